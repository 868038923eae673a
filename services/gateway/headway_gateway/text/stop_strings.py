"""Finds stop strings in text that comes in pieces; never releases part of one.

One automaton per stop string (Knuth, Morris and Pratt 1977); its state is how many characters to hold. The first
complete stop string wins, then the longest.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches one text."""

    __slots__ = ("_failures", "_first_characters", "_held", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Add text; return the certain part."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        text_with_held = self._held + text
        for place in range(len(self._held), len(text_with_held)):
            self.matched = self._advance(text_with_held[place])
            if self.matched is not None:
                self._held = ""
                return text_with_held[: place + 1 - len(self.matched)]
        held = max(self._states)
        self._held = text_with_held[len(text_with_held) - held :]
        return text_with_held[: len(text_with_held) - held]

    def finish(self) -> str:
        """Return the held text."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        complete: str | None = None
        states = self._states
        for which, stop in enumerate(self._stops):
            failure = self._failures[which]
            state = states[which]
            while state and stop[state] != character:
                state = failure[state]
            if stop[state] == character:
                state += 1
            states[which] = state
            if state == len(stop) and complete is None:
                complete = stop
        return complete


def _failure_function(stop: str) -> list[int]:
    """For each matched length, the longest shorter one that is a prefix."""
    failure = [0, 0]
    state = 0
    for place in range(1, len(stop)):
        while state and stop[state] != stop[place]:
            state = failure[state]
        if stop[state] == stop[place]:
            state += 1
        failure.append(state)
    return failure
