"""The description of a model, in one form for every family.

Owns: ``ModelConfig`` and its parts. Must not know: files, tensors, who computes.
"""

import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from headway_executor.models.attention_config import AttentionConfig, QueryGrowth, RopeConfig, Rotary
from headway_executor.models.tensor_names import (
    ExpertNames,
    LayerInputNames,
    LayerNormNames,
    RecurrenceNames,
    TensorNames,
)
from headway_kernels.routing import Routing

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish", "xielu", "limited_silu"]
Stacking: TypeAlias = Literal["pairs", "halves", "rows", "matrices", "apart"]
RecurrenceKind: TypeAlias = Literal["gated", "delta", "selective", "scanned", "unit"]
GateActivation: TypeAlias = Literal["silu", "sigmoid", "gelu_tanh"]


class NormConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All norms of a model; where they are is in its ``TensorNames``.

    ``offset`` is added to the weights; without ``has_weight`` they are 1. ``rounds_first``: the result is rounded before the
    product with the weight. Some differ from the others where it is said: ``final_offset`` is of the norm before the head,
    ``post_eps`` of those behind attention and feed-forward, ``embedding_eps`` of a norm of embeddings, whose weights are 1
    without ``embedding_has_weight``.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False
    rounds_first: bool = False
    embedding_eps: float | None = None
    embedding_has_weight: bool = True
    final_offset: float | None = None
    post_eps: float | None = None

    @property
    def eps_behind(self) -> float:
        """Of norms behind attention and feed-forward."""
        return self.eps if self.post_eps is None else self.post_eps


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


class RecurrenceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A layer without keys and values: of the tokens before, it knows a state of one size. See ``recurrence``.

    A convolution over the last ``taps`` tokens gives each of ``num_heads`` a value of ``value_dim`` channels, and each of
    ``num_key_heads`` a query and a key of ``key_dim``; "gated" has values alone, of one head. A query and a key serve heads
    that follow each other, or with ``keys_take_turns`` every so manieth. Behind the state, a norm is over ``norm_dim``
    channels; 0: there is none. With ``gates_behind`` it stands before the gates of "selective", too. ``norm_eps`` None: that of the other norms. With ``doubles_strengths``, "delta"
    writes up to twice a value. ``is_cut_alike``: the tensors of its convolution are equal parts of one, whatever is in them.

    ``gate`` is the activation of gates, but of "gated". With ``decays_channels``, "delta" has a step for each channel of
    a key; with a ``decay_bound`` (below 0), no decay is beyond that. Of so many numbers as ``gate_rank`` and ``step_rank``
    say, a further product makes gates and steps; 0: they are among the inputs. ``decay_shape``: as the decays of heads are
    stored; empty: ``[heads]``.

    With ``slopes``, "selective" has no steps: these are the logarithms of what stays in each head, and all of a value is
    written; its inputs are queries, keys and values head by head in one tensor, and gates in another. Without names of a
    ``convolution``, there is none but the activation behind it.

    "scanned" has values of one head, which keeps ``key_dim`` numbers for each channel. The convolved values give ``step_rank``
    numbers, a key and a query, and those numbers give a step for each channel. With ``selection_norm``, each of the three is
    normalised, "plain" without weights, by ``norm_eps``.

    "unit" has values of one head, too, and one number for each channel. Two matrices for each of ``num_blocks`` blocks of
    channels say how much of a value is taken, and how much stays.
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
    gate: GateActivation = "silu"
    decays_channels: bool = False
    decay_bound: float | None = None
    decay_shape: tuple[int, ...] = ()
    gate_rank: int = 0
    slopes: tuple[float, ...] = ()
    num_blocks: int = 0
    is_cut_alike: bool = False
    has_bias: bool = False
    has_convolution_bias: bool = False
    step_rank: int = 0
    selection_norm: Literal["none", "plain", "weighed"] = "none"
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
            "delta": (self.gate_rank or self.inner) + self.num_heads + (self.step_rank or self.num_steps),
            "selective": self.inner + self.num_steps,
            "scanned": self.inner,
            "unit": self.inner,
        }
        return self.channels + rest[self.kind]

    @property
    def num_steps(self) -> int:
        """Of a token, behind all products."""
        if self.slopes:
            return 0
        return self.inner if self.kind == "scanned" else self.num_heads * (self.key_dim if self.decays_channels else 1)

    @property
    def selection(self) -> list[int]:
        """Of "scanned": what a token's convolved values give: numbers that steps are made of, a key and a query."""
        return [self.step_rank, self.key_dim, self.key_dim]

    @property
    def state_numbers(self) -> int:
        """Of a request, in float32: past inputs of the convolution, and a matrix of each head."""
        return self.channels * (self.taps - 1) + self.num_heads * self.key_dim * self.value_dim


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which experts there are. All tokens go through a shared one of ``shared_size`` columns; 0: there is none. Those that are
    chosen read a compressed row of ``latent_size`` columns, and what they give is expanded; 0: they read the hidden state.

    With a ``stack``, one tensor holds all experts: "pairs", each gate beside its up, inputs before outputs; "halves", all
    gates before all ups, inputs before outputs; or "rows", the same with outputs before inputs. "matrices": gates, ups and
    ways back are a tensor each, with the rows of expert after expert, and inputs before outputs on the way back. "apart": three
    stacks of matrices, outputs before inputs. ``correction_rows``: the correction is the first of so many rows; 0: it is stored
    alone. With ``has_turned_router``, that is stored with inputs before outputs.
    ``halves_shared``: half of what the shared expert gives counts. ``shared_limit``: its own, as ``FeedForwardConfig.limit``.
    """

    routing: Routing
    shared_size: int = 0
    latent_size: int = 0
    has_router_bias: bool = False
    stack: Stacking | None = None
    correction_rows: int = 0
    has_turned_router: bool = False
    halves_shared: bool = False
    shared_limit: float = math.inf
    names: ExpertNames = ExpertNames()

    @property
    def has_shared_gate(self) -> bool:
        """Whether a sigmoid weighs what the shared expert gives."""
        return self.names.shared_gate is not None or self.halves_shared


class FeedForwardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``down(activation(gate) * up)``, or ``down(activation(up))`` if it is not gated; of ``experts``, each is such.

    "clamped_swish" bounds gates and ups, and adds 1 to ups: see ``cpu/rows.h``. "xielu" has numbers of its own in each layer,
    behind ``TensorNames.curve``. ``limit`` bounds what "limited_silu" gives from above, and ups on both sides. With
    ``sparsity``, so large a share of gates would be 0 if they were drawn from a normal distribution, and others are less by
    the same bound. An ``intermediate_size`` of 0: there is none.
    """

    intermediate_size: int
    activation: Activation = "silu"
    limit: float = math.inf
    sparsity: float = 0.0
    is_gated: bool = True
    has_bias: bool = False
    experts: ExpertsConfig | None = None


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``window``: how many positions a query sees, its own included; None: all. ``rope`` None: no rotation.
    ``query_growth`` None: queries stay as they are. With a ``chunk``, a query sees no more than its own chunk of so many
    positions; no backend has such masks, so no context is longer. Beside attention, or in its place, there may be a
    ``recurrence``. A layer may have neither, or no feed-forward. ``attention`` None: the model's; another may differ from that
    in ``num_heads``, ``num_kv_heads``, ``head_dim``, ``rotary_dim``, ``values_are_keys`` and ``has_sinks``. With ``keys_of``, the layer has queries alone,
    and reads the keys and values of that layer before it, which has attention of the same sizes. With ``sees_as_before``, its
    queries see the keys that those of the layer before see, and it has no index.
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
    sees_as_before: bool = False

    @property
    def mixes(self) -> bool:
        """Whether anything in it knows other tokens."""
        return self.attends or self.recurrence is not None

    @property
    def has_feed_forward(self) -> bool:
        """Whether it has one."""
        return self.feed_forward.intermediate_size > 0


