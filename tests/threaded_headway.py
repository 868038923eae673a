"""The three services over their real sockets, each in a thread of this process: no start-up cost, so many can be tried.

Owns: starting and stopping the threads. What runs in them is what the processes run.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import structlog
import uvloop

from headway_executor.backend import BackendConfig, ExecutorBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.host.beside import begun
from headway_executor.links.channel import SchedulerChannel
from headway_executor.links.step_link import StepLink
from headway_executor.step.loop import StepCycle
from headway_executor.step.loop import serve as serve_executor
from headway_gateway.config import GatewayConfig
from headway_gateway.server import GatewayServer
from headway_gateway.text.tokenization import load_text_model
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.links.transport import Transport
from headway_scheduler.process import serve as serve_scheduler


class WatchedTransport(Transport):
    """Tells whether the scheduler's loop has done its turn."""

    is_waiting = False

    def wait(self, timeout_s: float) -> None:
        self.is_waiting = True
        super().wait(timeout_s)
        self.is_waiting = False


@dataclass
class RunningHeadway:
    """Where it listens, and the engine inside, to be looked at."""

    address: str
    engine: SchedulerEngine
    transport: WatchedTransport
    http_port: int = 0
    """Of OpenAI's API, if it is served."""

    def core_when_quiet(self) -> Scheduler:
        """The scheduler's core once no step is in flight any more; the last may carry surplus tokens."""
        core = self.engine.fleet.cells[0].core
        assert core is not None
        limit = time.monotonic() + 5
        # The loop comes last: only while it waits has it done all that an answer changes.
        while core.num_in_flight or core.num_unfinished or not self.transport.is_waiting:
            assert time.monotonic() < limit, "work goes on without requests"
            time.sleep(0.001)
        return core


@contextmanager
def running(
    directory: Path,
    model: Path,
    backend: ExecutorBackend,
    config: BackendConfig,
    limits: SchedulerLimits,
    **gateway: object,
) -> Iterator[RunningHeadway]:
    """Serve ``model`` with an unopened ``backend``; ``directory`` holds the sockets, ``gateway`` is more of its settings."""
    with ExitStack() as stack:
        step, ingress = f"ipc://{directory}/step", f"ipc://{directory}/ingress"
        engine, transport = stack.enter_context(_scheduler(step, ingress, limits))
        stack.enter_context(_executor(step, backend, config))
        address, http_port = stack.enter_context(_gateway(ingress, model, gateway))
        yield RunningHeadway(address, engine, transport, http_port)


@contextmanager
def _scheduler(step: str, ingress: str, limits: SchedulerLimits) -> Iterator[tuple[SchedulerEngine, WatchedTransport]]:
    transport = WatchedTransport(step, ingress)
    engine = SchedulerEngine(limits, incarnation=secrets.randbits(62))
    stop = SimpleNamespace(count=0)
    thread = threading.Thread(target=serve_scheduler, args=(engine, transport, stop, 0.0, _silent_log()))
    thread.start()
    try:
        yield engine, transport
    finally:
        stop.count = 1
        thread.join()
        transport.close()


@contextmanager
def _executor(step: str, backend: ExecutorBackend, config: BackendConfig) -> Iterator[None]:
    info = backend.open(config)
    channel = SchedulerChannel(step)
    cycle = StepCycle(
        link=StepLink(incarnation=secrets.randbits(62), info=info),
        state=BatchState(info),
        backend=backend,
        log=_silent_log(),
        wake=channel.wake,
        beside=partial(begun, name="adapters"),
    )
    stop = threading.Event()
    thread = threading.Thread(target=serve_executor, args=(cycle, channel, stop.is_set))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        channel.wake()
        thread.join()
        channel.close()
        backend.close()


@contextmanager
def _gateway(ingress: str, model: Path, settings: dict[str, object]) -> Iterator[tuple[str, int]]:
    config = GatewayConfig(model=str(model), ingress_address=ingress, grpc_address="127.0.0.1:0", **settings)
    ready = threading.Event()
    control: dict[str, object] = {}

    async def main() -> None:
        server = GatewayServer(config, load_text_model(model))
        control["port"] = await server.start()
        control["http_port"] = server.http_port
        control["loop"] = asyncio.get_running_loop()
        stop = asyncio.Event()
        control["stop"] = stop
        ready.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=uvloop.run, args=(main(),))
    thread.start()
    assert ready.wait(20), "the gateway did not start"
    try:
        yield f"127.0.0.1:{control['port']}", control["http_port"]  # type: ignore[misc]
    finally:
        control["loop"].call_soon_threadsafe(control["stop"].set)  # type: ignore[attr-defined]
        thread.join()


def _silent_log() -> structlog.typing.FilteringBoundLogger:
    return structlog.wrap_logger(
        structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger("critical")
    )
