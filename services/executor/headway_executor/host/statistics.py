"""Figures of the executor's steps: number, sizes, times, and waits between them.

Owns: these figures. Must not know: their readers.
"""

from collections import Counter

from headway_process.histogram import Histogram

_STEP_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
_COUNTS = (1.0, *(float(1 << power) for power in range(1, 15)))


class ExecutorStatistics:
    """Times in seconds, monotonic."""

    def __init__(self) -> None:
        self.device_s = Histogram(_STEP_S)
        """Times of steps, from the backend."""
        self.idle_s = Histogram(_STEP_S)
        """Waits between a report and the next step, while no other step was pending."""
        self.tokens = Histogram(_COUNTS)
        self.rows = Histogram(_COUNTS)
        self.num_moved_blocks = {"copy": 0, "swap_out": 0, "swap_in": 0}
        self.num_exported_blocks = 0
        self.num_pulled_blocks = 0
        self.num_stale_blocks = 0
        self.num_pulled_bytes = 0
        self.pull_s = Histogram(_STEP_S)
        """Times in which a step's blocks were pulled."""
        self.failures: Counter[str] = Counter()
        self.num_epochs = 0
        self.num_row_errors = 0
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0
        self.num_pending = 0
        self._idle_since: float | None = None

    def record_step(self, num_tokens: int, num_rows: int, now: float) -> None:
        """Count a step that starts."""
        self.tokens.observe(num_tokens)
        self.rows.observe(num_rows)
        self.num_pending += 1
        if self._idle_since is not None:
            self.idle_s.observe(now - self._idle_since)
            self._idle_since = None

    def record_moves(self, *, copied: int, swapped_out: int, swapped_in: int) -> None:
        """Count the blocks that move before a step."""
        self.num_moved_blocks["copy"] += copied
        self.num_moved_blocks["swap_out"] += swapped_out
        self.num_moved_blocks["swap_in"] += swapped_in

    def record_exports(self, num_blocks: int) -> None:
        """Count blocks that are copied out for other executors."""
        self.num_exported_blocks += num_blocks

    def record_pulls(self, num_blocks: int, num_stale: int, num_bytes: int, seconds: float) -> None:
        """Count the blocks of a step that came, and those that were not right."""
        self.num_pulled_blocks += num_blocks
        self.num_stale_blocks += num_stale
        self.num_pulled_bytes += num_bytes
        self.pull_s.observe(seconds)

    def record_result(self, device_time_us: int, num_errors: int, now: float) -> None:
        """Count a finished step."""
        self.device_s.observe(device_time_us / 1e6)
        self.num_row_errors += num_errors
        self.num_pending -= 1
        if not self.num_pending:
            self._idle_since = now

    def record_speculation(self, num_proposed: int, num_accepted: int) -> None:
        """Count proposed and accepted tokens."""
        self.num_proposed_tokens += num_proposed
        self.num_accepted_tokens += num_accepted

    def record_failure(self, kind: str) -> None:
        """Count a failed step; ``kind`` is its error's name."""
        self.failures[kind] += 1
        self.num_pending -= 1

    def record_epoch(self) -> None:
        """Begin an epoch: steps of the last one are no longer pending."""
        self.num_epochs += 1
        self.num_pending = 0
        self._idle_since = None
