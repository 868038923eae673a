"""Libraries for chunks beside the oracle: the library itself on a device that has it, else what stands in for it."""

import ast
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fake_flash_infer
from attention_batches import TOLERANCE, UNTOUCHED, Batch, Shape
from fake_flash_attention import FakeFlash
from fake_flash_infer import BatchPrefillWithPagedKVCacheWrapper, FakeFlashInfer
from headway_kernels.gpu.attention import flash_attention, flash_infer
from headway_kernels.gpu.attention.flash_attention import find_flash_attention
from headway_kernels.gpu.attention.flash_infer import MODULE, WRAPPER, find_flash_infer
from headway_kernels.gpu.attention.long_chunks import ChunkSizes, LibraryLacking, LongAttention, LongChunks

FINDS = {"flash": (FakeFlash, find_flash_attention), "flashinfer": (FakeFlashInfer, find_flash_infer)}
ROWS = ((1, 40), (70, 200), (0, 0), (33, 33), (2, 17), (66, 91), (65, 65), (1, 9))
SHAPE = Shape(ROWS, head_dim=64, num_kv_heads=2, group=4, block_size=16, dtype=torch.bfloat16)
MOST_OWN = 64


@pytest.fixture(params=FINDS)
def find(request, kernel_device, monkeypatch):
    fake, find = FINDS[request.param]
    if kernel_device.type == "cpu":
        fake().install(monkeypatch)
    elif request.param == "flash" and torch.cuda.get_device_capability(kernel_device)[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.x")
    return find


def long_attention(find, shape, device):
    num_heads = shape.num_kv_heads * shape.group
    sizes = ChunkSizes(
        num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.head_dim**-0.5, shape.dtype, device
    )
    try:
        return LongAttention(find(sizes), sizes, MOST_OWN, sum(tokens for tokens, _ in shape.rows))
    except LibraryLacking as error:
        if device.type == "cpu":
            raise
        pytest.skip(str(error))


def planned(batch, attention, which=slice(None)):
    """Some of a batch's rows in a step of their own: the output, and what attends with their long chunks."""
    rows, pool = batch.rows, batch.pool.nan_to_num(nan=0.0, posinf=0.0)
    counts, lengths = np.array(batch.shape.rows, dtype=np.int32)[which].T
    first, last = (int(rows.query_start[which][0]), int(rows.query_start[1:][which][-1]))
    query, numbers = batch.query[first:last], rows.rows[which].cpu().numpy()
    # What a table has behind a row's blocks may be anything, and is the number of some block.
    tables = torch.where(rows.block_tables >= len(pool), 0, rows.block_tables)
    out = torch.full_like(query, UNTOUCHED, memory_format=torch.contiguous_format)
    attend = attention.plan(numbers, counts, lengths - counts, tables)
    return out, lambda: None if attend is None else attend(query, pool, out)


def attended(batch, attention, which=slice(None)):
    """What some rows give, where the library writes; the rest is as it was."""
    out, attend = planned(batch, attention, which)
    attend()
    return out


def is_long(shape, which=slice(None)):
    counts = torch.tensor([tokens for tokens, _ in shape.rows])[which]
    return (counts > MOST_OWN).repeat_interleave(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("which", [slice(None), slice(1, 2), slice(5, None)], ids=["apart", "one", "together"])
def test_long_chunks_of_a_step_are_what_the_oracle_gives(which, dtype, head_dim, find, kernel_device):
    shape = replace(SHAPE, dtype=dtype, head_dim=head_dim)
    batch = Batch(shape, kernel_device)
    starts, long = batch.rows.query_start, is_long(shape, which)
    expected = batch.expected()[starts[which][0] : starts[1:][which][-1]]
    out = attended(batch, long_attention(find, shape, kernel_device), which)
    torch.testing.assert_close(out[long].double(), expected[long], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert (out[~long] == UNTOUCHED).all()


def test_a_chunk_has_the_same_bits_in_any_company(find, kernel_device):
    batch, attention = Batch(SHAPE, kernel_device), long_attention(find, SHAPE, kernel_device)
    together = attended(batch, attention)
    parts = [attended(batch, attention, slice(row, row + 1)) for row in range(len(ROWS))]
    assert torch.equal(torch.cat(parts), together[: len(is_long(SHAPE))])


def test_a_step_that_is_planned_later_leaves_an_earlier_one_as_it_is(find, kernel_device):
    """The host plans ahead of the device."""
    batch, attention = Batch(SHAPE, kernel_device), long_attention(find, SHAPE, kernel_device)
    steps = slice(1, 2), slice(5, None)
    expected = [attended(batch, attention, which) for which in steps]
    outs, launches = zip(*(planned(batch, attention, which) for which in steps), strict=True)
    for attend in launches:
        attend()
    assert all(map(torch.equal, outs, expected))


def test_flash_infer_plans_in_memory_that_the_device_has_read(monkeypatch):
    said = []

    class Wrapper(BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, **kwargs):
            said.append(("plan", self))

    monkeypatch.setattr(flash_infer._Slot, "wait", lambda slot: said.append(("wait", slot.wrapper)))
    monkeypatch.setattr(flash_infer._Slot, "planned", lambda slot: said.append(("planned", slot.wrapper)))
    library = flash_infer.FlashInfer(Wrapper, ChunkSizes(2, 1, 64, 16, 1.0, torch.bfloat16, torch.device("cpu")))
    column = np.array([70], dtype=np.int32)
    chunks = LongChunks(column - 70, column - 70, column, column, torch.zeros(1, 5, dtype=torch.int32))
    for _ in range(4):
        library.plan(chunks)
    wrappers = [wrapper for _, wrapper in said[::3]]
    assert said == [(kind, wrapper) for wrapper in wrappers for kind in ("wait", "plan", "planned")]
    # Three steps may be in flight.
    assert len({*wrappers[:3]}) == 3
    assert wrappers[3] is wrappers[0]


def test_a_step_without_long_chunks_is_not_planned(find, kernel_device):
    attention = long_attention(find, SHAPE, kernel_device)
    columns = (np.array(column, dtype=np.int32) for column in ((0, 1), (64, 1), (0, 8)))
    assert attention.plan(*columns, torch.zeros(2, 4, dtype=torch.int32, device=kernel_device)) is None


def test_our_kernels_leave_long_chunks_alone(kernel_device):
    batch = Batch(SHAPE, kernel_device)
    ours, all_of_them = batch.attend(most_tokens=MOST_OWN), batch.attend()
    long = torch.nn.functional.pad(is_long(SHAPE), (0, len(ours) - len(is_long(SHAPE))))
    assert (ours[long] == UNTOUCHED).all()
    assert torch.equal(ours[~long], all_of_them[~long])


@pytest.mark.parametrize(
    ("module", "find", "call"),
    [
        (flash_attention, find_flash_attention, "flash_attn_with_kvcache"),
        (flash_infer, find_flash_infer, "BatchPrefillWithPagedKVCacheWrapper"),
    ],
)
def test_a_library_that_is_not_there_is_named(module, find, call, monkeypatch):
    monkeypatch.setattr(module, "MODULE", "no_such_module")
    with pytest.raises(LibraryLacking, match=rf"no_such_module.{call} cannot be had: No module named"):
        find(None)


def test_a_library_of_another_version_is_named(monkeypatch):
    class Older(FakeFlash):
        """The call of version 2, which cuts queries otherwise and has another name for the table."""

        def flash_attn_with_kvcache(self, q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, num_splits=0):  # fmt: skip
            raise AssertionError

    Older().install(monkeypatch)
    with pytest.raises(
        LibraryLacking, match=r"takes no page_table, cu_seqlens_q, max_seqlen_q; it is of another version"
    ):
        find_flash_attention(None)
    assert "page_table" in inspect.signature(FakeFlash().flash_attn_with_kvcache).parameters


def signatures(path):
    """Of the methods of the wrapper in a source file, without annotations; of an overloaded one, the last is the real one."""
    (wrapper,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == WRAPPER
    )
    found = {}
    for method in (node for node in wrapper.body if isinstance(node, ast.FunctionDef)):
        for argument in ast.walk(method.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        found[method.name] = ast.unparse(method.args)
    return {name: found[name] for name in ("__init__", "plan", "run")}


@pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="FlashInfer is not installed")
def test_what_stands_in_for_flash_infer_has_its_signatures():
    installed = Path(importlib.util.find_spec(MODULE).origin).with_name("prefill.py")
    assert signatures(Path(fake_flash_infer.__file__)) == signatures(installed)
