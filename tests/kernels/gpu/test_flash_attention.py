"""FlashAttention 3 beside the oracle: the library itself on a device that has it, else what stands in for it."""

import inspect
from dataclasses import replace

import pytest
import torch

from attention_batches import TOLERANCE, Batch, Shape
from fake_flash_attention import FakeFlash
from headway_kernels.gpu import flash_attention
from headway_kernels.gpu.flash_attention import FlashLacking, find_flash_attention

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def library(kernel_device, monkeypatch):
    if kernel_device.type == "cpu":
        FakeFlash().install(monkeypatch)
    elif torch.cuda.get_device_capability(kernel_device)[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.x")
    try:
        return find_flash_attention()
    except FlashLacking as error:
        pytest.skip(str(error))


SHAPE = Shape(
    ((1, 40), (70, 200), (0, 0), (33, 33), (2, 17)), head_dim=64, num_kv_heads=2, group=4, block_size=16, dtype=torch.bfloat16
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_rows_of_a_step_are_what_the_oracle_gives(dtype, head_dim, library, kernel_device):
    batch = Batch(replace(SHAPE, dtype=dtype, head_dim=head_dim), kernel_device)
    expected, rows = batch.expected(), batch.rows
    # What no row reads may be anything, but a library may multiply it with zero.
    pool = batch.pool.nan_to_num(nan=0.0, posinf=0.0)
    tables = torch.where(rows.block_tables >= len(pool), 0, rows.block_tables).index_select(0, rows.rows)
    out = torch.full_like(batch.query, torch.nan, memory_format=torch.contiguous_format)
    is_real = torch.arange(len(out), device=kernel_device) < len(expected)
    scale, kv_heads = batch.options["scale"], SHAPE.num_kv_heads
    library(
        batch.query, pool, out, rows, tables=tables, is_real=is_real, longest=70, num_kv_heads=kv_heads, scale=scale
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=tolerance, atol=tolerance)
    assert (out[len(expected) :] == 0).all()


def test_a_library_that_is_not_there_or_is_another_is_named(monkeypatch):
    monkeypatch.setattr(flash_attention, "MODULE", "no_such_module")
    with pytest.raises(FlashLacking, match=r"no_such_module.flash_attn_with_kvcache cannot be had: No module named"):
        find_flash_attention()

    class Older(FakeFlash):
        """The call of version 2, which cuts queries otherwise and has another name for the table."""

        def flash_attn_with_kvcache(self, q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, num_splits=0):  # fmt: skip
            raise AssertionError

    monkeypatch.undo()
    Older().install(monkeypatch)
    with pytest.raises(
        FlashLacking, match=r"takes no page_table, cu_seqlens_q, max_seqlen_q; it is of another version"
    ):
        find_flash_attention()
    assert "page_table" in inspect.signature(FakeFlash().flash_attn_with_kvcache).parameters
