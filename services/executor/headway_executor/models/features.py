"""What a description asks for beyond a plain decoder, by name.

Owns: these names. Must not know: which backend has what.

A plain decoder is Llama's: RMS norms before attention and before a feed-forward that is gated by SiLU.
"""

from collections.abc import Set as AbstractSet
from enum import StrEnum

from headway_executor.models.config import ModelConfig
from headway_kernels.routing import Scoring


class Feature(StrEnum):
    """In words that fit behind "the model has"."""

    LAYER_NORM = "layer norms"
    NO_PRE_NORM = "attention or feed-forward without a norm before it"
    POST_NORM = "norms behind attention and feed-forward"
    PARALLEL = "attention beside the feed-forward"
    NORM_OVER_HEADS = "a norm over all heads"
    INNER_NORM = "norms before the projections behind attention and within the feed-forward"
    HEAD_LAYER_NORM = "layer norms of heads"
    SCORE_SOFTCAP = "a soft cap on attention scores"
    UNGATED = "a feed-forward without a gate"
    OTHER_ACTIVATION = "an activation other than silu"
    RESIDUAL_FACTOR = "a factor on what layers add"
    LOGITS_FACTOR = "a factor on logits"
    LOGITS_SOFTCAP = "a soft cap on logits"
    EXPERTS = "experts"
    EXPERT_NORMS = "experts with norms of their own"
    LATENT_EXPERTS = "experts between a compression and an expansion"
    SINKS = "attention sinks"
    LATENT = "latent attention"
    INDEX = "an index of the keys that a query sees"
    NEAR_SHARES = "experts weighed by their share of near scores"
    WEIGHED_INPUTS = "experts whose inputs are weighed"
    QUERY_GROWTH = "queries that grow with their position"
    ALONE = "layers without attention or without a feed-forward"
    RECURRENCE = "layers with a state instead of attention"
    GATES = "gates behind attention"
    CLIP = "bounds of queries, keys and values"
    SOFTPLUS_GATES = "gates by softplus"
    LIMIT = "activations with a limit"
    CURVE = "activations with numbers of their own"
    POSITIONS = "a table of positions"
    ALIBI = "scores that fall with distance (ALiBi)"
    SUM_NORM = "norms of sums"
    UNEVEN_LAYERS = "layers that differ in their heads, or share keys and values"
    VALUE_NORM = "norms of values"
    NARROW_VALUES = "values with fewer channels than keys"
    LAYER_FACTOR = "a factor behind each layer"
    BEFORE_HEAD = "a product and a norm before the head"
    STATES = "several hidden states of a token (AltUp)"
    SPARSITY = "sparse activations"
    LAYER_INPUTS = "inputs of each layer's own"
    SEVERAL_ROPES = "several rotary embeddings, or layers without one"


DENSE = frozenset(
    {
        Feature.LAYER_NORM,
        Feature.NO_PRE_NORM,
        Feature.POST_NORM,
        Feature.PARALLEL,
        Feature.NORM_OVER_HEADS,
        Feature.SCORE_SOFTCAP,
        Feature.UNGATED,
        Feature.OTHER_ACTIVATION,
        Feature.RESIDUAL_FACTOR,
        Feature.LOGITS_FACTOR,
        Feature.LOGITS_SOFTCAP,
        Feature.SEVERAL_ROPES,
    }
)
"""What dense decoders have. A new feature is not among them, so that a backend which has these does not claim it."""


def features_of(config: ModelConfig) -> AbstractSet[Feature]:
    """What the model has."""
    names, attention, scalings = config.names, config.attention, config.scalings
    feeds = [layer.feed_forward for layer in config.layers]
    norms = [config.norms_of(index) for index in range(config.num_layers)]
    attending = [layer for layer in config.layers if layer.attends]
    routings = [feed.experts.routing for feed in feeds if feed.experts is not None]
    asked = {
        Feature.LAYER_NORM: config.norm.kind == "layer",
        Feature.NO_PRE_NORM: any(
            (layer.mixes and of_layer.attention is None) or (layer.has_feed_forward and of_layer.mlp is None)
            for layer, of_layer in zip(config.layers, norms, strict=True)
        ),
        Feature.POST_NORM: any(
            of_layer.attention_post is not None or of_layer.mlp_post is not None for of_layer in norms
        ),
        Feature.PARALLEL: config.is_parallel,
        Feature.NORM_OVER_HEADS: attention.qk_norm == "all",
        Feature.HEAD_LAYER_NORM: attention.qk_norm == "layer",
        Feature.INNER_NORM: names.output_norm is not None or names.down_norm is not None,
        Feature.SCORE_SOFTCAP: attention.softcap is not None,
        Feature.UNGATED: any(not feed.is_gated for feed in feeds),
        Feature.OTHER_ACTIVATION: any(feed.activation != "silu" for feed in feeds),
        Feature.EXPERTS: any(feed.experts is not None for feed in feeds),
        Feature.WEIGHED_INPUTS: any(routing.weighs_inputs for routing in routings),
        Feature.NEAR_SHARES: any(routing.scoring is Scoring.NEAR for routing in routings),
        Feature.EXPERT_NORMS: any(feed.experts is not None and feed.experts.names.norms is not None for feed in feeds),
        Feature.LATENT_EXPERTS: any(feed.experts is not None and feed.experts.latent_size > 0 for feed in feeds),
        Feature.LATENT: attention.latent is not None,
        Feature.INDEX: config.has_index,
        Feature.SINKS: names.sinks is not None,
        Feature.GATES: attention.gates != "none",
        Feature.SOFTPLUS_GATES: attention.gates != "none" and attention.gate_kind == "softplus",
        Feature.CLIP: attention.clip is not None,
        Feature.LIMIT: any(feed.activation == "limited_silu" for feed in feeds),
        Feature.CURVE: any(feed.activation == "xielu" for feed in feeds),
        Feature.POSITIONS: names.positions is not None or config.has_sinusoids,
        Feature.ALIBI: attention.alibi is not None,
        Feature.SUM_NORM: config.norms_sums,
        Feature.RESIDUAL_FACTOR: scalings.residual != 1,
        Feature.LOGITS_FACTOR: scalings.logits != 1,
        Feature.LOGITS_SOFTCAP: scalings.logits_softcap is not None,
        Feature.QUERY_GROWTH: any(layer.query_growth is not None for layer in config.layers),
        Feature.ALONE: any(not (layer.mixes and layer.has_feed_forward) for layer in config.layers),
        Feature.RECURRENCE: config.has_states,
        Feature.UNEVEN_LAYERS: len(config.attentions) > 1 or any(layer.keys_of is not None for layer in config.layers),
        Feature.VALUE_NORM: any(attention.norms_values for attention in config.attentions),
        Feature.NARROW_VALUES: any(attention.value_dim > 0 for attention in config.attentions),
        Feature.LAYER_FACTOR: names.layer_factor is not None,
        Feature.BEFORE_HEAD: config.before_head is not None and config.has_head,
        Feature.STATES: config.states is not None,
        Feature.SPARSITY: any(feed.sparsity > 0 for feed in feeds),
        Feature.LAYER_INPUTS: config.layer_inputs is not None,
        Feature.SEVERAL_ROPES: len({layer.rope for layer in attending}) > 1
        or any(layer.rope is None for layer in attending),
    }
    return {feature for feature, is_there in asked.items() if is_there}


def lacking(config: ModelConfig, has: AbstractSet[Feature]) -> str:
    """The features of the model that are not among ``has``, as a list in words; empty if there are none."""
    return ", ".join(sorted(features_of(config) - has))