class Scalings(msgspec.Struct, frozen=True, kw_only=True):
    """Factors on embeddings, on what a layer adds to the hidden state, and on logits, then their bound (None: none)."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    logits_softcap: float | None = None


class LayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Each token has ``size`` numbers for each layer: a row of a table with ``vocab_size`` rows, times ``sqrt(size)``, and what
    a projection makes of its embedding. Behind the feed-forward, a layer multiplies its numbers by a gate of the hidden
    state, and adds what it projects from these.
    """

    size: int
    vocab_size: int
    names: LayerInputNames = LayerInputNames()


class StatesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A token has ``count`` hidden states, of which a layer computes on the first; see ``altup``. Beside its attention is a
    product of ``rank``. ``scales_output``: what gates the layer's own inputs is multiplied by numbers of its own.
    """

    count: int
    rank: int
    scales_output: bool = True


class BeforeHead(msgspec.Struct, frozen=True, kw_only=True):
    """A product, an activation, and a norm of what that gives: between the final norm and the head."""

    activation: Activation
    has_bias: bool
    dense: str
    norm: str


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
    states: StatesConfig | None = None
    before_head: BeforeHead | None = None
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
        """Numbers that are stored of one token, in all layers: keys and values, or rows, and keys of an index."""
        own = [i for i, layer in enumerate(self.layers) if layer.attends and layer.keys_of is None]
        sizes = map(self.attention_of, own)
        return sum((attention.num_vectors + self.has_index) * attention.vector_dim for attention in sizes)

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
        first = None if names.lacks_first_norm and index == 0 else names.attention_norm
        before = (first, names.attention_post_norm) if layer.mixes else (None, None)
        post = None if names.has_norms_of_next and index == self.num_layers - 1 else names.mlp_post_norm
        behind = (names.mlp_norm, post) if layer.has_feed_forward else (None, None)
        return LayerNormNames(attention=before[0], attention_post=before[1], mlp=behind[0], mlp_post=behind[1])

    @property
    def has_states(self) -> bool:
        """Whether blocks alone do not say what a request's tokens have been."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def has_index(self) -> bool:
        """Whether queries see some of the keys alone."""
        return self.attention.latent is not None and self.attention.latent.index is not None

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
