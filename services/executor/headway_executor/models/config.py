"""The description of a model, in one form for every family.

Owns: ``ModelConfig`` and its parts. Must not know: files, tensors, who computes.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from headway_kernels.routing import Routing

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish", "xielu"]
QkNorm: TypeAlias = Literal["none", "head", "all", "plain", "layer"]
Gates: TypeAlias = Literal["none", "apart", "by_head"]
Stacking: TypeAlias = Literal["pairs", "halves", "rows"]
RecurrenceKind: TypeAlias = Literal["gated", "delta", "selective"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding; see ``rope``. ``factors`` divide the frequencies of longrope. Of "proportional", so large a
    ``share`` of the frequencies turns.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()
    share: float = 1.0


class NormConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All norms of a model; where they are is in its ``TensorNames``.

    ``offset`` is added to the weights; without ``has_weight`` they are 1. ``rounds_first``: the result is rounded before the
    product with the weight.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False
    rounds_first: bool = False


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of all heads come from one compressed row of ``rank``, queries from one of ``query_rank`` (None:
    from the hidden state). Heads of keys have ``plain_dim`` channels of their own and share ``rotary_dim``.
    """

    query_rank: int | None
    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        """Channels of a key."""
        return self.plain_dim + self.rotary_dim


class AlibiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Scores fall with the distance of a key, in each head at a slope of its own; see ``alibi``. ``is_rounded``: slopes and
    biases are rounded to bfloat16, and then scaled as scores are.
    """

    is_rounded: bool = False


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``scale`` multiplies scores; then ``softcap`` (None: none) bounds them.

    The first ``rotary_dim`` channels of a head are rotated in pairs: channel i with i + rotary_dim / 2, or neighbours if
    ``is_interleaved``; with ``turns_back``, the other way round. ``qk_norm`` normalises queries and keys by head, or over all heads of a token, or "plain": by
    head, without weights, in layers with a rope; "layer" is a layer norm by head, each with weights of its own, or, with
    ``shares_head_norms``, of one weight and one bias. It
    does so before they are rotated; with ``norms_rotated``, behind that. With ``latent``, keys and values are made of
    a compressed row. ``clip`` (None: none) bounds queries, keys and values on both sides, before all else. ``gates``
    multiply what heads give, each channel by the sigmoid of its own: stored "apart", as the fourth of
    ``TensorNames.qkv``, or "by_head", each head's behind its queries. ``alibi`` adds to scores (None: nothing does).
    With ``norms_values``, values are normalised by head, without weights. With ``values_are_keys``, they are what the
    projection to keys gives, which is neither normalised as keys are nor rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    is_interleaved: bool = False
    turns_back: bool = False
    softcap: float | None = None
    qk_norm: QkNorm = "none"
    norms_rotated: bool = False
    shares_head_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    latent: LatentConfig | None = None
    clip: float | None = None
    gates: Gates = "none"
    alibi: AlibiConfig | None = None
    norms_values: bool = False
    values_are_keys: bool = False


class Multipliers(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on what projections of a layer give (of muP, Yang et al. 2022, arXiv 2203.03466): their weights are multiplied
    while loading. Those to a state are of gates, values, keys, queries and steps.
    """

    queries: float = 1.0
    keys: float = 1.0
    values: float = 1.0
    output: float = 1.0
    to_state: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    from_state: float = 1.0
    gate: float = 1.0
    down: float = 1.0


class RecurrenceNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors behind a layer's prefix; ``recurrent_tensors`` says what is in ``inputs`` and in ``convolution``. The kind "gated" has only the
    first three.
    """

    inputs: tuple[str, ...]
    convolution: tuple[str, ...]
    output: str
    decay: str = ""
    step_bias: str = ""
    skip: str = ""
    norm: str = ""


class RecurrenceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layer without keys and values: of the tokens before, it knows a state of one size. See ``recurrence``.

    A convolution over the last ``taps`` tokens gives each of ``num_heads`` a value of ``value_dim`` channels, and each of
    ``num_key_heads`` a query and a key of ``key_dim``; "gated" has values alone, of one head. A query and a key serve heads
    that follow each other, or with ``keys_take_turns`` every so manieth. Behind the state, a norm is over ``norm_dim``
    channels; 0: there is none. With ``gates_behind`` it stands before the gates of "selective", too. ``norm_eps`` None: that of the other norms. With ``doubles_strengths``, "delta"
    writes up to twice a value. ``is_cut_alike``: the tensors of its convolution are equal parts of one, whatever is in them.
    """

    kind: RecurrenceKind
    taps: int
    num_heads: int = 1
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int
    norm_dim: int = 0
    keys_take_turns: bool = False
    norm_eps: float | None = None
    gates_behind: bool = False
    doubles_strengths: bool = False
    is_cut_alike: bool = False
    has_bias: bool = False
    has_convolution_bias: bool = False
    names: RecurrenceNames

    @property
    def inner(self) -> int:
        """Channels of all values, of the gates and of the result."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.inner

    @property
    def num_inputs(self) -> int:
        """Of a token: the channels, then gates, then numbers of heads."""
        rest = {
            "gated": 2 * self.inner,
            "delta": self.inner + 2 * self.num_heads,
            "selective": self.inner + self.num_heads,
        }
        return self.channels + rest[self.kind]

    @property
    def state_numbers(self) -> int:
        """Of a request, in float32: past inputs of the convolution, and a matrix of each head."""
        return self.channels * (self.taps - 1) + self.num_heads * self.key_dim * self.value_dim


class ExpertNorms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the norms of a layer whose router, chosen experts and shared one each normalise the hidden state by themselves,
    and what they give: then there is no norm before such a feed-forward. ``router`` is that of the router's scales, which are
    times ``hidden_size ** -0.5``; ``weights`` that of factors on the weight of each expert.
    """

    router: str
    weights: str
    experts: str
    experts_post: str
    shared: str
    shared_post: str


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors behind a layer's prefix; ``gate_up`` and ``down`` follow the prefix of an expert.

    Without a name, there is no ``correction`` and no ``shared_gate``. ``latent``: of the products before and behind experts. ``shared_gate_up`` names one tensor each, or one for
    both, gates first. ``stacks``: of tensors that hold all experts, gates and ups, and the way back; None: see
    ``expert_tensors``.
    """

    router: str = "mlp.gate"
    correction: str | None = None
    expert: str = "mlp.experts.{}."
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = "mlp.shared_experts."
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str | None = None
    latent: tuple[str, str] = ("", "")
    norms: ExpertNorms | None = None
    stacks: tuple[str, str] | None = None


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which experts there are. All tokens go through a shared one of ``shared_size`` columns; 0: there is none. Those that are
    chosen read a compressed row of ``latent_size`` columns, and what they give is expanded; 0: they read the hidden state.

    With a ``stack``, one tensor holds all experts: "pairs", each gate beside its up, inputs before outputs; "halves", all
    gates before all ups, inputs before outputs; or "rows", the same with outputs before inputs. ``has_correction_row``:
    the correction is stored as a matrix of one row. ``halves_shared``: half of what the shared expert gives counts.
    """

    routing: Routing
    shared_size: int = 0
    latent_size: int = 0
    has_router_bias: bool = False
    stack: Stacking | None = None
    has_correction_row: bool = False
    halves_shared: bool = False
    names: ExpertNames = ExpertNames()

    @property
    def has_shared_gate(self) -> bool:
        """Whether a sigmoid weighs what the shared expert gives."""
        return self.names.shared_gate is not None or self.halves_shared


class FeedForwardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``down(activation(gate) * up)``, or ``down(activation(up))`` if it is not gated; of ``experts``, each is such.

    "clamped_swish" bounds gates and ups, and adds 1 to ups: see ``cpu/rows.h``. "xielu" has numbers of its own in each layer,
    behind ``TensorNames.curve``. An ``intermediate_size`` of 0: there is none.
    """

    intermediate_size: int
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    experts: ExpertsConfig | None = None


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries grow with their position p, by the factor ``1 + beta * ln(1 + floor((p + first) / step))``."""

    beta: float
    step: int
    first: int = 0


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``window``: how many positions a query sees, its own included; None: all. ``rope`` None: no rotation.
    ``query_growth`` None: queries stay as they are. With a ``chunk``, a query sees no more than its own chunk of so many
    positions; no backend has such masks, so no context is longer. Beside attention, or in its place, there may be a
    ``recurrence``. A layer may have neither, or no feed-forward. ``attention`` None: the model's; another may differ from that
    in ``num_kv_heads``, ``head_dim``, ``rotary_dim`` and ``values_are_keys``. With ``keys_of``, the layer has queries alone,
    and reads the keys and values of that layer before it, which has attention of the same sizes.
    """

    feed_forward: FeedForwardConfig
    recurrence: RecurrenceConfig | None = None
    window: int | None = None
    rope: RopeConfig | None = None
    query_growth: QueryGrowth | None = None
    chunk: int | None = None
    attends: bool = True
    attention: AttentionConfig | None = None
    keys_of: int | None = None

    @property
    def mixes(self) -> bool:
        """Whether anything in it knows other tokens."""
        return self.attends or self.recurrence is not None

    @property
    def has_feed_forward(self) -> bool:
        """Whether it has one."""
        return self.feed_forward.intermediate_size > 0


class Rotary(NamedTuple):
    """A rope of heads of one size."""

    rope: RopeConfig
    head_dim: int
    rotary_dim: int


class Scalings(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on embeddings, on what a layer adds to the hidden state, and on logits, then their bound (None: none)."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    logits_softcap: float | None = None


class LayerNormNames(msgspec.Struct, frozen=True, kw_only=True):
    """Of a layer; norms without a name do not exist."""

    attention: str | None = None
    attention_post: str | None = None
    mlp: str | None = None
    mlp_post: str | None = None


class LayerInputNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors; those from ``gate`` on follow a layer's prefix."""

    table: str = "model.embed_tokens_per_layer.weight"
    projection: str = "model.per_layer_model_projection"
    norm: str = "model.per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    back: str = "per_layer_projection"
    post_norm: str = "post_per_layer_input_norm"


class LayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Each token has ``size`` numbers for each layer: a row of a table with ``vocab_size`` rows, times ``sqrt(size)``, and what
    a projection makes of its embedding. Behind the feed-forward, a layer multiplies its numbers by a gate of the hidden
    state, and adds what it projects from these.
    """

    size: int
    vocab_size: int
    names: LayerInputNames = LayerInputNames()


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint; those below ``layer`` follow its prefix.

    Norms, attention sinks, a table of ``positions``, ``projections`` and the ``layer_factor``, a number that multiplies the hidden
    state behind a layer, do not exist without a name. ``qkv`` and ``gate_up``
    name one tensor each, or one for all: part after part, key-value head after key-value head, each behind its queries
    (``is_fused_by_head``), or in so many ``blocks`` of heads, each queries, values, keys. With ``has_inputs_first``,
    projections of layers are ``[inputs, outputs]``. ``projections`` lead from embeddings to the first layer, and from the
    last one to the head; as ``embedding_norm``, they are applied while loading. ``heads``: the first that is stored. Nothing reads
    ``ignored``, what begins as one of ``ignored_prefixes``, and the ``ignored_layers`` behind the last one. With
    ``is_part``, other models are in the same checkpoint. They are not read either, and names have more in front of them,
    which the stored names tell. ``state_norms``: of layers with a state, if others than those of other layers. ``renamed``:
    norms of layers that may be stored under another name, and that name.
    """

    embedding: str = "model.embed_tokens.weight"
    embedding_norm: str | None = None
    positions: str | None = None
    projections: tuple[str, str] | None = None
    final_norm: str | None = "model.norm"
    heads: tuple[str, ...] = ("lm_head.weight",)
    layer: str = "model.layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    is_fused_by_head: bool = False
    blocks: int = 0
    has_inputs_first: bool = False
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    ignored_layers: int = 0
    ignored_prefixes: tuple[str, ...] = ()
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    curve: str = "mlp.act_fn"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    state_norms: LayerNormNames | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    layer_factor: str | None = None
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    is_part: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model.

    ``context`` includes rope scaling; ``context_note`` says why it is shorter than the file's. A model without ``has_head`` makes vectors and no text. In a layer with ``is_parallel``, attention and feed-forward read the same hidden
    state. With ``norms_sums``, norms behind attention and feed-forward are of the hidden state after the addition. Embeddings
    have ``embedding_size`` columns (0: as the hidden state). A table of positions begins at ``first_position``; that
    ``has_sinusoids`` is computed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context: int
    context_note: str = ""
    attention: AttentionConfig
    norm: NormConfig
    layers: tuple[LayerConfig, ...]
    is_parallel: bool = False
    norms_sums: bool = False
    embedding_size: int = 0
    first_position: int = 0
    has_sinusoids: bool = False
    scalings: Scalings = Scalings()
    multipliers: Multipliers = Multipliers()
    layer_inputs: LayerInputs | None = None
    names: TensorNames = TensorNames()
    tie_word_embeddings: bool
    has_head: bool = True
    has_head_bias: bool = False
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def shares_embedding(self) -> bool:
        """Whether the embedding, as it is read, is the head, too."""
        is_plain = self.names.embedding_norm is None and self.names.projections is None
        return self.tie_word_embeddings and self.scalings.embedding == 1 and is_plain and not self.has_head_bias

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Columns of the widest feed-forward."""
        return max(layer.feed_forward.intermediate_size for layer in self.layers)

    @property
    def dense_size(self) -> int:
        """Columns of the widest feed-forward without experts; 0: there is none."""
        feeds = [layer.feed_forward for layer in self.layers]
        return max([0, *(feed.intermediate_size for feed in feeds if feed.experts is None)])

    @property
    def experts(self) -> FeedForwardConfig | None:
        """The feed-forward of the first layer with experts; None: there is none."""
        feeds = [layer.feed_forward for layer in self.layers]
        return next((feed for feed in feeds if feed.experts is not None), None)

    def num_cached(self, layers: Iterable[int]) -> int:
        """How many of these layers have keys and values of their own."""
        return sum(self.layers[index].attends and self.layers[index].keys_of is None for index in layers)

    @property
    def num_kv_numbers(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        own = [i for i, layer in enumerate(self.layers) if layer.attends and layer.keys_of is None]
        sizes = map(self.attention_of, own)
        return sum(2 * attention.num_kv_heads * attention.head_dim for attention in sizes)

    def attention_of(self, index: int) -> AttentionConfig:
        """The attention of a layer."""
        return self.layers[index].attention or self.attention

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The different ones of its layers."""
        own = (self.attention_of(index) for index, layer in enumerate(self.layers) if layer.attends)
        return tuple(dict.fromkeys(own)) or (self.attention,)

    def recurrences(self, layers: Iterable[int]) -> list[RecurrenceConfig]:
        """Those of these layers."""
        found = (self.layers[index].recurrence for index in layers)
        return [recurrence for recurrence in found if recurrence is not None]

    def norms_of(self, index: int) -> LayerNormNames:
        """Those that a layer has."""
        names, layer = self.names, self.layers[index]
        if layer.recurrence is not None and names.state_norms is not None:
            return names.state_norms
        before = (names.attention_norm, names.attention_post_norm) if layer.mixes else (None, None)
        behind = (names.mlp_norm, names.mlp_post_norm) if layer.has_feed_forward else (None, None)
        return LayerNormNames(attention=before[0], attention_post=before[1], mlp=behind[0], mlp_post=behind[1])

    @property
    def has_states(self) -> bool:
        """Whether blocks alone do not say what a request's tokens have been."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different ropes of its layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    def rotary(self, index: int) -> Rotary | None:
        """The rope of a layer."""
        rope, attention = self.layers[index].rope, self.attention_of(index)
        return None if rope is None else Rotary(rope, attention.head_dim, attention.rotary_dim)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different ones of its layers."""
        found = (self.rotary(index) for index in range(self.num_layers))
        return tuple(dict.fromkeys(rotary for rotary in found if rotary is not None))
