"""A chat template, run in a process of its own so that its time and memory are bounded.

Owns: starting and ending that process, the time a rendering may take, and what a failure is called.
Must not know: jinja2, tokenizers.
"""

import os
import select
import subprocess
import sys
import threading
import time
import weakref

import msgspec

from headway_gateway.chat_templates import MAX_MESSAGE_CHARACTERS, Messages, Rendering, TemplateSource

MOST_RENDER_S = 5.0
_MOST_START_S = 30.0
_MOST_ANSWER_BYTES = 1 << 29
_LENGTH_BYTES = 4
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


class TemplateError(Exception):
    """A template that does not give a text; the message is one line, which begins with a verb: it refuses, fails..."""


class ChatTemplate:
    """Renders chats by one template. Thread-safe; one at a time."""

    def __init__(self, source: str, special: dict[str, str], *, most_render_s: float = MOST_RENDER_S) -> None:
        """Start the process and compile the template in it.

        Raises:
            TemplateError: it cannot be compiled.
        """
        self._template = TemplateSource(source, dict(special))
        self._most_render_s = most_render_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], ChatTemplate] | None = None
        with self._lock:
            self._start()

    def render(self, messages: tuple[tuple[str, str], ...]) -> str:
        """The text of a chat.

        Raises:
            TemplateError: the template refuses these messages, fails on them, or takes too long over them.
        """
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(Messages(messages), self._most_render_s).text

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headway_gateway.chat_templates"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            bufsize=0,
            start_new_session=True,  # A Ctrl-C is the gateway's to handle.
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._ask(self._template, _MOST_START_S)

    def _ask(self, question: msgspec.Struct, most_s: float) -> Rendering:
        assert self._process is not None
        try:
            encoded = msgspec.json.encode(question)
        except UnicodeEncodeError:
            raise TemplateError("cannot render a lone surrogate; allowed: valid Unicode") from None
        deadline = time.monotonic() + most_s
        try:
            _write(self._process, len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded, deadline)
            length = int.from_bytes(_read(self._process, _LENGTH_BYTES, deadline), "little")
            if length > _MOST_ANSWER_BYTES:
                raise TemplateError("fails on these messages: the text is too long")
            answer = msgspec.json.decode(_read(self._process, length, deadline), type=Rendering)
        except (TemplateError, OSError, ValueError) as error:
            self._stop()
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(f"fails on these messages: {type(error).__name__}") from None
        if answer.refusal:
            raise TemplateError(f"refuses these messages: {answer.refusal[:MAX_MESSAGE_CHARACTERS]}")
        if answer.failure:
            raise TemplateError(f"fails on these messages: {answer.failure[:MAX_MESSAGE_CHARACTERS]}")
        return answer

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = None


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
            raise TemplateError("fails on these messages: its process has ended")
        parts += part
    return bytes(parts)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # Not select: descriptors may be above 1023.
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TemplateError("takes too long on these messages")
