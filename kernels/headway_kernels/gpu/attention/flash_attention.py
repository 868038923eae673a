"""Attention of long chunks by FlashAttention 3, a library for compute capability 9.x, where it is installed.

Owns: finding it, the call. Must not know: which models may use it, whether it is faster.

Source: Shah et al. 2024 (arXiv 2407.08608); the call is ``flash_attn_with_kvcache`` of its ``flash_attn_interface``. It reads
keys and values through a table of blocks of any size, so those of a pool are views.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headway_kernels.gpu.attention.long_chunks import Attend, ChunkSizes, LongChunks, sent
from headway_kernels.gpu.attention.optional_library import found_in

MODULE, FUNCTION = "flash_attn_interface", "flash_attn_with_kvcache"
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Channels of heads for which it has kernels."""

_ARGUMENTS = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "num_splits"),
)


class FlashAttention:
    """A ``ChunkLibrary``; ``attend`` is ``flash_attn_with_kvcache``."""

    def __init__(self, attend: Callable[..., Any], sizes: ChunkSizes) -> None:
        self._attend = attend
        self._sizes = sizes

    def plan(self, chunks: LongChunks) -> Attend:
        """See ``ChunkLibrary``."""
        device = self._sizes.device
        starts, lengths = sent(chunks.starts, device), sent(chunks.lengths, device)
        tables = chunks.block_tables.index_select(0, sent(chunks.rows, device))
        longest = int(chunks.counts.max())

        def attend(query: Tensor, pool_layer: Tensor, out: Tensor) -> None:
            keys, values = pool_layer.transpose(1, 2).split(self._sizes.num_kv_heads, dim=2)
            found = self._attend(
                query,
                keys,
                values,
                cache_seqlens=lengths,
                page_table=tables,
                cu_seqlens_q=starts,
                max_seqlen_q=longest,
                softmax_scale=self._sizes.scale,
                causal=True,
                # The order of additions shall not follow from what else is in the step.
                num_splits=1,
            )
            out.copy_(found)

        return attend


def find_flash_attention(sizes: ChunkSizes) -> FlashAttention:
    """The installed library. Raises ``LibraryLacking``."""
    return FlashAttention(found_in(MODULE, {FUNCTION: _ARGUMENTS})[0], sizes)
