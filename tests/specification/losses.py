"""What is done after steps were lost: somebody runs alone, or all come back a few at a time."""

import math

from headway_scheduler.core.state.arrival import Origin
from specification.requests import SpecRequest
from specification.room import Room
from specification.state import SpecState


class Losses:
    def __init__(self, state: SpecState, room: Room) -> None:
        self._state = state
        self._room = room
        self.alone: SpecRequest | None = None
        self.unproven: list[tuple[SpecRequest, int]] = []
        """Who was in lost steps, each with the tokens with which it has come as far as those would have brought it."""
        self.window = 0
        """How many of them may run at once."""

    def run_alone(self, origin: Origin | None) -> None:
        self.alone = next((r for r in self._state.waiting + self._state.running if r.origin == origin), None)

    def start_slowly(self, origins: list[Origin]) -> None:
        """Those who were in lost steps come back a few at a time: twice the square root of their number."""
        state = self._state
        if state.limits.batching == "static":
            return
        known = [r for r, _ in self.unproven]
        more = [r for r in state.waiting + state.running if r.origin in origins]
        goals = {id(r): len(r.tokens) + state.max_in_flight for r in more}
        self.unproven = [(r, goals.get(id(r), goal)) for r, goal in self.unproven]
        self.unproven += [(r, goals[id(r)]) for r in more if r not in known]
        self.window = 2 * math.isqrt(len(self.unproven))

    def count_window(self) -> None:
        self.unproven = [(r, goal) for r, goal in self.unproven if len(r.tokens) < goal]
        self.num_in_window = sum(r.row is not None for r, _ in self.unproven)

    def clear_the_way(self) -> None:
        """Who is to run alone has everybody else make way."""
        if self.alone is not None:
            for request in sorted((r for r in self._state.running if r is not self.alone), key=lambda r: r.row):
                self._room.preempt(request)
            self._state.draft.short = False
