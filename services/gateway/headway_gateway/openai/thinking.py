"""What a model thinks before it answers: ``<think>...</think>`` at the beginning of an output.

Owns: where thinking begins and ends in a growing text. Must not know: requests, events.
"""

from collections.abc import Iterator
from typing import NamedTuple

BEGIN, END = "<think>", "</think>"


class Thought(NamedTuple):
    """A piece of what the model thinks."""

    text: str


def teaches_thinking(template: str) -> bool:
    """Return whether a chat template knows of thinking."""
    return END in template


class ThinkingText:
    """One output's text, divided."""

    def __init__(self, *, has_begun: bool) -> None:
        """``has_begun``: the prompt ends inside a thought."""
        self._is_undecided = not has_begun
        self._is_thinking = has_begun
        self._held = ""
        self._is_between = False
        """Whether line breaks behind the thought may come."""

    def push(self, text: str) -> list[str | Thought]:
        """Return what is certain now."""
        if not (self._is_undecided or self._is_thinking):
            return self._answer(text)
        self._held += text
        return list(self._take())

    def finish(self) -> list[str | Thought]:
        """Return the rest. A thought that was cut off is one."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thought(held) if self._is_thinking else held]

    def _answer(self, text: str) -> list[str | Thought]:
        if self._is_between:
            text = text.lstrip("\n")
            self._is_between = not text
        return [text] if text else []

    def _take(self) -> Iterator[str | Thought]:
        if self._is_undecided:
            start = self._held.lstrip()
            if BEGIN.startswith(start[: len(BEGIN)]) and len(start) < len(BEGIN):
                return
            self._is_undecided, self._is_thinking = False, start.startswith(BEGIN)
            if not self._is_thinking:
                text, self._held = self._held, ""
                yield text
                return
            self._held = start.removeprefix(BEGIN)
        thought, mark, answer = self._held.partition(END)
        if mark:
            self._is_thinking, self._held, self._is_between = False, "", True
            if thought:
                yield Thought(thought)
            yield from self._answer(answer)
            return
        certain = len(self._held) - _num_uncertain(self._held)
        thought, self._held = self._held[:certain], self._held[certain:]
        if thought:
            yield Thought(thought)


def _num_uncertain(text: str) -> int:
    """The characters at the end that may begin the mark."""
    sizes = range(min(len(END), len(text)), 0, -1)
    return next((size for size in sizes if END.startswith(text[-size:])), 0)
