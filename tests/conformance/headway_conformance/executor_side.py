"""The executor's side of a step, without frames: from a message to the backend and back.

Owns: ``BatchState``, calls of the backend, waiting. Must not know: right results.
"""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import msgspec

from headway_conformance.failures import ConformanceFailure
from headway_executor.backend import NO_SPECULATION, BackendConfig, ExecutorBackend, StepBatch, StepResult
from headway_executor.batch.batch_state import BatchState
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.step import BackendInfo, SchedulerOutput, info_problem


class ExecutorSide:
    """An open backend behind a ``BatchState``."""

    def __init__(
        self, create_backend: Callable[[], ExecutorBackend], config: BackendConfig, *, timeout_s: float
    ) -> None:
        backend = create_backend()
        is_inline = getattr(backend, "executes_inline", False)
        self._backend: ExecutorBackend = backend if is_inline else ThreadedBackend(backend)
        self._timeout_s = timeout_s
        self.info: BackendInfo = self._backend.open(config)
        if (problem := info_problem(self.info)) is not None:
            self._backend.close()
            raise ConformanceFailure(f"a scheduler refuses what it announces: {problem}")
        # Every scripted step is of one lane: lanes only let a scheduler keep several steps apart.
        self._state = BatchState(msgspec.structs.replace(self.info, num_lanes=1))

    def begin_epoch(self) -> None:
        self._state.begin_epoch()

    def submit(self, output: SchedulerOutput) -> Future[StepResult]:
        """Apply one step and run it.

        Raises:
            ImpossibleDiff: the message contradicts the state; the backend has not seen it.
            Exception: the backend's.
        """
        batch, moves = self._state.apply(output)
        if moves is not None:
            self._backend.move_blocks(copies=moves.copies, swap_out=moves.swap_out, swap_in=moves.swap_in)
        return execute(self._backend, batch)

    def wait(self, future: Future[StepResult]) -> StepResult:
        """Wait for a step's result.

        Raises:
            ConformanceFailure: it did not come in time.
            Exception: the backend's.
        """
        return wait(future, self._timeout_s)

    def accept(self, result: StepResult) -> None:
        """Count accepted proposals. Raises ``ConformanceFailure``: the number is impossible."""
        accepted = NO_SPECULATION if result.accepted_tokens is None else result.accepted_tokens
        try:
            self._state.accept(accepted)
        except ValueError as error:
            raise ConformanceFailure(f"accepted_tokens: {error}") from error

    def close(self) -> None:
        self._backend.close()


def execute(backend: ExecutorBackend, batch: StepBatch) -> Future[StepResult]:
    """``ExecutorBackend.execute``, always as a future."""
    result = backend.execute(batch)
    if isinstance(result, Future):
        return result
    future: Future[StepResult] = Future()
    future.set_result(result)
    return future


def wait(future: Future[StepResult], timeout_s: float) -> StepResult:
    """See ``ExecutorSide.wait``."""
    try:
        return future.result(timeout_s)
    except FutureTimeoutError as error:
        if future.done():
            raise
        raise ConformanceFailure(f"a step has not finished within {timeout_s:g} seconds") from error
