"""The scheduler's side of reading a flight log by an operator's call: pieces of a log that goes on meanwhile."""

import time
from pathlib import Path

import msgspec
import pytest

from headway_proto.operations import (
    MAX_FLIGHT_LOG_PIECE_BYTES,
    AdminCall,
    AdminReply,
    FlightLogFile,
    FlightLogPart,
    FlightLogPlace,
)
from headway_scheduler.flight import log as flight_log
from headway_scheduler.flight import pieces as flight_pieces
from headway_scheduler.flight.checkpoint import ForkingCheckpointer
from headway_scheduler.flight.log import FlightLogWriter, is_start, paths_of, segments_in
from headway_scheduler.flight.pieces import LogPieces
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.flight.records import Paused
from headway_scheduler.flight.replay import Replay
from simulation.world import World
from unit.scheduler.test_flight_log import (
    CONFIG,
    WORLD_LIMITS,
    RecordedWorld,
    fork_in_a_hurry,
    replay_from_disk,
    wait_for,
)

MIB = 1 << 20


def ask(world: World, place: FlightLogPlace | None = None) -> AdminReply:
    link = world.gateways[0].link
    link.call_admin(AdminCall(method="flight_log", place=place))
    replies: list[AdminReply] = []

    def answered() -> bool:
        replies.extend(link.take_admin_replies())
        return bool(replies)

    world.run_until(answered, 2)
    return replies[0]


class AskedWorld(RecordedWorld):
    """A recorded world whose gateway asks for the log."""

    def record_into(self, log: FlightLogWriter) -> None:
        self.log = log
        self.checkpointer = ForkingCheckpointer(log, fork_in_a_hurry)
        self.recorder = FlightRecorder(log, self.limits, "1", self.checkpointer, LogPieces(log))
        self.start_scheduler()

    def part(self, **place: int) -> FlightLogPart:
        part = ask(self, FlightLogPlace(**place)).flight_log
        assert part is not None
        return part

    def contents(self) -> FlightLogPart:
        found = [self.part()]

        def is_written() -> bool:
            if not found[-1].files:
                found.append(self.part(life=found[0].life, mark=found[0].mark))
            return bool(found[-1].files)

        wait_for(is_written)
        return found[-1]

    def copy(self, contents: FlightLogPart, file: FlightLogFile) -> bytes:
        data = b""
        while len(data) < file.num_bytes:
            part = self.part(
                life=contents.life, segment=file.segment, is_checkpoint=file.is_checkpoint, offset=len(data)
            )
            assert 0 < len(part.data) <= flight_pieces.MAX_FLIGHT_LOG_PIECE_BYTES
            data += part.data
        return data[: file.num_bytes]

    def copy_into(self, directory: Path) -> None:
        directory.mkdir()
        contents = self.contents()
        for file in contents.files:
            paths = paths_of(directory, contents.life, file.segment)
            (paths.checkpoint if file.is_checkpoint else paths.segment).write_bytes(self.copy(contents, file))


@pytest.fixture
def world(tmp_path: Path) -> AskedWorld:
    world = AskedWorld(WORLD_LIMITS, CONFIG, num_gateways=1, seed=3)
    world.record_into(FlightLogWriter(tmp_path / "log", MIB))
    return world


def replayed(directory: Path) -> Replay:
    log, replay = replay_from_disk(directory)
    assert not log.notice
    return replay


def rotated_to(world: AskedWorld, segment: int, segment_bytes: int = 3000) -> None:
    world.log._segment_bytes = segment_bytes
    for _ in range(80):
        world.ask_for(30)
        if segments_in(world.log.directory)[0][1] >= segment:
            return
    pytest.fail("no segment has gone")


def test_a_copy_made_of_pieces_is_whole_and_up_to_now(
    world: AskedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_pieces, "MAX_FLIGHT_LOG_PIECE_BYTES", 700)
    world.ask_for(30)
    assert world.engine.fleet.cells[0].core is not None
    num_finished = world.engine.fleet.cells[0].core.counters.num_finished
    world.copy_into(tmp_path / "copy")
    replay = replayed(tmp_path / "copy")
    assert replay.core is not None
    assert replay.core.counters.num_finished == num_finished == 30


def test_what_was_not_even_handed_to_the_log_is_in_the_copy(world: AskedWorld, tmp_path: Path) -> None:
    world.ask_for(3)
    before = replayed(world.log.directory).num_records
    for _ in range(5):
        world.engine.recorder.paused(is_paused=False)
    world.copy_into(tmp_path / "copy")
    assert replayed(tmp_path / "copy").num_records >= before + 5


