"""``headway serve`` beneath a program: its start, its addresses, its end.

Owns: the launcher's process and what it says. Must not know: what is asked of the model.
"""

import collections
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from threading import Event, Thread
from typing import IO

from headway.planning.plan import without_settings

_READY = re.compile(r"headway is ready on (\S+) ")
_HTTP = re.compile(r"headway serve: OpenAI API on (\S+)/v1$")
_OWN_AFFAIRS = ("headway serve: starting ", "headway serve: stopping", "headway serve: OpenAI API on ")
_KEPT_LINES = 20
_END_S = 20.0


class ServingError(Exception):
    """The processes did not start. The message says why."""


class ChildServer:
    """The launcher and its processes, which end with this program, however that ends.

    Args:
        words: the flags of ``headway serve``.

    Raises:
        ServingError: the processes refused to start.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "headway.beneath", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=without_settings(os.environ),
            start_new_session=True,  # an interrupt at the terminal is the program's alone
        )
        self._owner = os.getpid()
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._is_ready = Event()
        self._has_url = Event()
        self._url = ""
        self.address = ""
        """Of gRPC, HOST:PORT."""
        self._readers = [
            Thread(target=read, args=(stream,), daemon=True)
            for read, stream in ((self._read_stdout, self._launcher.stdout), (self._read_stderr, self._launcher.stderr))
        ]
        for reader in self._readers:
            reader.start()
        try:
            self._is_ready.wait()
        except BaseException:
            self.close()
            raise
        if not self.address:
            self.close()
            last = self._said[-1] if self._said else "it said nothing"
            raise ServingError(last.removeprefix("headway serve: "))

    @property
    def http_url(self) -> str:
        """Of OpenAI's API, without the path; for words with an ``--http-address``."""
        self._has_url.wait()
        return self._url

    def close(self) -> None:
        """End the processes."""
        if os.getpid() != self._owner:  # a fork of the program
            return
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # its processes end with it
        self._launcher.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._launcher.stdin, self._launcher.stdout, self._launcher.stderr):
            assert stream is not None
            stream.close()

    def _read_stdout(self, stream: IO[str]) -> None:
        for line in stream:
            ready = _READY.match(line)
            if ready:
                self.address = ready[1]
                self._is_ready.set()
        self._is_ready.set()

    def _read_stderr(self, stream: IO[str]) -> None:
        for line in stream:
            if line.strip():
                self._said.append(line.strip())
            if serves := _HTTP.match(line.strip()):
                self._url = serves[1]
                self._has_url.set()
            if not line.startswith(_OWN_AFFAIRS):
                sys.stderr.write(line)
        self._has_url.set()
