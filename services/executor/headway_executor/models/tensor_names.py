"""The names of a model's tensors in its checkpoint. Must not know: shapes, files."""

import msgspec


class RecurrenceNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors behind a layer's prefix; ``recurrent_tensors`` says what is in ``inputs`` and in ``convolution``. The
    kind "gated" has only the first three, and "scanned" alone a ``selection`` and perhaps ``selection_norms``. ``steps`` and
    ``gates``: of the products that make these of few numbers. ``blocks``: what is before ``_weight`` and ``_bias`` in the two
    of "unit".
    """

    inputs: tuple[str, ...]
    convolution: tuple[str, ...]
    output: str
    decay: str = ""
    step_bias: str = ""
    skip: str = ""
    norm: str = ""
    selection: str = ""
    steps: str = ""
    gates: str = ""
    selection_norms: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


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
    both, gates first. ``stacks``: of tensors that hold all experts, gates and ups (or both apart), and the way back; None: see
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
    stacks: tuple[str, ...] | None = None


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


class TensorNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names in the checkpoint; those below ``layer`` follow its prefix.

    Norms, attention sinks, a table of ``positions``, ``projections`` and the ``layer_factor``, a number that multiplies the hidden
    state behind a layer, do not exist without a name. ``output_norm`` is over all heads, before the projection ``output``;
    ``down_norm`` before that of a dense feed-forward. ``qkv`` and ``gate_up``
    name one tensor each, or one for all: part after part, key-value head after key-value head, each behind its queries
    (``is_fused_by_head``), or in so many ``blocks`` of heads, each queries, values, keys. With ``has_inputs_first``,
    projections of layers are ``[inputs, outputs]``. ``projections`` lead from embeddings to the first layer, and from the
    last one to the head; as ``embedding_norm``, they are applied while loading. ``heads``: the first that is stored. Nothing reads
    ``ignored``, which are tensors, or modules with a dot behind them, what begins as one of ``ignored_prefixes``, and the
    ``ignored_layers`` behind the last one. With ``is_part``, other models are in the same checkpoint. They are not read
    either, and names have more in front of them, which the stored names tell. ``state_norms``: of layers with a state, if others than those of other layers. ``renamed``:
    norms of layers that may be stored under another name, and that name. ``in_transformers``: beginnings of names behind
    ``layer`` as modules of transformers have them, and as they are here; the first that fits counts. A dense feed-forward may
    be stored where experts are, behind ``other_feed_forward`` in place of what is before the last dot. With
    ``has_norms_of_next``, the norm behind a feed-forward is in the layer after it, and the last layer has none. With
    ``has_ups_first``, the one tensor of gates and ups begins with ups. With
    ``lacks_first_norm``, the first layer has none before attention.
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
    output_norm: str | None = None
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    down_norm: str | None = None
    curve: str = "mlp.act_fn"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    state_norms: LayerNormNames | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    in_transformers: tuple[tuple[str, str], ...] = ()
    other_feed_forward: str | None = None
    has_norms_of_next: bool = False
    has_ups_first: bool = False
    lacks_first_norm: bool = False
    layer_factor: str | None = None
    ignored: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    is_part: bool = False
