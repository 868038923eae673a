"""Attention of a step's rows by FlashAttention 3, a library for compute capability 9.x, where it is installed.

Owns: finding it, the call. Must not know: which models may use it, whether it is faster.

Source: Shah et al. 2024 (arXiv 2407.08608); the call is ``flash_attn_with_kvcache`` of its ``flash_attn_interface``. It reads
keys and values through a table of blocks of any size, so those of a pool are views. It gives new memory, so no graph may
hold it.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway_kernels.gpu.attention import AttentionRows

MODULE, FUNCTION = "flash_attn_interface", "flash_attn_with_kvcache"
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Channels of heads for which it has kernels."""

_ARGUMENTS = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "num_splits"),
)


class FlashLacking(RuntimeError):  # noqa: N818 (it names the finding)
    """The library is not there, or is another; one line."""


class FlashAttention:
    """``attend`` is ``flash_attn_with_kvcache``."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        self._attend = attend

    def __call__(
        self,
        query: Tensor,
        pool_layer: Tensor,
        out: Tensor,
        rows: AttentionRows,
        *,
        tables: Tensor,
        is_real: Tensor,
        longest: int,
        num_kv_heads: int,
        scale: float,
    ) -> None:
        """As ``paged_attention`` for all rows, chunks and decodes, without window, cap and sinks; numbers of 16 bits.

        ``tables`` int32, ``[R, blocks]``: those of ``rows``. ``longest``: tokens of the longest row. Tokens that are not
        ``is_real`` (bool, ``[tokens]``) get zeros.
        """
        head_dim = pool_layer.shape[3]
        keys, values = pool_layer.transpose(1, 2).split(num_kv_heads, dim=2)
        found = self._attend(
            query.unflatten(1, (-1, head_dim)),
            keys,
            values,
            cache_seqlens=rows.kv_length,
            page_table=tables,
            cu_seqlens_q=rows.query_start,
            max_seqlen_q=longest,
            softmax_scale=scale,
            causal=True,
            # The order of additions shall not follow from what else is in the step.
            num_splits=1,
        )
        torch.where(is_real[:, None], found.flatten(1), found.new_zeros(()), out=out)


def find_flash_attention() -> FlashAttention:
    """The installed library. Raises ``FlashLacking``."""
    try:
        function = getattr(importlib.import_module(MODULE), FUNCTION)
    except (ImportError, AttributeError, OSError) as error:
        raise FlashLacking(f"{MODULE}.{FUNCTION} cannot be had: {' '.join(str(error).split())[:100]}") from error
    missing = [name for name in _ARGUMENTS if name not in inspect.signature(function).parameters]
    if missing:
        raise FlashLacking(f"{MODULE}.{FUNCTION} takes no {', '.join(missing)}; it is of another version")
    return FlashAttention(function)
