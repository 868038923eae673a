"""Queries, and the rows that latent attention stores of tokens, packed.

Owns: the C struct of one layer, how wide a row is. Must not know: checkpoints, the executor, how the library computes.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headway_kernels.cpu.library import CpuLibrary, PackedLinear, join_panels, rounded


class _LatentStruct(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("compress", ctypes.c_void_p),
        ("expand_query", ctypes.c_void_p),
        ("absorb", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("query_dim", ctypes.c_int64),
        ("num_shared", ctypes.c_int64),
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

    ``query`` takes the hidden state, or a compressed row, the first part of what ``compress`` gives; its heads are as wide as
    ``CpuLibrary.padded_head_dim`` makes them. ``norm`` is of what keys and values are made of, float32, contiguous,
    ``[rank]``. ``absorb`` and ``values`` have a product for each head. ``gates`` are of what heads give, or None.
    """

    def __init__(
        self,
        library: CpuLibrary,
        query: PackedLinear | PackedExpansion,
        compress: PackedLinear,
        norm: Tensor,
        absorb: Sequence[PackedLinear],
        values: Sequence[PackedLinear],
        *,
        num_shared: int,
        norm_eps: float,
        gates: PackedLinear | None = None,
    ) -> None:
        join_panels(library, [*absorb, *values])
        of_absorb, of_values = _handles(absorb), _handles(values)
        self._kept = (query, compress, norm, absorb, values, gates, of_absorb, of_values)
        self.attended_dim = values[0].padded_outputs
        """Columns that a head gives."""
        self.struct = _LatentStruct(
            query=None if isinstance(query, PackedExpansion) else query.handle,
            compress=compress.handle,
            expand_query=query.product.handle if isinstance(query, PackedExpansion) else None,
            absorb=ctypes.addressof(of_absorb),
            values=ctypes.addressof(of_values),
            query_dim=library.padded_head_dim(absorb[0].inputs),
            num_shared=num_shared,
            query_norm=query.norm.data_ptr() if isinstance(query, PackedExpansion) else None,
            norm=norm.data_ptr(),
            norm_eps=norm_eps,
            gates=None if gates is None else gates.handle,
        )


def latent_row(library: CpuLibrary, rank: int, num_shared: int) -> int:
    """Columns of what is stored of a token: its compressed part, in whole panels, and the channels that keys share."""
    return rounded(rank, library.panel) + rounded(num_shared, library.lanes)


def _handles(products: Sequence[PackedLinear]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(products))(*(product.handle for product in products))
