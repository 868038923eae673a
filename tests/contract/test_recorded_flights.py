"""What an earlier version recorded replays to the byte in this one.

``recorded_flights.msgpack`` holds pairs of limits and log batches, written by commit 936a5d4 from fault schedules that cover
every order, batching, reservation, budget and kind of preemption. A change of the wire or of a decision breaks it: then the
protocol version is raised, the change log says so, and the flights are recorded anew.
"""

from pathlib import Path

import msgspec
import pytest

from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight.records import Header, Record
from headway_scheduler.flight.replay import Replay

FILE = Path(__file__).parent / "recorded_flights.msgpack"
FLIGHTS = msgspec.msgpack.decode(FILE.read_bytes(), type=list[tuple[SchedulerLimits, list[bytes]]])


@pytest.mark.parametrize(
    ("limits", "batches"), FLIGHTS, ids=[f"{limits.order}-{limits.batching}" for limits, _ in FLIGHTS]
)
def test_an_old_flight_replays_to_the_byte(limits: SchedulerLimits, batches: list[bytes]):
    decoder = msgspec.msgpack.Decoder(list[Record])
    records = [record for batch in batches for record in decoder.decode(batch) if not isinstance(record, Header)]
    replay = Replay(limits)
    for _ in replay.run(records):
        pass
    assert replay.num_steps > 10


def test_the_flights_cover_the_policies():
    assert {limits.order for limits, _ in FLIGHTS} == {"fcfs", "priority", "shortest", "fair", "deadline"}
    assert {limits.batching for limits, _ in FLIGHTS} == {"static", "orca", "prefill_first", "chunked", "split_fuse"}
    assert {limits.preemption for limits, _ in FLIGHTS} == {"recompute", "swap", "auto"}
