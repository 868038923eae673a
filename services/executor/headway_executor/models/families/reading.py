"""What families read alike from config.json.

Owns: the fields that most families share. Must not know: one family, tensors.

Files come from transformers 4 (``torch_dtype``, ``rope_theta``, ``rope_scaling``) or 5 (``dtype``, ``rope_parameters``);
defaults are theirs.
"""

from collections.abc import Mapping, Sequence

import msgspec

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig, QkNorm, RopeConfig
from headway_executor.models.config import (
    Activation,
    FeedForwardConfig,
    LayerConfig,
    ModelConfig,
    Multipliers,
    NormConfig,
    RecurrenceConfig,
    Scalings,
)
from headway_executor.models.families.positions import THETA, read_rope, rotary_factor, scaled_context
from headway_executor.models.tensor_names import TensorNames

SLIDING, FULL, CHUNKED, LINEAR = "sliding_attention", "full_attention", "chunked_attention", "linear_attention"
INDEXED = "indexed_attention"
DEFAULT_WINDOW = 4096

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_attention(
    fields: ConfigFields,
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    partial: float = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    is_interleaved: bool = False,
    qk_norm: QkNorm = "none",
    qkv_bias: bool = False,
    output_bias: bool = False,
) -> AttentionConfig:
    """The heads; ``head_dim``, ``num_kv_heads`` and ``scale`` are defaults; ``partial`` is the share that is rotated."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    width = _read_head_dim(fields, num_heads, head_dim)
    rotary_dim = int(width * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= width:
        raise ModelFilesError(
            f"{fields.source}: rotating {rotary_dim} of {width} channels is not supported; allowed: an even number of them"
        )
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        rotary_dim=rotary_dim,
        scale=width**-0.5 if scale is None else scale,
        softcap=softcap,
        is_interleaved=is_interleaved,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )


def read_feed_forward(
    fields: ConfigFields,
    *,
    field: str = "hidden_act",
    default: str = "silu",
    size: int | None = None,
    is_gated: bool = True,
    has_bias: bool = False,
) -> FeedForwardConfig:
    """A dense feed-forward; ``field`` names its activation; ``size`` is a default."""
    name = fields.values.get(field, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.refuse(field, ", ".join(_ACTIVATIONS))
    return FeedForwardConfig(
        intermediate_size=fields.integer("intermediate_size", size),
        activation=_ACTIVATIONS[name],
        is_gated=is_gated,
        has_bias=has_bias,
    )


def read_plain_feed_forward(
    fields: ConfigFields, *, field: str = "activation_function", default: str = "gelu_new", has_bias: bool = True
) -> FeedForwardConfig:
    """One as in GPT-2: without a gate, four times as wide as the hidden state unless the file says."""
    size = 4 * fields.integer("hidden_size")
    return read_feed_forward(fields, field=field, default=default, size=size, is_gated=False, has_bias=has_bias)


def read_rms_norm(fields: ConfigFields, *, eps: float = 1e-6, rounds_first: bool = True) -> NormConfig:
    """RMS norms, by default as in Llama."""
    return NormConfig(eps=fields.number("rms_norm_eps", eps), rounds_first=rounds_first)


def read_layer_norm(fields: ConfigFields, *, field: str = "layer_norm_epsilon") -> NormConfig:
    """Layer norms with biases; ``field`` names their epsilon."""
    return NormConfig(eps=fields.number(field, 1e-5), kind="layer", has_bias=True)


def read_model(
    fields: ConfigFields,
    *,
    default_context: int,
    attention: AttentionConfig,
    feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig],
    norm: NormConfig | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig | None] | None = None,
    theta: float = THETA,
    rotates: Sequence[bool] | None = None,
    names: TensorNames | None = None,
    scalings: Scalings | None = None,
    multipliers: Multipliers | None = None,
    recurrences: Sequence[RecurrenceConfig | None] | None = None,
    attends: Sequence[bool] | None = None,
    is_parallel: bool = False,
    tied: bool = False,
    context: int | None = None,
) -> ModelConfig:
    """The rest of a description. ``windows``, ``ropes``, ``recurrences`` and ``feed_forward`` may differ by layer.

    Without ``ropes``, all layers that are rotated have the one of the file; ``rotates`` says which: by default, all. By default,
    those without a recurrence are they that have attention. ``theta`` and ``tied`` are defaults.
    """
    num_layers = num_layers_of(fields)
    max_position_embeddings = fields.integer("max_position_embeddings", default_context)
    if ropes is None:
        rope = read_rope(fields, max_position_embeddings, theta=theta)
        context = scaled_context(fields, rope, max_position_embeddings) if context is None else context
        ropes = [rope if rotated else None for rotated in rotates or [True] * num_layers]
    feeds = [feed_forward] * num_layers if isinstance(feed_forward, FeedForwardConfig) else feed_forward
    windows = [None] * num_layers if windows is None else windows
    recurrences = [None] * num_layers if recurrences is None else recurrences
    attends = [recurrence is None for recurrence in recurrences] if attends is None else attends
    return ModelConfig(
        architecture=architecture_of(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        context=max_position_embeddings if context is None else context,
        attention=attention,
        norm=norm or read_rms_norm(fields),
        layers=tuple(
            LayerConfig(
                feed_forward=feed, window=window, rope=rope if has_it else None, recurrence=state, attends=has_it
            )
            for feed, window, rope, state, has_it in zip(feeds, windows, ropes, recurrences, attends, strict=True)
        ),
        is_parallel=is_parallel,
        scalings=scalings or Scalings(),
        multipliers=multipliers or Multipliers(),
        names=names or TensorNames(),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=tied),
        dtype=_read_dtype(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def num_layers_of(fields: ConfigFields) -> int:
    """How many layers."""
    return fields.integer("num_hidden_layers", high=1024)


def architecture_of(fields: ConfigFields) -> str:
    """The one name in ``architectures``, or nothing."""
    names = fields.values.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


def window_of(fields: ConfigFields, default: int | None = DEFAULT_WINDOW) -> int | None:
    """``sliding_window``; null means none."""
    return default if "sliding_window" not in fields.values else fields.optional_integer("sliding_window")


def layer_types_of(fields: ConfigFields, default: Sequence[str]) -> list[str]:
    """The kind of each layer's attention."""
    return kinds_of(fields, default, [FULL, SLIDING] + [CHUNKED] * (CHUNKED in default))


