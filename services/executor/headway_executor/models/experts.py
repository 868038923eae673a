"""Feed-forward by a few of many experts, as plain torch operators.

Owns: sending tokens to experts and adding what they give. Must not know: weights, families.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.models.decoder import FeedForward, Product
from headway_kernels.experts import choose_experts
from headway_kernels.routing import Routing


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


@dataclass(frozen=True, slots=True)
class Experts:
    """Every function maps ``[tokens, hidden]`` to as many rows: ``router`` to ``[tokens, experts]``, an expert to its like.

    Ranks that have parts of each expert exchange columns ``between`` its products and ``behind`` them, once for all
    experts. All tokens go through the ``shared`` expert, if any, which the sigmoid of ``shared_gate`` (``[tokens, 1]``)
    weighs, if any. All others read what ``compress`` gives, and ``expand`` takes their sum. ``correction``: see
    ``choose_experts``. ``factors``, float32, ``[experts]``, multiply the weights of experts. ``begin`` is told the token of
    each row that goes through experts, expert after expert, and how many each has.
    """

    routing: Routing
    router: Product
    experts: tuple[FeedForward, ...]
    correction: Tensor | None = None
    factors: Tensor | None = None
    shared: Product | None = None
    shared_gate: Product | None = None
    between: Product = _as_it_is
    behind: Product = _as_it_is
    begin: Callable[[Tensor, list[int]], None] | None = None
    compress: Product = _as_it_is
    expand: Product = _as_it_is

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the sum of what each token's experts give, ``[tokens, hidden]``, a new tensor."""
        chosen, weights = choose_experts(self.routing, self.router(hidden), self.correction)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        given = self.expand(self._of_pairs(self.compress(hidden), chosen, weights.to(hidden.dtype)).sum(1))
        if self.shared is None:
            return given
        shared = self.shared(hidden)
        return given.add_(shared if self.shared_gate is None else shared.mul_(self.shared_gate(hidden).sigmoid()))

    def _of_pairs(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What each chosen expert gives, weighed, ``[tokens, num_chosen, hidden]``; each runs once, with all of its tokens."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        tokens = order // chosen.shape[1]
        if self.begin is not None:
            self.begin(tokens, counts)
        rows = hidden.index_select(0, tokens)
        if self.routing.weighs_inputs:
            rows.mul_(weights.flatten()[order, None])
        activated = self.between(self._in_turn([expert.activated for expert in self.experts], rows, counts))
        given = self.behind(self._in_turn([expert.down for expert in self.experts], activated, counts))
        in_order = torch.empty_like(given).index_copy_(0, order, given).view(*chosen.shape, -1)
        return in_order if self.routing.weighs_inputs else in_order.mul_(weights.unsqueeze(-1))

    @staticmethod
    def _in_turn(products: list[Product], rows: Tensor, counts: list[int]) -> Tensor:
        """Each with its rows, which follow each other."""
        parts = torch.split(rows, counts)
        return torch.cat([product(part) for product, part in zip(products, parts, strict=True) if len(part)])
