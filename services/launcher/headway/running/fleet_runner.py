"""Runs a fleet of child processes until it ends: starts, restarts, hangs, an orderly stop.

Owns: the loop between ``supervision``, which decides, and ``processes``, which acts. Must not know: what the processes
are, who asked for them, signals of this process.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from headway.running.processes import ChildExited, Children
from headway.running.pulse_watch import LOOK_INTERVAL_S, PulseWatch
from headway.running.supervision import Action, Fleet, Kill, Report, RestartPolicy, Start, Terminate
from headway_process.last_words import LAST_WORDS_VARIABLE

_HEAD_START_LOOK_S = 0.02
_HEAD_START_LOOKS = 25


class StopRequested(msgspec.Struct, frozen=True):
    """SIGINT or SIGTERM arrived, or someone asked as if."""

    signum: int


class ChildHangs(msgspec.Struct, frozen=True):
    """A child gives no sign of life."""

    name: str


Event = ChildExited | ChildHangs | StopRequested


class FleetOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``directory`` is private; ``environments`` and ``cores`` are by name, for those that have some.

    ``num_cores`` for all; 0: enough.
    """

    commands: Mapping[str, Sequence[str]]
    stop_stages: Sequence[Mapping[str, float]]
    restart_policy: RestartPolicy
    hang_s: float
    directory: Path
    environment: Mapping[str, str]
    environments: Mapping[str, Mapping[str, str]] = {}
    cores: Mapping[str, Collection[int]] = {}
    num_cores: int = 0


class FleetRunner:
    """One fleet. ``say`` gets a line for the operator now and then."""

    def __init__(self, orders: FleetOrders, say: Callable[[str], None]) -> None:
        self._orders = orders
        self._say = say
        self._fleet = Fleet(orders.stop_stages, orders.restart_policy)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._pulses = PulseWatch(orders.hang_s)
        self._words = {name: orders.directory / f"{name}.words" for name in orders.commands}
        environments = {
            name: {**orders.environment, **orders.environments.get(name, {}), LAST_WORDS_VARIABLE: str(file)}
            for name, file in self._words.items()
        }
        self._children = Children(orders.commands, environments, orders.cores, self._events.put_nowait, self._pulses)
        self._starts: Counter[str] = Counter()

    @property
    def refused_by(self) -> str:
        """The process that refused its settings, if one did."""
        return self._fleet.refused_by

    def refusal(self) -> str:
        """Return the line in which that process says why."""
        try:
            return self._words[self.refused_by].read_text(encoding="utf-8")
        except (KeyError, OSError):
            return f"{self.refused_by} could not work with its settings; the lines above say why\n"

    def has_begun(self, name: str) -> bool:
        """Return whether a process that lives has given a sign of life."""
        return self._pulses.has_begun(name)

    def process_id(self, name: str) -> int | None:
        """Return the process's id while it lives."""
        return self._children.process_id(name)

    def num_restarts(self, name: str) -> int:
        """Return how often the process was started again."""
        return max(0, self._starts[name] - 1)

    def ask_to_stop(self, signum: int) -> None:
        """Begin an orderly stop, as if this signal had come; a second request kills at once."""
        self._events.put_nowait(StopRequested(signum))

    async def run(self) -> int:
        """Run the fleet to its end; return the exit code. No child is left, whatever happens."""
        watcher = asyncio.create_task(self._watch_pulses())
        try:
            await self._start_all()
            return await self._supervise()
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            self._children.kill_all()

    async def _start_all(self) -> None:
        """In order, and later where cores are few: until its first sign of life a process keeps one busy."""
        num_cores = self._orders.num_cores or len(self._orders.commands)
        for number, start in enumerate(self._fleet.start(list(self._orders.commands))):
            for _ in range(_HEAD_START_LOOKS):
                if number - self._pulses.num_begun() < num_cores:
                    break
                await asyncio.sleep(_HEAD_START_LOOK_S)
            await self._perform([start])

    async def _watch_pulses(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            for name in self._pulses.look():
                self._events.put_nowait(ChildHangs(name))

    async def _supervise(self) -> int:
        fleet = self._fleet
        while (exit_code := fleet.exit_code) is None:
            event = await self._next_event(fleet.next_deadline)
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
            await self._perform(actions)
        return exit_code

    async def _next_event(self, deadline: float | None) -> Event | None:
        """Return None at the deadline (monotonic seconds)."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                return await self._events.get()
        except TimeoutError:
            return None

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    self._starts[name] += 1
                    await self._children.start(name)
                case Terminate(name):
                    self._children.terminate(name)
                case Kill(name):
                    self._children.kill(name)
                case Report(text):
                    self._say(text)
