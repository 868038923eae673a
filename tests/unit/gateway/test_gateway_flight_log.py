"""The gateway's side of reading a flight log: the order of its questions, and what becomes of the answers."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from headway_gateway.operators import flight_log
from headway_gateway.operators.flight_log import flight_log_pieces
from headway_gateway.statuses import CallRefusedError
from headway_proto.admin_pb2 import ReadFlightLogResponse
from headway_proto.operations import FlightLogFile, FlightLogPart, FlightLogPlace

CHECKPOINT = FlightLogFile(segment=4, is_checkpoint=True, num_bytes=3)
SEGMENT = FlightLogFile(segment=4, is_checkpoint=False, num_bytes=5)
LISTED = FlightLogPart(life=2, mark=7, files=(CHECKPOINT, SEGMENT))


class FakeLog:
    """Answers from memory, two bytes at a time, and remembers what it was asked."""

    def __init__(self, *first: FlightLogPart) -> None:
        self.first = list(first)
        self.asked: list[FlightLogPlace] = []
        self.change: Callable[[FlightLogPlace], FlightLogPart | None] = lambda place: None

    async def ask(self, place: FlightLogPlace) -> FlightLogPart:
        self.asked.append(place)
        changed = self.change(place)
        if changed is not None:
            return changed
        if not place.life or place.mark:
            return self.first.pop(0)
        content = b"abc" if place.is_checkpoint else b"defghijk"  # it has grown meanwhile
        return FlightLogPart(life=2, data=content[place.offset :][:2])


async def read(log: FakeLog) -> list[ReadFlightLogResponse]:
    return [piece async for piece in flight_log_pieces(log.ask)]


async def refusal_of(log: FakeLog) -> CallRefusedError:
    with pytest.raises(CallRefusedError) as refused:
        await read(log)
    return refused.value


async def test_files_come_one_after_the_other_as_large_as_they_were_told():
    log = FakeLog(FlightLogPart(life=2, mark=7), LISTED)
    pieces = await read(log)
    assert [(piece.is_checkpoint, piece.offset, piece.data) for piece in pieces] == [
        (True, 0, b"ab"),
        (True, 2, b"c"),
        (False, 0, b"de"),
        (False, 2, b"fg"),
        (False, 4, b"h"),
    ]
    assert {(piece.life, piece.segment, piece.num_log_bytes) for piece in pieces} == {(2, 4, 8)}
    assert [piece.num_bytes for piece in pieces] == [3, 3, 5, 5, 5]
    assert log.asked[:2] == [FlightLogPlace(), FlightLogPlace(life=2, mark=7)]


@pytest.mark.parametrize("answer", [FlightLogPart(life=2, is_gone=True), FlightLogPart(life=2)])
async def test_a_file_that_went_away_or_was_cut_is_aborted_in_words(answer: FlightLogPart):
    log = FakeLog(LISTED)
    log.change = lambda place: answer if place.offset == 2 else None
    refused = await refusal_of(log)
    assert refused.code is grpc.StatusCode.ABORTED
    assert refused.message == "the log has moved on: segment 4 of life 2 is no longer there; try again"


async def test_another_scheduler_at_the_other_end_is_aborted():
    log = FakeLog(FlightLogPart(life=2, mark=7))
    log.change = lambda place: FlightLogPart(life=3, is_gone=True) if place.mark else None
    assert (await refusal_of(log)).code is grpc.StatusCode.ABORTED


async def test_a_disk_that_does_not_follow_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flight_log, "_MOST_LOOKS", 3)
    refused = await refusal_of(FakeLog(*[FlightLogPart(life=2, mark=7)] * 4))
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert "its disk is slow" in refused.message


async def test_nothing_is_asked_ahead_of_a_reader():
    log = FakeLog(LISTED)
    pieces = flight_log_pieces(log.ask)
    await anext(pieces)
    await asyncio.sleep(0)
    assert len(log.asked) == 2
    await pieces.aclose()
