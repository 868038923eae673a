"""Batches of the attention kernels over random keys and values, with what no row may read spoilt."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from headway_kernels import kv_codes, reference
from headway_kernels.gpu.attention.paged import (
    AttentionRows,
    AttentionWorkspace,
    Slopes,
    paged_attention,
    plan_attention,
)
from headway_kernels.gpu.attention.tuning import AttentionTuning, KernelTuning, tokens_per_tile

UNTOUCHED = 7.0
SPARE_TOKENS = 2
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@dataclass(frozen=True)
class Shape:
    """One batch: ``rows`` are (tokens, positions after the step). ``alibi``: None, "exact", "rounded"."""

    rows: tuple[tuple[int, int], ...]
    head_dim: int = 12
    num_kv_heads: int = 2
    group: int = 2
    block_size: int = 8
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    alibi: str | None = None
    dtype: torch.dtype = torch.float32
    query_tile: int = 16
    key_tile: int = 64
    seed: int = 0
    has_codes: bool = False
    apart: int = 0
    """Numbers between a block and the next."""
    num_shared: int = 0
    """Of latent attention, the first channels of a row: the others are ``head_dim``, and kv heads are groups of heads."""

    @property
    def tuning(self):
        decode = KernelTuning(16, self.key_tile, 4, 2, 2)
        return AttentionTuning(decode, KernelTuning(self.query_tile, self.key_tile, 4, 2, 2))

    @property
    def num_vectors(self):
        """Of a position."""
        return 1 if self.num_shared else 2 * self.num_kv_heads

    @property
    def vector_dim(self):
        return self.num_shared + self.head_dim


class Batch:
    """Tensors of a batch; whatever no row may read is NaN, infinite or no block at all."""

    def __init__(self, shape, device):
        self.shape = shape
        self.device = device
        draw = torch.Generator().manual_seed(shape.seed)
        num_heads = shape.num_kv_heads * shape.group
        num_blocks = [-(-length // shape.block_size) if tokens else 0 for tokens, length in shape.rows]
        num_vectors, vector_dim = shape.num_vectors, shape.vector_dim
        pool = torch.full((sum(num_blocks) + 2, num_vectors, shape.block_size, vector_dim), float("nan"))
        ids = torch.randperm(len(pool), generator=draw)
        rows = torch.randperm(len(shape.rows) + 1, generator=draw)[: len(shape.rows)]
        tables = torch.full((len(shape.rows) + 1, max([1, *num_blocks]) + 1), 2**30)
        tokens = [tokens for tokens, _ in shape.rows]
        for row, (count, length), first in zip(rows, shape.rows, accumulate([0, *num_blocks[:-1]]), strict=True):
            used = ids[first : first + -(-length // shape.block_size)] if count else ids[:0]
            tables[row, : len(used)] = used
            held = pool.new_full((num_vectors, len(used) * shape.block_size, vector_dim), float("inf"))
            visible = length if count else 0
            held[:, :visible] = torch.randn((len(held), visible, vector_dim), generator=draw)
            pool[used] = held.unflatten(1, (len(used), shape.block_size)).transpose(0, 1)
        width = (num_heads + num_vectors) * vector_dim
        projected = torch.randn((sum(tokens) + SPARE_TOKENS, width), generator=draw)
        self.query = projected.to(device, shape.dtype)[:, : num_heads * vector_dim]
        self.pool = pool.to(device, shape.dtype)
        if shape.has_codes:
            self.pool = kv_codes.encoded(self.pool)
        if shape.apart:
            flat = self.pool.flatten(1)
            spread = flat.new_full((len(flat), flat.shape[1] + shape.apart), torch.nan)
            self.pool = spread[:, : flat.shape[1]].copy_(flat).unflatten(1, self.pool.shape[1:])
        starts = torch.tensor([0, *accumulate(tokens)])
        lengths = torch.tensor([length for _, length in shape.rows])
        self.rows = self.with_rows(rows, starts, lengths, tables)
        self.sinks = (torch.randn(num_heads, generator=draw) * 3).to(device) if shape.has_sinks else None
        slopes = torch.rand(num_heads, generator=draw).to(device)
        self.slopes = None if shape.alibi is None else Slopes(slopes, is_rounded=shape.alibi == "rounded")
        self.workspace = AttentionWorkspace.allocate(len(rows), num_heads, shape.head_dim, device)

    def with_rows(self, rows, starts, lengths, tables):
        rows, starts, lengths, tables = (held.to(self.device, torch.int32) for held in (rows, starts, lengths, tables))
        shape = self.shape
        tokens = tokens_per_tile(shape.group * shape.num_kv_heads, shape.num_kv_heads, shape.tuning)
        counts = [torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows[:1])]
        return AttentionRows(rows, starts, lengths, tables, *counts, tokens)

    def alone(self, index):
        """The batch's row ``index`` by itself: its tokens, and rows of a batch of one."""
        low, high = self.rows.query_start[index : index + 2].tolist()
        starts = torch.tensor([0, high - low])
        one = slice(index, index + 1)
        return slice(low, high), self.with_rows(
            self.rows.rows[one], starts, self.rows.kv_length[one], self.rows.block_tables
        )

    @property
    def options(self):
        shape = self.shape
        scale = shape.vector_dim**-0.5
        return {
            "num_kv_heads": shape.num_kv_heads,
            "scale": scale,
            "window": shape.window,
            "soft_cap": shape.soft_cap,
            "sinks": self.sinks,
            "slopes": self.slopes,
            "num_shared": shape.num_shared,
        }

    def attend(self, query=None, rows=None, most_tokens=None, **options):
        query = self.query if query is None else query
        rows = self.rows if rows is None else rows
        num_heads = query.shape[1] // self.shape.vector_dim
        out = query.new_full((len(query), num_heads * self.shape.head_dim), UNTOUCHED)
        plan_attention(rows, self.shape.num_kv_heads, most_tokens=most_tokens)
        chosen = {"tuning": self.shape.tuning} | self.options | options
        paged_attention(query, self.pool, out, rows, self.workspace, **chosen)
        assert not self.workspace.arrived.any()
        return out

    def expected(self, **options):
        rows = self.rows
        return reference.paged_attention(
            self.query,
            self.pool,
            rows=rows.rows,
            query_start=rows.query_start,
            kv_length=rows.kv_length,
            block_tables=rows.block_tables,
            **(self.options | options),
        )
