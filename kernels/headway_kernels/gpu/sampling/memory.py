"""The memory of the sampling kernels on the device: parameters of rows, scratch memory.

Owns: tensors and shapes. Must not know: kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.sampling.layout import ROW_LAYOUT, ROW_WORDS

DONE = tl.constexpr(0)
DRAWS = tl.constexpr(1)
DRAWS_RANKED = tl.constexpr(2)
"""A row's remaining work after ``merge``."""

SURVEYED = tl.constexpr(8)

NARROWING_ROUNDS = tl.constexpr(2)
NARROWING_PIVOTS = tl.constexpr(16)

CHUNK_WARPS = 8


@dataclass(frozen=True)
class SamplingColumns:
    """The sampling parameters of every row; columns are views of ``words``.

    ``words`` int32, ``[rows, ROW_WORDS]``. ``entry_token_ids`` int32 and ``entry_biases`` float32, ``[capacity]``; no
    token twice in a row. The complement of a token id also excludes the token below ``min_tokens``.
    """

    words: Tensor
    entry_token_ids: Tensor
    entry_biases: Tensor

    @classmethod
    def allocate(cls, *, num_rows: int, entry_capacity: int, device: torch.device) -> "SamplingColumns":
        """Columns of ``num_rows`` greedy rows."""
        return cls(
            torch.zeros((num_rows, ROW_WORDS), dtype=torch.int32, device=device),
            torch.zeros(entry_capacity, dtype=torch.int32, device=device),
            torch.zeros(entry_capacity, dtype=torch.float32, device=device),
        )

    def column(self, name: str) -> Tensor:
        """One parameter of every row, strided; a seed as the int64 of the same bits."""
        kind, offset = ROW_LAYOUT.fields[name][:2]  # type: ignore[index]
        dtype = {"u8": torch.int64, "f8": torch.float64, "f4": torch.float32, "i4": torch.int32}[kind.str[1:]]
        return self.words.view(dtype)[:, offset // kind.itemsize]

    def write_rows(self, rows: Tensor, words: Tensor) -> None:
        """Set ``rows`` (int64, ``[k]``) to ``words`` (int32, ``[k, ROW_WORDS]``), both on the device."""
        self.words.index_copy_(0, rows, words)

    def write_entries(self, first: int, token_ids: Tensor, biases: Tensor) -> None:
        """Set the entries from ``first`` on; both ``[k]``, on the device or pinned."""
        end = first + len(token_ids)
        self.entry_token_ids[first:end].copy_(token_ids, non_blocking=True)
        self.entry_biases[first:end].copy_(biases, non_blocking=True)


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch memory for up to ``max_batch`` rows; empty between calls.

    All batches must use the same ``chunk``, a power of two: sums are rounded once per chunk.
    """

    chunk: int
    vocab_size: int
    adjusted: Tensor
    words: Tensor
    chunk_max: Tensor
    chunk_place: Tensor
    chunk_sum: Tensor
    chunk_survey: Tensor
    chunk_weight: Tensor
    chunk_ties: Tensor
    remaining: Tensor
    row_max: Tensor
    row_scale: Tensor
    row_share: Tensor
    cutoff: Tensor
    threshold: Tensor
    ties_kept: Tensor
    list_length: Tensor
    ranges: Tensor
    range_weight: Tensor
    pivot_weight: Tensor
    narrowed: Tensor
    narrowed_weight: Tensor
    short_length: Tensor
    short_words: Tensor

    @classmethod
    def allocate(
        cls, *, max_batch: int, vocab_size: int, device: torch.device, chunk: int = 4096
    ) -> "SamplingWorkspace":
        """Reserve about ``8 * max_batch * vocab_size`` bytes."""
        num_chunks = triton.cdiv(vocab_size, chunk)

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((max_batch, *shape), dtype=dtype, device=device)

        return cls(
            chunk=chunk,
            vocab_size=vocab_size,
            adjusted=empty(torch.float32, vocab_size),
            words=empty(torch.int32, vocab_size),
            chunk_max=empty(torch.float32, num_chunks),
            chunk_place=empty(torch.int32, num_chunks),
            chunk_sum=empty(torch.int64, num_chunks),
            chunk_survey=empty(torch.float32, num_chunks, SURVEYED.value),
            chunk_weight=empty(torch.int64, num_chunks),
            chunk_ties=empty(torch.int32, num_chunks),
            remaining=empty(torch.int32),
            row_max=empty(torch.float32),
            row_scale=empty(torch.float32),
            row_share=empty(torch.float32),
            cutoff=empty(torch.int32),
            threshold=empty(torch.int32),
            ties_kept=empty(torch.int32),
            list_length=empty(torch.int32),
            ranges=empty(torch.int32, NARROWING_ROUNDS.value, 2),
            range_weight=empty(torch.int64, NARROWING_ROUNDS.value),
            pivot_weight=empty(torch.int64, NARROWING_ROUNDS.value, num_chunks, NARROWING_PIVOTS.value),
            narrowed=empty(torch.int32, 2),
            narrowed_weight=empty(torch.int64),
            short_length=empty(torch.int32),
            short_words=empty(torch.int32, chunk),
        )


def chunk_grid(rows: Tensor, workspace: SamplingWorkspace) -> tuple[int, int]:
    """One program per chunk of the vocabulary and row."""
    return workspace.chunk_max.shape[1], len(rows)
