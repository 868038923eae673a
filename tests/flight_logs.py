"""Flight logs for tests: one in memory, and a core that is recorded although no engine tells of it.

Owns: how tests record. Must not know: what is recorded.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from exact_core import ExactCore
from headway_proto.framing import HEADER_BYTES
from headway_proto.step import BackendInfo, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.flight.checkpoint import FleetState, encode_state, restore_state
from headway_scheduler.flight.log import FlightLogWriter
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.flight.records import Header, Record
from headway_scheduler.flight.replay import Replay


class MemoryLog:
    """A log that keeps everything."""

    def __init__(self) -> None:
        self.life = 1
        self.segment = 0
        self.failure = ""
        self.is_segment_full = False
        self.is_closed = False
        self._batches: list[bytes] = []

    def append(self, batch: bytes) -> None:
        self._batches.append(batch)

    def close(self) -> None:
        self.is_closed = True

    def write_to(self, directory: Path) -> Path:
        """The same log on disk."""
        writer = FlightLogWriter(directory, 1 << 24)
        for batch in self._batches:
            writer.append(batch)
        writer.close()
        assert not writer.failure
        return directory

    @property
    def records(self) -> list[Record]:
        """All but the headers."""
        decoder = msgspec.msgpack.Decoder(list[Record])
        records = [record for batch in self._batches for record in decoder.decode(batch)]
        return [record for record in records if not isinstance(record, Header)]


def recorder_into(log: MemoryLog, limits: SchedulerLimits) -> FlightRecorder:
    return FlightRecorder(log, limits, "0")


def replay_of(log: MemoryLog, limits: SchedulerLimits) -> Replay:
    """A replay to its end; raises where the core decides otherwise."""
    replay = Replay(limits)
    for _ in replay.run(log.records):
        pass
    return replay


class RecordedCore:
    """A core and its recorder behind the core's own calls; what is not here is the core's."""

    def __init__(self, core: Scheduler, recorder: FlightRecorder) -> None:
        self._core = core
        self._recorder = recorder
        self._encoder = msgspec.msgpack.Encoder()
        self._frames: list[tuple[bytes, bytes]] = []
        self._num_shed = 0
        self._begin(core.capacity, core.epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def paused(self) -> bool:
        return self._core.paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._core.paused = is_paused
        self._recorder.paused(is_paused=is_paused)

    def _begin(self, capacity: ExecutorCapacity, epoch: int) -> None:
        info = BackendInfo(
            **{name: getattr(capacity, name) for name in ExecutorCapacity.__struct_fields__},
            backend="test", device="test", dtype="test", model_name="test", model_fingerprint="test", eos_token_ids=(),
        )  # fmt: skip
        self._recorder.epoch_began(0.0, epoch, capacity, info, "test", same_model=True)

    def add_request(self, new: NewRequestEvent, now: float) -> None:
        self._core.add_request(new, now)
        self._recorder.arrived(now, new)

    def restore(self) -> None:
        """Go on with a core that was restored from a checkpoint of the present one."""
        payload = encode_state(FleetState({0: self._core}, {}))
        self._core = restore_state(payload, self._core.limits).cores[0]

    def abort(self, origin: Origin) -> FinishedEvent | None:
        self._recorder.aborted(0.0, origin, "test")
        return self._core.abort(origin)

    def run_alone(self, origin: Origin | None, num_tokens: int = 0) -> None:
        self._core.run_alone(origin, num_tokens)
        self._recorder.ran_alone(origin, num_tokens)

    def start_slowly(self, origins: Iterable[Origin]) -> None:
        lost = tuple(origins)
        self._core.start_slowly(lost)
        self._recorder.started_slowly(lost)

    def begin_epoch(self, capacity: ExecutorCapacity, epoch: int) -> StepEvents:
        events = self._core.begin_epoch(capacity, epoch)
        self._begin(capacity, epoch)
        return events

    def update(self, output: ExecutorOutput, now: float) -> StepEvents:
        events = self._core.update(output, now)
        self._recorder.answered(now, output, events.finished)
        return events

    def schedule(self, now: float) -> SchedulerOutput | None:
        output = self._core.schedule(now)
        if output is not None:
            self._frames.append((b"", bytes(HEADER_BYTES) + self._encoder.encode(output)))
        return output

    def take_shed(self) -> tuple[FinishedEvent, ...]:
        shed = self._core.take_shed()
        self._num_shed += len(shed)
        return shed

    def end_turn(self, now: float, *, was_full: bool) -> None:
        """It was asked for steps until it had no more."""
        if self._frames:
            self._recorder.sent(now, self._frames, self._num_shed)
        elif not was_full:
            self._recorder.sent_nothing(now, self._num_shed, is_idle=not self._core.num_unfinished)
        self._frames, self._num_shed = [], 0


class RecordedExactCore(ExactCore):
    """An exact core that asks for whole turns, as the engine does, and whose log can be replayed."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity) -> None:
        super().__init__(limits, capacity)
        self.log = MemoryLog()
        self.recorder = recorder_into(self.log, limits)
        self.core = RecordedCore(self.core, self.recorder)  # type: ignore[assignment]

    def schedule(self) -> bool:
        was_full = self.core.num_in_flight >= self.limits.steps_in_flight(self.core.capacity.num_lanes)
        num_steps = 0
        while super().schedule():
            num_steps += 1
        self.core.end_turn(self.now, was_full=was_full)  # type: ignore[attr-defined]
        return num_steps > 0

    def replay(self) -> Replay:
        """Everything so far, replayed."""
        self.recorder.flush(self.now, None, is_final=True)
        return replay_of(self.log, self.limits)
