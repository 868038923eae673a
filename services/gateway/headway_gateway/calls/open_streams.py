"""The streams that are open: how many there may be, until when each may last, and when none is left."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import grpc

from headway_gateway.calls.call_context import CallContext
from headway_gateway.statuses import CallRefusedError, past_deadline, try_later
from headway_gateway.wakeup import Wakeup


class OpenStreams:
    """Counts streams."""

    def __init__(self, most: int) -> None:
        self.num_open = 0
        self._most = most
        self._is_draining = False
        self._in_parts: set[CallContext] = set()
        self._became_idle = Wakeup()

    def drain(self) -> None:
        """Refuse new streams from now on."""
        self._is_draining = True

    async def wait_until_idle(self) -> None:
        """Return when none is open, nor a call in parts."""
        while self.num_open or self._in_parts:
            await self._became_idle.wait()

    def one_more(self, context: CallContext) -> "_OneMore":
        """Return what is entered for a stream: ``async with``.

        Raises:
            CallRefusedError: on entering, too many are open or none may begin; inside, the call's deadline has passed.
        """
        return _OneMore(self, context)

    @contextmanager
    def in_parts(self, context: CallContext) -> Iterator[None]:
        """Inside, streams of a call come one after the other, and a drain lets all of them begin.

        Raises:
            CallRefusedError: on entering, none may begin.
        """
        self._require_no_drain(context)
        self._in_parts.add(context)
        try:
            yield
        finally:
            self._in_parts.discard(context)
            self._became_idle.ring()

    def begin(self, context: CallContext) -> None:
        """See ``one_more``."""
        self._require_no_drain(context)
        if self.num_open >= self._most:
            message = f"{self.num_open} streams are open; allowed: {self._most}"
            raise try_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="too_many_streams")
        self.num_open += 1

    def end(self) -> None:
        """See ``one_more``."""
        self.num_open -= 1
        if not self.num_open:
            self._became_idle.ring()

    def _require_no_drain(self, context: CallContext) -> None:
        if self._is_draining and context not in self._in_parts:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "this gateway is draining", reason="draining")


class _OneMore:
    """A class rather than a generator: every request enters it before its prompt is read."""

    __slots__ = ("_context", "_streams", "_timeout")

    def __init__(self, streams: OpenStreams, context: CallContext) -> None:
        self._streams = streams
        self._context = context
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        remaining_s = self._context.time_remaining()
        self._streams.begin(self._context)
        if remaining_s is not None:
            self._timeout = asyncio.timeout(remaining_s)
            await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.end()
        if self._timeout is None:
            return
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise past_deadline() from None
