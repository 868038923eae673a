"""Gemma 3 (text): norms of heads, and a rope of their own for layers with windows."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.gemma import read_gemma
from headway_executor.models.families.positions import read_rope
from headway_executor.models.families.reading import SLIDING, every_nth_full, refuse_unless

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """``Gemma3ForCausalLM``. Layers with a window have a rope of their own."""
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuse_unless(fields, field, None)
    kinds = every_nth_full(fields, 6)
    context = fields.integer("max_position_embeddings", 131_072)
    parameters = fields.section("rope_parameters") or ConfigFields(fields.source, {})
    scaling = fields.section("rope_scaling") or parameters.section("full_attention") or ConfigFields(fields.source, {})
    local = parameters.section("sliding_attention") or ConfigFields(fields.source, {})
    for section in (fields, scaling, local):
        refuse_unless(section, "partial_rotary_factor", 1.0)
    far = read_rope(fields, context, section=scaling, theta=_GLOBAL_THETA)
    near = read_rope(fields, context, section=local, theta=_LOCAL_THETA, theta_field="rope_local_base_freq")
    ropes = [near if kind == SLIDING else far for kind in kinds]
    return read_gemma(fields, kinds, default_context=context, qk_norm="head", ropes=ropes)
