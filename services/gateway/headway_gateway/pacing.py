"""How often one stream may write: at once while the event loop keeps up, more rarely the further it falls behind.

Owns: measuring how late the loop runs its timers, and the pause between two writes of a stream that follows from it.
Must not know: what is written.

A write costs some 100 us whether it carries one token or fifty. Tokens that come while a stream pauses share the next
write, so pauses turn lateness into larger deltas instead of a longer queue. The pause is proportional to the measured
lateness and the lateness falls as streams pause, so the two settle; a stream whose tokens come further apart than the
pause never notices it.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator

_SAMPLE_INTERVAL_S = 0.02
_SMOOTHING = 0.2
_PAUSE_PER_LATENESS = 6.0
_PARDONED_LATENESS_S = 0.005
_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.04


class WritePace:
    """One per event loop, shared by its streams. Measures only while somebody ``writes``."""

    def __init__(self) -> None:
        self._num_writers = 0
        self._lateness_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lateness_s(self) -> float:
        """How late the loop runs its timers, smoothed; 0 while nobody writes."""
        return self._lateness_s if self._num_writers else 0.0

    @property
    def pause_s(self) -> float:
        """How long to let tokens gather after a write; 0 for not at all."""
        pause_s = self._lateness_s * _PAUSE_PER_LATENESS
        return 0.0 if pause_s < _SHORTEST_PAUSE_S else min(pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Measure as long as any such context is open."""
        self._num_writers += 1
        if self._num_writers == 1:
            self._lateness_s = 0.0
            self._schedule()
        try:
            yield
        finally:
            self._num_writers -= 1
            if self._num_writers == 0 and self._timer is not None:
                self._timer.cancel()

    def _schedule(self) -> None:
        due = time.monotonic() + _SAMPLE_INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_SAMPLE_INTERVAL_S, self._sample, due)

    def _sample(self, due: float) -> None:
        # The loop's timers are a millisecond coarse, and so is an operating system that has other work.
        lateness_s = max(0.0, time.monotonic() - due - _PARDONED_LATENESS_S)
        self._lateness_s += _SMOOTHING * (lateness_s - self._lateness_s)
        self._schedule()
