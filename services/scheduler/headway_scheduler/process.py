"""The scheduler process: sockets, clock, signals and logs around the engine.

Owns: the loop, start and stop. Must not know: how anything is decided.
"""

import importlib.metadata
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import structlog

from headway_process.collector import relax_collector
from headway_process.last_words import write_last_line
from headway_process.log_sink import LogSink, notice_of
from headway_process.logs import make_logger
from headway_process.open_files import raise_limit_of_open_files
from headway_process.parent import end_with_parent
from headway_process.pulse import Pulse, pulse_of
from headway_process.snapshots import Snapshots
from headway_process.stop_signals import StopRequests, stop_signals
from headway_proto.framing import VERSION_INTERVAL_S
from headway_proto.wording import shown
from headway_scheduler.compiled_core import runs_compiled
from headway_scheduler.config import SchedulerConfig
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.flight.checkpoint import ForkingCheckpointer
from headway_scheduler.flight.log import FlightLogWriter
from headway_scheduler.flight.pieces import LogPieces
from headway_scheduler.flight.recorder import FlightRecorder, NullRecorder
from headway_scheduler.links.executor_link import ExecutorLink
from headway_scheduler.links.ingress_link import IngressLinks
from headway_scheduler.links.transport import Transport
from headway_scheduler.metrics import SchedulerSnapshot, families_of, take_snapshot

if TYPE_CHECKING:
    from headway_process.metrics_endpoint import MetricsEndpoint

EXIT_OK = 0
EXIT_BAD_CONFIGURATION = 2
_LONGEST_SLEEP_S = 0.25
_LOG_DRAIN_S = 0.5
_REJECTIONS_INTERVAL_S = 5.0


def run(config: SchedulerConfig) -> int:
    """Run until SIGTERM or SIGINT; return the exit code.

    The first signal gives running requests ``grace_s``; the second ends at once.
    """
    # Before the sockets: a signal may come as soon as they exist.
    stop = _StopSignals(os.getppid() if config.exit_with_parent else None)
    if config.exit_with_parent and not end_with_parent():
        os.kill(os.getpid(), signal.SIGTERM)
    sink = LogSink(sys.stderr.fileno(), notice=notice_of(config.log_format))
    log = make_logger("scheduler", level=config.log_level, log_format=config.log_format, sink=sink)
    snapshots: Snapshots[SchedulerSnapshot] = Snapshots()
    try:
        config.validate()
        raise_limit_of_open_files()
        endpoint = _metrics_endpoint(config, snapshots)
        recorder = make_recorder(config)
        transport = Transport(config.step_address, config.ingress_address, config.curve_keys)
    except (ValueError, OSError) as error:
        write_last_line(f"headway scheduler: {error}")
        return EXIT_BAD_CONFIGURATION
    engine = SchedulerEngine(
        config.limits(),
        incarnation=secrets.randbits(62),
        recorder=recorder,
        max_executors=config.max_executors,
        placement=config.placement_settings(),
    )
    engine.notices.includes_requests = config.log_level == "debug"
    relax_collector()
    log.info(
        "scheduler ready",
        step_address=config.step_address,
        ingress_address=config.ingress_address,
        core="compiled" if runs_compiled() else "as written",
    )
    if endpoint is not None:
        log.info("metrics", port=endpoint.port)
    try:
        serve(engine, transport, stop, config.grace_s, log, pulse_of(os.environ), snapshots)
    finally:
        recorder.close(time.monotonic(), engine.fleet)
        transport.close()
    log.info(
        "scheduler stopped",
        damaged_step_frames=engine.fleet.links.num_damaged_frames,
        damaged_ingress_frames=engine.gateways.num_damaged_frames,
    )
    sink.drain(_LOG_DRAIN_S)
    return EXIT_OK


def _metrics_endpoint(config: SchedulerConfig, snapshots: Snapshots[SchedulerSnapshot]) -> "MetricsEndpoint | None":
    if not config.metrics_address:
        return None
    from headway_process.metrics_endpoint import MetricsEndpoint

    return MetricsEndpoint(config.metrics_address, config.metrics_token_file, lambda: families_of(snapshots.ask()))


class StopRequest(Protocol):
    """Counts stop requests."""

    @property
    def count(self) -> int: ...  # noqa: D102 - see above


