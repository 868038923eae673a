"""The end of streams that the client leaves unread. While this process was stopped, no client could read; so it counts
looks.
"""

import asyncio
from types import TracebackType
from typing import Self

_LOOKS = 8


class ClientPatience:
    """Ends a stream when one write has waited ``slow_client_s``."""

    def __init__(self, slow_client_s: float) -> None:
        self._look_interval_s = slow_client_s / _LOOKS
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._is_waiting = False
        self._num_looks = 0

    @property
    def has_ended(self) -> bool:
        """Whether this object ended the stream."""
        return self._timeout.expired()

    def begin_write(self) -> None:
        """Start counting."""
        self._is_waiting = True
        self._num_looks = 0

    def rest(self) -> None:
        """Stop counting."""
        self._is_waiting = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look_later()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_interval_s, self._look)

    def _look(self) -> None:
        self._num_looks += self._is_waiting
        if self._num_looks > _LOOKS:  # the first look may have come right after the write began
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_later()
