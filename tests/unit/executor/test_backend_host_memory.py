"""Backends keep their host blocks where they are told to, and fill device blocks with what was kept elsewhere."""

import threading
import types

import numpy as np
import pytest
import torch

from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.memory import host_pool, kv_pool
from headway_executor.memory.host_pool import allocate_blocks, memory_for
from headway_executor.memory.kv_pool import KvPool, StoredBlock
from headway_executor.simulated.pool import SimulatedPool
from headway_executor.startup.threaded_backend import ThreadedBackend
from step_columns import NO_PAIRS, pair_columns

CPU = torch.device("cpu")


class Memory:
    """Gives the memory of host blocks, and keeps it."""

    def __init__(self) -> None:
        self.asked = []
        self.blocks = None

    def __call__(self, num_blocks, block_bytes, layout):
        self.asked.append((num_blocks, block_bytes, layout))
        self.blocks = np.full((num_blocks, block_bytes), 9, dtype=np.uint8)
        return self.blocks


def make_pool(memory=None, num_host_blocks=5) -> KvPool:
    pool = KvPool(
        num_layers=3,
        num_blocks=7,
        block_size=4,
        block=StoredBlock((2, 4, 5), torch.float32),
        device=CPU,
        num_host_blocks=num_host_blocks,
        host_memory=memory,
    )
    pool.layers.copy_(torch.randn(pool.layers.shape))
    return pool


def test_swapped_blocks_lie_in_the_given_memory_and_fill_blocks_of_another_pool():
    memory, other = Memory(), make_pool()
    pool = make_pool(memory)
    pool.move(copies=NO_PAIRS, swap_out=pair_columns([(6, 1), (2, 4)]), swap_in=NO_PAIRS)
    assert memory.blocks[1].tobytes() == pool.layers[:, 6].contiguous().numpy().tobytes()
    assert (memory.blocks[[0, 2, 3]] == 9).all()
    other.load_blocks(memory.blocks[[4, 1]], np.array([0, 3], dtype=np.int32))
    assert torch.equal(other.layers[:, [0, 3]], pool.layers[:, [2, 6]])


@pytest.mark.parametrize("in_one_go", [1, 2])
def test_blocks_are_filled_through_staging_in_parts(in_one_go):
    memory, other = Memory(), make_pool()
    pool = make_pool(memory)
    pool.move(copies=NO_PAIRS, swap_out=pair_columns([(block, block) for block in range(5)]), swap_in=NO_PAIRS)
    other._host._is_staged, other._host._in_one_go = True, in_one_go
    other.load_blocks(memory.blocks, np.array([6, 0, 3, 1, 2], dtype=np.int32))
    assert torch.equal(other.layers[:, [6, 0, 3, 1, 2]], pool.layers[:, :5])


def test_measuring_changes_no_host_block_and_counts_checksums(monkeypatch):
    memory, summed = Memory(), []
    pool = make_pool(memory)
    monkeypatch.setattr(host_pool, "crc32", lambda data: summed.append(len(data)) or 0)
    assert pool.measure_swap_us() > 0
    assert (memory.blocks == 9).all()
    assert len(summed) == 5 * (1 + kv_pool._TIMED_ROUNDS)
    summed.clear()
    assert make_pool().measure_swap_us() > 0
    assert summed == [], "private blocks have no records"


def test_layouts_that_differ_have_other_names_and_no_host_blocks_are_asked_for_too():
    memory = Memory()
    make_pool(memory)
    make_pool(memory, num_host_blocks=0)
    assert [asked[:2] for asked in memory.asked] == [(5, 480), (0, 480)]
    assert len({layout for _, _, layout in memory.asked}) == 1
    KvPool(
        num_layers=3,
        num_blocks=7,
        block_size=4,
        block=StoredBlock((4, 2, 5), torch.float32),
        device=CPU,
        host_memory=memory,
    )
    assert memory.asked[-1][1] == 480
    assert memory.asked[-1][2] != memory.asked[0][2]


