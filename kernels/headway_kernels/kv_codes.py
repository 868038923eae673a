"""Keys and values as codes of 8 bits, with a power of two for each head's vector at a position.

Owns: the layout of a block of codes, the codes in plain torch. Must not know: attention, pools.

Codes are E4M3 (Micikevicius et al. 2022, arXiv 2209.05433). A vector's exponent is shared as in the Microscaling formats
(OCP MX specification 1.0, 2023): its largest magnitude is coded between 128 and 256. A factor that is a power of two
rounds nothing, so the factor of a key may multiply its logit, and that of a value its weight.

A block of codes has the shape ``[vectors, positions, channels + 1]``, uint8, but not its order: first all codes, those of a
vector's channels side by side, then the exponent of each.
"""

import torch
from torch import Tensor

LEAST_EXPONENT = 8
"""Of smaller vectors, and of zeros: its factors are normal numbers."""
NO_NUMBER = 255
"""The exponent of a vector of which some channel is infinite or NaN: all of it counts as NaN."""
_FACTOR_OF_CODES = 134
"""A code c with exponent e stands for c * 2 ** (e - 134): 127 for the bias of float32, 7 for the largest code."""


def encode(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and exponents of floating vectors, ``[..., channels]``: uint8, ``[..., channels]`` and ``[...]``.

    An exponent is that of the largest magnitude, as float32 stores it.
    """
    wide = vectors.float()
    # The bits of floats that are not negative are in their order.
    exponents = (wide.abs().contiguous().view(torch.int32).amax(-1) >> 23).clamp(min=LEAST_EXPONENT)
    factors = ((_FACTOR_OF_CODES + 127 - exponents) << 23).view(torch.float32)
    codes = (wide * factors[..., None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), exponents.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor) -> Tensor:
    """What codes and exponents stand for: float32, ``[..., channels]``."""
    factors = (exponents.to(torch.int32) << 23).view(torch.float32) * 2.0 ** (127 - _FACTOR_OF_CODES)
    factors = factors.masked_fill(exponents == NO_NUMBER, torch.nan)
    return codes.contiguous().view(torch.float8_e4m3fn).float() * factors[..., None]


def parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the codes, ``[n, vectors, positions, channels]``, and exponents, ``[n, vectors, positions]``, of blocks.

    ``blocks`` uint8, ``[n, vectors, positions, channels + 1]``; each block is contiguous.
    """
    num_blocks, num_vectors, num_positions, width = blocks.shape
    flat = blocks.flatten(1)
    num_codes = num_vectors * num_positions * (width - 1)
    codes = flat[:, :num_codes].view(num_blocks, num_vectors, num_positions, width - 1)
    return codes, flat[:, num_codes:].view(num_blocks, num_vectors, num_positions)


def is_coded(pool: Tensor) -> bool:
    """Whether a pool's blocks are of codes."""
    return pool.dtype == torch.uint8


def encoded(blocks: Tensor) -> Tensor:
    """Blocks of numbers, ``[n, vectors, positions, channels]``, as blocks of codes."""
    coded = torch.empty((*blocks.shape[:3], blocks.shape[3] + 1), dtype=torch.uint8, device=blocks.device)
    for part, values in zip(parts(coded), encode(blocks), strict=True):
        part.copy_(values)
    return coded


def decoded(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of codes as numbers of ``dtype``: ``[n, vectors, positions, channels]``."""
    return decode(*parts(blocks)).to(dtype)
