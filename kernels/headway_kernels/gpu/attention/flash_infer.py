"""Attention of long chunks by FlashInfer, a library for compute capability 8.0 and above, where it is installed.

Owns: finding it, its plans and their memory. Must not know: which models may use it, whether it is faster.

Source: Ye et al. 2025 (arXiv 2501.01005); the calls are ``plan`` and ``run`` of its ``BatchPrefillWithPagedKVCacheWrapper``,
as of version 0.7.2. Its layout "HND" is that of our pools. From compute capability 9.0 its kernels are those of
FlashAttention 3, else of FlashAttention 2. It compiles them with ``nvcc`` when it first plans, unless they are installed.

By its sources, a chunk's result then follows from its own tokens and length: keys and values are not split, and the tile of
queries, which follows from the mean of all chunks, is the same for any chunks of more than 64 tokens.
"""

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway_kernels.gpu.attention.long_chunks import Attend, ChunkSizes, LongChunks, pinned, running_counts, sent
from headway_kernels.gpu.attention.optional_library import found_in

MODULE, WRAPPER = "flashinfer", "BatchPrefillWithPagedKVCacheWrapper"
HEAD_DIMS = (64, 128, 256)
"""Channels of heads for which both generations have kernels."""

_PLAN_ARGUMENTS = (
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads"),
    *("head_dim_qk", "page_size", "causal", "sm_scale", "q_data_type", "non_blocking", "seq_lens", "disable_split_kv"),
)
_CALLS = {
    WRAPPER: ("float_workspace_buffer", "kv_layout"),
    f"{WRAPPER}.plan": _PLAN_ARGUMENTS,
    f"{WRAPPER}.run": ("q", "paged_kv_cache", "out", "enable_pdl"),
}
_SLOTS = 3
"""Wrappers in turn: one holds 8 MiB on both sides, and steps in flight have one each."""
_WORKSPACE_BYTES = 1 << 20
"""Of partial results, of which there are none: nothing is split."""


class FlashInfer:
    """A ``ChunkLibrary``; ``wrapper`` is ``BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(self, wrapper: Any, sizes: ChunkSizes) -> None:
        self._sizes = sizes
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=sizes.device)
        self._slots = cycle([_Slot(wrapper(workspace, "HND"), sizes.device) for _ in range(_SLOTS)])

    def plan(self, chunks: LongChunks) -> Attend:
        """See ``ChunkLibrary``."""
        sizes, slot = self._sizes, next(self._slots)
        here = partial(pinned, device=sizes.device)
        num_blocks = -(-chunks.lengths // sizes.block_size)
        slot.wait()
        slot.wrapper.plan(
            here(chunks.starts),
            here(running_counts(num_blocks)),
            _blocks(chunks, num_blocks, sizes.device),
            here(chunks.lengths - (num_blocks - 1) * sizes.block_size),
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_dim,
            sizes.block_size,
            causal=True,
            sm_scale=sizes.scale,
            q_data_type=sizes.dtype,
            non_blocking=True,
            seq_lens=here(chunks.lengths),
            # The order of additions shall not follow from what else is in the step.
            disable_split_kv=True,
        )
        slot.planned()
        return partial(self._attend, slot.wrapper)

    def _attend(self, wrapper: Any, query: Tensor, pool_layer: Tensor, out: Tensor) -> None:
        halves = pool_layer.unflatten(1, (2, self._sizes.num_kv_heads))
        # It waits for the kernel before it as a whole: what ours write early is our own affair.
        wrapper.run(query, halves, out=out, enable_pdl=False)


class _Slot:
    """A wrapper. It plans in pinned memory, which it must not write again before the device has read it."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._read = torch.cuda.Event() if device.type == "cuda" else None

    def planned(self) -> None:
        """Call behind ``plan``."""
        if self._read is not None:
            self._read.record()

    def wait(self) -> None:
        """Until the device has the last plan."""
        if self._read is not None:
            self._read.synchronize()


def _blocks(chunks: LongChunks, num_blocks: np.ndarray[Any, np.dtype[np.int32]], device: torch.device) -> Tensor:
    """The blocks of all chunks, one behind the other, int32. The host knows where they stand, only the device which they are."""
    width = chunks.block_tables.shape[1]
    within = np.arange(num_blocks.sum()) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    places = np.repeat(chunks.rows.astype(np.int64) * width, num_blocks) + within
    return chunks.block_tables.view(-1).index_select(0, sent(places, device))


def find_flash_infer(sizes: ChunkSizes) -> FlashInfer:
    """The installed library. Raises ``LibraryLacking``."""
    return FlashInfer(found_in(MODULE, _CALLS)[0], sizes)
