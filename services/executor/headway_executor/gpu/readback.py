"""A thread that waits until results have come from the device.

Owns: the order of results. Must not know: their contents.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from headway_executor.gpu.runtime import Mark, Runtime
from headway_executor.host.device_errors import translated

_T = TypeVar("_T")


class Readback:
    """Waits for results, because the launching thread must not."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._under_way: queue.SimpleQueue[tuple[Mark, Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="readback", daemon=True)
        self._thread.start()

    def when_reached(self, mark: Mark, build: Callable[[], _T]) -> Future[_T]:
        """Call ``build`` for the future once the device has passed ``mark``."""
        future: Future[_T] = Future()
        self._under_way.put((mark, build, future))
        return future

    def close(self) -> None:
        """Finish the running steps."""
        self._under_way.put(None)
        self._thread.join()

    def _work(self) -> None:
        # A new thread's device is the first one: CUDA would take memory there for each rank that waits for its own.
        with self._runtime.on_stream():
            while (entry := self._under_way.get()) is not None:
                mark, build, future = entry
                try:
                    mark.wait()
                    with torch.inference_mode():  # a thread has its own, and what it reads was made so
                        result = build()
                except Exception as error:  # noqa: BLE001 (the future carries a device's failure)
                    future.set_exception(translated(error))
                else:
                    future.set_result(result)
