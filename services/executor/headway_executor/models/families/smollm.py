"""SmolLM3: Llama in which some layers have no rotary positions."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    window_of,
    windows_of,
)


def read_smollm3(fields: ConfigFields) -> ModelConfig:
    """``SmolLM3ForCausalLM``."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    rotates = rotating_layers(fields)
    window = window_of(fields, None) if fields.flag("use_sliding_window", default=False) else None
    usual = [FULL if window is None or rotated else SLIDING for rotated in rotates]
    return read_model(
        fields,
        default_context=32_768,
        theta=2e6,
        rotates=rotates,
        attention=read_attention(fields, num_kv_heads=4, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False)),
        windows=windows_of(fields, layer_types_of(fields, usual), window),
        tied=True,
    )


def rotating_layers(fields: ConfigFields) -> list[bool]:
    """Which layers have rotary positions."""
    num_layers = num_layers_of(fields)
    interval = fields.integer("no_rope_layer_interval", 4)
    flags = fields.values.get("no_rope_layers")
    if not flags:
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.refuse("no_rope_layers", f"a list of {num_layers} numbers, each 0 or 1")
    return [bool(flag) for flag in flags]
