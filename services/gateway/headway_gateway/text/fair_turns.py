"""Few turns for many callers, in rotation, one at a time."""

import asyncio
from collections import deque


class TooManyWaitError(Exception):
    """Too many calls wait; the message has their number."""


class FairTurns:
    """``most_at_once`` turns, in one event loop."""

    def __init__(self, most_at_once: int, *, most_waiting_of_one: int, most_waiting: int) -> None:
        self._most_at_once = most_at_once
        self._most_waiting_of_one = most_waiting_of_one
        self._most_waiting = most_waiting
        self._holders: set[str] = set()
        # The next caller comes first.
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        """Waiting requests."""
        return sum(map(len, self._queues.values()))

    async def take(self, caller: str) -> None:
        """Wait for a turn; ``give_back`` ends it.

        Raises:
            TooManyWaitError: the queue is full.
        """
        num_own = len(self._queues.get(caller, ()))
        if num_own >= self._most_waiting_of_one:
            raise TooManyWaitError(f"{num_own} of this caller are waiting; allowed: {self._most_waiting_of_one}")
        if self.num_waiting >= self._most_waiting:
            raise TooManyWaitError(f"{self.num_waiting} are waiting; allowed: {self._most_waiting}")
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(turn)
        self._pass_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(caller)
            else:
                self._leave(caller, turn)
            raise

    def give_back(self, caller: str) -> None:
        """End ``caller``'s turn."""
        self._holders.remove(caller)
        if caller in self._queues:
            self._queues[caller] = self._queues.pop(caller)  # behind the others
        self._pass_on()

    def _pass_on(self) -> None:
        while len(self._holders) < self._most_at_once:
            caller = next((one for one in self._queues if one not in self._holders), None)
            if caller is None:
                return
            queue = self._queues[caller]
            turn = queue.popleft()
            if not queue:
                del self._queues[caller]
            self._holders.add(caller)
            turn.set_result(None)

    def _leave(self, caller: str, turn: "asyncio.Future[None]") -> None:
        queue = self._queues[caller]
        queue.remove(turn)
        if not queue:
            del self._queues[caller]
