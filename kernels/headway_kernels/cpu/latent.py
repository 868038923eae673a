"""Queries, keys and values of latent attention, packed.

Owns: the C struct of one layer. Must not know: checkpoints, the executor, how the library computes.
"""

import ctypes
from typing import NamedTuple

from torch import Tensor

from headway_kernels.cpu.library import PackedLinear


class _LatentStruct(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("compress", ctypes.c_void_p),
        ("expand_query", ctypes.c_void_p),
        ("expand", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("gates", ctypes.c_void_p),
    )


class PackedExpansion(NamedTuple):
    """A norm of compressed rows, float32, contiguous, ``[rank]``, and the product behind it."""

    norm: Tensor
    product: PackedLinear


class PackedLatent:
    """The products of one layer: see ``latent_weights`` in ``decoder_structs.h``.

    ``query`` takes the hidden state, or a compressed row, the first part of what ``compress`` gives. ``gates`` are of what
    attention gives, or None.
    """

    def __init__(
        self,
        query: PackedLinear | PackedExpansion,
        compress: PackedLinear,
        expand: PackedExpansion,
        norm_eps: float,
        gates: PackedLinear | None = None,
    ) -> None:
        self._kept = (query, compress, expand, gates)
        self.struct = _LatentStruct(
            query=None if isinstance(query, PackedExpansion) else query.handle,
            compress=compress.handle,
            expand_query=query.product.handle if isinstance(query, PackedExpansion) else None,
            expand=expand.product.handle,
            query_norm=query.norm.data_ptr() if isinstance(query, PackedExpansion) else None,
            norm=expand.norm.data_ptr(),
            norm_eps=norm_eps,
            gates=None if gates is None else gates.handle,
        )
