"""ALiBi (Press et al. 2021, arXiv 2108.12409): scores fall with the distance of a key.

Owns: the slopes and the biases. Must not know: how attention adds them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headway_executor.models.attention_config import AttentionConfig

_LEAST = 8.0
"""The least slope is 2 to the power of minus this."""


class ScoreBiases(NamedTuple):
    """What is added to scaled scores: float32, ``[heads, positions]``, at the place of the key, or at its distance."""

    table: Tensor
    is_by_distance: bool

    def of(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Of keys by queries, int64, ``[..., n]`` each: ``[heads, ..., queries, keys]``. Of later keys it is of no use."""
        places = keys.unsqueeze(-2).expand(*keys.shape[:-1], queries.shape[-1], keys.shape[-1])
        if self.is_by_distance:
            places = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).clamp(min=0)
        return self.table[:, places]

    def of_heads(self, heads: range) -> "ScoreBiases":
        """Of some heads."""
        return self._replace(table=self.table[heads.start : heads.stop])


def score_biases(attention: AttentionConfig, num_positions: int) -> ScoreBiases | None:
    """Of all heads of a model; None: it has none.

    Rounded biases differ with the place of the key, as in transformers; others are exact, since softmax sees distances alone.
    """
    alibi = attention.alibi
    if alibi is None:
        return None
    positions, slopes = torch.arange(num_positions), slopes_of(attention.num_heads)[:, None]
    if alibi.is_rounded:
        return ScoreBiases((slopes.bfloat16() * positions).float() * attention.scale, is_by_distance=False)
    return ScoreBiases(-slopes * positions, is_by_distance=True)


def slopes_of(num_heads: int) -> Tensor:
    """By how much scores fall from key to key, float32, ``[heads]``: those of the next power of two, every second one, and
    then those between.
    """
    count = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-torch.arange(1, count + 1) * _LEAST / count)
    return slopes if count == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
