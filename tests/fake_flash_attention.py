"""Stands in for FlashAttention 3 where it cannot run: the signature of its ``flash_attn_with_kvcache``, computed plainly.

Signature and shapes are those of ``hopper/flash_attn_interface.py`` of github.com/Dao-AILab/flash-attention.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch

from headway_kernels import reference
from headway_kernels.gpu.attention.flash_attention import FUNCTION, MODULE


class FakeFlash:
    """``calls``: the tokens of each. ``spoils``: it gives something else."""

    def __init__(self, *, spoils=False):
        self.calls = []
        self.spoils = spoils

    def install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, MODULE, self.module())
        return self

    def module(self):
        module = ModuleType(MODULE)
        setattr(module, FUNCTION, self.flash_attn_with_kvcache)
        return module

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        """``q`` ``[tokens, heads, head_dim]``; caches ``[blocks, block_size, kv_heads, head_dim]``; columns int32."""
        columns = SimpleNamespace(lengths=cache_seqlens, starts=cu_seqlens_q, tables=page_table)
        assert {column.dtype for column in vars(columns).values()} == {torch.int32}
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape == v_cache.shape
        assert len(columns.lengths) == len(columns.tables) == len(columns.starts) - 1
        assert max_seqlen_q >= columns.starts.diff().max()
        assert causal
        self.calls.append(int(columns.starts[-1]))
        num_kv_heads = k_cache.shape[2]
        # What no sequence has is not written.
        out = torch.full_like(q, torch.nan)
        found = reference.paged_attention(
            q.flatten(1),
            torch.cat([k_cache, v_cache], dim=2).transpose(1, 2),
            rows=torch.arange(len(columns.lengths)),
            query_start=columns.starts,
            kv_length=columns.lengths,
            block_tables=columns.tables,
            num_kv_heads=num_kv_heads,
            scale=softmax_scale,
        )
        out[: len(found)] = found.unflatten(1, q.shape[1:]).to(q.dtype)
        return out + 1 if self.spoils else out
