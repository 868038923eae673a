"""Contents of messages as a chat template wants them: a text, or a list of parts.

Owns: how it is found out, and the change from one to the other. Must not know: how a template is compiled and run.

Templates of models that see pictures may show parts alone, and of a text nothing (LLaVA, SmolVLM). Most others show texts
alone, and of parts what Python calls them.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

_TRIED = "17d4c1"
"""A text that no template has."""
_NAMES_OF_A_PART = ("'type'", '"type"')


class ContentInTemplate:
    """One template's needs. ``render`` gives the text of a chat of one message, or raises anything."""

    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        self._render = render

    def shaped(self, content: object) -> object:
        """A text or a list of texts' parts as the template shows it; anything else as it is."""
        if isinstance(content, str):
            return _parts([content]) if self._shows_parts_alone else content
        if not isinstance(content, list) or not all(map(_is_text, content)) or self._shows_parts:
            return content
        return "\n".join(part["text"] for part in content)

    @cached_property
    def _shows_parts(self) -> bool:
        return self._shows(_parts([_TRIED]))

    @cached_property
    def _shows_parts_alone(self) -> bool:
        return not self._shows(_TRIED) and self._shows_parts

    def _shows(self, content: object) -> bool:
        try:
            text = self._render({"role": "user", "content": content})
        except Exception:  # noqa: BLE001  # Whatever a template does, it does not show this.
            return False
        return _TRIED in text and not any(name in text for name in _NAMES_OF_A_PART)


def with_text(content: Any, text: str) -> Any:
    """A content with a text behind it."""
    return [*content, *_parts([text])] if isinstance(content, list) else content + text


def with_more_text(content: Any, text: str) -> Any:
    """A content whose last text is longer by ``text``."""
    if not isinstance(content, list):
        return content + text
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + text}] if content else _parts([text])


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
