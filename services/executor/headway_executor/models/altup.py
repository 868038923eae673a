"""Layers that keep several hidden states and compute on one of them, as plain torch operators.

Owns: alternating updates (Baykal et al. 2023, arXiv 2301.13310), the low-rank residual beside attention (LAuReL, Menghani et
al. 2024, arXiv 2411.07501). Must not know: weights, attention.

Of each token there are several states. A layer predicts all of them, computes on the first, and corrects all by what it got.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.models.decoder import Attention, LayerInput, Product, Rotations, StepPlan

_LEAST_SQUARE = 1e-5
"""Of a state that is brought to the size of another."""


@dataclass(frozen=True, slots=True)
class States:
    """From embeddings to the states of the first layer, and from those of the last layer to one: a product for each further
    state.
    """

    projections: tuple[Callable[[Tensor], Tensor], ...]
    back: tuple[Callable[[Tensor], Tensor], ...]

    def begin(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden]`` to ``[states, tokens, hidden]``."""
        return torch.stack([hidden, *_as_large_as(hidden, [project(hidden) for project in self.projections])])

    def end(self, states: Tensor) -> Tensor:
        """The way back: the mean."""
        first, *others = states
        made = [project(state) for project, state in zip(self.back, others, strict=True)]
        return torch.stack([first, *_as_large_as(first, made)]).mean(0)


def _as_large_as(target: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    size = target.square().mean(-1, keepdim=True).sqrt()
    return [row * size / row.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt() for row in rows]


@dataclass(frozen=True, slots=True)
class AlternatingLayer:
    """``router`` gives a number of each state, behind its norm and times ``1 / hidden``; ``predict`` and ``correct`` make
    coefficients of these. ``output_scale`` multiplies what the layer's own inputs are gated by; None: nothing does.
    """

    router: Product
    predict: Product
    correct: Product
    output_scale: Tensor | None
    attention_norm: Product
    attention: Attention
    attention_post_norm: Product
    beside: Product
    mlp_norm: Product
    feed_forward: Product
    mlp_post_norm: Product
    own_input: LayerInput

    def __call__(self, states: Tensor, rotations: Rotations, plan: StepPlan) -> None:
        """Change ``states`` (``[states, tokens, hidden]``) in place."""
        count = len(states)
        coefficients = self.predict(self._numbers(states[0])).view(-1, count, count)
        predicted = torch.einsum("itd,tji->jtd", states, coefficients).add_(states)
        active = predicted[0]
        inputs = self.attention_norm(active)
        attended = active + self.attention_post_norm(self.attention(inputs, rotations, plan))
        together = (attended + inputs + self.beside(inputs)) / math.sqrt(2)
        made = together + self.mlp_post_norm(self.feed_forward(self.mlp_norm(together)))
        corrections = (self.correct(self._numbers(made)) + 1).t().unsqueeze(-1)
        states.copy_(corrections * (made - active)).add_(predicted)
        assert plan.layer_inputs is not None
        first = states[0] if self.output_scale is None else states[0] * self.output_scale
        states[1:].add_(self.own_input.made_of(first, plan.layer_inputs))

    def _numbers(self, hidden: Tensor) -> Tensor:
        return self.router(hidden).float().tanh().to(hidden.dtype)
