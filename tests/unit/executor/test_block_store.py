"""The pieces of the block store: files in shared memory, records, the transport shm, naming, pulling."""

import os
import stat
import subprocess
import sys
import threading
import time
import weakref
import zlib
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from headway_executor.backend import BackendConfigError
from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store import pool_file
from headway_executor.block_store.kept_memory import MOST_BYTES, KeptMemory
from headway_executor.block_store.pool_file import PoolHeader, PoolLayout, hold_pool_file, read_header
from headway_executor.block_store.puller import BlockPuller
from headway_executor.block_store.records import BlockRecords
from headway_executor.block_store.registry import enabled_transports, make_transport, transport_names
from headway_executor.block_store.shm_transport import ShmTransport
from headway_executor.block_store.store import BlockStore
from headway_executor.block_store.transport import RECORD, HostMemory, PulledBlocks, PullError
from headway_process.entry_points import ByName
from step_columns import backend_info

LAYOUT = PoolLayout(6, 5000)
BLOCK_BYTES = 64


def int32(*values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def shm(tmp_path):
    """The transport, with a directory of the test's own."""
    transport = ShmTransport()
    transport._directory = tmp_path
    return transport


# The file


def test_a_file_is_private_untouched_and_laid_out_by_pages(tmp_path):
    held = hold_pool_file(tmp_path, "here", 3, PoolLayout(1 << 14, 1 << 16))
    status = held.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 4096 + (1 << 18) + (1 << 30)
    assert status.st_blocks * 512 < 1 << 20, "nothing is written before it is used"
    assert held.blocks.ctypes.data % 4096 == 0
    assert (held.records.shape, held.blocks.shape) == ((1 << 14,), (1 << 14, 1 << 16))
    held.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_left_is_taken_over_and_what_another_holds_is_not(tmp_path):
    first = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    first.write_header(name="pool", identity="model")
    first.blocks[2] = 7
    first.records[2] = (1, 2, 3)
    beside = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    assert beside.path != first.path
    assert beside.header == PoolHeader(LAYOUT, "", "")
    first.close(remove=False)
    others = [hold_pool_file(tmp_path, *place, LAYOUT) for place in (("here", 1), ("there", 0), ("here", -1))]
    assert first.path not in {other.path for other in others}
    heir = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    assert heir.path == first.path
    assert heir.header == PoolHeader(LAYOUT, "pool", "model")
    assert heir.blocks[2].tolist() == [7] * 5000
    assert heir.records[2].item() == (1, 2, 3)


def test_a_file_of_another_size_is_replaced(tmp_path):
    old = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    old.close(remove=False)
    new = hold_pool_file(tmp_path, "here", 0, PoolLayout(6, 5001))
    assert [path.name for path in tmp_path.iterdir()] == [new.path.name]


@pytest.mark.parametrize("content", [b"", b"x" * 4096, b"HWBLOCKS" + bytes(4088)])
def test_a_damaged_file_is_replaced(tmp_path, content):
    old = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    old.close(remove=False)
    old.path.write_bytes(content)
    assert hold_pool_file(tmp_path, "here", 0, LAYOUT).path != old.path
    assert not old.path.exists()


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    program = (
        "import sys, time; from pathlib import Path\n"
        "from headway_executor.block_store.pool_file import *\n"
        "held = hold_pool_file(Path(sys.argv[1]), 'here', 0, PoolLayout(6, 5000))\n"
        "held.write_header(name='pool', identity='model')\n"
        "print(held.path, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    path = Path(process.stdout.readline().strip())
    assert hold_pool_file(tmp_path, "here", 0, LAYOUT).path != path
    process.kill()
    process.wait()
    process.stdout.close()
    assert hold_pool_file(tmp_path, "here", 0, LAYOUT).header.name == "pool"


def test_who_may_wait_gets_the_file_of_a_process_that_takes_a_while_to_end(tmp_path):
    before = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    before.write_header(name="pool", identity="model")
    ending = threading.Timer(0.2, before.close, kwargs={"remove": False})
    ending.start()
    after = hold_pool_file(tmp_path, "here", 0, LAYOUT, patience_s=60)
    ending.join()
    assert after.path == before.path
    assert after.header.name == "pool"
    assert hold_pool_file(tmp_path, "here", 0, LAYOUT, patience_s=0.05).path != before.path, "its process goes on"


def test_room_that_other_pools_may_still_take_is_not_free(tmp_path, monkeypatch):
    room = os.statvfs_result((4096, 4096, 100, 100, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    layout = PoolLayout(50, 4096)
    held = hold_pool_file(tmp_path, "here", 0, layout)
    with pytest.raises(OSError, match="MiB are needed"):
        hold_pool_file(tmp_path, "there", 0, layout)
    held.close(remove=True)
    hold_pool_file(tmp_path, "there", 0, layout)


def test_files_that_nobody_came_back_to_are_removed(tmp_path):
    forgotten, held, fresh = (hold_pool_file(tmp_path, place, 0, LAYOUT) for place in ("a", "b", "c"))
    forgotten.close(remove=False)
    fresh.close(remove=False)
    long_ago = time.time() - 2 * pool_file._FORGOTTEN_S
    for one in (forgotten, held):
        os.utime(one.path, (long_ago, long_ago))
    hold_pool_file(tmp_path, "d", 0, LAYOUT)
    assert [one.path.exists() for one in (forgotten, held, fresh)] == [False, True, True]
    os.utime(held.path, (long_ago, long_ago))
    held.touch()
    assert held.path.stat().st_mtime > time.time() - 60


def test_a_header_is_read_only_from_files_of_this_user_alone(tmp_path):
    held = hold_pool_file(tmp_path, "here", 0, LAYOUT)
    held.path.chmod(0o640)
    with held.path.open("rb") as file, pytest.raises(ValueError, match="this user alone"):
        read_header(file.fileno())


# Records


def test_a_record_is_written_last_and_invalid_while_bytes_change():
    records, blocks = np.zeros(4, dtype=RECORD), np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
    kept = BlockRecords(records, blocks)
    write = kept.begin(int32(2, 1))
    blocks[[2, 1]] = [[5], [6]]
    kept.end(write, int32(2, 1), epoch=1 << 62, step=9)
    assert records[2].item() == (1 << 62, 9, zlib.crc32(bytes([5] * BLOCK_BYTES), 2))
    assert records[1].item() == (1 << 62, 9, zlib.crc32(bytes([6] * BLOCK_BYTES), 1))
    later = kept.begin(int32(1))
    assert records[1].item() == (0, 0, 0)
    # What ends late says nothing of blocks that something else has begun to overwrite.
    kept.end(write, int32(2, 1), epoch=3, step=3)
    assert [records[block].item()[:2] for block in (1, 2)] == [(0, 0), (3, 3)]
    kept.end(later, int32(1), epoch=4, step=4)
    assert records[1].item()[:2] == (4, 4)
    unfinished = kept.begin(int32(3))
    kept.forget()
    kept.end(unfinished, int32(3), epoch=5, step=5)
    assert not records["epoch"].any()


# The transport shm


def filled_pool(directory: Path, name="pool"):
    held = hold_pool_file(directory, "here", 0, PoolLayout(6, BLOCK_BYTES))
    held.write_header(name=name, identity="model")
    held.blocks[:] = np.arange(6, dtype=np.uint8)[:, None]
    held.records["step"] = np.arange(6)
    held.records["epoch"] = 1
    return held


def pull(shm, held, *blocks, pool="pool", address=None, block_bytes=BLOCK_BYTES) -> PulledBlocks:
    address = held.path.name if address is None else address
    return shm.pull(pool, address, int32(*blocks), block_bytes=block_bytes, timeout_s=1.0)


def test_shm_copies_blocks_and_records(shm, tmp_path):
    held = filled_pool(tmp_path)
    assert shm.register(HostMemory("pool", str(held.path), held.records, held.blocks)) == held.path.name
    for chosen in ([3], [5, 0, 1, 2, 2], []):
        pulled = pull(shm, held, *chosen)
        assert pulled.blocks.tolist() == [[block] * BLOCK_BYTES for block in chosen]
        assert pulled.records["step"].tolist() == chosen
    pulled = pull(shm, held, 3)
    held.blocks[3] = 77
    assert pulled.blocks[0, 0] == 3, "the copy is private"


def test_shm_copies_to_pages_that_it_had_before_and_that_nobody_holds(shm, tmp_path):
    held = filled_pool(tmp_path)
    first = pull(shm, held, 1, 2)
    place = first.blocks.ctypes.data
    second = pull(shm, held, 3)
    assert second.blocks.ctypes.data != place
    assert first.blocks[:, 0].tolist() == [1, 2]
    kept = first.blocks[1:].reshape(-1)[5:]
    del first
    assert pull(shm, held, 3).blocks.ctypes.data != place, "part of it is still held"
    assert kept.tolist() == [2] * (BLOCK_BYTES - 5)
    del kept
    assert pull(shm, held, 3, 4).blocks.ctypes.data == place


def test_more_blocks_than_are_kept_get_memory_of_their_own():
    memory = KeptMemory()
    assert memory.blocks(3, MOST_BYTES).shape == (3, MOST_BYTES)
    assert memory.blocks(0, 64).shape == (0, 64)
    assert memory.blocks(1, MOST_BYTES).shape == (1, MOST_BYTES)


def test_shm_reads_no_bytes_while_no_block_has_a_record(shm, tmp_path, monkeypatch):
    held = filled_pool(tmp_path)
    held.records["epoch"] = 0
    sizes, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        sizes.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert pull(shm, held, 1, 2, 3).records["step"].tolist() == [1, 2, 3]
    assert sizes == [3 * RECORD.itemsize], "the puller asks again soon"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pool": "another"}, "another pool"),
        ({"block_bytes": 65}, "64 bytes, not 65"),
        ({"address": "headway-none"}, "No such file"),
        ({"address": "../headway-x"}, "no file of a pool"),
        ({"address": "other-file"}, "no file of a pool"),
        ({"address": "headway-link"}, "symbolic link|symlink"),
        ({"address": "headway-text"}, "no header|no pool"),
        ({"address": "headway-directory"}, "no file of this user"),
    ],
)
def test_shm_opens_pools_of_its_user_only(shm, tmp_path, changes, problem):
    held = filled_pool(tmp_path)
    (tmp_path / "headway-link").symlink_to(held.path)
    (tmp_path / "headway-text").write_text("x")
    (tmp_path / "headway-text").chmod(0o600)
    (tmp_path / "headway-directory").mkdir(mode=0o700)
    with pytest.raises(PullError, match=problem):
        pull(shm, held, 1, **changes)
    assert pull(shm, held, 1).blocks[0, 0] == 1


@pytest.mark.parametrize("block", [6, -1])
def test_shm_refuses_blocks_outside_the_pool(shm, tmp_path, block):
    with pytest.raises(PullError, match=f"no block {block}; allowed: 0 to 5"):
        pull(shm, filled_pool(tmp_path), 1, block)


def test_a_file_that_became_shorter_is_an_error(shm, tmp_path):
    held = filled_pool(tmp_path)
    os.truncate(held.path, 5000)
    with pytest.raises(PullError, match="5000 bytes"):
        pull(shm, held, 5)


def test_shm_does_not_offer_private_memory(shm):
    with pytest.raises(BackendConfigError, match="private memory"):
        shm.register(HostMemory("pool", "", np.zeros(1, RECORD), np.zeros((1, 1), np.uint8)))


# The registry


def test_transports_are_known_by_name():
    assert "shm" in transport_names()
    assert enabled_transports("") == ()
    assert enabled_transports(" shm ") == ("shm",)
    for value in ("smh", "shm,shm", "shm,"):
        with pytest.raises(
            BackendConfigError, match=r"block_transports: '.*' is not allowed; allowed: each at most once"
        ):
            enabled_transports(value)
    assert isinstance(make_transport("shm"), ShmTransport)
    with pytest.raises(BackendConfigError, match="block_transports: 'smh'"):
        make_transport("smh")


class Configured:
    def __init__(self, curve_keys: str = "", other: int = 3) -> None:
        self.values = (curve_keys, other)


def test_a_transport_gets_the_settings_that_it_names(monkeypatch):
    monkeypatch.setattr(ByName, "load", lambda registered, name: Configured)
    assert make_transport("shm", {"curve_keys": "k", "step_address": "s"}).values == ("k", 3)


# The store


def opened_store(directory: Path, **fields) -> tuple[BlockStore, object, list[str]]:
    warnings = []
    shm = ShmTransport()
    shm._directory = directory
    transports = fields.pop("transports", {"shm": shm})
    info = fields.pop("info", backend_info(num_host_blocks=6))
    store = BlockStore(transports, place="here", directory=directory, warn=warnings.append, **fields)
    store.host_memory(6, BLOCK_BYTES, "layout")
    return store, store.open(info), warnings


def test_contents_are_announced_by_name_and_address(tmp_path):
    store, info, warnings = opened_store(tmp_path)
    (path,) = tmp_path.iterdir()
    assert info.block_addresses == (f"shm:{path.name}",)
    assert len(info.host_pool) == 24 + 1 + 12
    assert warnings == []
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []


def end_suddenly(store: BlockStore) -> None:
    store._file.close(remove=False)


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"model_fingerprint": "other"}, False),
        ({"backend": "other"}, False),
        ({"dtype": "other"}, False),
        ({"block_size": 8}, False),
        ({"num_blocks": 128}, True),
    ],
)
def test_contents_are_kept_for_the_same_model_and_layout(tmp_path, changes, is_kept):
    store, before, _ = opened_store(tmp_path)
    store.end_write(store.begin_write(int32(4)), int32(4), epoch=5, step=6)
    end_suddenly(store)
    heir, after, _ = opened_store(tmp_path, info=backend_info(num_host_blocks=6, **changes))
    assert (after.host_pool == before.host_pool) == is_kept
    assert after.block_addresses == before.block_addresses
    assert heir._memory.records[4].item()[:2] == ((5, 6) if is_kept else (0, 0))


