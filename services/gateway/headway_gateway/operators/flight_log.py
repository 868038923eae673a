"""Reads the scheduler's flight log piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NoReturn, TypeAlias

import grpc

from headway_gateway.statuses import CallRefusedError
from headway_proto import admin_pb2 as api
from headway_proto.operations import FlightLogFile, FlightLogPart, FlightLogPlace

_LOOK_INTERVAL_S = 0.01
_MOST_LOOKS = 500

Ask: TypeAlias = Callable[[FlightLogPlace], Awaitable[FlightLogPart]]


async def flight_log_pieces(ask: Ask) -> AsyncIterator[api.ReadFlightLogResponse]:
    """Yield every file up to now.

    Raises:
        CallRefusedError: ABORTED, a file or the scheduler has gone; UNAVAILABLE, the disk is too slow.
    """
    contents = await _contents(ask)
    num_log_bytes = sum(file.num_bytes for file in contents.files)
    for file in contents.files:
        async for offset, data in _pieces_of(file, contents.life, ask):
            yield api.ReadFlightLogResponse(
                life=contents.life,
                segment=file.segment,
                is_checkpoint=file.is_checkpoint,
                offset=offset,
                num_bytes=file.num_bytes,
                num_log_bytes=num_log_bytes,
                data=data,
            )


async def _contents(ask: Ask) -> FlightLogPart:
    part = await _answer(ask, FlightLogPlace())
    for _ in range(_MOST_LOOKS):
        if part.files:
            return part
        await asyncio.sleep(_LOOK_INTERVAL_S)
        part = await _answer(ask, FlightLogPlace(life=part.life, mark=part.mark))
    raise CallRefusedError(
        grpc.StatusCode.UNAVAILABLE, "the newest events are not in the flight log yet: its disk is slow; try again"
    )


async def _pieces_of(file: FlightLogFile, life: int, ask: Ask) -> AsyncIterator[tuple[int, bytes]]:
    offset = 0
    while offset < file.num_bytes:
        place = FlightLogPlace(life=life, segment=file.segment, is_checkpoint=file.is_checkpoint, offset=offset)
        data = (await _answer(ask, place)).data[: file.num_bytes - offset]
        if not data:
            _went_on(life, file.segment)
        yield offset, data
        offset += len(data)


async def _answer(ask: Ask, place: FlightLogPlace) -> FlightLogPart:
    part = await ask(place)
    if part.is_gone:
        _went_on(place.life, place.segment)
    return part


def _went_on(life: int, segment: int) -> NoReturn:
    message = f"the log has moved on: segment {segment} of life {life} is no longer there; try again"
    raise CallRefusedError(grpc.StatusCode.ABORTED, message)
