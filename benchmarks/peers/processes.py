"""Engines and servers as processes, and what they take of the machine.

Owns: starting and ending them, the lines of a driver, their memory and processor time. Must not know: any engine, what is
measured.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_STOP_S = 60.0
_START_S = 900.0
_POLL_S = 0.05
_KIB_PER_MIB = 1024
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_of(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [root]
    for process in found:
        found.extend(parents.get(process, ()))
    return found


def _stat(process: int) -> list[str]:
    """The fields of a process from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def peak_memory_mib(root: int) -> float:
    """The sum of the peak resident memory of a process and its descendants that still run."""
    total = 0
    for process in tree_of(root):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total / _KIB_PER_MIB


def run_alone(chosen: "Driver | Server | None", all_engines: Iterable["Driver | Server"]) -> None:
    """Stop the processes of all engines but one: some turn in circles while they wait for work."""
    for engine in all_engines:
        for process in tree_of(engine.process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT if engine is chosen else signal.SIGSTOP)


def _own_seconds(root: int) -> float:
    """Processor time of a process and its descendants, also of those that have ended."""
    ticks = 0
    for process in tree_of(root):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat(process)[11:15]))
    return ticks / _TICKS_PER_S


def _busy_seconds() -> float:
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, soft_irq, steal = map(int, fields[:8])
    return (user + nice + system + irq + soft_irq + steal) / _TICKS_PER_S


class ForeignLoad:
    """The share of the machine's processor time that other programs take, from now on."""

    def __init__(self) -> None:
        self._begin = (_busy_seconds() - _own_seconds(os.getpid()), time.perf_counter())

    def share(self) -> float:
        """Return it, between 0 and 1."""
        foreign, began = self._begin
        elapsed = time.perf_counter() - began
        taken = _busy_seconds() - _own_seconds(os.getpid()) - foreign
        return round(max(0.0, taken / elapsed / (os.cpu_count() or 1)), 3)


class Driver:
    """An engine in a process of its own, ``process``. ``ready_s``: from its start to its first answer; ``foreign_share``: what
    other programs took of the machine meanwhile.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the driver)
        started, load = time.perf_counter(), ForeignLoad()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        self.process = self._process.pid
        self.version = str(self._answer()["version"])
        self.ready_s = time.perf_counter() - started
        self.foreign_share = load.share()

    def ask(self, **asked: object) -> dict[str, Any]:
        """Have one thing done, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def peak_memory_mib(self) -> float:
        """See ``peak_memory_mib``."""
        return peak_memory_mib(self._process.pid)

    def close(self) -> None:
        """End it."""
        run_alone(self, [self])
        _end(self._process)
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"the driver of {self._name} ended:\n{self._log.read()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server:
    """A server in processes of its own, the first of which is ``process``. ``ready`` gets what it has printed, and returns
    the words that tell ``headway bench`` where it is, or none before it serves. ``ready_s``: from its start until then;
    ``foreign_share``: what other programs took of the machine meanwhile.
    """

    version = ""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        ready: Callable[[str], Sequence[str]],
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 (closed with the server)
        started, load = time.perf_counter(), ForeignLoad()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=dict(environment), start_new_session=True
        )
        self.process = self._process.pid
        while not (target := ready(Path(self._log.name).read_text())):
            if self._process.poll() is not None or time.perf_counter() - started > _START_S:
                text = Path(self._log.name).read_text()[-4000:]
                self.close()
                raise SystemExit(f"the server of {name} did not come up:\n{text}")
            time.sleep(_POLL_S)
        self.target = list(target)
        self.ready_s = time.perf_counter() - started
        self.foreign_share = load.share()

    def peak_memory_mib(self) -> float:
        """See ``peak_memory_mib``."""
        return peak_memory_mib(self._process.pid)

    def close(self) -> None:
        """End it."""
        run_alone(self, [self])
        _end(self._process)
        self._log.close()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and the group that it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