def test_an_executor_in_another_state_offers_nothing(tmp_path):
    store, _, _ = opened_store(tmp_path)
    store.end_write(store.begin_write(int32(4)), int32(4), epoch=5, step=6)
    store.forget()
    assert store._memory.records[4].item()[:2] == (0, 0)


def test_a_quantised_model_has_other_contents(tmp_path):
    store, before, _ = opened_store(tmp_path, variant="int8")
    end_suddenly(store)
    _, after, _ = opened_store(tmp_path)
    assert after.host_pool.rpartition("-")[2] != before.host_pool.rpartition("-")[2]


def test_too_little_room_is_a_warning_and_private_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_file, "_free_bytes", lambda _: 1000)
    store, info, warnings = opened_store(tmp_path)
    assert (info.host_pool, info.block_addresses) == ("", ())
    assert store.host_memory(6, BLOCK_BYTES, "layout") is None
    assert "MiB are free" in warnings[0]


def test_no_shared_memory_is_a_warning(tmp_path):
    _, info, warnings = opened_store(tmp_path / "none")
    assert (info.host_pool, info.block_addresses) == ("", ())
    assert "none: No such file or directory" in warnings[0]


class FakeTransport:
    """Offers anything, and answers pulls from a script."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked = []
        self.threads = []
        self.is_closed = False

    def register(self, memory):
        return "anywhere"

    def pull(self, pool, address, host_blocks, *, block_bytes, timeout_s):
        self.asked.append((address, host_blocks.tolist()))
        self.threads.append(threading.current_thread())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(host_blocks)

    def release(self, address): ...

    def close(self):
        self.is_closed = True


def test_private_memory_is_offered_by_transports_that_can(tmp_path):
    transport = FakeTransport()
    store, info, warnings = opened_store(tmp_path, uses_shared_memory=False, transports={"fake": transport})
    assert info.block_addresses == ("fake:anywhere",)
    assert info.host_pool
    assert list(tmp_path.iterdir()) == []
    store.close()
    assert transport.is_closed
    assert warnings == []


def test_a_process_that_ends_while_opening_leaves_nothing(tmp_path):
    store = BlockStore({"shm": ShmTransport()}, place="here", directory=tmp_path)
    store.host_memory(6, BLOCK_BYTES, "layout")
    assert len(list(tmp_path.iterdir())) == 1
    store.leave()
    assert list(tmp_path.iterdir()) == []


# Pulling


def contents_of(blocks, epoch, step, right=True):
    """An answer: block b is full of b, with its record."""

    def answer(host_blocks):
        contents = np.repeat(host_blocks.astype(np.uint8)[:, None], BLOCK_BYTES, axis=1)
        records = np.zeros(len(host_blocks), dtype=RECORD)
        records["epoch"], records["step"] = epoch, step
        records["checksum"] = [
            zlib.crc32(block, number) for block, number in zip(contents, host_blocks.tolist(), strict=True)
        ]
        if not right:
            contents[:, 3] ^= 1
        return PulledBlocks(records, contents)

    return answer


def fetch(transports, *pulls, patience_s=0.2, own=None):
    puller = BlockPuller(transports, own=own, identity="id", block_bytes=BLOCK_BYTES, patience_s=patience_s)
    try:
        future = puller.fetch(pulls)
        assert isinstance(future, Future)
        return future.result(10)
    finally:
        puller.close()


def pull_from(*addresses, pool="x-id", blocks=((4, 2), (7, 7), (11, 12))) -> Pull:
    return Pull(pool, addresses, 5, np.array(blocks, dtype=np.int32))


def test_blocks_come_by_the_first_address_that_works():
    dead, alive = FakeTransport(PullError("nobody is there")), FakeTransport(contents_of(None, 5, 7))
    found = fetch({"dead": dead, "alive": alive}, pull_from("other:0", "dead:1", "alive:2"))
    assert found.blocks.tolist() == [11, 12]
    assert found.contents[:, 0].tolist() == [4, 2]
    assert (found.missing.tolist(), found.problems) == ([], ())
    assert (dead.asked, alive.asked) == ([("1", [4, 2])], [("2", [4, 2])])


def test_older_blocks_are_asked_for_again_and_only_they():
    def half(host_blocks):
        answer = contents_of(None, 5, 7)(host_blocks)
        answer.records[1] = (5, 6, 0)
        return answer

    transport = FakeTransport(half, contents_of(None, 0, 0), contents_of(None, 5, 7))
    found = fetch({"fake": transport}, pull_from("fake:1"))
    assert found.blocks.tolist() == [11, 12]
    assert [asked for _, asked in transport.asked] == [[4, 2], [2], [2]]


@pytest.mark.parametrize(
    ("answer", "num_asked"),
    [
        (contents_of(None, 5, 8), 1),
        (contents_of(None, 5, 7, right=False), 1),
        (lambda host_blocks: contents_of(None, 5, 7)(host_blocks[::-1].copy()), 1),  # each is right, elsewhere
        (PullError("gone"), 1),
        (RuntimeError("a mistake of the transport"), 1),
        (contents_of(None, 5, 6), None),
        (contents_of(None, 6, 7), None),
    ],
)
def test_what_is_not_right_is_missing_at_once_or_after_a_while(answer, num_asked):
    transport = FakeTransport(answer)
    found = fetch({"fake": transport}, pull_from("fake:1"))
    assert found.missing.tolist() == [11, 12]
    assert found.blocks.tolist() == []
    assert len(transport.asked) == num_asked if num_asked else len(transport.asked) > 3
    assert found.seconds < 1.0


def test_a_pool_of_another_identity_is_not_even_asked():
    transport = FakeTransport(contents_of(None, 5, 7))
    found = fetch({"fake": transport}, pull_from("fake:1", pool="x-other"))
    assert found.missing.tolist() == [11, 12]
    assert "another model" in found.problems[0]
    assert transport.asked == []


def test_one_pool_that_is_gone_costs_only_its_blocks():
    transports = {"dead": FakeTransport(PullError("gone")), "alive": FakeTransport(contents_of(None, 5, 7))}
    found = fetch(transports, pull_from("dead:1"), pull_from("alive:2", blocks=((1,), (7,), (30,))))
    assert (found.blocks.tolist(), found.missing.tolist()) == ([30], [11, 12])
    assert found.contents.shape == (1, BLOCK_BYTES)


def test_a_block_beyond_the_own_pool_is_missing():
    memory = HostMemory("x-id", "", np.zeros(3, RECORD), np.zeros((3, BLOCK_BYTES), np.uint8))
    found = fetch({}, pull_from(), own=memory)
    assert "no block 4; allowed: 0 to 2" in found.problems[0]


class QuickTransport(FakeTransport):
    """Never waits."""

    never_waits = True


@pytest.fixture
def puller_of():
    """Makes a puller of these transports, which ends with the test."""
    made = []

    def make(transports, block_bytes=BLOCK_BYTES):
        made.append(BlockPuller(transports, own=None, identity="id", block_bytes=block_bytes, patience_s=0.2))
        return made[-1]

    yield make
    for puller in made:
        puller.close()


def test_a_transport_that_never_waits_is_asked_at_once(puller_of):
    quick, slow = QuickTransport(contents_of(None, 5, 7)), FakeTransport(contents_of(None, 5, 7))
    future = puller_of({"quick": quick, "slow": slow}).fetch((pull_from("quick:1"),))
    assert future.done()
    assert future.result().blocks.tolist() == [11, 12]
    assert quick.threads == [threading.current_thread()]


@pytest.mark.parametrize("answer", [contents_of(None, 5, 6), PullError("gone"), RuntimeError("a mistake")])
def test_what_is_not_there_at_once_is_fetched_by_the_other_thread_and_transports(puller_of, answer):
    quick, slow = QuickTransport(answer, PullError("gone")), FakeTransport(contents_of(None, 5, 7))
    found = puller_of({"quick": quick, "slow": slow}).fetch((pull_from("quick:1", "slow:2"),)).result(10)
    assert found.blocks.tolist() == [11, 12]
    here = threading.current_thread()
    assert [thread is here for thread in quick.threads] == [True, False]
    assert [thread is here for thread in slow.threads] == [False]


def test_many_bytes_are_fetched_by_the_other_thread(puller_of):
    quick = QuickTransport(PullError("gone"))
    puller_of({"quick": quick}, block_bytes=3 << 20).fetch((pull_from("quick:1"),)).result(10)
    assert threading.current_thread() not in quick.threads


def test_a_puller_that_waits_for_work_holds_no_blocks(puller_of):
    puller = puller_of({"fake": FakeTransport(contents_of(None, 5, 7))})
    held = weakref.ref(puller.fetch((pull_from("fake:1"),)).result(10).contents)
    deadline = time.monotonic() + 5
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() is None
