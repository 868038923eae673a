"""What mixtures read alike from config.json.

Owns: the numbers of experts, which layers have them. Must not know: one family, tensors.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_executor.models.families.reading import (
    num_layers_of,
    read_feed_forward,
    refuse_others,
)
from headway_executor.models.tensor_names import ExpertNames
from headway_kernels.routing import MOST_EXPERTS, Routing, Scoring

CORRECTION = "mlp.gate.e_score_correction_bias"
"""Where most mixtures with corrected scores have the correction."""


def read_routing(
    fields: ConfigFields,
    count: tuple[str, int | None],
    *,
    chosen: int | None,
    is_normalised: bool,
    chosen_field: str = "num_experts_per_tok",
) -> Routing:
    """Of how many experts each token goes through how many.

    ``count`` is the field of all experts and its default, ``chosen`` a default.
    """
    num_experts = fields.integer(*count, high=MOST_EXPERTS)
    num_chosen = fields.integer(chosen_field, chosen)
    if num_chosen > num_experts:
        raise fields.refuse(chosen_field, f"an integer from 1 to {num_experts}, the number of experts")
    return Routing(num_experts=num_experts, num_chosen=num_chosen, is_normalised=is_normalised)


def layers_named(fields: ConfigFields, field: str, num_layers: int) -> frozenset[int]:
    """A list of layers, by default none."""
    named = fields.values.get(field) or []
    if not isinstance(named, list) or any(layer not in range(num_layers) for layer in named):
        raise fields.refuse(field, f"a list of integers from 0 to {num_layers - 1}")
    return frozenset(named)


def read_corrected(
    fields: ConfigFields,
    count: tuple[str, int | None],
    *,
    chosen: int | None = 8,
    is_normalised: bool = True,
    scaling: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    correction: str = CORRECTION,
) -> ExpertsConfig:
    """Experts chosen by sigmoid scores with a correction, in groups, as in DeepSeek V3.

    All numbers are defaults. ``correction`` is the name of its tensor.
    """
    refuse_others(fields, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    is_normalised = fields.flag("norm_topk_prob", default=is_normalised)
    routing = read_routing(fields, count, chosen=chosen, is_normalised=is_normalised)
    routing = replace(routing, scoring=Scoring.SIGMOID, scaling=fields.number("routed_scaling_factor", scaling))
    return ExpertsConfig(
        routing=in_groups(fields, routing, scores_per_group=2, default=groups), names=ExpertNames(correction=correction)
    )


def in_groups(
    fields: ConfigFields,
    routing: Routing,
    *,
    scores_per_group: int,
    default: tuple[int | None, int | None] = (None, None),
) -> Routing:
    """Choose experts in groups. ``default``: of how many groups, and how many of them take part."""
    num_groups, num_open = fields.integer("n_group", default[0]), fields.integer("topk_group", default[1])
    size = routing.num_experts // num_groups
    if routing.num_experts % num_groups or (num_groups > 1 and size < scores_per_group):
        raise fields.refuse("n_group", f"a divisor of n_routed_experts, {routing.num_experts}, for groups of 2 or more")
    if num_open > num_groups or routing.num_chosen > num_open * size:
        raise fields.refuse("topk_group", f"at most n_group, {num_groups}, with num_experts_per_tok experts or more")
    return replace(routing, num_groups=num_groups, num_open_groups=num_open, scores_per_group=scores_per_group)


def behind_dense_layers(
    fields: ConfigFields,
    experts: ExpertsConfig,
    *,
    size: int | None = None,
    shared: int | None = None,
    shared_field: str = "n_shared_experts",
    first: int,
    first_field: str = "first_k_dense_replace",
) -> list[FeedForwardConfig]:
    """The feed-forward of each layer: by default dense ones before ``first``, and then experts, with shared ones in one.

    ``size`` (columns of an expert), ``shared`` (how many) and ``first`` are defaults.
    """
    dense, inner = read_feed_forward(fields), fields.integer("moe_intermediate_size", size)
    experts = msgspec.structs.replace(experts, shared_size=inner * fields.integer(shared_field, shared, high=64))
    sparse = msgspec.structs.replace(dense, intermediate_size=inner, experts=experts)
    first = fields.integer(first_field, first, low=0)
    return by_mlp_type(fields, dense, sparse, [i >= first for i in range(num_layers_of(fields))])


def by_mlp_type(
    fields: ConfigFields, dense: FeedForwardConfig, sparse: FeedForwardConfig, usual: Sequence[bool]
) -> list[FeedForwardConfig]:
    """The feed-forward of each layer by ``mlp_layer_types``; ``usual``: which are sparse if the file does not say."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        return [sparse if is_sparse else dense for is_sparse in usual]
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(usual)
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise fields.refuse("mlp_layer_types", f"a list of {len(usual)} names, each dense or sparse")
    return [sparse if kind == "sparse" else dense for kind in kinds]
