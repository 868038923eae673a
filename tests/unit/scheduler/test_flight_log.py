"""The files of a flight log: torn, damaged, bounded, and a disk that fails."""

import errno
import os
import re
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from headway_executor.backend import BackendConfig
from headway_proto.sampling import SamplingParams
from headway_scheduler.config import SchedulerConfig
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight import log as flight_log
from headway_scheduler.flight.checkpoint import (
    CheckpointError,
    FleetState,
    ForkingCheckpointer,
    encode_state,
    restore_state,
)
from headway_scheduler.flight.log import FlightLog, FlightLogError, FlightLogWriter, segments_in
from headway_scheduler.flight.recorder import FlightRecorder, NullRecorder
from headway_scheduler.flight.records import LOG_VERSION, Header, Paused, Record, Turn
from headway_scheduler.flight.replay import Replay
from headway_scheduler.process import make_recorder
from simulation.world import World

LIMITS = SchedulerLimits()
HEADER = Header(LOG_VERSION, "1", 1, 0, LIMITS)
MIB = 1 << 20


def written(directory: Path, batches: list[list[Record]]) -> Path:
    """The path of a segment with these batches behind the header."""
    writer = FlightLogWriter(directory, MIB)
    for batch in [[HEADER], *batches]:
        writer.append(msgspec.msgpack.encode(batch))
    writer.close()
    assert not writer.failure
    return directory / f"{writer.life:06d}-000000.flight"


def turns(*times: float) -> list[Record]:
    return [Turn(now) for now in times]


def test_what_is_written_is_read(tmp_path: Path):
    path = written(tmp_path / "log", [turns(1.0, 2.0), turns(3.0)])
    log = FlightLog(tmp_path / "log")
    assert list(log.records()) == turns(1.0, 2.0, 3.0)
    assert log.header == HEADER
    assert not log.notice
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_newest_life_is_read_and_any_other_by_its_segment(tmp_path: Path):
    first = written(tmp_path, [turns(1.0)])
    written(tmp_path, [turns(2.0)])
    assert list(FlightLog(tmp_path).records()) == turns(2.0)
    assert list(FlightLog(first).records()) == turns(1.0)


def test_a_torn_tail_is_cut_wherever_it_is(tmp_path: Path):
    path = written(tmp_path, [turns(1.0), turns(2.0)])
    whole = path.read_bytes()
    last = flight_log.framed(msgspec.msgpack.encode(turns(2.0)))
    assert whole.endswith(last)
    for length in range(len(whole) - len(last) + 1, len(whole)):
        path.write_bytes(whole[:length])
        log = FlightLog(tmp_path)
        assert list(log.records()) == turns(1.0)
        assert f"from byte {len(whole) - len(last)}" in log.notice


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path):
    path = written(tmp_path, [turns(1.0)])
    path.write_bytes(path.read_bytes() + bytes(500))
    log = FlightLog(tmp_path)
    assert list(log.records()) == turns(1.0)
    assert "its last 500 bytes" in log.notice


def test_a_damaged_byte_anywhere_is_an_error_that_tells_where(tmp_path: Path):
    path = written(tmp_path, [turns(1.0), turns(2.0)])
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(FlightLogError, match=r"damaged at byte|does not begin"):
            list(FlightLog(tmp_path).records())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "none", "No such file"),
        (lambda path: path, "there is no flight log in it"),
    ],
)
def test_a_log_that_is_not_there_is_one_line(tmp_path: Path, make, message):
    with pytest.raises(FlightLogError, match=message):
        FlightLog(make(tmp_path))


def test_another_version_is_refused(tmp_path: Path):
    writer = FlightLogWriter(tmp_path, MIB)
    writer.append(msgspec.msgpack.encode([msgspec.structs.replace(HEADER, version=LOG_VERSION + 1)]))
    writer.close()
    with pytest.raises(FlightLogError, match=f"version {LOG_VERSION + 1} is not allowed; allowed: {LOG_VERSION}"):
        FlightLog(tmp_path)


