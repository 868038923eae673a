"""A backend whose failed steps are counted, so that ranks can compare them.

Owns: the numbers of steps that failed. Must not know: frames, other ranks.

All ranks make the same calls in the same order. A step that fails on all of them costs an epoch, as with one rank. One
that fails on some has left them apart.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import (
    BackendConfig,
    ExecutorBackend,
    ReadAdapter,
    StepBatch,
    StepResult,
    taking_adapters,
)
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import Int32Array
from headway_proto.step import BackendInfo


class WatchedBackend:
    """See ``ExecutorBackend``. ``wake`` is called after a failure; any thread may call it."""

    def __init__(self, backend: ExecutorBackend, wake: Callable[[], None], *, draws: bool = True) -> None:
        self._backend = backend
        self._wake = wake
        self._failures: deque[tuple[int, str]] = deque()
        self.num_steps = 0
        self.draws = draws
        """Whether it draws the same tokens as rank 0. If not, it answers anything in their place."""

    def take_failure(self) -> tuple[int, str] | None:
        """Return the number of a failed step, counted from 1, and the error's name."""
        return self._failures.popleft() if self._failures else None

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        return self._backend.open(config)

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        self.num_steps += 1
        number = self.num_steps
        try:
            result = self._backend.execute(batch)
        except Exception as error:
            self._note(number, error)
            raise
        if isinstance(result, Future):
            result.add_done_callback(lambda done: self._note(number, done.exception()))
        return result

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None] | None:
        """See ``ExecutorBackend.move_blocks``."""
        return self._backend.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        self._backend.load_blocks(contents, blocks)

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``."""
        return taking_adapters(self._backend).read_adapter(name, directory)

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter | Future[LoadedAdapter | None]:
        """See ``AdapterBackend.load_adapter``."""
        return taking_adapters(self._backend).load_adapter(read)

    def unload_adapter(self, name: str) -> Future[LoadedAdapter | None] | None:
        """See ``AdapterBackend.unload_adapter``."""
        return taking_adapters(self._backend).unload_adapter(name)

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        self._backend.close()

    def _note(self, number: int, error: BaseException | None) -> None:
        if error is not None:
            self._failures.append((number, type(error).__name__))
            self._wake()
