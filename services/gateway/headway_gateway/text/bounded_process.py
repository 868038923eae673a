"""A child process for untrusted programs, which answers questions, each within a time limit.

A frame is a length (4 bytes, little-endian) and a body; the first body opens the process.
"""

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO

_MOST_START_S = 30.0
_MOST_ANSWER_BYTES = 1 << 29
_LENGTH = struct.Struct("<I")
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
_MOST_CPU_S = 10.0
_SOMEBODY_ELSES = (-signal.SIGKILL, -signal.SIGTERM)
"""The errors of a process that ends."""


class NoAnswerError(Exception):
    """The process has been ended. ``is_its_own_fault`` is False if something else ended it."""

    def __init__(self, message: str, *, is_its_own_fault: bool = False) -> None:
        super().__init__(message)
        self.is_its_own_fault = is_its_own_fault


class OutOfTimeError(NoAnswerError):
    """Time ran out. The same question may succeed later."""


class BoundedProcess:
    """Runs one module as a child."""

    def __init__(self, module: str, opening: bytes) -> None:
        self._module = module
        self._opening = opening
        self.process: subprocess.Popen[bytes] | None = None
        """The process, while there is one."""
        self._end: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None

    def start(self) -> bytes:
        """Start the child, and return its first answer.

        Raises:
            NoAnswerError: there is none.
        """
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD,
                bufsize=0,
                start_new_session=True,  # The gateway handles Ctrl-C.
            )
        except OSError as error:
            raise NoAnswerError(f"its process cannot be started: {error.strerror}") from None
        self._end = weakref.finalize(self, _end, self.process)
        return self.ask(self._opening, _MOST_START_S)

    def ask(self, question: bytes, most_s: float) -> bytes:
        """Return the answer, within ``most_s`` seconds.

        Raises:
            NoAnswerError: the process is ended.
        """
        assert self.process is not None
        deadline = time.monotonic() + most_s
        try:
            _write(self.process, _LENGTH.pack(len(question)) + question, deadline)
            (length,) = _LENGTH.unpack(_read(self.process, _LENGTH.size, deadline))
            if length > _MOST_ANSWER_BYTES:
                raise NoAnswerError("the answer is too long")
            return _read(self.process, length, deadline)
        except (OSError, EOFError):
            raise self._death() from None
        except NoAnswerError:
            self.stop()
            raise

    def _death(self) -> NoAnswerError:
        process = self.process
        assert process is not None
        self.stop()
        if process.returncode == -signal.SIGPROF:
            return OutOfTimeError("it used up its processor time")
        return NoAnswerError("its process has ended", is_its_own_fault=process.returncode not in _SOMEBODY_ELSES)

    def stop(self) -> None:
        """End the child at once."""
        if self._end is not None:
            self._end()
        self.process = None


def limit_this_process(most_memory_bytes: int) -> None:
    """In the child: limit memory; allow no files."""
    for what, most in (
        (resource.RLIMIT_AS, most_memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # the limit is already lower
            resource.setrlimit(what, (most, most))


def serve(answer: Callable[[bytes], bytes], most_cpu_s: float = _MOST_CPU_S) -> None:
    """In the child: answer frames, each within ``most_cpu_s``. Unlike the clock, processor time ignores the load."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    allowed_s = _MOST_START_S
    while (body := read_frame(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, allowed_s)
        write_frame(answers, answer(body))
        allowed_s = most_cpu_s


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return None at the end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _write(process: "subprocess.Popen[bytes]", data: bytes, deadline: float) -> None:
    assert process.stdin is not None
    descriptor = process.stdin.fileno()
    os.set_blocking(descriptor, False)
    rest = memoryview(data)
    while rest:
        _wait(descriptor, select.POLLOUT, deadline)
        rest = rest[os.write(descriptor, rest) :]


def _read(process: "subprocess.Popen[bytes]", num_bytes: int, deadline: float) -> bytes:
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    parts = bytearray()
    while len(parts) < num_bytes:
        _wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(1 << 20, num_bytes - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select would refuse descriptors above 1023
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise OutOfTimeError("no answer came in time")
