"""The executor process: configuration, signals and logs around the cycle.

Owns: start, stop, exit codes. Must not know: steps.
"""

import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import zmq
from structlog.typing import FilteringBoundLogger

from headway_executor.backend import BackendConfigError, DeviceLostError, ExecutorBackend, ModelFilesError
from headway_executor.batch.batch_state import BatchState
from headway_executor.block_store.store import Store
from headway_executor.config import ExecutorConfig
from headway_executor.host.beside import Nicer
from headway_executor.host.ending import (
    EXIT_BAD_CONFIGURATION,
    EXIT_DEVICE_LOST,
    EXIT_OK,
    LAST_FRAMES_S,
    LOG_DRAIN_S,
    StopRequest,
    end_without_device,
    exit_at_once_on_signals,
    refuse,
)
from headway_executor.host.metrics import ExecutorSnapshot, GroupFigures, families_of, take_snapshot
from headway_executor.links.channel import DealerChannel, SchedulerChannel
from headway_executor.links.step_link import StepLink
from headway_executor.rank_processes.agreed_store import AgreedStore
from headway_executor.rank_processes.follower import Follower
from headway_executor.rank_processes.leading_link import LeadingLink
from headway_executor.rank_processes.refusal import RankRefusedError, exit_code_of
from headway_executor.rank_processes.surroundings import Surroundings, own_device, surroundings_of, take_cores
from headway_executor.rank_processes.watched_backend import WatchedBackend
from headway_executor.rank_processes.whole_group import Group
from headway_executor.startup.opening import Opening
from headway_executor.step.loop import StepCycle, serve
from headway_executor.step.seams import Link, Ranks
from headway_process.collector import relax_collector
from headway_process.fleet_numbers import fleet_fields
from headway_process.log_sink import LogSink, notice_of
from headway_process.logs import make_logger
from headway_process.open_files import raise_limit_of_open_files
from headway_process.parent import LAUNCHER_VARIABLE, end_with_parent
from headway_process.pulse import pulse_of
from headway_process.snapshots import Snapshots
from headway_proto.step import BackendInfo
from headway_proto.wording import one_line

if TYPE_CHECKING:
    from headway_process.metrics_endpoint import MetricsEndpoint

SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep another from the interpreter: loop, steps and pulls hand over several times a step."""

READING_NICENESS = 5
"""Of adapters, beside steps that may need every core."""


class Companions(Protocol):
    """The other processes of a group, as the main loop sees them."""

    @property
    def has_ended(self) -> bool:
        """Whether this process must end in good order."""
        ...

    @property
    def figures(self) -> GroupFigures | None:
        """Of rank 0."""
        ...

    def turn(self) -> None:
        """Hear them, in each turn of the loop."""
        ...

    def leave(self) -> None:
        """End what has not begun. For signal handlers."""
        ...

    def give_up(self, reason: str, exit_code: int) -> None:
        """End all, since this process cannot go on."""
        ...

    def end(self, close: Callable[[], None]) -> None:
        """End in good order; ``close`` closes this process's own things."""
        ...


class Alone:
    """There are no others."""

    has_ended = False
    figures = None

    def turn(self) -> None:
        """See ``Companions``."""

    def leave(self) -> None:
        """See ``Companions``."""

    def give_up(self, reason: str, exit_code: int) -> None:
        """See ``Companions``."""

    def end(self, close: Callable[[], None]) -> None:
        """See ``Companions``."""
        close()


class _Surface(NamedTuple):
    """What a process shows of itself. ``number`` of the executor, or -1."""

    log: FilteringBoundLogger
    sink: LogSink
    snapshots: Snapshots[ExecutorSnapshot]
    number: int


class _Works(NamedTuple):
    """All that runs steps, open."""

    info: BackendInfo
    link: Link
    channel: DealerChannel
    backend: ExecutorBackend
    store: Store
    companions: Companions
    close: Callable[[], None]
    ranks: Ranks | None = None


