"""This gateway's health: a model is ready and steps are made. Must not know: generation calls."""

import asyncio
import time

import structlog
from grpc_health.v1 import health, health_pb2

from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.wakeup import Wakeup
from headway_proto.ingress import STATE_SERVING

LIVENESS = "liveness"
"""SERVING as long as this process answers, for supervisors."""

_log = structlog.get_logger("headway.gateway.health")


class ProgressWatch:
    """A stall is unfinished sequences without a new step for ``stall_s``."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._num_steps = -1
        self._moved_at = float("-inf")

    def is_stalled(self, *, num_steps: int, num_unfinished: int, now: float) -> bool:
        """Record the latest figures and judge."""
        if num_unfinished == 0 or num_steps != self._num_steps:
            self._num_steps = num_steps
            self._moved_at = now
        return now - self._moved_at > self._stall_s


class HealthReporter:
    """Keeps ``service`` up to date."""

    def __init__(
        self,
        *,
        service: health.aio.HealthServicer,
        service_names: tuple[str, ...],
        client: SchedulerClient,
        tokenizer_width: int,
        stall_s: float,
    ) -> None:
        self._service = service
        self._service_names = service_names
        self._client = client
        self._tokenizer_width = tokenizer_width
        self._watch = ProgressWatch(stall_s)
        self._interval_s = min(1.0, stall_s / 4)
        self._wakeup = Wakeup()
        self._is_shutting_down = False
        self._reported: str | None = "not known yet"
        self._task: asyncio.Task[None] | None = None
        client.add_status_listener(self._wakeup.ring)

    async def start(self) -> None:
        """Report now, and after every change."""
        await self._service.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._report()
        self._task = asyncio.create_task(self._keep_reporting(), name="health")

    @property
    def problem(self) -> str | None:
        """The reported reason to send no requests."""
        return self._reported

    async def shut_down(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_shutting_down = True
        await self._report()

    async def close(self) -> None:
        """Stop reporting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_reporting(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            await self._report()

    async def _report(self) -> None:
        problem = self._problem()
        if problem == self._reported:
            return
        self._reported = problem
        _log.info("health", serving=problem is None, reason=problem)
        status = health_pb2.HealthCheckResponse.NOT_SERVING if problem else health_pb2.HealthCheckResponse.SERVING
        for name in self._service_names:
            await self._service.set(name, status)

    def _problem(self) -> str | None:
        link = self._client.link
        is_stalled = self._watch.is_stalled(
            num_steps=link.num_steps, num_unfinished=link.num_unfinished, now=time.monotonic()
        )
        if self._is_shutting_down:
            return "shutting down"
        model = self._client.model
        if model is None:
            return "no scheduler with a model"
        if self._tokenizer_width > model.vocab_size:
            return f"the tokenizer knows {self._tokenizer_width} tokens, the model's logits {model.vocab_size}"
        if link.scheduler_state != STATE_SERVING:
            return f"the scheduler is {link.scheduler_state}"
        return "work is pending, but no step runs" if is_stalled else None
