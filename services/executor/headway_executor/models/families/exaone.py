"""EXAONE 4: norms only behind attention and feed-forward, norms of heads; layers without a window have no positions."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.olmo import NORMS_BEHIND
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    every_nth_full,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_rms_norm,
    refuse_partial_rotation,
    window_of,
    windows_of,
)


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    """``Exaone4ForCausalLM``. Without a window at all, every layer has positions."""
    refuse_partial_rotation(fields)
    window = window_of(fields)
    if window is None or fields.values.get("layer_types") is not None:  # The pattern may be a text then.
        kinds = layer_types_of(fields, [FULL] * num_layers_of(fields))
    else:
        kinds = every_nth_full(fields, 4)
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, num_kv_heads=32, qk_norm="head"),
        feed_forward=read_feed_forward(fields),
        norm=read_rms_norm(fields, eps=1e-5),
        windows=windows_of(fields, kinds, window),
        rotates=[window is None or kind == SLIDING for kind in kinds],
        names=NORMS_BEHIND,
    )
