"""A backend on its own thread, so that the executor shows life while the model computes.

Owns: the order of calls. Must not know: the protocol.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
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

_T = TypeVar("_T")
_CLOSE_SECONDS = 5.0


class ThreadedBackend:
    """Makes the calls of ``backend`` on one thread, all but ``read_adapter``; ``execute`` returns a future.

    The thread is a daemon: a model that hangs cannot keep the process from ending.
    """

    def __init__(self, backend: ExecutorBackend) -> None:
        self._backend = backend
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._moves_error: BaseException | None = None
        self._block_size = 1
        self._is_closed = False
        # A backend with its own block tables needs no copy.
        self._reads_block_table = getattr(backend, "reads_block_table", True)
        self._thread = threading.Thread(target=self._work, name="backend", daemon=True)
        self._thread.start()

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        info = self._submit(lambda: self._backend.open(config)).result()
        self._block_size = info.block_size
        return info

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        own_batch = self._with_own_block_table(batch) if self._reads_block_table else batch
        future: Future[StepResult] = Future()

        def run() -> None:
            error, self._moves_error = self._moves_error, None
            try:
                if error is not None:
                    raise error
                result = self._backend.execute(own_batch)
            except BaseException as error:  # noqa: BLE001 (the caller gets every error)
                future.set_exception(error)
            else:
                _pass_on(result, future)

        self._put(run)
        return future

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None]:
        """See ``ExecutorBackend.move_blocks``. What goes wrong is raised by the next ``execute``."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                done = self._backend.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)
            except BaseException as error:  # noqa: BLE001 (as above)
                self._moves_error = self._moves_error or error
                future.set_exception(error)
            else:
                _pass_on(done, future)

        self._put(run)
        return future

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``. What goes wrong is raised by the next ``execute``."""

        def run() -> None:
            try:
                self._backend.load_blocks(contents, blocks)
            except BaseException as error:  # noqa: BLE001 (as above)
                self._moves_error = self._moves_error or error

        self._put(run)

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``: on the thread that calls."""
        return taking_adapters(self._backend).read_adapter(name, directory)

    def load_adapter(self, read: ReadAdapter) -> Future[LoadedAdapter | None]:
        """See ``AdapterBackend.load_adapter``."""
        return self._submit(lambda: _settled(taking_adapters(self._backend).load_adapter(read)))

    def unload_adapter(self, name: str) -> Future[LoadedAdapter | None]:
        """See ``AdapterBackend.unload_adapter``."""
        return self._submit(lambda: _settled(taking_adapters(self._backend).unload_adapter(name)))

    def close(self) -> None:
        """See ``ExecutorBackend.close``. Waits a few seconds for a running step."""
        if not self._is_closed:
            self._submit(self._backend.close)
            self._calls.put(None)
            self._is_closed = True
            self._thread.join(_CLOSE_SECONDS)

    def _with_own_block_table(self, batch: StepBatch) -> StepBatch:
        """The next step may change the block table first."""
        ends = batch.num_computed_tokens + batch.num_scheduled_tokens
        if batch.num_speculative_tokens is not None:
            ends += batch.num_speculative_tokens
        reached = int(ends.max(initial=0))
        width = max(1, -(-reached // self._block_size))
        return msgspec.structs.replace(batch, block_table=np.ascontiguousarray(batch.block_table[:, :width].copy()))

    def _submit(self, call: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._put(lambda: _settle(future, call))
        return future

    def _put(self, call: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("the backend is closed")
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _pass_on(result: _T | Future[_T], future: Future[_T]) -> None:
    """This thread does not wait: it runs the next step."""
    if isinstance(result, Future):
        result.add_done_callback(lambda done: _settle(future, done.result))
    else:
        future.set_result(result)


def _settled(result: LoadedAdapter | Future[LoadedAdapter | None] | None) -> LoadedAdapter | None:
    return result.result() if isinstance(result, Future) else result


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 (the caller gets every error)
        future.set_exception(error)
    else:
        future.set_result(result)
