"""What the scheduler asks for about adapters while steps run.

Owns: the order of these changes and their answers. Must not know: the link, what a step is, how a backend loads.

They are made one after the other, in the order of asking. An adapter is read beside the steps, and taken into use between
two of them. So an unload behind a load waits until that is done.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeAlias

from headway_executor.backend import ExecutorBackend, ReadAdapter, taking_adapters
from headway_proto.adapters import AdapterChange, AdapterChanged, LoadedAdapter
from headway_proto.wording import one_line

_MAX_ERROR_CHARACTERS = 300

Beside: TypeAlias = Callable[[Callable[[], ReadAdapter]], Future[ReadAdapter]]
"""Makes a call while its caller goes on."""

_Making: TypeAlias = Generator[Future[Any], None, AdapterChanged]
"""A change that is being made: yields what it waits for."""


def at_once(call: Callable[[], ReadAdapter]) -> Future[ReadAdapter]:
    """In place of ``Beside``, where nothing has to go on meanwhile."""
    future: Future[ReadAdapter] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 (whoever asks for the result gets it)
        future.set_exception(error)
    return future


class AdapterChanges:
    """One thread makes all calls. ``wake`` is called, by any thread, when ``take_answers`` is due."""

    def __init__(self, backend: ExecutorBackend, wake: Callable[[], None], beside: Beside = at_once) -> None:
        self._backend = backend
        self._wake = wake
        self._beside = beside
        self._asked: deque[tuple[AdapterChange, _Making]] = deque()
        self._loaded: dict[str, LoadedAdapter] = {}
        """By name: what was loaded when asked for, and not unloaded since."""
        self._awaited: Future[Any] | None = None
        """By the first one, which is under way; None: nothing."""

    @property
    def names(self) -> list[str]:
        """Of the adapters that are not yet as they were asked to be."""
        return [change.name for change, _ in self._asked]

    def begin(self, change: AdapterChange) -> None:
        """Make a change behind those before it, when ``take_answers`` is called next."""
        self._asked.append((change, self._made(change)))

    def take_answers(self) -> list[tuple[AdapterChange, AdapterChanged]]:
        """Go on with what has waited long enough; return what is done, in order."""
        answers = []
        while self._asked and (self._awaited is None or self._awaited.done()):
            change, making = self._asked[0]
            answer = self._went_on(change, making)
            if answer is not None:
                answers.append((change, answer))
                self._asked.popleft()
                self._awaited = None
        return answers

    def _went_on(self, change: AdapterChange, making: _Making) -> AdapterChanged | None:
        """The answer, or None: it waits again."""
        try:
            awaited = next(making)
        except StopIteration as end:
            answer: AdapterChanged = end.value
            return answer
        except Exception as error:  # noqa: BLE001 (a file that cannot be loaded must not end the process)
            return AdapterChanged(change.number, error=one_line(error, _MAX_ERROR_CHARACTERS))
        self._awaited = awaited
        if not awaited.done():
            awaited.add_done_callback(lambda _: self._wake())
        return None

    def _made(self, change: AdapterChange) -> _Making:
        backend = taking_adapters(self._backend)
        loaded = self._loaded.get(change.name)
        if loaded is not None and change.fingerprint == loaded.fingerprint:
            # The scheduler asks again with each epoch. Nothing is read: the files may have gone, or be others by now.
            return AdapterChanged(change.number, loaded)
        if not change.directory:
            self._loaded.pop(change.name, None)
            yield from _settled(backend.unload_adapter(change.name))
            return AdapterChanged(change.number)
        reading = self._beside(lambda: backend.read_adapter(change.name, change.directory))
        yield reading
        read = reading.result()
        if change.fingerprint not in {"", read.adapter.fingerprint}:
            return AdapterChanged(
                change.number,
                error=f"{change.directory}: other files than before, with fingerprint {read.adapter.fingerprint} in place "
                f"of {change.fingerprint}",
            )
        loaded = yield from _settled(backend.load_adapter(read))
        if loaded is not None:
            self._loaded[change.name] = loaded
        return AdapterChanged(change.number, loaded)


def _settled(
    result: LoadedAdapter | Future[LoadedAdapter | None] | None,
) -> Generator[Future[Any], None, LoadedAdapter | None]:
    if not isinstance(result, Future):
        return result
    yield result
    return result.result()
