"""The rate of a stream's writes: lower when the event loop falls behind.

A write costs as much for one token as for fifty, so a pause makes larger deltas instead of a longer queue. It is
proportional to the lateness, which falls as streams pause, so the two settle.
"""

import asyncio
import time

_SAMPLE_INTERVAL_S = 0.02
_SMOOTHING = 0.2
_PAUSE_PER_LATENESS = 6.0
_PARDONED_LATENESS_S = 0.005
_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.04


class WritePace:
    """The pace of one event loop's streams."""

    def __init__(self) -> None:
        self._num_writers = 0
        self._lateness_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lateness_s(self) -> float:
        """The smoothed delay of the loop's timers."""
        return self._lateness_s if self._num_writers else 0.0

    @property
    def pause_s(self) -> float:
        """The wait after a write."""
        pause_s = self._lateness_s * _PAUSE_PER_LATENESS
        return 0.0 if pause_s < _SHORTEST_PAUSE_S else min(pause_s, _LONGEST_PAUSE_S)

    def begin(self) -> None:
        """A stream opens."""
        self._num_writers += 1
        if self._num_writers == 1:
            self._lateness_s = 0.0
            self._schedule()

    def end(self) -> None:
        """A stream ends."""
        self._num_writers -= 1
        if self._num_writers == 0 and self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        due = time.monotonic() + _SAMPLE_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_SAMPLE_INTERVAL_S, self._sample, due)

    def _sample(self, due: float) -> None:
        # Timers are coarse: about a millisecond, more on a busy machine.
        lateness_s = max(0.0, time.monotonic() - due - _PARDONED_LATENESS_S)
        self._lateness_s += _SMOOTHING * (lateness_s - self._lateness_s)
        self._schedule()
