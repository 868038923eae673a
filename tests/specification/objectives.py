"""Objectives on first tokens: who is urgent, who is late, who is shed."""

from headway_scheduler.core.state.arrival import Origin
from specification.endings import Endings
from specification.queue import Queue
from specification.state import SpecState


class Objectives:
    def __init__(self, state: SpecState, endings: Endings, queue: Queue) -> None:
        self._state = state
        self._endings = endings
        self._queue = queue
        self.shed: list[Origin] = []

    def mind_first_tokens(self, now: float) -> None:
        state = self._state
        watched = [r for r in state.waiting if r.latest_start is not None and not r.has_started]
        events = []
        for r in watched:
            at_risk = max(r.arrival_time, r.latest_start - 0.5 * r.objective_s)
            if at_risk <= now and r.danger < 1:
                events.append((at_risk, 2 * r.arrival, r))
            if r.latest_start <= now and r.danger < 2:
                events.append((r.latest_start, 2 * r.arrival + 1, r))
        is_untried = not state.running
        for _, number, r in sorted(events, key=lambda event: event[:2]):
            r.danger = 1 + number % 2
            if number % 2 == 0:
                r.lane = self._queue.lane(1)
            elif state.limits.shed_late and not is_untried:
                self.shed.append(r.origin)
                self._endings.end(r)
            else:
                r.lane = self._queue.lane(3)
                is_untried = False

    def hurry(self) -> None:
        """Too many steps have only decoded while a prompt waited: the next request is urgent."""
        state, draft = self._state, self._state.draft
        draft.is_prompt_due = 0 < state.limits.max_decode_only_steps <= state.num_decode_only_steps
        draft.is_prompt_due &= not (state.limits.batching == "static" and state.batch_is_closed)
        if draft.is_prompt_due and state.waiting and self._queue.in_order()[0].lane in {2, 3}:
            self._queue.in_order()[0].lane = self._queue.lane(1)

    def take_shed(self) -> list[Origin]:
        shed, self.shed = self.shed, []
        return shed
