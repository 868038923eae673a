"""Marks in growing texts. Must not know: what they mean."""

from collections.abc import Iterable


def num_uncertain(text: str, marks: Iterable[str]) -> int:
    """Return how many characters at the end may begin one of the marks, or are one."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def may_begin(text: str, mark: str) -> bool:
    """Return whether a text is a beginning of ``mark``, which may still become all of it."""
    return len(text) < len(mark) and mark.startswith(text)


def _overlap(text: str, mark: str) -> int:
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
