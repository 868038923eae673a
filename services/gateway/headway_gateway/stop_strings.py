"""Finds stop strings in text that arrives in pieces, without ever letting out a part of one.

Owns: how much of the text is certain not to belong to a stop string, and where the first one ends it.
Must not know: tokens, streams, gRPC.

One Knuth-Morris-Pratt automaton per stop string (Knuth, Morris and Pratt 1977): the state is how many characters of
the stop string the text ends with, so what must be held back is the largest state, and the cost per character does not
depend on the length of the stop strings. The stop string that is complete first, in characters, wins; of several
complete at the same character, the longest.
"""

from collections.abc import Sequence


class StopMatcher:
    """Watches one output text for ``stops`` (each at least one character)."""

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
        """Take in more text; return what may be let out. After a match everything further is swallowed."""
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
        """Return the text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Feed one character to every automaton; return the stop string it completes."""
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
    """For each matched length, the longest shorter one that is also a prefix: where to go on after a mismatch."""
    failure = [0, 0]
    state = 0
    for place in range(1, len(stop)):
        while state and stop[state] != stop[place]:
            state = failure[state]
        if stop[state] == stop[place]:
            state += 1
        failure.append(state)
    return failure