def test_a_full_disk_ends_the_recording_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = FlightLogWriter(tmp_path, MIB)
    recorder = FlightRecorder(log, LIMITS, "1")
    drain(log)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FlightLogWriter, "_write", full)
    recorder.paused(is_paused=True)
    recorder.flush(1.0, None, is_final=True)
    wait_for(lambda: log.failure)
    assert recorder.take_failure() == "No space left on device"
    assert recorder.take_failure() == ""
    for now in range(1000):
        recorder.paused(is_paused=False)
        recorder.flush(float(now), None)
    recorder.close(2000.0, None)


def test_a_disk_that_is_too_slow_ends_the_recording_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = FlightLogWriter(tmp_path, MIB)
    monkeypatch.setattr(flight_log, "framed", lambda batch: time.sleep(0.02) or batch)
    for _ in range(1000):
        log.append(msgspec.msgpack.encode([Paused(True)]))
    assert log.failure == "the disk is too slow for it"
    log.close()


@pytest.mark.parametrize(("directory", "message"), [("file", "flight_log: .* cannot be used: ")])
def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path, directory: str, message: str):
    (tmp_path / directory).write_text("")
    with pytest.raises(ValueError, match=message):
        make_recorder(SchedulerConfig(flight_log=str(tmp_path / directory)))


def test_without_a_directory_nothing_is_recorded():
    assert type(make_recorder(SchedulerConfig())) is NullRecorder


# ---------------------------------------------------------------------------------------------- bounded by checkpoints

WORLD_LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=12, max_steps_in_flight=2, order="fair")
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=50,
    max_model_len=128,
    max_num_seqs=12,
    options={"vocab_size": "97", "context_length": "128", "real_time": "false"},
)


def wait_for(done) -> None:
    limit = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < limit, "no end in sight"
        time.sleep(0.001)


def drain(log: FlightLogWriter) -> None:
    wait_for(lambda: not log.is_busy)


def fork_in_a_hurry() -> int:
    """The child keeps its parent's priority: the test waits for each, while others use the machine."""
    child = os.fork()
    if not child:
        os.nice = lambda _: 0
    return child


class RecordedWorld(World):
    """A world whose scheduler has a recorder with a log of tiny segments."""

    def record_into(self, log: FlightLogWriter) -> None:
        self.log = log
        self.checkpointer = ForkingCheckpointer(log, fork_in_a_hurry)
        self.recorder = FlightRecorder(log, self.limits, "1", self.checkpointer)
        self.start_scheduler()

    def beat(self) -> None:
        super().beat()
        segment = self.log.segment
        self.engine.recorder.flush(self.now, self.engine.fleet)
        if self.log.segment != segment:
            wait_for(lambda: not self.checkpointer._is_child_alive())
            drain(self.log)

    def ask_for(self, count: int) -> None:
        for number in range(count):
            prompt = self.rng.integers(0, 97, size=int(self.rng.integers(1, 60))).tolist()
            self.gateways[0].submit(
                f"{self.now}-{number}", prompt, int(self.rng.integers(1, 50)), SamplingParams(), tenant=str(number % 3)
            )
        self.run_until(self.all_ended, 100.0)
        drain(self.log)


def replay_from_disk(directory: Path) -> tuple[FlightLog, Replay]:
    log = FlightLog(directory)
    checkpoint = log.checkpoint()
    state = None if checkpoint is None else restore_state(checkpoint, log.header.limits)
    replay = Replay(log.header.limits, state)
    for _ in replay.run(log.records()):
        pass
    return log, replay


