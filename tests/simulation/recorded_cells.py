"""A world of several executors whose scheduler records, with a checkpoint every so many records.

Owns: the log in memory, its checkpoints, and a replay from each of them. Must not know: what happens in the world.
"""

from typing import Any

from flight_logs import MemoryLog
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.flight.checkpoint import FleetState, encode_state, restore_state
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.flight.replay import Replay
from simulation.test_nothing_is_lost import CONFIG, LIMITS
from simulation.world import World


class RecordedCells(World):
    """A world whose log in memory has a new segment after every so many beats, each with a checkpoint."""

    def __init__(
        self, num_executors: int, seed: int, limits: SchedulerLimits = LIMITS, beats: int = 40, **options: Any
    ) -> None:
        super().__init__(limits, CONFIG, num_gateways=2, seed=seed, num_executors=num_executors, **options)
        self._beats_per_segment = beats
        self._num_beats = 0
        self._begin_recording()
        self.run_until(lambda: len(self.engine.fleet.open_cells) == num_executors, 2)

    def _begin_recording(self) -> None:
        self.log = MemoryLog()
        self.checkpoints: list[tuple[int, bytes]] = []
        """With the number of the records before it."""
        self.num_moving: list[int] = []
        """The requests that no core had, at each checkpoint."""
        self.recorder = FlightRecorder(self.log, self.limits, "0", self._checkpoint)
        self.start_scheduler()

    def _checkpoint(self, state: FleetState) -> None:
        self.checkpoints.append((len(self.log.records), encode_state(state)))
        self.num_moving.append(len(state.moving))
        self.log.segment += 1

    def beat(self) -> None:
        super().beat()
        if self.recorder is None:
            return
        self._num_beats += 1
        self.log.is_segment_full = self._num_beats % self._beats_per_segment == 0
        self.recorder.flush(self.now, self.engine.fleet, is_final=True)

    def replays(self) -> list[Replay]:
        """Replays to the end, from the beginning and from each checkpoint."""
        records = self.log.records
        found = [Replay(self.limits)]
        found += [Replay(self.limits, restore_state(payload, self.limits)) for _, payload in self.checkpoints]
        for replay, first in zip(found, [0, *(first for first, _ in self.checkpoints)], strict=True):
            for _ in replay.run(records[first:]):
                pass
        return found