def run(config: ExecutorConfig) -> int:
    """Run until SIGTERM or SIGINT; return the exit code.

    0 after a signal, 2 for a bad setting, 3 for a bad checkpoint (both with one line on stderr). A lost device or rank
    exits with 4.
    """
    exit_at_once_on_signals()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if config.exit_with_parent and not end_with_parent():
        os.kill(os.getpid(), signal.SIGTERM)
    sink = LogSink(sys.stderr.fileno(), notice=notice_of(config.log_format))
    log = make_logger("executor", level=config.log_level, log_format=config.log_format, sink=sink)
    surface = _Surface(log, sink, Snapshots(), fleet_fields(os.environ).get("executor", -1))
    is_child = False
    with ExitStack() as stack:
        try:
            config.validate()
            raise_limit_of_open_files()
            around = surroundings_of(config, os.environ)
            is_child = around.is_child
            if not around.place.is_alone:
                log = log.bind(rank=around.place.rank)
                surface = surface._replace(log=log)
            if is_child and not _lives_with(os.environ[LAUNCHER_VARIABLE]):
                return EXIT_OK
            works = _open(config, around, surface, stack)
        except (ModelFilesError, BackendConfigError, ValueError, zmq.ZMQError) as error:
            code = EXIT_BAD_CONFIGURATION if isinstance(error, zmq.ZMQError) else exit_code_of(error)
            is_said = is_child and isinstance(error, RankRefusedError)  # by rank 0
            return code if is_said else refuse(one_line(error), code)
        except DeviceLostError as error:
            end_without_device(error, log, sink)
        reading = Nicer("adapters", READING_NICENESS)
        code = _work(config, works, surface, reading)
    if reading.is_busy:
        os._exit(code)  # nobody waits for this adapter any more
    return code


def _lives_with(parent: str) -> bool:
    """A rank that rank 0 has started dies with it at once: its host blocks stay for the next one, as rank 0's do."""
    return end_with_parent(signal.SIGKILL) and parent == str(os.getppid())


def _open(config: ExecutorConfig, around: Surroundings, surface: _Surface, stack: ExitStack) -> _Works:
    if around.place.is_alone:
        return _open_alone(config, around, surface, stack)
    return (_open_follower if around.place.rank else _open_leader)(config, around, surface, stack)


def _open_alone(config: ExecutorConfig, around: Surroundings, surface: _Surface, stack: ExitStack) -> _Works:
    endpoint = _metrics_endpoint(config, surface)
    opening = _opening(config, around, surface, stack, Alone())
    info = opening.open()
    channel = _to_scheduler(config, surface, info, endpoint)
    link = StepLink(incarnation=secrets.randbits(62), info=info, number=surface.number)
    return _Works(info, link, channel, opening.backend, opening.store, Alone(), opening.close)


def _open_leader(config: ExecutorConfig, around: Surroundings, surface: _Surface, stack: ExitStack) -> _Works:
    endpoint = _metrics_endpoint(config, surface)
    group = Group(config, around)
    stack.callback(group.leave)
    opening = _opening(config, around._replace(place=group.place, keys=group.keys), surface, stack, group)
    info = group.open(opening.open)
    channel = _to_scheduler(config, surface, info, endpoint)
    channel.watch(group.socket.pollable)
    backend = WatchedBackend(opening.backend, channel.wake)
    store = AgreedStore(opening.store, group.place, channel.wake)
    alone = StepLink(incarnation=secrets.randbits(62), info=info, number=surface.number)
    link = LeadingLink(alone, group.followers, store, backend)
    return _Works(info, link, channel, backend, store, group, opening.close, ranks=link)


def _open_follower(config: ExecutorConfig, around: Surroundings, surface: _Surface, stack: ExitStack) -> _Works:
    follower = Follower(config, around)
    opening = _opening(config, around._replace(keys=follower.keys), surface, stack, follower)
    info = follower.open(opening.open)
    backend = WatchedBackend(opening.backend, follower.channel.wake, draws=opening.every_rank_draws)
    store = AgreedStore(opening.store, follower.place, follower.channel.wake)
    follower.attach(store, backend, info)
    surface.log.info("rank ready", **_facts(info))
    return _Works(info, follower.link, follower.channel, backend, store, follower, opening.close, ranks=follower.link)