def test_old_segments_go_and_the_rest_can_be_replayed(tmp_path: Path):
    most = 300_000
    log = FlightLogWriter(tmp_path, most)
    log._segment_bytes = 3000
    world = RecordedWorld(WORLD_LIMITS, CONFIG, num_gateways=1, seed=3)
    world.record_into(log)
    for _ in range(80):
        world.ask_for(30)
        assert not log.failure
        if segments_in(tmp_path)[0][1] > 1:
            break
    world.engine.recorder.close(world.now, world.engine.fleet)
    assert not log.failure
    kept = segments_in(tmp_path)
    assert len(kept) > 1
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1.1 * most
    found, replay = replay_from_disk(tmp_path)
    assert found.header.segment == kept[0][1] > 0
    assert replay.num_steps > 100
    assert replay.core is not None
    assert world.engine.fleet.cells[0].core is not None
    assert replay.core.counters == world.engine.fleet.cells[0].core.counters


def test_without_checkpoints_recording_stops_at_the_bound(tmp_path: Path):
    log = FlightLogWriter(tmp_path, 6000)
    log._segment_bytes = 2000
    world = RecordedWorld(WORLD_LIMITS, CONFIG, num_gateways=1, seed=3)
    world.record_into(log)

    def no_process() -> int:
        raise OSError(errno.EAGAIN, "no process left")

    world.checkpointer._fork = no_process
    for _ in range(8):
        world.ask_for(30)
    assert "no checkpoint allows deleting the oldest" in world.engine.recorder.take_failure()
    world.engine.recorder.close(world.now, world.engine.fleet)
    assert replay_from_disk(tmp_path)[1].num_steps > 10


def test_a_recording_that_was_ended_is_closed_at_once(tmp_path: Path):
    log = FlightLogWriter(tmp_path, 6000)
    log.stop("it is long enough")
    log.close()
    assert not log._thread.is_alive(), "whoever closes it would wait for a thread that waits"


def test_recording_goes_on_when_there_is_room_again_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log = FlightLogWriter(tmp_path, MIB)
    world = RecordedWorld(WORLD_LIMITS, CONFIG, num_gateways=1, seed=3)
    world.record_into(log)
    recorder = world.engine.recorder
    world.ask_for(30)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(flight_log.os, "write", full)
        disk.setattr(flight_log.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        world.ask_for(1)
        wait_for(lambda: log.failure)
        assert recorder.take_failure() == "No space left on device"
        world.ask_for(1)  # from now on it looks for room
        world.now += 100.0
        world.ask_for(5)
        assert log.life == 1
        assert log.failure
    world.now += 100.0
    world.ask_for(30)
    assert not log.failure
    assert re.fullmatch(
        r"the 2\d\d\.\d s before it are not recorded \(No space left on device\); life 1 ends before them",
        missing := recorder.take_missing(),
    )
    assert recorder.take_missing() == recorder.take_failure() == ""
    recorder.close(world.now, world.engine.fleet)
    found, replay = replay_from_disk(tmp_path)
    assert (found.life, found.notice) == (2, missing)
    assert replay.core is not None
    assert world.engine.fleet.cells[0].core is not None
    assert replay.core.counters == world.engine.fleet.cells[0].core.counters
    before = FlightLog(tmp_path / "000001-000000.flight")
    assert len(list(before.records())) > 100


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in (full, lambda file, data: len(data) if len(data) == 8 else full()):
        monkeypatch.setattr(flight_log.os, "write", write)
        with pytest.raises(OSError, match="No space"):
            flight_log.write_checkpoint(tmp_path / "000001-000001.checkpoint", b"state")
        assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_state(msgspec.msgpack.encode([1, 2, 3]), LIMITS)
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_state(os.urandom(100), LIMITS)


def test_a_core_with_something_strange_in_it_is_refused():
    world = World(WORLD_LIMITS, CONFIG, num_gateways=1, seed=1)
    world.run_until(lambda: world.engine.fleet.cells[0].core is not None, 10.0)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    core._shed.append(Path())
    with pytest.raises(CheckpointError, match="Path"):
        flight_encode(core)
    core._shed[:] = [np.float64(1.5)]
    assert restore_state(flight_encode(core), WORLD_LIMITS).cores[0]._shed == [1.5]


def flight_encode(core) -> bytes:
    return encode_state(FleetState({0: core}, {}))
