"""Whose turn it is to start, by prefixes and adapters."""

from specification.losses import Losses
from specification.queue import Queue
from specification.requests import SpecRequest
from specification.state import SpecState


class Candidates:
    def __init__(self, state: SpecState, losses: Losses, queue: Queue) -> None:
        self._state = state
        self._losses = losses
        self._queue = queue

    def next_to_start(self, now: float) -> tuple[list[SpecRequest], SpecRequest | None]:
        state = self._state
        if self._losses.alone is not None:
            return [], self._losses.alone if not state.running and not state.in_flight else None
        first = self._queue.first(now)
        if (
            first is not None
            and any(first is r for r, _ in self._losses.unproven)
            and self._losses.num_in_window >= self._losses.window
        ):
            return [], None
        if first is None:
            return [], None
        has_place = self._has_place_for_adapter_of
        if first.passed_over >= 16 or self._losses.unproven or (has_place(first) and not state.limits.prefix_aware):
            return [], first if has_place(first) else None
        queue = self._queue.in_order()
        if state.limits.order == "fair":
            alike = [r for r in queue if r.lane != 0 and r.tenant == first.tenant] if first.lane else [first]
        else:
            alike = [r for r in queue if (r.rank, r.lane) == (first.rank, first.lane)]
        few = alike[:8]
        allowed = [r for r in few if has_place(r)]
        if not allowed:
            return [], None
        best = max(allowed, key=lambda r: len(self.find_cached(r)[0])) if state.limits.prefix_aware else allowed[0]
        return few[: few.index(best)], best

    def _has_place_for_adapter_of(self, request: SpecRequest) -> bool:
        """Rows of at most so many adapters run."""
        adapters = {r.adapter for r in self._state.running if r.adapter}
        return not request.adapter or request.adapter in adapters or len(adapters) < self._state.limits.max_adapters

    def find_cached(self, request: SpecRequest) -> tuple[list[int], list[int]]:
        if not self._state.limits.enable_prefix_caching:
            return [], []
        return self._state.pool.find(request.tokens, self._most_cached(request), request.scope)

    def _most_cached(self, request: SpecRequest) -> int:
        """Tokens that need not run: not the last, nor those from which log probabilities are still to come."""
        if request.runs_whole:
            return 0
        is_owed = request.wants_prompt_logprobs and request.told < request.num_prompt_tokens - 1
        return min(len(request.tokens) - 1, request.told) if is_owed else len(request.tokens) - 1

    def waits_for_prefix(self, request: SpecRequest, start: int) -> bool:
        """Another computes a beginning of this prompt that is worth sharing, and some of it is in this step or in flight."""
        state = self._state
        limits, size = state.limits, state.capacity.block_size
        if not limits.prefix_wait_tokens or not limits.enable_prefix_caching or limits.batching == "static":
            return False
        end = -(-(start + limits.prefix_wait_tokens) // size) * size
        if request.host_blocks or end > self._most_cached(request) // size * size:
            return False
        planned = [
            r for row in reversed(state.draft.tokens) for r in state.running if r.row == row and state.is_planned(r)
        ]
        in_flight = [
            r
            for step in reversed(state.in_flight)
            for r, stay, _, computed, _ in reversed(step.ran)
            if stay == r.stay and self._is_chunk(r, computed)
        ]
        newest = list(dict.fromkeys(planned + in_flight))[:8]
        return any(
            r is not request
            and r.scope == request.scope
            and r.prompt_end // size * size >= end
            and r.tokens[:end] == request.tokens[:end]
            for r in newest
        )

    def _is_chunk(self, request: SpecRequest, computed: int) -> bool:
        return request.row is not None and computed <= request.prompt_end