def test_a_log_that_has_lost_its_oldest_segments_comes_with_the_checkpoint(world: AskedWorld, tmp_path: Path) -> None:
    world.log._max_bytes = 300_000
    rotated_to(world, 1)
    world.copy_into(tmp_path / "copy")
    # Usually the oldest one has a checkpoint, but a child that makes one may fail.
    first = next(
        number for life, number in segments_in(world.log.directory) if is_start(world.log.directory, life, number)
    )
    assert [path.name for path in sorted((tmp_path / "copy").iterdir()) if path.suffix == ".checkpoint"] == [
        f"000001-{first:06d}.checkpoint"
    ]
    replay = replayed(tmp_path / "copy")
    assert replay.core is not None
    assert world.engine.fleet.cells[0].core is not None
    assert replay.core.counters.num_finished == world.engine.fleet.cells[0].core.counters.num_finished


def test_a_segment_that_went_away_between_two_pieces_is_told(
    world: AskedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_pieces, "MAX_FLIGHT_LOG_PIECE_BYTES", 100)
    world.log._max_bytes = 300_000
    world.ask_for(10)
    first = world.contents().files[0]
    assert not world.part(life=1, segment=first.segment).is_gone
    rotated_to(world, first.segment + 1)
    assert world.part(life=1, segment=first.segment, offset=100) == FlightLogPart(life=1, is_gone=True)


@pytest.mark.parametrize(
    "place",
    [
        {"life": 2},
        {"life": -1},
        {"life": 2, "mark": 1},
        {"life": 1, "segment": 1},
        {"life": 1, "segment": -1},
        {"life": 1, "is_checkpoint": True},
        {"life": 1, "offset": -1},
        {"life": 1, "offset": (1 << 63)},
    ],
)
def test_a_place_that_is_nowhere_is_gone(world: AskedWorld, place: dict[str, int]) -> None:
    assert world.part(**place) == FlightLogPart(life=1, is_gone=True)


def test_a_call_reads_no_more_than_a_bounded_piece_and_beyond_the_end_nothing(world: AskedWorld) -> None:
    path = paths_of(world.log.directory, 1, 0).segment
    wait_for(lambda: world.log.written.num_items == world.log.num_queued)
    size = 2 * MAX_FLIGHT_LOG_PIECE_BYTES
    with path.open("ab") as file:
        file.truncate(size)
    assert len(world.part(life=1).data) == MAX_FLIGHT_LOG_PIECE_BYTES <= 256 << 10
    assert world.part(life=1, offset=size) == FlightLogPart(life=1)


def test_the_files_are_told_when_what_was_queued_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    framed, is_slow = flight_log.framed, [True]

    def slowly(batch: bytes) -> bytes:
        while is_slow:
            time.sleep(0.001)
        return framed(batch)

    monkeypatch.setattr(flight_log, "framed", slowly)
    log = FlightLogWriter(tmp_path, MIB)
    batch = msgspec.msgpack.encode([Paused(True)])
    log.append(batch)
    log.append(batch)
    pieces = LogPieces(log)
    waiting = pieces.contents()
    assert waiting == FlightLogPart(life=1, mark=2)
    log.append(batch)
    is_slow.clear()
    wait_for(lambda: pieces.contents(waiting.mark).files)
    log.close()
    (file,) = pieces.contents(waiting.mark).files
    assert file.num_bytes == paths_of(tmp_path, 1, 0).segment.stat().st_size


def test_a_log_whose_recording_has_ended_can_be_read_as_far_as_it_goes(tmp_path: Path) -> None:
    log = FlightLogWriter(tmp_path, MIB)
    log.append(msgspec.msgpack.encode([Paused(True)]))
    wait_for(lambda: log.written.num_items == 1)
    log.stop("the disk is full")
    assert LogPieces(log).contents(9).files == (
        FlightLogFile(segment=0, is_checkpoint=False, num_bytes=log.written.num_bytes),
    )
    log.close()


def test_without_a_recorder_the_setting_is_named() -> None:
    reply = ask(World(WORLD_LIMITS, CONFIG, num_gateways=1, seed=3))
    assert reply.flight_log is None
    assert reply.error == "flight_log: the scheduler records nothing; allowed: a directory (--flight-log DIRECTORY)"
