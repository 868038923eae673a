"""DBRX: layer norms without biases, bounds of queries, keys and values, experts whose matrices lie in three tensors."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig, NormConfig
from headway_executor.models.families.positions import THETA
from headway_executor.models.families.reading import (
    is_of_gguf,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
    refuse_unless,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_NAMES = TensorNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f",
    layer="transformer.blocks.{}.",
    qkv=("norm_attn_norm.attn.Wqkv",),
    output="norm_attn_norm.attn.out_proj",
    attention_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
)
_EXPERTS = ExpertNames(
    router="ffn.router.layer",
    expert="ffn.experts.{}.",
    gate_up=("w1", "v1"),
    down="w2",
    stacks=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2"),
)
_SHARES = "moe_normalize_expert_weights"


def read_dbrx(fields: ConfigFields) -> ModelConfig:
    """``DbrxForCausalLM``. Theta stands among the fields of attention in published files, which transformers passes over."""
    fields = fields.renamed(
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    refuse_partial_rotation(fields)
    refuse_unless(fields, "tie_word_embeddings", False)
    empty = ConfigFields(fields.source, {})
    of_attention, of_experts = (fields.section(field) or empty for field in ("attn_config", "ffn_config"))
    refuse_unless(of_experts, _SHARES, 1.0)
    values = {
        "head_dim": None,
        "num_key_value_heads": of_attention.integer("kv_n_heads", 1),
        "intermediate_size": of_experts.integer("ffn_hidden_size", 3584),
        "hidden_act": (of_experts.section("ffn_act_fn") or empty).values.get("name") or "silu",
    }
    fields = ConfigFields(fields.source, {**fields.values, **values})
    # A null means: as they are.
    routing = read_routing(
        of_experts,
        ("moe_num_experts", 4),
        chosen=1,
        is_normalised=of_experts.values.get(_SHARES, 1.0) is not None,
        chosen_field="moe_top_k",
    )
    experts = ExpertsConfig(routing=routing, stack=None if is_of_gguf(fields) else "matrices", names=_EXPERTS)
    attention = msgspec.structs.replace(read_attention(fields), clip=of_attention.optional_number("clip_qkv"))
    return read_model(
        fields,
        default_context=2048,
        attention=attention,
        feed_forward=msgspec.structs.replace(read_feed_forward(fields), experts=experts),
        norm=NormConfig(eps=1e-5, kind="layer"),
        theta=of_attention.number("rope_theta", THETA),
        names=_NAMES,
    )
