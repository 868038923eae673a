"""Sends a load at the intended times, and records the answers.

Nothing slow delays a send: requests are prepared before, and tasks follow their answers.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from headway_lab.bench.records import OK, TIMEOUT, Answer, RequestFailed, RequestRecord
from headway_lab.bench.target import Target
from headway_lab.workload.arrivals import Arrival, Arrivals


class Runner:
    """Sends one load, once."""

    def __init__(
        self, target: Target, arrivals: Arrivals, *, timeout_s: float, on_end: Callable[[RequestRecord], None]
    ) -> None:
        self._target = target
        self._arrivals = arrivals
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    async def run(self, start: float) -> None:
        """Run from ``start`` (event loop's clock)."""
        self._start = start
        async with asyncio.TaskGroup() as group:
            for arrival in self._arrivals.first():
                prepared = self._target.prepare(arrival.request)
                await self._until(arrival.time_s)
                group.create_task(self._follow(arrival, prepared))

    def _now(self) -> float:
        return self._loop.time() - self._start

    async def _until(self, time_s: float) -> None:
        # It sleeps even if it is late already, so that sent requests may go out first.
        await asyncio.sleep(max(0.0, time_s - self._now()))

    async def _follow(self, arrival: Arrival, prepared: Any) -> None:
        """Follow one request and its successors."""
        following: Arrival | None = arrival
        while following is not None:
            record = await self._record(following, prepared)
            self._on_end(record)
            following = self._arrivals.after_end(record.end_s, rejected=not record.is_ok)
            if following is not None:
                prepared = self._target.prepare(following.request)
                await self._until(following.time_s)

    async def _record(self, arrival: Arrival, prepared: Any) -> RequestRecord:
        answer, status, error = Answer(self._now), OK, ""
        sent_s = self._now()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._target.send(prepared, answer)
        except RequestFailed as failure:
            status, error = failure.status, failure.message
        except TimeoutError:
            status, error = TIMEOUT, f"no end after {self._timeout_s:g} s"
        request = arrival.request
        return RequestRecord(
            number=request.number,
            intended_s=arrival.time_s,
            sent_s=sent_s,
            end_s=self._now(),
            status=status,
            error=error,
            chunk_times_s=answer.chunk_times_s,
            chunk_tokens=answer.chunk_tokens,
            num_prompt_tokens=_or(answer.num_prompt_tokens, request.num_prompt_tokens),
            num_output_tokens=_or(answer.num_output_tokens, sum(answer.chunk_tokens)),
            num_cached_tokens=answer.num_cached_tokens,
            server=answer.server,
        )


def _or(counted: int | None, assumed: int) -> int:
    return assumed if counted is None else counted
