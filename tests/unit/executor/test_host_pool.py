"""Swapped-out blocks: what goes out comes back, bit for bit, and the memory is there only when it is used."""

import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.backend import AUTOMATIC_SWAP_SPACE, BackendConfigError
from headway_executor.memory import host_pool
from headway_executor.memory.host_memory import copy_of_table
from headway_executor.memory.host_pool import HostPool, num_host_blocks
from headway_executor.memory.kv_pool import KvPool, StoredBlock
from step_columns import NO_PAIRS, pair_columns

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 7
SMAPS = Path("/proc/self/smaps")


def make_pool(dtype=torch.float32, num_host_blocks=NUM_HOST_BLOCKS, device=CPU) -> KvPool:
    pool = KvPool(
        num_layers=3,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        block=StoredBlock((2, 4, 5), dtype),
        device=device,
        num_host_blocks=num_host_blocks,
    )
    pool.layers.copy_(torch.randn(pool.layers.shape))
    return pool


def check_moves(pool: KvPool, steps) -> None:
    """The pool does what a list of blocks would do; host blocks that were never written hold zeros."""
    blocks = [pool.layers[:, block].cpu().clone() for block in range(NUM_BLOCKS)]
    host = [torch.zeros_like(blocks[0]) for _ in range(NUM_HOST_BLOCKS)]
    for out, back in steps:
        pool.move(copies=NO_PAIRS, swap_out=pair_columns(out), swap_in=pair_columns(back))
        for block, host_block in out:
            host[host_block] = blocks[block]
        for host_block, block in back:
            blocks[block] = host[host_block]
        assert torch.equal(pool.layers.cpu(), torch.stack(blocks, dim=1))


device_blocks, host_blocks = st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_HOST_BLOCKS - 1)
swaps = st.tuples(
    st.lists(st.tuples(device_blocks, host_blocks), unique_by=lambda pair: pair[1]),
    st.lists(st.tuples(host_blocks, device_blocks), unique_by=lambda pair: pair[1]),
)


@settings(max_examples=60)
@given(st.lists(swaps, max_size=5), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_blocks_come_back_as_they_went(steps, dtype):
    check_moves(make_pool(dtype), steps)


@pytest.mark.parametrize(
    "device",
    [CPU, pytest.param(CUDA, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))],
)
@settings(max_examples=60)
@given(st.lists(swaps, max_size=5), st.integers(1, 4))
def test_blocks_come_back_through_staging_in_parts(device, steps, in_one_go):
    """As beside a GPU, whose transfers need whole pieces of memory; a CPU can do it too."""
    pool = make_pool(device=device)
    pool._host._is_staged, pool._host._in_one_go = True, in_one_go
    check_moves(pool, steps)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([4], [(0, 1, 4)]),
        ([4, 5, 6], [(0, 3, 4)]),
        ([6, 5, 4], [(0, 1, 6), (1, 2, 5), (2, 3, 4)]),
        ([0, 1, 3, 4, 2], [(0, 2, 0), (2, 4, 3), (4, 5, 2)]),
    ],
)
def test_neighbours_are_one_transfer(numbers, expected):
    runs = list(host_pool._runs(np.array(numbers, dtype=np.int32)))
    assert [(here.start, here.stop, there.start) for here, there in runs] == expected
    assert all(here.stop - here.start == there.stop - there.start for here, there in runs)


def test_measuring_leaves_the_blocks_as_they_are():
    pool = make_pool()
    before = pool.layers.clone()
    assert 0 < pool.measure_swap_us() < 10_000
    assert torch.equal(pool.layers, before)
    assert make_pool(num_host_blocks=0).measure_swap_us() == 0.0
    assert make_pool(num_host_blocks=1).measure_swap_us() > 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory from /proc")
def test_memory_is_taken_when_it_is_used():
    process = psutil.Process()
    before = process.memory_info().rss
    pool = HostPool(num_blocks=1 << 14, block_shape=(1, 1 << 15), dtype=torch.float32, device=CPU)
    assert process.memory_info().rss - before < 64 << 20, "2 GiB of blocks, none of them used"
    layers = torch.ones((1, 2, 1 << 15))
    pool.store(layers, np.array([0, 1], dtype=np.int32), np.array([3, 9000], dtype=np.int32))
    assert process.memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    ("swap_space_mib", "device", "free_mib", "expected"),
    [
        (0, CPU, 1000, 0),
        (64, CPU, 1, 32),
        (65, CUDA, 1, 32),
        (2, CPU, 1000, 1),
        (AUTOMATIC_SWAP_SPACE, CPU, 1 << 20, 5000),
        (AUTOMATIC_SWAP_SPACE, CPU, 800, 100),
        (AUTOMATIC_SWAP_SPACE, CPU, 0, 0),
        (AUTOMATIC_SWAP_SPACE, CUDA, 1 << 20, 1024),
        (AUTOMATIC_SWAP_SPACE, CUDA, 800, 100),
    ],
)
def test_how_many_blocks_the_swap_space_holds(monkeypatch, swap_space_mib, device, free_mib, expected):
    monkeypatch.setattr(host_pool, "free_host_bytes", lambda: free_mib << 20)
    found = num_host_blocks(swap_space_mib=swap_space_mib, block_bytes=2 << 20, num_device_blocks=5000, device=device)
    assert found == expected


def test_a_space_below_one_block_is_refused():
    with pytest.raises(BackendConfigError, match=r"swap_space_mib 2 is not allowed; .* -1 \(automatic\), 3 or more"):
        num_host_blocks(swap_space_mib=2, block_bytes=(2 << 20) + 1, num_device_blocks=9, device=CPU)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_blocks_that_no_memory_can_hold_are_refused_in_one_line():
    told = r"^num_kv_blocks 1073741824 is not allowed; the memory cannot be had: .*; allowed: fewer$"
    with pytest.raises(BackendConfigError, match=told):
        KvPool(
            num_layers=1 << 20,
            num_blocks=1 << 30,
            block_size=4,
            block=StoredBlock((2, 4, 5), torch.float32),
            device=CPU,
        )


def test_a_copied_table_may_have_huge_pages():
    table = torch.arange(3 << 10, dtype=torch.bfloat16).view(-1, 3)
    copied = copy_of_table(table, torch.float32)
    assert torch.equal(copied, table.float())
    mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+)(?s:.*?)^VmFlags: (.*)$", SMAPS.read_text(), re.MULTILINE)
    rights, flags = next(
        (rights, flags) for start, end, rights, flags in mappings if int(start, 16) <= copied.data_ptr() < int(end, 16)
    )
    assert rights == "rw-p"  # shared memory would have none, whatever it is advised
    assert "hg" in flags.split()