def kinds_of(fields: ConfigFields, default: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """``layer_types``, each one of ``allowed``."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return list(default)
    further = fields.integer("num_nextn_predict_layers", 0, low=0)
    if isinstance(kinds, list) and len(kinds) == len(default) + further:
        kinds = kinds[: len(default)]  # Some files tell of layers that nothing reads, too.
    if not isinstance(kinds, list) or len(kinds) != len(default) or any(kind not in allowed for kind in kinds):
        raise fields.refuse("layer_types", f"a list of {len(default)} names, each {' or '.join(allowed)}")
    return kinds


def every_nth_full(fields: ConfigFields, default: int, field: str = "sliding_window_pattern") -> list[str]:
    """Of so many layers, the last one sees all positions: ``field``, or ``layer_types``."""
    pattern = fields.integer(field, default)
    return layer_types_of(fields, [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers_of(fields))])


def windows_of(fields: ConfigFields, kinds: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer. Raises ``ModelFilesError``: there is none for a sliding layer."""
    if SLIDING in kinds and window is None:
        raise fields.refuse("sliding_window", f"a number, as layer_types names {SLIDING}")
    return [window if kind == SLIDING else None for kind in kinds]


def read_ropes(
    fields: ConfigFields,
    kinds: Sequence[str],
    max_position_embeddings: int,
    *,
    near: float,
    far: float,
    near_field: str = "rope_theta",
) -> list[RopeConfig]:
    """The rope of each layer, where layers with windows have one of their own; ``near`` is its theta, ``far`` of others."""
    empty = ConfigFields(fields.source, {})
    parameters = fields.section("rope_parameters") or empty
    scaling = fields.section("rope_scaling") or parameters.section(FULL) or empty
    local = parameters.section(SLIDING) or empty
    for section in (fields, scaling, local):
        refuse_unless(section, "partial_rotary_factor", 1.0)
    plain = read_rope(fields, max_position_embeddings, section=scaling, theta=far)
    of_windows = read_rope(fields, max_position_embeddings, section=local, theta=near, theta_field=near_field)
    return [of_windows if kind == SLIDING else plain for kind in kinds]


def refuse_partial_rotation(fields: ConfigFields) -> None:
    """Most families rotate whole heads, whatever this field says."""
    rotary_factor(fields, 1.0, allowed="1.0")


def is_of_gguf(fields: ConfigFields) -> bool:
    """Whether ``headway gguf`` has made the checkpoint, which then has some tensors as llama.cpp has them."""
    quantization = fields.section("quantization_config")
    return quantization is not None and quantization.values.get("quant_method") == "gguf"


def with_attentions(model: ModelConfig, attentions: Sequence[AttentionConfig]) -> ModelConfig:
    """Give each layer its attention."""
    layers = (
        msgspec.structs.replace(layer, attention=None if own == model.attention else own)
        for layer, own in zip(model.layers, attentions, strict=True)
    )
    return msgspec.structs.replace(model, layers=tuple(layers))


def refuse_unless(fields: ConfigFields, field: str, allowed: object) -> None:
    """A field that may be absent or have one value."""
    if fields.values.get(field) not in (None, allowed):
        raise fields.refuse(field, repr(allowed))


def refuse_others(fields: ConfigFields, allowed: Mapping[str, object]) -> None:
    """Fields that may be absent or have the one value that they have here."""
    for field, value in allowed.items():
        refuse_unless(fields, field, value)


def refuse_groups(fields: ConfigFields) -> None:
    """Some families have a head of keys for each of queries, whatever this field says."""
    refuse_unless(fields, "num_key_value_heads", fields.integer("num_attention_heads"))


def _read_head_dim(fields: ConfigFields, num_heads: int, default: int | None) -> int:
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.optional_integer("head_dim") or default
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelFilesError(f"{fields.source}: a head_dim of {head_dim} is not supported; allowed: an even number")
    return head_dim


def _read_dtype(fields: ConfigFields) -> str:
    field = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    name = fields.values.get(field)
    if name is None:
        return _DTYPES[0]
    if name not in _DTYPES:
        raise fields.refuse(field, ", ".join(_DTYPES))
    return str(name)
