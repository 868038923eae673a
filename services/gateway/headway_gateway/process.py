"""A gateway as a process: logging, signals, exit codes. Must not know: how requests are served."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop

from headway_gateway.config import GatewayConfig
from headway_gateway.listening import AddressInUseError
from headway_gateway.server import GatewayServer
from headway_gateway.text.tokenization import TextModel, TokenizerFilesError, load_text_model
from headway_gateway.worker_group import WorkerGroup
from headway_process.collector import relax_collector
from headway_process.last_words import write_last_line
from headway_process.log_sink import LogSink, notice_of
from headway_process.logs import configure
from headway_process.open_files import raise_limit_of_open_files
from headway_process.parent import end_with_parent
from headway_process.pulse import PULSE_INTERVAL_S, Pulse, pulse_of
from headway_process.stop_signals import StopRequests

EXIT_OK = 0
EXIT_CONFIGURATION = 2
EXIT_MODEL_FILES = 3
_SWITCH_INTERVAL_S = 0.0005
_LOG_DRAIN_S = 0.5

_log = structlog.get_logger("headway.gateway")


def run(config: GatewayConfig) -> int:
    """Run until a signal; return the exit code."""
    sink = LogSink(sys.stderr.fileno(), notice=notice_of(config.log_format))
    configure("gateway", level=config.log_level, log_format=config.log_format, sink=sink)
    try:
        config.validate()
        raise_limit_of_open_files()
        # gRPC's and the tokeniser's threads hand over to the event loop many times per request. With the default switch
        # interval each handover could wait 5 ms for the interpreter lock.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # The library would hand each text to a thread of its own, and wait for it: it can share out several texts only.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if config.exit_with_parent and not end_with_parent():
            return EXIT_OK
        # libuv's event loop, for the time to a request's first token: asyncio's own takes a third longer in all.
        code = uvloop.run(_run(config))
        sink.drain(_LOG_DRAIN_S)
        return code
    except (ValueError, AddressInUseError) as error:
        sink.drain(_LOG_DRAIN_S)  # the error must be the last line
        _print_error(error)
        return EXIT_CONFIGURATION
    except TokenizerFilesError as error:
        _print_error(error)
        return EXIT_MODEL_FILES


async def _beat(pulse: Pulse) -> None:
    while True:
        pulse.beat(time.monotonic())
        await asyncio.sleep(PULSE_INTERVAL_S)


async def _run(config: GatewayConfig) -> int:
    beating = asyncio.create_task(_beat(pulse_of(os.environ)))
    try:
        return await (_run_workers(config) if config.workers > 1 else _run_server(config))
    finally:
        beating.cancel()


async def _run_server(config: GatewayConfig) -> int:
    text_model = load_text_model(Path(config.model))
    if not config.reuse_port:  # for a worker, the group has logged it
        _log_template_fault(text_model)
    stop, stop_now = _events_of_signals(config)
    server = GatewayServer(config, text_model)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload_tokens)
    try:
        relax_collector()
        await server.start()
        await stop.wait()
        _log.info("draining", grace_s=config.grace_s)
        drained = asyncio.create_task(server.drain(config.grace_s))
        hurry = asyncio.create_task(stop_now.wait())
        await asyncio.wait([drained, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        _log.info("stopping", drained=drained.done() and drained.result())
        drained.cancel()
    finally:
        await server.close()
    return EXIT_OK


async def _run_workers(config: GatewayConfig) -> int:
    _log_template_fault(load_text_model(Path(config.model)))  # fails here, once, rather than in every worker
    stop, stop_now = _events_of_signals(config)
    relax_collector()
    group = WorkerGroup(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, group.reload_tokens)
    return await group.run(stop, stop_now)


def _log_template_fault(text_model: TextModel) -> None:
    if text_model.template_fault:
        _log.warning("chats are refused: the chat template cannot be used", reason=text_model.template_fault)


def _events_of_signals(config: GatewayConfig) -> tuple[asyncio.Event, asyncio.Event]:
    """Return events for the first and the second SIGTERM or SIGINT.

    Without a parent the first sets both: a dead scheduler would not restart, so open calls might never end.
    """
    stop, stop_now, requests = asyncio.Event(), asyncio.Event(), StopRequests()
    parent = os.getppid()

    def on_signal() -> None:
        is_orphan = config.exit_with_parent and os.getppid() != parent
        requests.add(loop.time())
        if requests.count > 1 or is_orphan:
            stop_now.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop, stop_now


def _print_error(error: Exception) -> None:
    write_last_line(f"headway gateway: {error}")
