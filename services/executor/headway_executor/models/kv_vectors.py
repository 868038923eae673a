"""A pool's blocks as vectors of one head at one position, as numbers or as codes.

Owns: where a vector is, how it is stored and read. Must not know: rows, attention.

A layer's part of a block is ``[2 * kv_heads, block_size, head_dim]``, key heads first, or half of that where keys are the
values, too, and behind those perhaps keys of an index; ``headway_kernels.kv_codes`` says what one of codes is.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.kv_layout import KvPlace
from headway_kernels import kv_codes

_Int64Array = NDArray[np.int64]


class LayerVectors(Protocol):
    """The vectors of one layer."""

    def store(self, places: Tensor, vectors: Tensor) -> None:
        """Store ``vectors``, ``[n, head_dim]``, at distinct ``places``, int64, ``[n]``."""
        ...

    def read(self, places: Tensor) -> Tensor:
        """The vectors at ``places``, int64, ``[n]``: ``[n, head_dim]``, in the model's dtype."""
        ...


class KvVectors:
    """The vectors of all layers with ``num_kv_heads`` heads of ``head_dim`` channels."""

    def __init__(
        self, pool: KvPool, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, keys_are_values: bool = False
    ) -> None:
        self._num_kv_heads = num_kv_heads
        self._num_vectors = num_kv_heads * (1 if keys_are_values else 2)
        self._layers = pool.layers
        self._dtype = dtype
        self.block_size = pool.block_size
        self.is_coded = kv_codes.is_coded(pool.layers)
        """What is read differs from what has been stored."""
        is_alone = pool.layers.dim() > 3  # Else layers stand behind each other.
        self._per_block = pool.layers.shape[2] * self.block_size if is_alone else pool.layers.shape[2] // head_dim
        self._head_dim = head_dim

    def of(self, slots: _Int64Array) -> _Int64Array:
        """The places of the keys of ``slots``, and of their values, if these are others: int64, ``[1 or 2, kv_heads,
        *slots.shape]``.
        """
        places = self._places(slots, np.arange(self._num_vectors))
        return places.reshape(-1, self._num_kv_heads, *slots.shape)

    def at(self, place: KvPlace) -> LayerVectors:
        """Views of a layer's vectors."""
        layer = self._layers[place.layer]
        if self.is_coded:
            return _Codes(layer, self._dtype)
        return _Numbers(layer.view(-1)[place.first :].view(-1, self._head_dim))

    def index_keys(self, slots: _Int64Array) -> _Int64Array:
        """The places of the index's keys of ``slots``: int64, of their shape."""
        return self._places(slots, np.array([self._num_vectors])).reshape(slots.shape)

    def _places(self, slots: _Int64Array, vectors: _Int64Array) -> _Int64Array:
        """``[vectors, *slots.shape]``."""
        blocks, offsets = np.divmod(slots, self.block_size)
        within = vectors.reshape(-1, *(1 for _ in slots.shape)) * self.block_size + offsets
        found: _Int64Array = blocks * self._per_block + within
        return found


class _Numbers:
    def __init__(self, vectors: Tensor) -> None:
        self._vectors = vectors

    def store(self, places: Tensor, vectors: Tensor) -> None:
        self._vectors.index_copy_(0, places, vectors)

    def read(self, places: Tensor) -> Tensor:
        return self._vectors.index_select(0, places)


class _Codes:
    def __init__(self, layer: Tensor, dtype: torch.dtype) -> None:
        codes, exponents = kv_codes.parts(layer)
        self._codes, self._exponents = codes.flatten(1, 2), exponents.flatten(1, 2)
        self._dtype = dtype

    def store(self, places: Tensor, vectors: Tensor) -> None:
        where = self._where(places)
        self._codes[where], self._exponents[where] = kv_codes.encode(vectors)

    def read(self, places: Tensor) -> Tensor:
        where = self._where(places)
        return kv_codes.decode(self._codes[where], self._exponents[where]).to(self._dtype)

    def _where(self, places: Tensor) -> tuple[Tensor, Tensor]:
        vectors_of_block = self._exponents.shape[1]
        return places // vectors_of_block, places % vectors_of_block
