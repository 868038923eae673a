"""A chat template in a bounded process."""

import contextlib
import threading

import msgspec

from headway_gateway.text.bounded_process import BoundedProcess, NoAnswerError, OutOfTimeError
from headway_gateway.text.chat_templates import MAX_MESSAGE_CHARACTERS, Rendering, TemplateSource
from headway_gateway.text.conversation import Conversation

MOST_RENDER_S = 5.0
_PROGRAM = "headway_gateway.text.chat_templates"


class TemplateError(Exception):
    """The template gave no text; the message begins with a verb. ``part``: of the chat, if that alone is to blame."""

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part


class TemplateUnavailableError(TemplateError):
    """There is no text this time; the template is not at fault."""


class ChatTemplate:
    """Renders one chat at a time. Thread-safe."""

    def __init__(
        self,
        source: str,
        special: dict[str, str],
        *,
        for_tools: str | None = None,
        most_render_s: float = MOST_RENDER_S,
    ) -> None:
        """Compile the template; ``for_tools``: see ``TemplateSource``.

        Raises:
            TemplateError: it does not compile.
        """
        self._most_render_s = most_render_s
        self._lock = threading.Lock()
        self._renderer = BoundedProcess(_PROGRAM, _encoded(TemplateSource(source, dict(special), for_tools)))
        with self._lock, contextlib.suppress(TemplateUnavailableError):  # the first chat tries again
            self._start()

    def render(self, chat: Conversation) -> str:
        """Return the text of a chat.

        Raises:
            TemplateError: the template refuses these messages, or fails.
            TemplateUnavailableError: it took too long, or its process ended.
        """
        question = _encoded(chat)
        with self._lock:
            if self._renderer.process is None:
                self._start()
            try:
                answer = self._asked(question)
            except NoAnswerError as error:
                raise _no_rendering(error) from None
            return self._rendered(answer).text

    def _asked(self, question: bytes) -> bytes:
        try:
            return self._renderer.ask(question, self._most_render_s)
        except OutOfTimeError:
            raise
        except NoAnswerError:  # it may have been broken before
            self._start()
            return self._renderer.ask(question, self._most_render_s)

    def _start(self) -> None:
        try:
            answer = self._renderer.start()
        except NoAnswerError as error:
            raise _no_rendering(error, "cannot be compiled") from None
        try:
            self._rendered(answer, "cannot be compiled", "cannot be compiled")
        except TemplateError:
            self._renderer.stop()
            raise

    def _rendered(
        self, encoded: bytes, refuses: str = "refuses these messages", fails: str = "fails on these messages"
    ) -> Rendering:
        try:
            answer = msgspec.json.decode(encoded, type=Rendering)
        except ValueError as error:
            self._renderer.stop()
            raise TemplateError(f"{fails}: {type(error).__name__}") from None
        if answer.refusal:
            refuses = f"refuses these {answer.part}" if answer.part else refuses
            raise TemplateError(f"{refuses}: {answer.refusal[:MAX_MESSAGE_CHARACTERS]}", answer.part)
        if answer.failure:
            raise TemplateError(f"{fails}: {answer.failure[:MAX_MESSAGE_CHARACTERS]}")
        return answer


def _encoded(question: msgspec.Struct) -> bytes:
    try:
        return msgspec.json.encode(question)
    except UnicodeEncodeError:
        raise TemplateError("cannot render a lone surrogate; allowed: valid Unicode") from None


def _no_rendering(error: NoAnswerError, fails: str = "fails on these messages") -> TemplateError:
    if isinstance(error, OutOfTimeError):
        return TemplateUnavailableError(f"took too long this time: {error}")
    if error.is_its_own_fault:
        return TemplateError(f"{fails}: {error}")
    return TemplateUnavailableError(f"gave no text this time: {error}")
