"""``headway serve``: scheduler, executor and gateway on this machine, under ``supervision``."""

import argparse
import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headway.planning import openai_front, preflight
from headway.planning.model_source import ALLOWED
from headway.planning.plan import Plan, make_plan, without_settings
from headway.planning.services import add_serve_flags
from headway.running.fleet_runner import FleetRunner
from headway.running.readiness import wait_until_serving
from headway.running.service_manager import tell_ready, tell_stopping
from headway.running.socket_directory import socket_directory
from headway_executor.checkpoint.reading_ahead import read_ahead
from headway_process.log_sink import LogSink
from headway_process.stop_signals import stop_signals

_LOG_DRAIN_S = 0.5

WhenReady = Callable[[str, str], Awaitable[bool]]
"""A callback for the readiness line and the first gateway's address; False stops the fleet."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add serve's and the services' flags, and the model as a word without a flag."""
    parser.add_argument(
        "model",
        nargs="?",
        action="append",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"{ALLOWED}, the default",
    )
    add_serve_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped; see ``Command``."""
    environment = os.environ
    with socket_directory() as directory:
        plan = make_plan(arguments, environment, directory)
        preflight.check(plan)
        return asyncio.run(serve(plan, without_settings(environment), _print_readiness))


async def serve(plan: Plan, environment: Mapping[str, str], when_ready: WhenReady) -> int:
    """Run the fleet; return the exit code."""
    for model in plan.models:  # the executor itself would begin later, after some imports
        read_ahead(model)
    runner = FleetRunner(plan.orders(environment), say)
    _deliver_signals(runner)
    attendant = asyncio.create_task(_attend(plan, runner, when_ready))
    announcer = asyncio.create_task(
        _announce_openai(plan.openai_address, [each.reachable_address for each in plan.targets])
    )
    try:
        say(f"starting {', '.join(plan.start_order)}")
        exit_code = await runner.run()
        if runner.refused_by:
            _sink().write(runner.refusal())
        return exit_code
    finally:
        for task in (attendant, announcer):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        _sink().drain(_LOG_DRAIN_S)


def _deliver_signals(runner: FleetRunner) -> None:
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, _stop, runner, signum)


def _stop(runner: FleetRunner, signum: int) -> None:
    tell_stopping()
    runner.ask_to_stop(signum)


async def _attend(plan: Plan, runner: FleetRunner, when_ready: WhenReady) -> None:
    keep_serving = False
    try:
        readiness_line = await wait_until_serving(
            plan.targets, plan.awaited, started=time.monotonic(), report=say, has_begun=runner.has_begun
        )
        for url in plan.http_urls:
            say(f"OpenAI API on {url}")
        tell_ready(readiness_line)
        keep_serving = await when_ready(readiness_line, plan.targets[0].address)
    finally:
        if not keep_serving:
            runner.ask_to_stop(signal.SIGTERM)


async def _announce_openai(address: str, gateways: Sequence[str]) -> None:
    if address:
        await openai_front.wait_until_serving(address, len(gateways), gateways)
        say(f"OpenAI API on http://{address}/v1")


async def _print_readiness(readiness_line: str, address: str) -> bool:
    del address
    with contextlib.suppress(OSError):
        sys.stdout.write(readiness_line + "\n")
        sys.stdout.flush()
    return True


def say(text: str) -> None:
    """A closed or full stderr does not stop serving."""
    _sink().write(f"headway serve: {text}\n")


@functools.cache
def _sink() -> LogSink:
    return LogSink(sys.stderr.fileno())
