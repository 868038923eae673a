"""A device as a benchmark sees it: a clock.

Owns: timing. Must not know: what is timed.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

_EVICTING_BYTES = 256 << 20
"""More than a device's second cache holds."""
_BUSY_CYCLES = 2_000_000
"""A millisecond: the host launches what is timed meanwhile."""


class Device:
    """Times work on a device by its own clock; on a CPU, by the host's.

    On a device, work finds nothing in the caches, as in a step, whose other layers have passed them since. And it waits for
    no launch: the device is busy with something else until all is launched, unless that takes a millisecond.
    """

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repetitions: int, warm_ups: int = 3) -> float:
        """The median time of ``work``, seconds."""
        for _ in range(warm_ups):
            work()
        self.synchronize()
        return median(list(self._times(work, repetitions)))

    def _times(self, work: Callable[[], object], repetitions: int) -> Iterator[float]:
        evicting = torch.empty(_EVICTING_BYTES if self.is_cuda else 0, dtype=torch.uint8, device=self.device)
        for _ in range(repetitions):
            if not self.is_cuda:
                started = time.perf_counter()
                work()
                yield time.perf_counter() - started
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evicting.zero_()
            torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001 (torch has no public name for it)
            start.record()
            work()
            end.record()
            end.synchronize()
            yield start.elapsed_time(end) / 1e3
