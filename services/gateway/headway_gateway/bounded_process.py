"""A process of our own that answers one question after the other, within a time, and is replaced where it does not.

Owns: starting and ending it, the frames on its pipes, and the time that an answer may take.
Must not know: what is asked.

What must not stop the gateway, whatever it is given, runs in one: a template that loops, a schema that explodes. The
module that is its program limits what memory and time the process may use (``limit_this_process``, ``serve``).

A frame is a length (4 bytes, little-endian) and a body. The first body that a process gets is its opening.
"""

import contextlib
import os
import resource
import select
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
_MOST_CPU_S = 10


class NoAnswerError(Exception):
    """The process gave none and has been ended. ``is_too_late``: it took too long; else the message says what happened."""

    def __init__(self, message: str, *, is_too_late: bool = False) -> None:
        super().__init__(message)
        self.is_too_late = is_too_late


class BoundedProcess:
    """Runs the module of that name, from its first question on. For one thread at a time."""

    def __init__(self, module: str, opening: bytes) -> None:
        self._module = module
        self._opening = opening
        self.process: subprocess.Popen[bytes] | None = None
        """The process, while there is one."""
        self._end: weakref.finalize[[subprocess.Popen[bytes]], BoundedProcess] | None = None

    def start(self) -> bytes:
        """Start it, and return what it says to its opening.

        Raises:
            NoAnswerError: nothing.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD,
            bufsize=0,
            start_new_session=True,  # A Ctrl-C is the gateway's to handle.
        )
        self._end = weakref.finalize(self, _end, self.process)
        return self.ask(self._opening, _MOST_START_S)

    def ask(self, question: bytes, most_s: float) -> bytes:
        """Its answer to ``question``, within ``most_s`` seconds; it must have been started.

        Raises:
            NoAnswerError: there is none; the process is ended.
        """
        assert self.process is not None
        deadline = time.monotonic() + most_s
        try:
            _write(self.process, _LENGTH.pack(len(question)) + question, deadline)
            (length,) = _LENGTH.unpack(_read(self.process, _LENGTH.size, deadline))
            if length > _MOST_ANSWER_BYTES:
                raise NoAnswerError("the answer is too long")
            return _read(self.process, length, deadline)
        except OSError as error:
            self.stop()
            raise NoAnswerError(type(error).__name__) from None
        except NoAnswerError:
            self.stop()
            raise

    def stop(self) -> None:
        """End it, whatever it does."""
        if self._end is not None:
            self._end()
        self.process = None


def limit_this_process(most_memory_bytes: int) -> None:
    """Called by the program: no more memory than that, no files, no core dumps."""
    for what, most in (
        (resource.RLIMIT_AS, most_memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # It is lower already.
            resource.setrlimit(what, (most, most))


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Called by the program: answer every frame on standard input, until that is closed."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (body := read_frame(requests)) is not None:
        _allow_cpu_time()
        write_frame(answers, answer(body))


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame."""
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one frame, None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def _allow_cpu_time() -> None:
    """Let this process end by itself if it loops after the one who asked has gone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + _MOST_CPU_S, hard))


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
            raise NoAnswerError("its process has ended")
        parts += part
    return bytes(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # Not select: descriptors may be above 1023.
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise NoAnswerError("too late", is_too_late=True)
