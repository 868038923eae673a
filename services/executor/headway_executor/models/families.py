"""The supported model families: from config.json to a ``ModelConfig``.

Owns: names, defaults, refusing other models. Must not know: tensors.

Llama 2, 3 and 3.x, Mistral, Qwen2 / Qwen2.5 and Qwen3 (dense) are one decoder. Files come from transformers 4
(``torch_dtype``, ``rope_theta``, ``rope_scaling``) or 5 (``dtype``, ``rope_parameters``); defaults are theirs.
"""

import stat
from collections.abc import Callable
from pathlib import Path

from headway_executor.backend import ModelFilesError
from headway_executor.models.config import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    MAX_SIZE,
    ConfigFields,
    ModelConfig,
    RopeConfig,
    read_json_object,
)

_DTYPES = ("float32", "bfloat16", "float16")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULT_EPS = 1e-6
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128


def read_model_config(directory: Path) -> ModelConfig:
    """Read and check a checkpoint's configuration.

    Raises:
        ModelFilesError: the file is missing or damaged, or has a value that cannot be served.
    """
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise ModelFilesError(f"{directory}: not a model directory")
    except FileNotFoundError:
        raise ModelFilesError(f"{directory}: no such model directory") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{directory}: {getattr(error, 'strerror', None) or error}") from None
    fields = read_json_object(directory / CONFIG_FILE)
    if fields.values.get("auto_map") is not None:
        raise ModelFilesError(f"{fields.source}: auto_map asks for code from the checkpoint, which is never run")
    if fields.values.get("quantization_config") is not None:
        raise fields.refuse("quantization_config", "none; give a float checkpoint and --quantization int8")
    read = _FAMILIES[_architecture(fields)]
    config = read(fields)
    return _with_generation_config(config, directory / GENERATION_CONFIG_FILE)


def _architecture(fields: ConfigFields) -> str:
    names = fields.values.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] in _FAMILIES:
        return str(names[0])
    raise fields.refuse("architectures", "one of " + ", ".join(sorted(_FAMILIES)))


def _with_generation_config(config: ModelConfig, path: Path) -> ModelConfig:
    named = read_json_object(path).token_ids("eos_token_id") if path.exists() else ()
    token_ids = named or config.eos_token_ids
    wide = [token_id for token_id in token_ids if token_id >= config.vocab_size]
    if wide:
        file = path.name if named else CONFIG_FILE
        raise ModelFilesError(f"{file}: eos_token_id {wide[0]} is not below vocab_size {config.vocab_size}")
    return _replace(config, eos_token_ids=token_ids)


def _replace(config: ModelConfig, **changes: object) -> ModelConfig:
    return ModelConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | changes)


def _read_llama(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return _read(
        fields,
        default_context=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


def _read_mistral(fields: ConfigFields) -> ModelConfig:
    absent = "sliding_window" not in fields.values
    window = _DEFAULT_WINDOW if absent else fields.optional_integer("sliding_window")
    return _read(fields, default_context=131_072, windows=lambda num_layers: (window,) * num_layers)


def _read_qwen2(fields: ConfigFields) -> ModelConfig:
    return _read(fields, default_context=32_768, qkv_bias=True, windows=lambda n: _qwen_windows(fields, n))


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", default=False)
    return _read(
        fields,
        default_context=32_768,
        default_head_dim=_QWEN3_HEAD_DIM,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        windows=lambda n: _qwen_windows(fields, n),
    )


_FAMILIES: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "LlamaForCausalLM": _read_llama,
    "MistralForCausalLM": _read_mistral,
    "Qwen2ForCausalLM": _read_qwen2,
    "Qwen3ForCausalLM": _read_qwen3,
}


def _qwen_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    used = fields.flag("use_sliding_window", default=False)
    absent = "sliding_window" not in fields.values
    window = _DEFAULT_WINDOW if absent else fields.optional_integer("sliding_window")
    first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if used and window is not None and i >= first else _FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise fields.refuse("layer_types", f"a list of {num_layers} names, each {_SLIDING} or {_FULL}")
    if _SLIDING in kinds and not (used and window is not None):
        raise fields.refuse("use_sliding_window", f"true with a sliding_window, as layer_types names {_SLIDING}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _read(
    fields: ConfigFields,
    *,
    default_context: int,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Callable[[int], tuple[int | None, ...]] = lambda num_layers: (None,) * num_layers,
) -> ModelConfig:
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "'silu'")
    num_layers = fields.integer("num_hidden_layers", high=1024)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    max_position_embeddings = fields.integer("max_position_embeddings", default_context)
    rope = _read_rope(fields, max_position_embeddings)
    return ModelConfig(
        architecture=_architecture(fields),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_read_head_dim(fields, hidden_size, num_heads, default_head_dim),
        rms_norm_eps=fields.number("rms_norm_eps", _DEFAULT_EPS),
        context=_context(fields, rope, max_position_embeddings),
        rope=rope,
        sliding_windows=windows(num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=_read_dtype(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _read_head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, default: int | None) -> int:
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


def _read_rope(fields: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    """``rope_scaling`` (transformers 4) wins over ``rope_parameters`` (5); theta may be inside or beside them."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters") or ConfigFields(fields.source, {})
    theta = section.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for holder in (section, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.refuse("partial_rotary_factor", "1.0")
    field = "rope_type" if "rope_type" in section.values else "type"
    kind = section.values.get(field, "default")
    if not isinstance(kind, str):
        raise section.refuse(field, "default, linear, dynamic, yarn, llama3")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in {"linear", "dynamic"}:
        factor = section.number("factor")
        return RopeConfig(kind=kind, theta=theta, factor=factor, original_context=max_position_embeddings)
    inner = section.integer("original_max_position_embeddings", max_position_embeddings)
    original_context = fields.integer("original_max_position_embeddings", inner)
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=section.number("factor"),
            original_context=original_context,
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=section.number("factor", max_position_embeddings / original_context),
            original_context=original_context,
            attention_factor=section.optional_number("attention_factor"),
            beta_fast=section.number("beta_fast", 32.0),
            beta_slow=section.number("beta_slow", 1.0),
            mscale=section.optional_number("mscale"),
            mscale_all_dim=section.optional_number("mscale_all_dim"),
            truncate=section.flag("truncate", default=True),
        )
    raise section.refuse(field, "default, linear, dynamic, yarn, llama3")


def _context(fields: ConfigFields, rope: RopeConfig, max_position_embeddings: int) -> int:
    """Linear, dynamic and yarn scaling stretch the original context by ``factor``.

    ``max_position_embeddings`` is the stretched length in some checkpoints, and always with Llama 3's scaling.
    """
    if rope.kind in {"linear", "dynamic", "yarn"}:
        stretched = rope.original_context * rope.factor
        if not stretched <= MAX_SIZE:
            raise ModelFilesError(
                f"{fields.source}: a rope factor of {rope.factor:g} stretches the context to {stretched:g}; "
                f"allowed: at most {MAX_SIZE}"
            )
        return max(max_position_embeddings, int(stretched))
    return max_position_embeddings
