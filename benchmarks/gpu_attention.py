"""The attention kernels over random keys and values of one layer, as a step launches them.

Owns: the memory of such a load. Must not know: what is timed, or how tiles are chosen.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gpu_stepping import BLOCK_SIZE
from headway_executor.gpu.attention import groups_of
from headway_executor.gpu.chunk_library import sizes_of
from headway_executor.memory.kv_pool import CODES
from headway_executor.models.config import ModelConfig
from headway_kernels import kv_codes
from headway_kernels.gpu.attention.long_chunks import ChunkLibrary, ChunkSizes, LongAttention
from headway_kernels.gpu.attention.paged import AttentionRows, AttentionWorkspace, paged_attention, plan_attention
from headway_kernels.gpu.attention.tuning import AttentionTuning, tokens_per_tile


class AttentionLoad:
    """``batch`` rows of ``num_queries`` tokens each, that reach ``context`` positions."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: str,
        *,
        batch: int,
        context: int,
        num_queries: int,
    ) -> None:
        self._config = config
        self._num_queries = num_queries
        self._context = context
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_each
        attention = config.attention
        shape = (num_blocks, attention.num_vectors, BLOCK_SIZE, attention.vector_dim)
        pool = torch.randn(shape, dtype=dtype, device=device)
        self._pool = kv_codes.encoded(pool) if kv_cache_dtype == CODES else pool
        num_tokens, num_heads = batch * num_queries, attention.num_heads
        self._query = torch.randn(num_tokens, num_heads * attention.vector_dim, dtype=dtype, device=device)
        self.out: Tensor = torch.empty(num_tokens, num_heads * attention.summed_dim, dtype=dtype, device=device)
        plan = torch.zeros(2, batch, dtype=torch.int32, device=device)
        self._rows = AttentionRows(
            rows=torch.arange(batch, dtype=torch.int32, device=device),
            query_start=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            kv_length=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_tables=torch.randperm(num_blocks, device=device).to(torch.int32).view(batch, blocks_each),
            split_ends=plan[0],
            tile_ends=plan[1],
            splits_per_item=torch.ones(1, dtype=torch.int32, device=device),
            tokens_per_tile=1,
        )
        self._workspace = AttentionWorkspace.allocate(batch, num_heads, attention.summed_dim, device)

    def launching(self, tuning: AttentionTuning) -> Callable[[], None]:
        """Plan for some tiles; return what launches them."""
        attention = self._config.attention
        num_groups = groups_of(attention, tuning)
        rows = replace(self._rows, tokens_per_tile=tokens_per_tile(attention.num_heads, num_groups, tuning))
        plan_attention(rows, num_groups)
        return lambda: paged_attention(
            self._query,
            self._pool,
            self.out,
            rows,
            self._workspace,
            num_kv_heads=num_groups,
            num_shared=attention.num_shared,
            scale=attention.head_dim**-0.5,
            has_decodes=self._num_queries == 1,
            has_chunks=self._num_queries > 1,
            tuning=tuning,
        )

    def launching_library(self, find: Callable[[ChunkSizes], ChunkLibrary]) -> Callable[[], None]:
        """Plan for a library; return what launches the same by it. Raises ``LibraryLacking``."""
        sizes = sizes_of(self._config, self._query.dtype, self._query.device, BLOCK_SIZE)
        attention = LongAttention(find(sizes), sizes, 0, len(self._query))
        tables, batch = self._rows.block_tables, len(self._rows.rows)
        counts = np.full(batch, self._num_queries, dtype=np.int32)
        attend = attention.plan(np.arange(batch, dtype=np.int32), counts, self._context - counts, tables)
        assert attend is not None
        return lambda: attend(self._query, self._pool, self.out)
