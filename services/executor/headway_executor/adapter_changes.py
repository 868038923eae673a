"""What the scheduler asks for about adapters, between steps.

Owns: the order of these changes and their answers. Must not know: the link, steps, or how a backend loads.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from headway_executor.backend import ExecutorBackend, taking_adapters
from headway_proto.adapters import AdapterChange, AdapterChanged, LoadedAdapter

_MAX_ERROR_CHARACTERS = 300


class AdapterChanges:
    """Any thread may call ``wake``."""

    def __init__(self, backend: ExecutorBackend, wake: Callable[[], None]) -> None:
        self._backend = backend
        self._wake = wake
        self._pending: deque[tuple[AdapterChange, Future[LoadedAdapter | None]]] = deque()

    def begin(self, change: AdapterChange) -> None:
        """Let the backend do it behind its earlier calls."""
        future = self._asked(change)
        self._pending.append((change, future))
        if not future.done():
            future.add_done_callback(lambda _: self._wake())

    def take_answers(self) -> list[tuple[AdapterChange, AdapterChanged]]:
        """What is done, in order."""
        answers = []
        while self._pending and self._pending[0][1].done():
            change, future = self._pending.popleft()
            answers.append((change, self._answer(change, future)))
        return answers

    def _asked(self, change: AdapterChange) -> Future[LoadedAdapter | None]:
        done: Future[LoadedAdapter | None] = Future()
        result: Future[LoadedAdapter | None] | LoadedAdapter | None
        try:
            backend = taking_adapters(self._backend)
            if change.directory:
                result = backend.load_adapter(change.name, change.directory)
            else:
                result = backend.unload_adapter(change.name)
        except Exception as error:  # noqa: BLE001 (a file that cannot be loaded must not end the process)
            done.set_exception(error)
            return done
        if isinstance(result, Future):
            return result
        done.set_result(result)
        return done

    def _answer(self, change: AdapterChange, future: Future[LoadedAdapter | None]) -> AdapterChanged:
        error = future.exception()
        if error is not None:
            return AdapterChanged(change.number, error=" ".join(str(error).split())[:_MAX_ERROR_CHARACTERS])
        loaded = future.result()
        if loaded is not None and change.fingerprint not in {"", loaded.fingerprint}:
            # Rows name the fingerprint, so none of them runs with it.
            return AdapterChanged(
                change.number,
                error=f"{change.directory}: other files than before, with fingerprint {loaded.fingerprint} in place of "
                f"{change.fingerprint}",
            )
        return AdapterChanged(change.number, loaded)
