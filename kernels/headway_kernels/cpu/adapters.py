"""Adapters in the layout of the compiled library.

Owns: the C structs and the order of their numbers. Must not know: files, names, how they are computed.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headway_kernels.cpu.library import CpuLibrary, rounded


class _LowRankStruct(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int64),
        ("is_bfloat16", ctypes.c_int64),
        ("down", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
    )


class LowRankUpdate(NamedTuple):
    """The addition to one product: ``down`` ``[rank, in]``, ``up`` ``[out, rank]``, float32, on the CPU.

    Both are in the form of the product's weights; ``gated`` as of its ``PackedLinear``.
    """

    down: Tensor
    up: Tensor
    gated: bool


class PackedAdapter:
    """By layer and product (``enum site`` in decoder.h), an addition or None.

    Its numbers are held in ``dtype``, float32 or bfloat16; in bfloat16, too, where that holds all of an addition's exactly.
    """

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[Sequence[LowRankUpdate | None]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dtype = dtype
        self._kept: list[Tensor] = []
        additions = [self._struct(library, update) for layer in layers for update in layer]
        self._structs = (_LowRankStruct * len(additions))(*additions)
        self.address = ctypes.addressof(self._structs)
        self.most_rank = max([1, *(addition.rank for addition in additions)])

    def _struct(self, library: CpuLibrary, update: LowRankUpdate | None) -> _LowRankStruct:
        if update is None:
            return _LowRankStruct(rank=0)
        down = functional.pad(update.down, (0, -update.down.shape[1] % library.lanes)).contiguous()
        up, spans = packed_up(library, update.up, gated=update.gated)
        narrow = down.bfloat16(), up.bfloat16()
        is_narrow = self._dtype == torch.bfloat16 or all(map(torch.equal, (down, up), (n.float() for n in narrow)))
        if is_narrow:
            down, up = narrow
        self._kept += [down, up, spans]
        return _LowRankStruct(
            rank=len(down), is_bfloat16=is_narrow, down=down.data_ptr(), up=up.data_ptr(), spans=spans.data_ptr()
        )


def packed_up(library: CpuLibrary, up: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
    """``[out, rank]`` by half panels of the product's weights, without the ranks that add nothing to a half.

    Returns the numbers, and of each half: its first rank, how many, and where they are (int64, ``[halves, 3]``).
    """
    width = library.lanes if gated else library.panel
    parts = up.chunk(2) if gated else (up,)
    padding = rounded(len(parts[0]), width) - len(parts[0])
    by_panel = [functional.pad(part, (0, 0, 0, padding)).reshape(-1, width, up.shape[1]) for part in parts]
    halves = torch.cat(by_panel, 1).reshape(-1, library.lanes, up.shape[1]).transpose(1, 2)
    spans, packed, at = [], [torch.zeros(0)], 0
    for half in halves:
        ranks = half.any(1).nonzero().flatten().tolist()
        begin, end = (ranks[0], ranks[-1] + 1) if ranks else (0, 0)
        spans.append((begin, end - begin, at))
        packed.append(half[begin:end].flatten())
        at += packed[-1].numel()
    return torch.cat(packed), torch.tensor(spans, dtype=torch.int64)


def addresses_of(adapters: Sequence[PackedAdapter | None], num_tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The address of each token's adapter, or 0."""
    of_rows = np.array([0 if adapter is None else adapter.address for adapter in adapters], dtype=np.uint64)
    return np.repeat(of_rows, num_tokens)
