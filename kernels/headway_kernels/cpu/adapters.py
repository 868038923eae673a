"""Adapters in the layout of the compiled library.

Owns: the C structs and the order of their numbers. Must not know: files, names, how they are computed.
"""

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum
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


class Site(IntEnum):
    """A product of a layer: ``enum site`` in ``decoder_structs.h``."""

    COMPRESS = 0
    GATES = 1
    STATE_INPUTS = 2
    STATE_SELECTION = 3
    STATE_STEPS = 4
    STATE_GATES = 5
    QKV = 6
    OUTPUT = 7
    STATE_OUTPUT = 8
    GATE_UP = 9
    DOWN = 10
    ROUTER = 11


def expert_gate_up(number: int) -> int:
    """The product to an expert; the shared one is behind the others."""
    return len(Site) + 2 * number


def expert_down(number: int) -> int:
    """The product back from an expert."""
    return len(Site) + 2 * number + 1


def latent_absorb(num_experts: int, head: int) -> int:
    """The product of a head of latent attention to what compressed rows are multiplied with."""
    return expert_gate_up(num_experts) + 2 * head


def latent_values(num_experts: int, head: int) -> int:
    """The product of a head of latent attention to what it gives."""
    return latent_absorb(num_experts, head) + 1


class LowRankUpdate(NamedTuple):
    """The addition to one product: ``down`` ``[rank, in]``, ``up`` ``[out, rank]``, float32, on the CPU.

    Both are in the form of the product's weights; ``gated`` as of its ``PackedLinear``.
    """

    down: Tensor
    up: Tensor
    gated: bool


class PackedAdapter:
    """By layer and product (a ``Site``, or one of an expert or of a head), an addition; most need not have any.

    ``num_experts`` are those of the layer that has most, the shared one included; ``latent_heads`` those of latent attention. Numbers are held in ``dtype``, float32 or
    bfloat16; in bfloat16, too, where that holds all of an addition's exactly.
    """

    def __init__(
        self,
        library: CpuLibrary,
        layers: Sequence[Mapping[int, LowRankUpdate]],
        dtype: torch.dtype = torch.float32,
        num_experts: int = 0,
        latent_heads: int = 0,
    ) -> None:
        self._dtype = dtype
        self._kept: list[Tensor] = []
        of_heads = latent_absorb(num_experts, 0)
        of_layer = latent_absorb(num_experts, latent_heads)
        self._structs = (_LowRankStruct * (of_layer * len(layers)))()
        self.address = ctypes.addressof(self._structs)
        self.most_rank = 1
        self.most_expert_rank = 0
        for index, layer in enumerate(layers):
            for site, update in layer.items():
                self._structs[index * of_layer + site] = self._struct(library, update)
                if site < Site.ROUTER or site >= of_heads:
                    self.most_rank = max(self.most_rank, len(update.down))
                else:
                    self.most_expert_rank = max(self.most_expert_rank, len(update.down))

    def _struct(self, library: CpuLibrary, update: LowRankUpdate) -> _LowRankStruct:
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
    ranks = torch.arange(up.shape[1])
    adds = halves.any(2)
    begins = torch.where(adds, ranks, up.shape[1]).amin(1)
    ends = torch.where(adds, ranks + 1, 0).amax(1)
    counts = (ends - begins).clamp(min=0)
    places = (counts.cumsum(0) - counts) * library.lanes
    in_span = (ranks >= begins[:, None]) & (ranks < ends[:, None])
    return halves[in_span].flatten(), torch.stack([begins, counts, places], 1)


def addresses_of(adapters: Sequence[PackedAdapter | None], num_tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The address of each token's adapter, or 0."""
    of_rows = np.array([0 if adapter is None else adapter.address for adapter in adapters], dtype=np.uint64)
    return np.repeat(of_rows, num_tokens)
