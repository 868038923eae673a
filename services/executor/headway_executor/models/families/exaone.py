"""EXAONE 4 and K-EXAONE: norms of heads; layers without a window have no positions."""

from collections.abc import Sequence

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig
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
from headway_executor.models.families.routing import behind_dense_layers, read_corrected
from headway_executor.models.tensor_names import TensorNames


def read_exaone4(fields: ConfigFields) -> ModelConfig:
    """``Exaone4ForCausalLM``: norms are only behind attention and feed-forward."""
    return _read(fields, read_feed_forward(fields), NORMS_BEHIND)


def read_exaone_moe(fields: ConfigFields) -> ModelConfig:
    """``ExaoneMoeForCausalLM``. Nothing reads its layers that predict further tokens."""
    experts = read_corrected(fields, ("num_experts", 64), scaling=2.5, correction="mlp.e_score_correction_bias")
    feeds = behind_dense_layers(fields, experts, size=1024, shared=1, shared_field="num_shared_experts", first=1)
    return _read(fields, feeds, TensorNames(ignored_prefixes=("mtp",)))


def _read(
    fields: ConfigFields, feed_forward: FeedForwardConfig | Sequence[FeedForwardConfig], names: TensorNames
) -> ModelConfig:
    """Without a window at all, every layer has positions."""
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
        feed_forward=feed_forward,
        norm=read_rms_norm(fields, eps=1e-5),
        windows=windows_of(fields, kinds, window),
        rotates=[window is None or kind == SLIDING for kind in kinds],
        names=names,
    )
