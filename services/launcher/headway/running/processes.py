"""Child processes: start, watch, signal, and leave none running.

Every child leads its own session. So Ctrl-C reaches only the launcher, and a kill reaches a child's own children.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from headway.running.pulse_watch import PulseWatch
from headway_process.parent import LAUNCHER_VARIABLE
from headway_process.pulse import PULSE_VARIABLE


class ChildExited(msgspec.Struct, frozen=True):
    """A child ended; ``returncode`` is negative for a signal."""

    name: str
    returncode: int


class Children:
    """This process's children by name. ``on_exit`` is called once per child that ends."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        environments: Mapping[str, Mapping[str, str]],
        cores: Mapping[str, Collection[int]],
        on_exit: Callable[[ChildExited], None],
        pulses: PulseWatch,
    ) -> None:
        self._on_exit = on_exit
        self._pulses = pulses
        self._commands = commands
        self._environments = environments
        self._cores = cores
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()

    async def start(self, name: str) -> None:
        """Start a child."""
        pulse = self._pulses.open(name)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._commands[name],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env={
                    **self._environments[name],
                    LAUNCHER_VARIABLE: str(os.getpid()),
                    PULSE_VARIABLE: str(pulse),
                },
                start_new_session=True,
                pass_fds=(pulse,),
            )
        finally:
            os.close(pulse)
        self._processes[name] = process
        if name in self._cores:
            # The child has one thread now; later threads inherit the cores.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, self._cores[name])
        watcher = asyncio.create_task(self._watch(name, process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def process_id(self, name: str) -> int | None:
        """Return a living child's process id."""
        process = self._processes.get(name)
        return process.pid if process else None

    def terminate(self, name: str) -> None:
        """Send SIGTERM."""
        if name in self._processes:
            with contextlib.suppress(ProcessLookupError):
                self._processes[name].send_signal(signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Kill the child's process group."""
        if name in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._processes[name].pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every child."""
        for name in list(self._processes):
            self.kill(name)

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        returncode = await process.wait()
        # Workers of a dead child would otherwise hold its port or its sockets.
        self.kill(name)
        self._pulses.close(name)
        del self._processes[name]
        self._on_exit(ChildExited(name, returncode))
