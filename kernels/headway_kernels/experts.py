"""Experts: what they consist of, and how a token chooses some of them, in plain torch.

Owns: ``Expert``, the choice. Must not know: who multiplies.

Sources: softmax over all experts, Shazeer et al. 2017 (arXiv 1701.06538); groups of experts, DeepSeek-AI 2024 (arXiv
2405.04434); sigmoid scores with a correction that balances load, DeepSeek-AI 2024 (arXiv 2412.19437); shares of near
scores, Liu et al. 2024 (arXiv 2409.12136).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_kernels.routing import Routing, Scoring


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Weights of one expert.

    ``gate_up`` ``[2 * inner, hidden]``, gates first; ``down`` ``[hidden, inner]``. Biases fit, or are None.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def choose_experts(routing: Routing, logits: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the chosen experts (int64) in ascending order and their weights (float32), both ``[tokens, num_chosen]``.

    ``logits`` floating, ``[tokens, num_experts]``; ``correction``, ``[num_experts]``, is added to choose, not to weigh.
    """
    wide = logits.float()
    scores = _scores(routing, wide)
    ranked = wide if routing.corrects_outputs else scores
    if correction is not None:
        ranked = ranked + correction.float()
    if routing.num_groups > 1:
        ranked = _without_closed_groups(routing, ranked)
    chosen = ranked.topk(routing.num_chosen, dim=-1).indices.sort(dim=-1).values
    weights = scores.gather(-1, chosen)
    if routing.is_normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * routing.scaling


def _scores(routing: Routing, logits: Tensor) -> Tensor:
    if routing.scoring is Scoring.NEAR:
        return _near_shares(routing, logits)
    return logits.sigmoid() if routing.scoring is Scoring.SIGMOID else logits.softmax(-1)


def _near_shares(routing: Routing, logits: Tensor) -> Tensor:
    """-1 where an expert is not among the best."""
    shares, left = torch.full_like(logits, -1.0), logits
    for _ in range(routing.num_chosen):
        largest, best = left.max(-1, keepdim=True)
        is_far = (largest - logits) / torch.maximum(logits.abs(), largest) > routing.tolerance
        near = left.masked_fill(is_far, float("-inf")).softmax(-1)
        shares = shares.scatter(-1, best, near.gather(-1, best))
        left = left.scatter(-1, best, float("-inf"))
    return shares


def _without_closed_groups(routing: Routing, ranked: Tensor) -> Tensor:
    grouped = ranked.view(len(ranked), routing.num_groups, -1)
    of_groups = grouped.topk(routing.scores_per_group, dim=-1).values.sum(-1)
    best = of_groups.topk(routing.num_open_groups, dim=-1).indices
    closed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).view_as(ranked)
