"""ModernBERT's decoders (Ettin): layer norms, of embeddings too, windows with a rope of their own, a product before the head."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import BeforeHead, ModelConfig, NormConfig
from headway_executor.models.families.reading import (
    FULL,
    SLIDING,
    layer_types_of,
    num_layers_of,
    read_attention,
    read_feed_forward,
    read_model,
    read_ropes,
    refuse_groups,
    refuse_others,
    refuse_partial_rotation,
    windows_of,
)
from headway_executor.models.tensor_names import TensorNames

_NAMES = TensorNames(
    embedding="model.embeddings.tok_embeddings.weight",
    embedding_norm="model.embeddings.norm",
    final_norm="model.final_norm",
    heads=("decoder.weight",),
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
    attention_norm="attn_norm",
    mlp_norm="mlp_norm",
    lacks_first_norm=True,
)


def read_modernbert_decoder(fields: ConfigFields) -> ModelConfig:
    """``ModernBertDecoderForCausalLM``. Half of ``local_attention`` is before a token: so many positions it sees."""
    refuse_partial_rotation(fields)
    refuse_groups(fields)
    refuse_others(fields, {"rope_scaling": None})
    num_layers, context = num_layers_of(fields), fields.integer("max_position_embeddings", 8192)
    every = fields.integer("global_attn_every_n_layers", 3)
    kinds = layer_types_of(fields, [SLIDING if i % every else FULL for i in range(num_layers)])
    fields, local = fields.renamed(rope_theta="global_rope_theta"), fields.integer("local_attention", 128, low=2)
    has_bias, in_mlp, in_norms, in_dense = (
        fields.flag(field, default=False) for field in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")
    )
    before_head = BeforeHead(
        activation=read_feed_forward(fields, field="classifier_activation", default="gelu", size=1152).activation,
        has_bias=in_dense,
        dense="lm_head.dense",
        norm="lm_head.norm",
    )
    config = read_model(
        fields,
        default_context=context,
        attention=read_attention(fields, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=read_feed_forward(fields, field="hidden_activation", default="gelu", size=1152, has_bias=in_mlp),
        norm=NormConfig(eps=fields.number("norm_eps", 1e-5), kind="layer", has_bias=in_norms),
        windows=windows_of(fields, kinds, fields.integer("sliding_window", local // 2)),
        ropes=read_ropes(fields, kinds, context, near=10_000.0, far=160_000.0, near_field="local_rope_theta"),
        names=_NAMES,
        tied=True,
    )
    return msgspec.structs.replace(
        config, before_head=before_head, has_head_bias=fields.flag("decoder_bias", default=True)
    )
