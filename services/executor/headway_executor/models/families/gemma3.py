"""Gemma 3 (text): norms of heads, and a rope of their own for layers with windows."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.gemma import read_gemma
from headway_executor.models.families.reading import every_nth_full, read_ropes, refuse_unless

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """``Gemma3ForCausalLM``. Layers with a window have a rope of their own."""
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuse_unless(fields, field, None)
    kinds = every_nth_full(fields, 6)
    context = fields.integer("max_position_embeddings", 131_072)
    ropes = read_ropes(fields, kinds, context, near=_LOCAL_THETA, far=_GLOBAL_THETA, near_field="rope_local_base_freq")
    return read_gemma(fields, kinds, default_context=context, qk_norm="head", ropes=ropes)
