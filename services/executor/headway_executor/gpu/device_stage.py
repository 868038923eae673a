"""The ends of a stage on a device: hidden states come from the stage before, and go to the stage behind.

Owns: their way through main memory. Must not know: layers, what is drawn.

Through main memory, so that no device must reach another one's: a step passes some megabytes at most, once a stage.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor

from headway_executor.gpu.runtime import Mark, Runtime
from headway_executor.models.stage import Stage

_SLOTS = 3
"""Steps in main memory, on their way in each direction. With more, a stage would only wait elsewhere."""


class DeviceStage:
    """``hidden``: the device's, ``[max tokens, hidden]``, in which a step begins and ends."""

    def __init__(self, stage: Stage, runtime: Runtime, hidden: Tensor) -> None:
        self._before, self._behind = stage.before, stage.behind
        self._runtime = runtime
        self._hidden = hidden
        self._arrivals = _slots(runtime, hidden) if self._before else iter(())
        self._departures = _slots(runtime, hidden) if self._behind else iter(())
        self._copied: deque[Mark] = deque()
        self._free = threading.Semaphore(_SLOTS)

    def receive(self, num_tokens: int) -> None:
        """Wait for a step's hidden states, if there is a stage before; they are on the device for what is launched next."""
        if self._before is None:
            return
        if len(self._copied) == _SLOTS:
            self._copied.popleft().wait()
        arrived = next(self._arrivals)[:num_tokens]
        self._before.receive(arrived)
        self._hidden[:num_tokens].copy_(arrived, non_blocking=True)
        self._copied.append(self._runtime.mark())

    def pass_on(self, num_tokens: int) -> Callable[[], None]:
        """Copy the hidden states of what was launched last, if there is a stage behind. The returned function sends them: call
        it, from any thread, once the device has passed the copy.
        """
        if self._behind is None:
            return _send_nothing
        self._free.acquire()
        behind, leaving = self._behind, next(self._departures)[:num_tokens]
        leaving.copy_(self._hidden[:num_tokens], non_blocking=True)

        def send() -> None:
            behind.send(leaving)
            self._free.release()

        return send


def _slots(runtime: Runtime, hidden: Tensor) -> Iterator[Tensor]:
    """Memory for transfers, in turn."""
    return itertools.cycle([runtime.host_tensor(tuple(hidden.shape), hidden.dtype) for _ in range(_SLOTS)])


def _send_nothing() -> None:
    """This is the last stage."""
