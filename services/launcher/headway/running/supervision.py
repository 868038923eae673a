"""The supervision of a fleet of processes, as a pure state machine: events and the time in, actions out."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from headway_process.stop_signals import StopRequests

USER_ERROR_EXIT_CODES = frozenset({2, 3})
"""Configuration (2) and model files (3): a restart cannot help, and the process has written why."""

RESTARTS_EXHAUSTED_EXIT_CODE = 1


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how fast a dead process restarts. Times are in seconds.

    The delay doubles with each restart within the window, from ``first_delay_s`` to ``max_delay_s``. More than
    ``max_restarts`` within a window end the fleet.
    """

    max_restarts: int = 10
    window_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start the process."""

    name: str


class Terminate(msgspec.Struct, frozen=True, tag=True):
    """Send SIGTERM."""

    name: str


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Send SIGKILL to a whole session."""

    name: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """Write a line for the operator."""

    text: str


Action = Start | Terminate | Kill | Report


class Fleet:
    """The processes of one served model.

    Each of the ``stop_stages`` maps names to seconds from SIGTERM to SIGKILL. It begins when all processes of the stage
    before have ended.
    """

    def __init__(self, stop_stages: Sequence[Mapping[str, float]], policy: RestartPolicy) -> None:
        self._stages = [tuple(stage) for stage in stop_stages]
        self._stop_grace_s = {name: grace_s for stage in stop_stages for name, grace_s in stage.items()}
        self._policy = policy
        self._alive: set[str] = set()
        self._restart_at: dict[str, float] = {}
        self._recent_restarts: dict[str, deque[float]] = {name: deque() for name in self._stop_grace_s}
        self._stop_requests = StopRequests()
        self._stopping = False
        self._is_orderly = False
        self._asked: set[str] = set()
        self._kill_at: dict[str, float] = {}
        self._exit_code = 0
        self._refused_by = ""

    @property
    def refused_by(self) -> str:
        """The process that refused its settings."""
        return self._refused_by

    @property
    def exit_code(self) -> int | None:
        """The exit code, once ended."""
        has_ended = self._stopping and not self._alive and not self._restart_at
        return self._exit_code if has_ended else None

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` is due without another event."""
        return min((*self._restart_at.values(), *self._kill_at.values()), default=None)

    def start(self, names: Sequence[str]) -> list[Action]:
        """Start in this order; no process waits."""
        self._alive.update(names)
        return [Start(name) for name in names]

    def child_exited(self, name: str, returncode: int, now: float) -> list[Action]:
        """Process an end; ``returncode`` is negative for a signal."""
        self._alive.discard(name)
        self._kill_at.pop(name, None)
        if self._stopping:
            is_unexpected = self._is_orderly and name not in self._asked and returncode not in USER_ERROR_EXIT_CODES
            if is_unexpected and self._is_needed(name):
                return self._restart_or_give_up(name, returncode, now)
            self._drop_needless_restarts()
            return self._terminate_next(now)
        if returncode in USER_ERROR_EXIT_CODES:
            self._refused_by = name
            return self._stop_all(returncode, now)
        return self._restart_or_give_up(name, returncode, now)

    def child_hangs(self, name: str) -> list[Action]:
        """Process silence; the end follows."""
        return [Report(f"{name} gives no sign of life; killing it"), Kill(name)]

    def stop_requested(self, now: float, *, impatient_exit_code: int) -> list[Action]:
        """Begin an orderly stop; a second request kills at once (see ``StopRequests``).

        A process that dies unasked meanwhile restarts, to finish accepted work.
        """
        if not self._stop_requests.add(now):
            return []
        if self._stopping:
            self._is_orderly = False
            self._exit_code = impatient_exit_code
            self._kill_at.clear()
            self._restart_at.clear()
            return [Report("killing at once"), *(Kill(name) for name in self._in_stop_order())]
        self._stopping = self._is_orderly = True
        self._drop_needless_restarts()
        stages = (" and ".join(stage) for stage in self._living_stages())
        return [Report("stopping: " + ", then ".join(stages)), *self._terminate_next(now)]

    def tick(self, now: float) -> list[Action]:
        """Do due restarts and kills."""
        actions: list[Action] = []
        for name in [name for name, due in self._restart_at.items() if due <= now]:
            del self._restart_at[name]
            self._alive.add(name)
            actions.append(Start(name))
        for name in [name for name, due in self._kill_at.items() if due <= now]:
            del self._kill_at[name]
            actions += [Report(f"{name} did not end within {self._stop_grace_s[name]:g} s; killing it"), Kill(name)]
        return actions

    def _restart_or_give_up(self, name: str, returncode: int, now: float) -> list[Action]:
        recent = self._recent_restarts[name]
        while recent and recent[0] <= now - self._policy.window_s:
            recent.popleft()
        ended = f"{name} ended ({_describe(returncode)})"
        if len(recent) >= self._policy.max_restarts:
            budget = f"{len(recent)} restarts within {self._policy.window_s:g} s"
            return [Report(f"{ended} after {budget}: giving up"), *self._stop_all(RESTARTS_EXHAUSTED_EXIT_CODE, now)]
        delay = min(self._policy.first_delay_s * 2 ** len(recent), self._policy.max_delay_s)
        recent.append(now)
        self._restart_at[name] = now + delay
        return [Report(f"{ended}; starting it again in {delay:g} s")]

    def _stop_all(self, exit_code: int, now: float) -> list[Action]:
        """The others cannot finish without the lost process."""
        self._stopping = True
        self._is_orderly = False
        self._exit_code = exit_code
        self._restart_at.clear()
        return [self._terminate(name, now) for name in self._in_stop_order()]

    def _terminate_next(self, now: float) -> list[Action]:
        if self._kill_at or not self._alive:
            return []
        return [self._terminate(name, now) for name in self._living_stages()[0]]

    def _terminate(self, name: str, now: float) -> Action:
        self._kill_at[name] = now + self._stop_grace_s[name]
        self._asked.add(name)
        return Terminate(name)

    def _is_needed(self, name: str) -> bool:
        """A process that stops earlier may still have work."""
        earlier = itertools.takewhile(lambda stage: name not in stage, self._stages)
        return any(other in self._alive for stage in earlier for other in stage)

    def _drop_needless_restarts(self) -> None:
        for name in [name for name in self._restart_at if not self._is_needed(name)]:
            del self._restart_at[name]

    def _in_stop_order(self) -> list[str]:
        return [name for stage in self._living_stages() for name in stage]

    def _living_stages(self) -> list[list[str]]:
        living = ([name for name in stage if name in self._alive] for stage in self._stages)
        return [stage for stage in living if stage]


def _describe(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
