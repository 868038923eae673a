"""Experts of a layer as plain torch operators.

Owns: which tensor becomes which part of them. Must not know: how a product or a norm is made, files.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from headway_executor.models.adapters import AdapterSite
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig
from headway_executor.models.decoder import FeedForward, Product
from headway_executor.models.eager_products import EagerProducts
from headway_executor.models.expert_tensors import ExpertTensors, NormsOfExperts
from headway_executor.models.experts import Experts
from headway_executor.models.latent import InTurn
from headway_executor.ranks.stage_mates import Alone
from headway_kernels.experts import Expert


def eager_experts(
    make: EagerProducts, place: int, tensors: ExpertTensors, feed: FeedForwardConfig, config: ExpertsConfig
) -> Experts:
    """Of one layer; ``place``: the layer's in the stage."""
    correction, shared, shared_gate = tensors.correction(), tensors.shared(), tensors.shared_gate()
    latent = tensors.latent()
    sites = (AdapterSite.EXPERTS_IN, AdapterSite.EXPERTS_OUT)
    around: dict[str, Any] = {
        name: make.adapted(make.linear(weight), place, site)
        for name, weight, site in zip(("compress", "expand"), latent or (), sites, strict=False)
    }
    part, between = make.part, Alone() if make.part.is_fast else make.mates
    products = [_of_expert(make, place, tensors.expert(number), number) for number in range(config.routing.num_experts)]
    made = Experts(
        routing=config.routing,
        router=make.adapted(make.linear(*tensors.router()), place, AdapterSite.ROUTER),
        experts=tuple(FeedForward(up, feed.activation, feed.is_gated, down, limit=feed.limit) for up, down in products),
        between=partial(between.gather, cut=part.inner(feed.intermediate_size)),
        behind=make.mates.add_up if part.is_fast else partial(make.mates.gather, cut=part.hidden),
        correction=None if correction is None else make.wide(correction),
        shared=None if shared is None else _shared(make, place, shared, feed, config),
        shared_gate=None
        if shared_gate is None
        else make.adapted(make.linear(shared_gate), place, AdapterSite.SHARED_GATE),
        begin=None if make.adapters is None else make.adapters.begin_experts,
        **around,
    )
    norms = tensors.norms()
    return made if norms is None else _with_norms(make, made, norms)


def _with_norms(make: EagerProducts, experts: Experts, norms: NormsOfExperts) -> Experts:
    """Where each part normalises the hidden state by itself."""
    assert experts.shared is not None
    return replace(
        experts,
        router=InTurn((make.rms_norm(norms.router), experts.router)),
        compress=make.rms_norm(norms.experts),
        expand=make.rms_norm(norms.experts_post),
        shared=InTurn((make.rms_norm(norms.shared), experts.shared, make.rms_norm(norms.shared_post))),
        factors=make.wide(norms.weights),
    )


def _shared(
    make: EagerProducts, place: int, expert: Expert, feed: FeedForwardConfig, config: ExpertsConfig
) -> FeedForward:
    up, down = _of_expert(make, place, expert, None)
    back = make.back(down, make.part.inner(config.shared_size))
    return FeedForward(up, feed.activation, feed.is_gated, back, limit=config.shared_limit)


def _of_expert(make: EagerProducts, place: int, expert: Expert, number: int | None) -> tuple[Product, Product]:
    """The products to and from an expert; ``number`` None: the shared one."""
    sites = (
        (AdapterSite.SHARED_GATE_UP, AdapterSite.SHARED_DOWN)
        if number is None
        else (AdapterSite.EXPERT_GATE_UP, AdapterSite.EXPERT_DOWN)
    )
    return (
        make.adapted(make.linear(expert.gate_up, expert.gate_up_bias), place, sites[0], number),
        make.adapted(make.linear(expert.down, expert.down_bias), place, sites[1], number),
    )
