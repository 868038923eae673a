"""Granite and HyperCLOVA X: Llama with factors on embeddings, scores, the hidden state and logits; mixtures of it."""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, RecurrenceConfig, Scalings
from headway_executor.models.families.reading import (
    is_of_gguf,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_partial_rotation,
)
from headway_executor.models.families.routing import read_routing
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_EXPERT_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe.experts.{}.",
    stacks=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared="shared_mlp.",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
_NAMES_APART = ExpertNames(
    router="block_sparse_moe.router.layer", expert="block_sparse_moe.experts.{}.", shared="shared_mlp."
)
_NORMS_BEHIND = TensorNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")


def read_granite(fields: ConfigFields) -> ModelConfig:
    """``GraniteForCausalLM``."""
    return read_scaled(fields, read_granite_dense(fields))


def read_hyperclovax(fields: ConfigFields) -> ModelConfig:
    """``HyperCLOVAXForCausalLM``: with norms behind attention and feed-forward, too."""
    names = _NORMS_BEHIND if fields.flag("use_post_norm", default=True) else None
    config = read_scaled(fields, read_granite_dense(fields), scale=None, names=names)
    # What divides logits elsewhere multiplies them here.
    factor = fields.number("logits_scaling", 1.0)
    return msgspec.structs.replace(config, scalings=msgspec.structs.replace(config.scalings, logits=factor))


def read_granite_moe(fields: ConfigFields) -> ModelConfig:
    """``GraniteMoeForCausalLM``, ``GraniteMoeSharedForCausalLM``: all experts of a layer in one tensor.

    What ``headway gguf`` makes has one for each matrix of an expert.
    """
    return read_scaled(fields, read_mixture(fields))


def read_mixture(fields: ConfigFields, shared_size: int = 0) -> FeedForwardConfig:
    """Experts, and a shared one; ``shared_size`` is a default."""
    is_stacked = not is_of_gguf(fields)
    experts = ExpertsConfig(
        routing=read_routing(fields, ("num_local_experts", 8), chosen=2, is_normalised=True),
        shared_size=fields.integer("shared_intermediate_size", shared_size, low=0),
        stack="rows" if is_stacked else None,
        names=_EXPERT_NAMES if is_stacked else _NAMES_APART,
    )
    return msgspec.structs.replace(read_feed_forward(fields), experts=experts)


def read_granite_dense(fields: ConfigFields) -> FeedForwardConfig:
    """That of all without experts."""
    return read_feed_forward(fields, has_bias=fields.flag("mlp_bias", default=False))


def read_scaled(
    fields: ConfigFields,
    feed_forward: FeedForwardConfig,
    *,
    scale: float | None = 1.0,
    names: TensorNames | None = None,
    recurrences: Sequence[RecurrenceConfig | None] | None = None,
    rotates: Sequence[bool] | None = None,
) -> ModelConfig:
    """What all share. ``scale`` is a default; None: that of the heads."""
    refuse_partial_rotation(fields)
    has_bias = fields.flag("attention_bias", default=False)
    scale = fields.optional_number("attention_multiplier") or scale
    return read_model(
        fields,
        default_context=2048,
        attention=read_attention(fields, scale=scale, qkv_bias=has_bias, output_bias=has_bias),
        feed_forward=feed_forward,
        scalings=Scalings(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logits=1.0 / fields.number("logits_scaling", 1.0),
        ),
        names=names,
        recurrences=recurrences,
        rotates=rotates,
    )
