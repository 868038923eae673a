"""The lanes of an executor that works on several steps at once: which rows each step runs.

Owns: the lane of each row, and the checks of what a step lists. Must not know: positions, blocks, stages.
"""

import numpy as np
from numpy.typing import NDArray

from headway_executor.batch.diff_checks import ImpossibleDiff, check_distinct, check_range, decoded_group
from headway_proto.columns import Int32Array
from headway_proto.step import NO_LANE, LaneOutput, SchedulerOutput

_NO_ROWS = np.empty(0, dtype=np.int32)


class RowLanes:
    """A row is in no lane until it samples; see ``headway_proto.step``."""

    def __init__(self, max_num_rows: int, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self._lane_of = np.full(max_num_rows, NO_LANE, dtype=np.int32)
        # The rows of each lane, ascending, with one token for each: the same arrays until they change.
        self._steps = [(_NO_ROWS, _NO_ROWS)] * num_lanes

    def clear(self) -> None:
        """No row is live."""
        self._lane_of[:] = NO_LANE
        self._steps = [(_NO_ROWS, _NO_ROWS)] * self.num_lanes

    def of(self, rows: Int32Array) -> Int32Array:
        """The lanes of these rows."""
        found: Int32Array = self._lane_of[rows]
        return found

    def lane_of_step(self, output: SchedulerOutput) -> int:
        """The lane of a step.

        Raises:
            ImpossibleDiff: it names none of this executor's lanes, or speculates.
        """
        if not isinstance(output, LaneOutput):
            raise ImpossibleDiff(f"lane: the step names none of {self.num_lanes}")
        if not 0 <= output.lane < self.num_lanes:
            raise ImpossibleDiff(f"lane: {output.lane} is outside 0 to {self.num_lanes - 1}")
        if output.num_speculative_tokens:
            raise ImpossibleDiff("num_speculative_tokens: an executor with several lanes does not speculate")
        return output.lane

    def leave(self, rows: Int32Array) -> None:
        """These rows have finished."""
        lanes = np.unique(self._lane_of[rows]).tolist()
        self._lane_of[rows] = NO_LANE
        for lane in lanes:
            self._collect(lane)

    def enter(self, lane: int, sampling: Int32Array) -> None:
        """These rows sample in a step of ``lane``: those that are in none stay in this one."""
        entering = sampling[self._lane_of[sampling] == NO_LANE]
        if entering.size:
            self._lane_of[entering] = lane
            self._collect(lane)

    def scheduled(
        self, lane: int, exceptions: bytes, live: NDArray[np.bool_], most: int
    ) -> tuple[Int32Array, Int32Array]:
        """The rows of a step of ``lane``, ascending, and the tokens of each, at most ``most``.

        Raises:
            ImpossibleDiff: it lists a row of another lane.
        """
        rows, scheduled = self._steps[lane]
        if not exceptions:
            return rows, scheduled
        listed, counts = checked_exceptions(exceptions, live, most)
        is_elsewhere = (self._lane_of[listed] != lane) & (self._lane_of[listed] != NO_LANE)
        if is_elsewhere.any():
            row = listed[is_elsewhere][0]
            raise ImpossibleDiff(
                f"num_scheduled_tokens: row {row} is in lane {self._lane_of[row]}; the step is of lane {lane}"
            )
        rows = np.union1d(rows, listed)
        scheduled = np.ones_like(rows)
        scheduled[np.searchsorted(rows, listed)] = counts
        running = scheduled > 0
        return rows[running], scheduled[running]

    def _collect(self, lane: int) -> None:
        if lane != NO_LANE:
            rows = np.flatnonzero(self._lane_of == lane).astype(np.int32)
            ones = np.ones_like(rows)
            rows.flags.writeable = ones.flags.writeable = False
            self._steps[lane] = rows, ones


def checked_exceptions(column: bytes, live: NDArray[np.bool_], most: int) -> tuple[Int32Array, Int32Array]:
    """The rows of ``num_scheduled_tokens``, which are live and distinct, and their counts, 0 to ``most``."""
    rows, counts = decoded_group(column, "num_scheduled_tokens")
    check_range(rows, len(live), "num_scheduled_tokens: row")
    check_range(counts, most + 1, "num_scheduled_tokens: count")
    check_distinct(rows, "num_scheduled_tokens: row")
    if not live[rows].all():
        raise ImpossibleDiff(f"num_scheduled_tokens: row {rows[~live[rows]][0]} is not live")
    return rows, counts
