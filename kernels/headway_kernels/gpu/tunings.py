"""The tiles of a device's kernels: those that ship, or those that somebody has measured there.

Owns: which tiles a model's kernels get. Must not know: files, what a kernel computes.

Tiles are of a device, a head size and a dtype, and hold as long as a model is open. Nothing that a step has in it chooses
among them, so they change results from device to device at most, by rounding, and never with the company of a row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from headway_kernels.gpu.attention.tuning import AttentionTuning, TileSizes, attention_tuning
from headway_kernels.gpu.linear.float8 import FLOAT8_TILINGS
from headway_kernels.gpu.linear.quantized import FLOAT32_TILINGS, TILINGS, Tiling
from headway_kernels.gpu.linear.skinny import MOST_TOKENS

MOST_FEW_TOKENS = MOST_TOKENS
"""Products of up to so many tokens have a kernel of their own, or in float32 a tiling that stays."""


@dataclass(frozen=True)
class Tunings:
    """What a ``device`` has instead of the tiles that ship.

    ``products``, of more than ``MOST_FEW_TOKENS`` tokens, and ``pairs`` of tokens and experts, by bytes of an element of the inputs.
    """

    device: torch.device
    attention: Mapping[TileSizes, AttentionTuning] = field(default_factory=dict)
    products: Mapping[int, tuple[Tiling, ...]] = field(default_factory=dict)
    pairs: Mapping[int, Tiling] = field(default_factory=dict)

    def of_attention(self, sizes: TileSizes) -> AttentionTuning:
        """For attention of these sizes."""
        return self.attention.get(sizes) or attention_tuning(self.device, sizes)

    def of_products(self, dtype: torch.dtype) -> tuple[Tiling, ...]:
        """For products of weights as codes with inputs of ``dtype``, perhaps E4M3, by ascending number of tokens."""
        shipped = shipped_tilings(dtype)
        few = tuple(
            tiling for tiling in shipped if tiling.max_tokens is not None and tiling.max_tokens <= MOST_FEW_TOKENS
        )
        many = self.products.get(dtype.itemsize)
        return shipped if many is None else (*few, *many)

    def most_tokens(self, dtype: torch.dtype) -> set[int]:
        """Up to which numbers of tokens products with codes have tiles of their own."""
        return _bounds((*self.of_products(dtype), *self.of_products(torch.float8_e4m3fn)))

    def most_rounded_pairs(self) -> set[int]:
        """Up to which numbers of an expert's pairs products with inputs that are rounded have tiles of their own."""
        return _bounds(self.of_rounded_pairs())

    def of_pairs(self, dtype: torch.dtype) -> Tiling:
        """For the products of experts, of any number of pairs, with inputs as they are."""
        return self.pairs.get(dtype.itemsize) or shipped_pair_tiling(dtype)

    def of_rounded_pairs(self) -> tuple[Tiling, ...]:
        """For those with inputs that are rounded to E4M3, by ascending number of an expert's pairs."""
        many = self.pairs.get(torch.float8_e4m3fn.itemsize)
        return FLOAT8_TILINGS if many is None else (replace(many, max_tokens=None),)


def _bounds(tilings: Iterable[Tiling]) -> set[int]:
    return {tiling.max_tokens for tiling in tilings if tiling.max_tokens is not None}


def shipped_tilings(dtype: torch.dtype) -> tuple[Tiling, ...]:
    """Those of products with codes."""
    if dtype == torch.float8_e4m3fn:
        return FLOAT8_TILINGS
    return FLOAT32_TILINGS if dtype == torch.float32 else TILINGS


def shipped_pair_tiling(dtype: torch.dtype) -> Tiling:
    """One for any number of pairs. With few, memory bounds the product, and columns of a tile that go to waste cost little."""
    tiling = FLOAT32_TILINGS[1] if dtype == torch.float32 else TILINGS[0]
    return Tiling(None, tiling.tokens, tiling.outputs, tiling.inputs, 4, tiling.num_stages)