def _opening(
    config: ExecutorConfig, around: Surroundings, surface: _Surface, stack: ExitStack, companions: Companions
) -> Opening:
    num_threads, device = take_cores(config, around), own_device(config, around)
    settings = msgspec.structs.replace(config, num_threads=num_threads, device=device)
    opening = Opening(settings, around.place, surface.number, surface.log, around.keys)
    stack.callback(opening.store.close)

    def leave() -> None:
        opening.store.leave()
        companions.leave()

    exit_at_once_on_signals(leave)
    return opening


def _to_scheduler(
    config: ExecutorConfig, surface: _Surface, info: BackendInfo, endpoint: "MetricsEndpoint | None"
) -> SchedulerChannel:
    channel = SchedulerChannel(config.step_address, config.curve_keys)
    surface.log.info("executor ready", step_address=config.step_address, **_facts(info))
    if endpoint is not None:
        surface.log.info("metrics", port=endpoint.port)
    surface.snapshots.wake = channel.wake
    return channel


def _work(config: ExecutorConfig, works: _Works, surface: _Surface, reading: Nicer) -> int:
    companions, log = works.companions, surface.log
    has_begun_to_end = False
    try:
        device_lost = _serve(config, works, surface, reading)
        has_begun_to_end = True
        if device_lost is not None:
            works.channel.close(linger_s=LAST_FRAMES_S)
            companions.give_up(str(device_lost), EXIT_DEVICE_LOST)
            end_without_device(device_lost, log, surface.sink)
        companions.end(works.close)
    finally:
        if not has_begun_to_end:
            companions.give_up("an error in the loop of rank 0", EXIT_DEVICE_LOST)
            works.close()
        works.channel.close(linger_s=LAST_FRAMES_S if has_begun_to_end else 0.0)
    log.info("executor stopped", damaged_frames=works.link.num_damaged_frames)
    surface.sink.drain(LOG_DRAIN_S)
    return EXIT_OK


def _serve(config: ExecutorConfig, works: _Works, surface: _Surface, reading: Nicer) -> DeviceLostError | None:
    companions, snapshots = works.companions, surface.snapshots
    stop = StopRequest(works.channel.wake)
    cycle = StepCycle(
        link=works.link,
        state=BatchState(works.info),
        backend=works.backend,
        log=surface.log,
        wake=works.channel.wake,
        step_timeout_s=config.step_timeout_s or float("inf"),
        store=works.store,
        ranks=works.ranks,
        beside=reading,
    )

    def turn() -> None:
        companions.turn()
        if problem := works.channel.problem():
            surface.log.warning("no link to the scheduler", step_address=config.step_address, reason=problem)
        if snapshots.wanted:
            snapshots.give(take_snapshot(works.info, cycle.statistics, companions.figures))

    relax_collector()
    serve(
        cycle,
        works.channel,
        should_stop=lambda: stop.requested or companions.has_ended,
        pulse=pulse_of(os.environ),
        on_turn=turn,
    )
    return cycle.device_lost


def _metrics_endpoint(config: ExecutorConfig, surface: _Surface) -> "MetricsEndpoint | None":
    """Before the model is loaded, it answers with status 503."""
    if not config.metrics_address:
        return None
    from headway_process.metrics_endpoint import MetricsEndpoint

    return MetricsEndpoint(
        config.metrics_address, config.metrics_token_file, lambda: families_of(surface.snapshots.ask())
    )


def _facts(info: BackendInfo) -> dict[str, object]:
    return {
        "backend": info.backend,
        "model": info.model_name,
        "device": info.device,
        "dtype": info.dtype,
        "num_blocks": info.num_blocks,
        "num_host_blocks": info.num_host_blocks,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
    }
