"""Long chunks of a step, with which a library attends instead of our kernel.

Owns: which tokens they have, the form in which a library gets them. Must not know: libraries, models.

A chunk is *long* by its own number of tokens alone, so nothing that shares its step decides who computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""From queries ``[tokens, heads, head_dim]``, any stride of a token, and a layer's pool to an output of that shape, contiguous."""


class LibraryLacking(RuntimeError):  # noqa: N818 (it names the finding)
    """The library is not there, or is another; one line."""


@dataclass(frozen=True)
class ChunkSizes:
    """What all steps of a model have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class LongChunks:
    """Rows of ``block_tables`` (int32, ``[max_rows, max_blocks]``, on the device), and on the host, as int32:

    ``first`` token of each in the step, ``counts`` of tokens, ``lengths`` after the step.
    """

    rows: NDArray[np.int32]
    first: NDArray[np.int32]
    counts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    block_tables: Tensor

    @property
    def starts(self) -> NDArray[np.int32]:
        """Of the tokens of each chunk among those of all, and their end."""
        return running_counts(self.counts)

    @property
    def are_together(self) -> bool:
        """Whether their tokens are consecutive."""
        return bool((self.first[1:] == (self.first + self.counts)[:-1]).all())

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Where their tokens are in the step."""
        return np.repeat(self.first - self.starts[:-1], self.counts) + np.arange(self.counts.sum(), dtype=np.int64)


class ChunkLibrary(Protocol):
    """A library for chunks; a token sees all positions up to its own."""

    def plan(self, chunks: LongChunks) -> Attend:
        """Prepare a step; what it returns is called for each layer. Nothing here waits for the device."""
        ...


class LongAttention:
    """Attends with chunks of more than ``most_tokens`` tokens; ``max_num_tokens``: of a step."""

    def __init__(self, library: ChunkLibrary, sizes: ChunkSizes, most_tokens: int, max_num_tokens: int) -> None:
        self._library = library
        self.most_tokens = most_tokens
        shape = (2, max_num_tokens, sizes.num_heads, sizes.head_dim)
        self._space = torch.empty(shape, dtype=sizes.dtype, device=sizes.device)

    def plan(
        self, rows: NDArray[np.int32], counts: NDArray[np.int32], computed: NDArray[np.int32], block_tables: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """What attends in each layer with a step's long chunks; None: it has none.

        ``rows``, ``counts`` of tokens and positions ``computed`` before them, of all rows of the step. What it returns takes
        queries ``[tokens, heads * head_dim]`` of the whole step, a layer's pool, and the output, of which it writes its own.
        """
        which = counts > self.most_tokens
        if not which.any():
            return None
        first = np.cumsum(counts, dtype=np.int32) - counts
        chunks = LongChunks(rows[which], first[which], counts[which], (computed + counts)[which], block_tables)
        attend, (queries, results) = self._library.plan(chunks), self._space
        head_dim = self._space.shape[-1]
        if chunks.are_together:
            span = slice(int(chunks.first[0]), int(chunks.first[-1] + chunks.counts[-1]))

            def in_place(query: Tensor, pool_layer: Tensor, out: Tensor) -> None:
                attend(_by_head(query[span], head_dim), pool_layer, _by_head(out[span], head_dim))

            return in_place
        places = sent(chunks.tokens, block_tables.device)
        queries, results = queries[: len(places)], results[: len(places)]

        def gathered(query: Tensor, pool_layer: Tensor, out: Tensor) -> None:
            torch.index_select(query, 0, places, out=queries.flatten(1))
            attend(queries, pool_layer, results)
            out.index_copy_(0, places, results.flatten(1))

        return gathered


def running_counts(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Sums from 0 on: one more than there are ``counts``."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


def sent(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device, in order with launches. torch keeps pinned memory until it is read."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy in main memory from which a copy to the device waits for nothing."""
    here = torch.from_numpy(np.ascontiguousarray(values))
    return here.pin_memory() if device.type == "cuda" else here


def _by_head(tokens: Tensor, head_dim: int) -> Tensor:
    split: Tensor = tokens.unflatten(1, (-1, head_dim))
    return split
