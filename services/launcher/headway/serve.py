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
from pathlib import Path

import msgspec

from headway import openai_front, preflight
from headway.plan import Plan, make_plan, without_settings
from headway.processes import ChildExited, Children
from headway.pulse_watch import LOOK_INTERVAL_S, PulseWatch
from headway.readiness import wait_until_serving
from headway.services import add_serve_flags
from headway.socket_directory import socket_directory
from headway.supervision import Action, Fleet, Kill, Report, Start, Terminate
from headway_process.last_words import LAST_WORDS_VARIABLE
from headway_process.log_sink import LogSink


class StopRequested(msgspec.Struct, frozen=True):
    """SIGINT or SIGTERM arrived."""

    signum: int


class ChildHangs(msgspec.Struct, frozen=True):
    """A child gives no sign of life."""

    name: str


Event = ChildExited | ChildHangs | StopRequested

_LOG_DRAIN_S = 0.5

WhenReady = Callable[[str, str], Awaitable[bool]]
"""A callback for the readiness line and the first gateway's address; False stops the fleet."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add serve's and the services' flags."""
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
    fleet = Fleet(plan.stop_stages, plan.restart_policy)
    events: asyncio.Queue[Event] = asyncio.Queue()
    pulses = PulseWatch(plan.hang_s)
    last_words = {name: plan.directory / f"{name}.words" for name in plan.commands}
    environments = {
        name: {**environment, **plan.environments.get(name, {}), LAST_WORDS_VARIABLE: str(file)}
        for name, file in last_words.items()
    }
    children = Children(plan.commands, environments, plan.cores, events.put_nowait, pulses)
    _deliver_signals(events)
    attendant = asyncio.create_task(_attend(plan, pulses, when_ready, events))
    watcher = asyncio.create_task(_watch_pulses(pulses, events))
    announcer = asyncio.create_task(
        _announce_openai(plan.openai_address, [each.reachable_address for each in plan.targets])
    )
    try:
        say(f"starting {', '.join(plan.start_order)}")
        await _perform(fleet.start(plan.start_order), children)
        exit_code = await _supervise(fleet, children, events)
        if fleet.refused_by:
            _report_last_words(fleet.refused_by, last_words[fleet.refused_by])
        return exit_code
    finally:
        for task in (attendant, watcher, announcer):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        children.kill_all()
        _sink().drain(_LOG_DRAIN_S)


def _deliver_signals(events: "asyncio.Queue[Event]") -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, events.put_nowait, StopRequested(signum))


async def _watch_pulses(pulses: PulseWatch, events: "asyncio.Queue[Event]") -> None:
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        for name in pulses.look():
            events.put_nowait(ChildHangs(name))


async def _attend(plan: Plan, pulses: PulseWatch, when_ready: WhenReady, events: "asyncio.Queue[Event]") -> None:
    keep_serving = False
    try:
        readiness_line = await wait_until_serving(
            plan.targets, plan.awaited, started=time.monotonic(), report=say, has_begun=pulses.has_begun
        )
        keep_serving = await when_ready(readiness_line, plan.targets[0].address)
    finally:
        if not keep_serving:
            events.put_nowait(StopRequested(signal.SIGTERM))


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


async def _supervise(fleet: Fleet, children: Children, events: "asyncio.Queue[Event]") -> int:
    while (exit_code := fleet.exit_code) is None:
        event = await _next_event(events, fleet.next_deadline)
        now = time.monotonic()
        match event:
            case None:
                actions = fleet.tick(now)
            case ChildExited(name, returncode):
                actions = fleet.child_exited(name, returncode, now)
            case ChildHangs(name):
                actions = fleet.child_hangs(name)
            case StopRequested(signum):
                actions = fleet.stop_requested(now, impatient_exit_code=128 + signum)
        await _perform(actions, children)
    return exit_code


async def _next_event(events: "asyncio.Queue[Event]", deadline: float | None) -> Event | None:
    """Return None at the deadline (monotonic seconds)."""
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        async with asyncio.timeout(timeout):
            return await events.get()
    except TimeoutError:
        return None


async def _perform(actions: list[Action], children: Children) -> None:
    for action in actions:
        match action:
            case Start(name):
                await children.start(name)
            case Terminate(name):
                children.terminate(name)
            case Kill(name):
                children.kill(name)
            case Report(text):
                say(text)


def _report_last_words(name: str, file: Path) -> None:
    """Write why a process could not work."""
    try:
        _sink().write(file.read_text(encoding="utf-8"))
    except OSError:
        say(f"{name} could not work with its settings; the lines above say why")


def say(text: str) -> None:
    """A closed or full stderr does not stop serving."""
    _sink().write(f"headway serve: {text}\n")


@functools.cache
def _sink() -> LogSink:
    return LogSink(sys.stderr.fileno())
