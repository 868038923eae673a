"""Objectives on the gaps between tokens: who sits out, and how much of prompts may run."""

import math
from collections.abc import Callable

from specification.queue import Queue
from specification.requests import SpecRequest
from specification.state import SpecState


class Gaps:
    def __init__(self, state: SpecState, queue: Queue, predict_s: Callable[[int, int, int, int], float] | None) -> None:
        self._state = state
        self._queue = queue
        self.predict_s = predict_s
        """Of a step's tokens, rows, context tokens and pairs of prefill attention."""
        self.last_answer_time = [0.0] * state.capacity.num_lanes
        self.prompts_kept_out_since: float | None = None

    def protect_gaps(self) -> None:
        """Who would miss an objective on gaps has lower classes sit out, if that is enough."""
        draft = self._state.draft
        if not self._state.protects_gaps or self.predict_s is None:
            return
        slack, class_of = self._slack, self._class_of
        decodes = [
            r for r in draft.may_run if r.computed >= r.prompt_end and not r.stalled and r.computed < r.limit - 1
        ]
        decodes.sort(key=self.urgency)
        if not decodes:
            return

        def duration_s(running: list[SpecRequest], num_prompt_tokens: int = 0, num_before: int = 0) -> float:
            """Of a step in which these decode, and one more row runs part of a prompt."""
            pairs = num_prompt_tokens * num_before + num_prompt_tokens * (num_prompt_tokens + 1) // 2
            tokens = len(running) + num_prompt_tokens
            context = sum(r.computed for r in running) + num_before
            return self.predict_s(tokens, len(running) + (num_prompt_tokens > 0), context, pairs)

        running = decodes
        for number in sorted({class_of(r) for r in decodes}):
            not_lower = [r for r in decodes if class_of(r) <= number]
            slacks = [slack(r) for r in not_lower if class_of(r) == number and slack(r) >= duration_s(not_lower)]
            if slacks:
                kept = [
                    decodes[:count]
                    for count in range(len(not_lower), len(decodes) + 1)
                    if count == len(not_lower) or duration_s(decodes[:count]) <= min(slacks)
                ]
                running = min(running, kept[-1], key=len)
        draft.held_back = decodes[len(running) :]
        if not draft.is_prompt_due:
            self._limit_prompts(running, duration_s)

    def _slack(self, request: SpecRequest) -> float:
        has_objective = request.itl_slo_s > 0
        return request.token_time + request.itl_slo_s - self._state.draft.start_of_step if has_objective else math.inf

    def _class_of(self, request: SpecRequest) -> int:
        """Who was promoted, or had no token for too long, goes before all classes."""
        is_starved = self._state.draft.start_of_step - request.token_time >= self._state.limits.aging_s
        return 0 if request.rank % 2 == 0 or is_starved else request.priority

    def urgency(self, request: SpecRequest) -> tuple[float, ...]:
        return (self._class_of(request), self._slack(request), request.token_time, *request.key)

    def start_of_step(self) -> float:
        """When this step will start: those in flight bring their tokens before."""
        state = self._state
        start = self.last_answer_time[state.lane]
        in_flight = [step for step in state.in_flight if step.lane == state.lane]
        for step in in_flight:
            if step.expected_s is not None:
                start = max(start, step.sent_time) + step.expected_s
            start = max(start, state.now)
            for request, stay, _, _, samples in step.ran:
                if samples and request.row is not None and stay == request.stay:
                    request.token_time = start
        return start if in_flight else state.now

    def _limit_prompts(self, running: list[SpecRequest], duration_s: Callable[..., float]) -> None:
        """Prompts get as many times 64 tokens as those of higher classes have time for."""
        state, draft = self._state, self._state.draft
        under_way = [r for r in state.running if r.computed < r.prompt_end]
        prompts = under_way + self._queue.in_order()[:1]
        if not prompts:
            self.prompts_kept_out_since = None
            return
        highest = min(0 if r.rank % 2 == 0 else r.priority for r in prompts)
        protected = [r for r in running if self._class_of(r) < highest]
        slacks = [self._slack(r) for r in protected if r.itl_slo_s]
        keepable = [least for least in slacks if least >= duration_s(running)]
        before = max((r.computed for r in under_way), default=0)
        tiles = 1 if slacks and not keepable else 0
        for count in range(1, -(-(draft.most_tokens - len(running)) // 64) + 1):
            if all(duration_s(running, 64 * count, before) <= least for least in keepable) and (keepable or not slacks):
                tiles = count
        if tiles:
            self.prompts_kept_out_since = None
        elif self.prompts_kept_out_since is None:
            self.prompts_kept_out_since = state.now
        since = self.prompts_kept_out_since
        if since is None or state.now - since < state.limits.aging_s:
            draft.most_tokens = min(draft.most_tokens, len(running) + 64 * tiles)

    def expected_s(self) -> float:
        """How long this step will take."""
        draft = self._state.draft
        rows = [r for r in self._state.running if r.row in draft.tokens]
        chunks = [(draft.tokens[r.row], r.computed) for r in rows if r.computed < r.prompt_end]
        pairs = sum(count * before + count * (count + 1) // 2 for count, before in chunks)
        return self.predict_s(sum(draft.tokens.values()), len(rows), sum(r.computed for r in rows), pairs)

    def record_token_times(self, lane: int, requests: list[SpecRequest], now: float) -> None:
        self.last_answer_time[lane] = now
        if self._state.protects_gaps:
            for request in requests:
                request.token_time = now