def serve(
    engine: SchedulerEngine,
    transport: Transport,
    stop: StopRequest,
    grace_s: float,
    log: structlog.typing.FilteringBoundLogger,
    pulse: Pulse | None = None,
    snapshots: Snapshots[SchedulerSnapshot] | None = None,
) -> None:
    """Receive, schedule, send, sleep. After a stop request, finish accepted work within ``grace_s`` seconds."""
    stop_by = float("inf")
    report_rejections_at = float("-inf")
    versions_told: dict[str, float] = {}
    while True:
        now = time.monotonic()
        if pulse is not None:
            pulse.beat(now)
        if stop.count and stop_by == float("inf"):
            stop_by = now + grace_s
            engine.drain()
            log.info("draining", unfinished=engine.num_unfinished)
        if stop.count > 1 or now >= stop_by or (stop.count and not engine.num_unfinished):
            _send_frames(engine, transport, now)
            return
        # Send steps before reading gateways' frames: the executor must not wait for them.
        for peer, data in transport.receive(transport.executor):
            engine.executor_frame(peer, data, now)
            _send_step_frames(engine, transport, now)
        for peer, data in transport.receive(transport.gateways):
            engine.gateway_frame(peer, data, now)
        engine.run(now)
        _send_frames(engine, transport, now)
        _log_notices(engine, now, log)
        if snapshots is not None and snapshots.wanted:
            snapshots.give(take_snapshot(engine, now))
        if now >= report_rejections_at and _log_guard(transport, log):
            report_rejections_at = now + _REJECTIONS_INTERVAL_S
        _log_other_versions(engine, now, versions_told, log)
        transport.wait(min(_LONGEST_SLEEP_S, max(0.0, engine.next_deadline - time.monotonic())))


def _log_notices(engine: SchedulerEngine, now: float, log: structlog.typing.FilteringBoundLogger) -> None:
    for notice in engine.notices.take():
        getattr(log, notice.level)(notice.event, **notice.details)
    engine.recorder.flush(now, engine.fleet)
    failure = engine.recorder.take_failure()
    if failure:
        log.warning("the flight recorder has stopped; serving goes on", reason=failure)
    missing = engine.recorder.take_missing()
    if missing:
        log.warning("the flight recorder goes on", missing=missing)


def _log_guard(transport: Transport, log: structlog.typing.FilteringBoundLogger) -> bool:
    """Return whether there was anything."""
    rejections, problems = transport.take_rejections(), transport.take_key_problems()
    for one in rejections:
        log.warning("connections turned away", link=one.link, new=one.new, total=one.total)
    for problem in problems:
        log.error("a key file was not read; its former key stays valid", reason=problem)
    return bool(rejections or problems)


def _log_other_versions(
    engine: SchedulerEngine, now: float, told: dict[str, float], log: structlog.typing.FilteringBoundLogger
) -> None:
    """``told``: when it was last told of each link. Peers try on and on. Those without a link are the first executor's."""
    name: str
    links: ExecutorLink | IngressLinks
    for name, links in (("step", engine.fleet.links[0]), ("ingress", engine.gateways)):
        if links.other_version and now - told.get(name, float("-inf")) >= VERSION_INTERVAL_S:
            log.error("a peer of another version of Headway is refused", link=name, reason=links.other_version)
            links.other_version, told[name] = "", now


def make_recorder(config: SchedulerConfig) -> NullRecorder:
    """Make the recorder for ``flight_log``.

    Raises:
        ValueError: the directory cannot be used.
    """
    if not config.flight_log:
        return NullRecorder()
    try:
        log = FlightLogWriter(Path(config.flight_log), config.flight_log_mib << 20)
    except OSError as error:
        raise ValueError(f"flight_log: {shown(config.flight_log)} cannot be used: {error.strerror}") from error
    version = importlib.metadata.version("headway")
    return FlightRecorder(log, config.limits(), version, ForkingCheckpointer(log), LogPieces(log))


def _send_step_frames(engine: SchedulerEngine, transport: Transport, now: float) -> None:
    for peer in transport.send(transport.executor, engine.fleet.links.outgoing):
        engine.executor_unreachable(peer, now)


def _send_frames(engine: SchedulerEngine, transport: Transport, now: float) -> None:
    _send_step_frames(engine, transport, now)
    for peer in transport.send(transport.gateways, engine.gateways.outgoing):
        engine.gateway_unreachable(peer, now)


class _StopSignals:
    """A signal counts twice if ``parent`` has ended: nobody would restart a dead executor."""

    def __init__(self, parent: int | None) -> None:
        self._requests = StopRequests()
        self._parent = parent
        for number in stop_signals():
            signal.signal(number, self._count)

    @property
    def count(self) -> int:
        """The requests so far."""
        return self._requests.count

    def _count(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        is_orphan = self._parent is not None and os.getppid() != self._parent
        self._requests.add(time.monotonic())
        self._requests.count += is_orphan
