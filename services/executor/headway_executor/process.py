"""The executor process: configuration, signals and logs around the cycle.

Owns: start, stop, exit codes. Must not know: steps.
"""

import os
import secrets
import signal
import sys
import time
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq
from structlog.typing import FilteringBoundLogger

from headway_executor.backend import (
    BackendConfig,
    BackendConfigError,
    DeviceLostError,
    ExecutorBackend,
    ModelFilesError,
)
from headway_executor.batch_state import BatchState
from headway_executor.block_store.registry import enabled_transports, make_transport
from headway_executor.block_store.store import BlockStore
from headway_executor.channel import SchedulerChannel
from headway_executor.config import ExecutorConfig
from headway_executor.loop import StepCycle, serve
from headway_executor.metrics import ExecutorSnapshot, families_of, take_snapshot
from headway_executor.registry import create_backend
from headway_executor.step_link import StepLink
from headway_executor.threaded_backend import ThreadedBackend
from headway_process.last_words import write_last_line
from headway_process.log_sink import LogSink, notice_of
from headway_process.logs import fleet_fields, make_logger
from headway_process.parent import end_with_parent
from headway_process.pulse import pulse_of
from headway_process.snapshots import Snapshots
from headway_proto.step import BackendInfo

if TYPE_CHECKING:
    from headway_process.metrics_endpoint import MetricsEndpoint

EXIT_OK = 0
EXIT_BAD_CONFIGURATION = 2
EXIT_BAD_MODEL_FILES = 3
EXIT_DEVICE_LOST = 4

_PROGRESS_INTERVAL_S = 2.0
_LOG_DRAIN_S = 0.5
_LAST_FRAMES_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: ExecutorConfig) -> int:
    """Run until SIGTERM or SIGINT; return the exit code.

    0 after a signal, 2 for a bad setting, 3 for a bad checkpoint (both with one line on stderr). A lost device exits
    with 4.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, _exit_at_once)
    if config.exit_with_parent and not end_with_parent():
        os.kill(os.getpid(), signal.SIGTERM)
    sink = LogSink(sys.stderr.fileno(), notice=notice_of(config.log_format))
    log = make_logger("executor", level=config.log_level, log_format=config.log_format, sink=sink)
    with ExitStack() as stack:
        return _run(config, log, sink, stack)


def _run(config: ExecutorConfig, log: FilteringBoundLogger, sink: LogSink, stack: ExitStack) -> int:
    snapshots: Snapshots[ExecutorSnapshot] = Snapshots()
    cell = fleet_fields(os.environ).get("executor", -1)
    try:
        config.validate()
        endpoint = _metrics_endpoint(config, snapshots)
        backend = _create_backend(config.backend)
        log.info("opening the backend", backend=config.backend, model=config.model, device=config.device)
        store = _block_store(config, cell, log)
        stack.callback(store.close)
        info = store.open(backend.open(_backend_config(config, store, log)))
        channel = SchedulerChannel(config.step_address, config.curve_keys)
    except ModelFilesError as error:
        return _refuse(error, EXIT_BAD_MODEL_FILES)
    except (BackendConfigError, ValueError, zmq.ZMQError) as error:
        return _refuse(error, EXIT_BAD_CONFIGURATION)
    log.info("executor ready", step_address=config.step_address, **_facts(info))
    if endpoint is not None:
        log.info("metrics", port=endpoint.port)
    link = StepLink(incarnation=secrets.randbits(62), info=info, number=cell)
    snapshots.wake = channel.wake
    try:
        device_lost = _serve(config, link, info, backend, store, channel, log, snapshots)
        if device_lost is not None:
            channel.close(linger_s=_LAST_FRAMES_S)
            _end_without_device(device_lost, log, sink)
    finally:
        channel.close()
        backend.close()
    log.info("executor stopped", damaged_frames=link.num_damaged_frames)
    sink.drain(_LOG_DRAIN_S)
    return EXIT_OK


def _block_store(config: ExecutorConfig, number: int, log: FilteringBoundLogger) -> BlockStore:
    transports = {
        name: make_transport(name, msgspec.structs.asdict(config))
        for name in enabled_transports(config.block_transports)
    }
    store = BlockStore(
        transports,
        place=config.step_address,
        number=number,
        variant=config.quantization,
        uses_shared_memory=config.host_pool == "shm",
        warn=log.warning,
    )

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        store.leave()
        _exit_at_once(signum, frame)

    for number_of_signal in _STOP_SIGNALS:
        signal.signal(number_of_signal, leave)
    return store


def _backend_config(config: ExecutorConfig, store: BlockStore, log: FilteringBoundLogger) -> BackendConfig:
    progress = _OpeningProgress(log)
    return msgspec.structs.replace(
        config.backend_config(), progress=progress.report, warn=log.warning, host_memory=store.host_memory
    )


def _end_without_device(error: DeviceLostError, log: FilteringBoundLogger, sink: LogSink) -> NoReturn:
    """The usual clean-up may hang on a lost device."""
    log.critical("the device is lost; the process ends", reason=str(error))
    sink.drain(_LOG_DRAIN_S)
    os._exit(EXIT_DEVICE_LOST)


def _create_backend(name: str) -> ExecutorBackend:
    backend = create_backend(name)
    return backend if getattr(backend, "executes_inline", False) else ThreadedBackend(backend)


def _serve(
    config: ExecutorConfig,
    link: StepLink,
    info: BackendInfo,
    backend: ExecutorBackend,
    store: BlockStore,
    channel: SchedulerChannel,
    log: FilteringBoundLogger,
    snapshots: Snapshots[ExecutorSnapshot],
) -> DeviceLostError | None:
    stop = _StopRequest(channel)
    cycle = StepCycle(
        link=link,
        state=BatchState(info),
        backend=backend,
        log=log,
        wake=channel.wake,
        step_timeout_s=config.step_timeout_s or float("inf"),
        store=store,
    )

    def answer_reader() -> None:
        if snapshots.wanted:
            snapshots.give(take_snapshot(info, cycle.statistics))

    serve(
        cycle,
        channel,
        should_stop=lambda: stop.requested,
        pulse=pulse_of(os.environ),
        on_turn=answer_reader,
    )
    return cycle.device_lost


def _metrics_endpoint(config: ExecutorConfig, snapshots: Snapshots[ExecutorSnapshot]) -> "MetricsEndpoint | None":
    """Before the model is loaded, it answers with status 503."""
    if not config.metrics_address:
        return None
    from headway_process.metrics_endpoint import MetricsEndpoint

    return MetricsEndpoint(config.metrics_address, config.metrics_token_file, lambda: families_of(snapshots.ask()))


class _OpeningProgress:
    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._what = ""
        self._said_at = float("-inf")

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or now - self._said_at >= _PROGRESS_INTERVAL_S:
            self._what, self._said_at = what, now
            self._log.info(what, done=done, total=total)


class _StopRequest:
    def __init__(self, channel: SchedulerChannel) -> None:
        self.requested = False
        self._channel = channel
        for number in _STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.requested = True
        self._channel.wake()


def _exit_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    """A loading process has nothing to save, and a loader cannot be interrupted."""
    del signum, frame
    os._exit(EXIT_OK)


def _refuse(error: Exception, code: int) -> int:
    write_last_line(f"headway executor: {' '.join(str(error).split())}")
    return code


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
