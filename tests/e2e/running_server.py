"""Starts ``headway`` commands as a user would, and cleans up after them whatever happens."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from headway_process.free_ports import free_ports

READY = re.compile(
    r"^headway is ready on (?P<address>\S+) \(model \S+, (?P<runs_on>\S+), (\d+ executors, )?[\d.]+ s\)$"
)


def environment(**extra: str) -> dict[str, str]:
    """The environment of the tests without settings of whoever runs them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return {**kept, **extra}


class Command:
    """A running ``headway`` command with its output so far."""

    def __init__(self, words: Sequence[str], **extra_environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**extra_environment),
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, lines):
        with stream:
            lines.extend(iter(stream.readline, ""))

    def wait_for_ready(self, timeout_s: float = 60.0) -> str:
        """Return the address of the readiness line."""
        wait_until(lambda: self.out or self.process.poll() is not None, timeout_s, "the readiness line")
        assert self.out, "".join(self.err)
        match = READY.match(self.out[0].rstrip("\n"))
        assert match, self.out
        return match["address"]

    def children(self) -> dict[str, psutil.Process]:
        """The service processes by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found[child.cmdline()[4]] = child
        return found

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(signum)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code, with all output read."""
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code


@contextlib.contextmanager
def command(*words: str, **extra_environment: str) -> Iterator[Command]:
    """Run a command; kill it and all that it started at the end."""
    running = Command(words, **extra_environment)
    started: list[psutil.Process] = []
    try:
        yield running
    finally:
        with contextlib.suppress(psutil.Error):
            started = [
                psutil.Process(running.process.pid),
                *psutil.Process(running.process.pid).children(recursive=True),
            ]
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()
        running.wait()


def finished(*words: str, timeout_s: float = 60.0, **extra_environment: str) -> Command:
    """Run a command to its end."""
    with command(*words, **extra_environment) as running:
        running.wait(timeout_s)
        return running


async def eventually(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


def free_port() -> int:
    """A port that nobody listens on just now."""
    return free_ports("127.0.0.1", 1)[0]


def wait_until(condition, timeout_s: float, what: str) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def sockets_in(directory: Path) -> list[Path]:
    """What the launcher has left in its temporary directory."""
    return list(directory.glob("headway-*"))