def test_memory_that_a_device_cannot_use_is_given_back(monkeypatch):
    memory = Memory()
    kept_errors = []

    def register(address, size, flags):
        """CUDA keeps what failed; torch raises it at its next launch, and not again."""
        assert (address, size) == (memory.blocks.ctypes.data, 5 * 8)
        kept_errors.append("cudaErrorInvalidValue")
        return 1

    def ones(*shape, device):
        raise RuntimeError(kept_errors.pop())

    library = types.SimpleNamespace(cudart=lambda: types.SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(host_pool, "_untyped_cuda", library)
    monkeypatch.setattr(torch, "ones", ones)
    found = memory_for(memory, num_blocks=5, block_bytes=8, layout="x", device=torch.device("cuda"))
    assert found is None
    assert memory.asked == [(5, 8, "x"), (0, 8, "x")]
    assert not kept_errors, "nothing is left for the launch that comes next"


def test_a_device_s_blocks_take_what_they_need_and_are_let_go_with_the_last_view(monkeypatch):
    """Torch takes a power of two when it pins memory."""
    pinned = {}

    def register(address, size, flags):
        pinned[address] = size
        return 0

    library = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(host_pool, "_untyped_cuda", types.SimpleNamespace(cudart=lambda: library))
    blocks = allocate_blocks((33, 2, 3), torch.float32, torch.device("cuda"))
    assert pinned == {blocks.data_ptr(): 33 * 6 * 4}
    assert torch.equal(blocks, torch.zeros(33, 2, 3))
    view = blocks[7:].view(torch.uint8).numpy()
    del blocks
    assert pinned
    view += 1
    del view
    assert not pinned


def test_the_simulated_cache_is_bytes_in_host_memory():
    memory = Memory()
    pool = SimulatedPool(8, 4, 2, memory)
    pool.write_at(np.array([5, 6]), np.arange(3), np.array([11, 12, 13], dtype=np.uint64))
    pool.move(copies=NO_PAIRS, swap_out=pair_columns([(5, 3), (6, 0)]), swap_in=NO_PAIRS)
    assert memory.blocks.view(np.uint64)[[3, 0]].tolist() == [[11, 12, 2], [13, 0, 1]]
    other = SimulatedPool(8, 0, 2)
    other.load(memory.blocks[[0, 3]], np.array([1, 2], dtype=np.int32))
    assert other._slots[[2, 1]].tolist() == [[11, 12], [13, 0]]
    assert other._filled[[2, 1]].tolist() == [2, 1]


class Recording(SimulatedBackend):
    """Notes its calls; the move may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.may_go_on = threading.Event()
        self.error = None

    def move_blocks(self, **moves):
        self.may_go_on.wait(10)
        self.calls.append("move")
        if self.error is not None:
            raise self.error

    def load_blocks(self, contents, blocks):
        self.calls.append(f"load {blocks.tolist()}")

    def execute(self, batch):
        self.calls.append("execute")
        return "result"


def threaded() -> tuple[ThreadedBackend, Recording]:
    backend = Recording()
    wrapped = ThreadedBackend(backend)
    wrapped._reads_block_table = False
    wrapped.open(BackendConfig(model="", block_size=4, num_kv_blocks=64, max_model_len=64, max_num_seqs=4))
    return wrapped, backend


def test_a_thread_makes_the_calls_in_order_and_does_not_wait_for_a_step():
    wrapped, backend = threaded()
    done = wrapped.move_blocks(copies=NO_PAIRS, swap_out=NO_PAIRS, swap_in=NO_PAIRS)
    assert not done.done()
    backend.may_go_on.set()
    assert done.result(10) is None
    wrapped.load_blocks(np.zeros((1, 8), dtype=np.uint8), np.array([3], dtype=np.int32))
    assert wrapped.execute(None).result(10) == "result"
    assert backend.calls == ["move", "load [3]", "execute"]
    wrapped.close()


def test_moves_that_failed_fail_the_next_step_and_only_it():
    wrapped, backend = threaded()
    backend.may_go_on.set()
    backend.error = MemoryError("gone")
    assert isinstance(
        wrapped.move_blocks(copies=NO_PAIRS, swap_out=NO_PAIRS, swap_in=NO_PAIRS).exception(10), MemoryError
    )
    with pytest.raises(MemoryError, match="gone"):
        wrapped.execute(None).result(10)
    assert wrapped.execute(None).result(10) == "result"
    assert backend.calls == ["move", "execute"]
    wrapped.close()
