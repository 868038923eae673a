"""A model inside a program: the processes of ``headway serve`` beneath it, and calls that take many prompts at once.

Owns: the order of answers, and when the processes start and end. Must not know: messages, models, settings by name.
"""

import asyncio
import atexit
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from numbers import Integral
from threading import Lock, Thread
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from headway.child_server import ChildServer, ServingError
from headway.client import AsyncClient, ChatMessage, Client, GenerateOptions, GenerationResult, GenerationStream
from headway.client.requests import BatchOptions, EmbedOptions, Input, Prompt
from headway.flags.configuration import suggestion
from headway.flags.settings import as_text
from headway.planning.model_source import DEMO_MODEL
from headway.planning.services import serve_settings
from headway.terminal.progress import ProgressLine
from headway_proto import generation_pb2
from headway_proto.wording import shown

ResultT = TypeVar("ResultT")

_MOST_AT_ONCE = 256
_MOST_INPUTS = 64
_OWN_SETTINGS = {"grpc_address": "127.0.0.1:0", "log_level": "warning", "unavailable_grace_s": 3600.0}
"""Unless the caller says otherwise. The last: prompts wait for a process that is replaced, whatever its model takes to load."""

_CLOSED = "this LLM is closed"

__all__ = ["LLM", "ServingError"]


class LLM:
    """A served model that belongs to this program.

    Processes start with it and end with ``close``, with the ``with`` block, or with the program, however that ends.
    They listen on loopback, at ``address``, for any other client too. Threads may share an ``LLM``.

    Args:
        model: what ``headway serve`` takes: a directory, a GGUF file, a hub's name, or demo.
        progress: whether a terminal gets a progress line; nothing else ever does.
        settings: the flags of ``headway serve`` as keywords, such as ``max_num_seqs=32``.

    Raises:
        TypeError: there is no such setting.
        ServingError: the processes refused to start.
    """

    def __init__(self, model: str | os.PathLike[str] = DEMO_MODEL, *, progress: bool = True, **settings: Any) -> None:
        self._progress = progress
        self._owner = os.getpid()
        self._is_closed = False
        self._processes = ChildServer(_words(os.fspath(model), settings))
        self.address = self._processes.address
        self._client = _OwnClient(self.address)
        self._loop = _Loop()
        atexit.register(self.close)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[GenerationResult]:
        """Answer prompts: texts, or lists of token ids. One prompt gives a list of one result.

        The results have the order of the prompts. The options are those of ``Client.generate``, for all of them.

        Raises:
            HeadwayError: a request was refused or failed; the others are cancelled.
        """
        return self._all(_several(prompts), lambda client, prompt: client.generate(prompt, **options).result())

    def chat(
        self, chats: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]], **options: Unpack[GenerateOptions]
    ) -> list[GenerationResult]:
        """Answer conversations, as ``generate``. A conversation is a list of ``{"role": ..., "content": ...}``."""
        several = [chats] if chats and isinstance(chats[0], dict) else list(chats)
        if isinstance(chats, str) or any(isinstance(chat, str) for chat in several):
            raise TypeError('a conversation is a list of {"role": ..., "content": ...}; generate takes texts')
        return self._all(several, lambda client, chat: client.generate(chat, **options).result())

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Answer one prompt piece by piece; see ``Client.generate``."""
        self._require_usable()
        return self._client.generate(prompt, **options)

    def embed(self, inputs: Input | Sequence[Input], **options: Unpack[EmbedOptions]) -> list[list[float]]:
        """Return a vector of each text or list of token ids. Raises as ``generate``."""
        several = _several(inputs)
        parts = [several[first : first + _MOST_INPUTS] for first in range(0, len(several), _MOST_INPUTS)]
        answers = self._all(parts, lambda client, part: client.embed(part, **options))
        return [list(one.values) for answer in answers for one in answer.embeddings]

    def score(
        self, prompt: Input, continuations: Sequence[Input], **options: Unpack[BatchOptions]
    ) -> list[generation_pb2.Score]:
        """Return the log probabilities of continuations, or with a reranker the relevance of documents.

        Raises as ``generate``.
        """
        self._require_usable()
        return list(self._client.score(prompt, continuations, **options).scores)

    def async_client(self) -> AsyncClient:
        """Return a new client for the event loop of the caller."""
        self._require_usable()
        return _OwnAsyncClient(self.address)

    def close(self) -> None:
        """End the processes. A second call does nothing, nor does one in a fork of the program."""
        atexit.unregister(self.close)
        if self._is_closed or os.getpid() != self._owner:
            return
        self._is_closed = True
        self._client.close()
        self._loop.close()
        self._processes.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be sent to another process; make another there, or ask this one's address with a Client"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all(self, several: Sequence[Any], call: Callable[[AsyncClient, Any], Awaitable[ResultT]]) -> list[ResultT]:
        self._require_usable()
        progress = ProgressLine(sys.stderr) if self._progress else None
        try:
            return self._loop.run(_answered(self.address, several, call, progress))
        finally:
            if progress is not None:
                progress.erase()

    def _require_usable(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("this LLM belongs to the program that this process was forked from; make another here")
        if self._is_closed:
            raise RuntimeError(_CLOSED)


class _OwnClient(Client):
    """It asks a gateway that was there: if none is, one will be again."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._connection.expect_answers()


class _OwnAsyncClient(AsyncClient):
    """As ``_OwnClient``."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._connection.expect_answers()


async def _answered(
    address: str,
    several: Sequence[Any],
    call: Callable[[AsyncClient, Any], Awaitable[ResultT]],
    progress: ProgressLine | None,
) -> list[ResultT]:
    """Answer in order, so many at once that the scheduler is never short of work."""
    places = asyncio.Semaphore(_MOST_AT_ONCE)
    num_done = 0

    async def one(number: int, given: Any) -> ResultT:
        nonlocal num_done
        async with places:
            try:
                result = await call(client, given)
            except Exception as error:
                error.add_note(f"number {number} of {len(several)}: {shown(given)}")
                raise
        num_done += 1
        if progress is not None:
            progress.show(num_done, len(several), "answered")
        return result

    async with _OwnAsyncClient(address) as client:
        tasks = [asyncio.ensure_future(one(*given)) for given in enumerate(several, 1)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _several(prompts: Any) -> list[Any]:
    """One prompt is a text or a list of token ids, perhaps NumPy's."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise TypeError("a prompt is a text or a list of token ids, and no mapping")
    several = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _words(model: str, settings: dict[str, Any]) -> list[str]:
    known = serve_settings()
    words = [f"--model={model}"]
    for name, value in (_OWN_SETTINGS | settings).items():
        if name not in known:
            raise TypeError(f"{name} is no setting of headway serve{suggestion(name, known)}")
        words += as_text(known[name], value)
    return words


class _Loop:
    """An event loop on a thread of its own, since the caller's thread may run one already, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = Lock()
        self._is_closed = False
        self._thread = Thread(target=self._loop.run_forever, name="headway-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Wait for the result. An interrupt cancels it."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError(_CLOSED) from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """What runs is cancelled first: whoever waits for it in another thread would wait for ever."""
        with self._lock:
            self._is_closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
