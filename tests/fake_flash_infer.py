"""Stands in for FlashInfer where it cannot run: the signatures of its wrapper for paged prefill, computed plainly.

They are those of version 0.7.2.post1, without annotations; a test compares them with those of an installed one.
"""

import sys
from functools import wraps
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import torch

from headway_kernels import reference
from headway_kernels.gpu.attention.flash_infer import MODULE, WRAPPER


class FakeFlashInfer:
    """``calls``: the tokens of each. ``spoils``: it gives something else. ``mixes``: results depend on what else is there."""

    def __init__(self, *, spoils=False, mixes=False):
        self.calls = []
        self.spoils = spoils
        self.mixes = mixes

    def install(self, monkeypatch):
        library = self

        class Installed(BatchPrefillWithPagedKVCacheWrapper):
            """Tells of its calls."""

            @wraps(BatchPrefillWithPagedKVCacheWrapper.run)
            def run(self, q, *args, **kwargs):
                given = super().run(q, *args, **kwargs)
                library.calls.append(len(q))
                given += 1 if library.spoils else 2.0**-8 * library.mixes * len(self._chunks.lengths)
                return given

        module = ModuleType(MODULE)
        setattr(module, WRAPPER, Installed)
        monkeypatch.setitem(sys.modules, MODULE, module)
        return self


class BatchPrefillWithPagedKVCacheWrapper:
    """Takes what the library takes, in the forms in which we give it."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.device = float_workspace_buffer.device

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True,
        prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None,
        seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None,
        disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        """Counts in main memory, else the library waits for the device; the blocks where its kernels read them."""
        counted = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        assert {column.dtype for column in (*counted, paged_kv_indices)} == {torch.int32}
        assert {column.device.type for column in counted} == {"cpu"}
        assert paged_kv_indices.device == self.device
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert disable_split_kv
        assert non_blocking
        # As its ``get_seq_lens``.
        lengths = (paged_kv_indptr.diff() - 1).clamp(min=0) * page_size + paged_kv_last_page_len
        assert torch.equal(lengths, seq_lens)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        tables = torch.full((len(lengths), int(paged_kv_indptr.diff().max())), 2**30, dtype=torch.int32)
        for row, (first, last) in enumerate(pairwise(paged_kv_indptr)):
            tables[row, : last - first] = paged_kv_indices[first:last]
        self._sizes = (num_qo_heads, num_kv_heads, page_size, head_dim_qk)
        self._dtype, self._scale = q_data_type, sm_scale
        # What a step planned before must not change with the next one.
        self._chunks = SimpleNamespace(starts=qo_indptr.clone(), lengths=lengths, tables=tables)

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        """``q`` ``[tokens, heads, head_dim]``; the cache ``[pages, 2, kv_heads, page_size, head_dim]``."""
        num_heads, num_kv_heads, page_size, head_dim = self._sizes
        chunks = self._chunks
        assert q.dtype == paged_kv_cache.dtype == out.dtype == self._dtype
        assert q.shape == out.shape == (chunks.starts[-1], num_heads, head_dim)
        assert paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert q.stride()[1:] == (head_dim, 1)
        assert out.is_contiguous()
        found = reference.paged_attention(
            q.flatten(1),
            paged_kv_cache.flatten(1, 2),
            rows=torch.arange(len(chunks.lengths)),
            query_start=chunks.starts,
            kv_length=chunks.lengths,
            block_tables=chunks.tables,
            num_kv_heads=num_kv_heads,
            scale=self._scale,
        )
        return out.copy_(found.unflatten(1, q.shape[1:]).to(q.dtype))
