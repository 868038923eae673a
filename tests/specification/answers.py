"""Taking in what steps have brought."""

from headway_scheduler.core.state.arrival import Origin
from specification.endings import Endings
from specification.gaps import Gaps
from specification.requests import SpecRequest
from specification.speculation import Speculation
from specification.state import SpecState


class Answers:
    def __init__(self, state: SpecState, endings: Endings, gaps: Gaps, speculation: Speculation) -> None:
        self._state = state
        self._endings = endings
        self._gaps = gaps
        self._speculation = speculation

    def update(
        self, sampled: list[int], accepted: dict[int, tuple[int, list[int]]] | None = None, now: float = 0.0
    ) -> tuple[list[tuple[Origin, int, int]], list[tuple[Origin, str, int]]]:
        """Take the oldest step's tokens in; answer with new tokens (origin, index, id) and ends (origin, why, stop).

        ``accepted`` by row that speculated: how many tokens were proposed, and what follows the first token.
        """
        state = self._state
        step = state.in_flight.pop(0)
        state.pool.complete(step.number)
        by_row = dict(zip(sorted(row for _, _, row, _, samples in step.ran if samples), sampled, strict=True))
        for request, stay, _, computed, _ in step.ran:
            if request.row is not None and request.stay == stay:
                request.confirmed = computed
                self._cache_prompt(request)
            if request in state.running or request in state.waiting:
                request.told = max(request.told, min(computed, request.num_prompt_tokens - 1))
        delivered: list[tuple[Origin, int, int]] = []
        ended: list[tuple[Origin, str, int]] = []
        sampling = sorted((entry for entry in step.ran if entry[4]), key=lambda entry: entry[2])
        stays = [entry for entry in sampling if entry[0].row is not None and entry[0].stay == entry[1]]
        left = [entry for entry in sampling if entry[0] in state.waiting and entry[0].unreturned]
        self._gaps.record_token_times(step.lane, [request for request, *_ in stays], now)
        for request, _, row, _, _ in stays:
            request.sampled_ahead -= 1
            self._endings.deliver(request, by_row[row], delivered)
        for request, _, row, _, _ in stays:
            self._endings.end_if_done(request, by_row[row], ended)
        for request, _, row, _, _ in left:
            request.unreturned -= 1
            self._endings.deliver(request, by_row[row], delivered)
            self._endings.end_if_done(request, by_row[row], ended)
        for row, (num_proposed, tokens) in sorted((accepted or {}).items()):
            for request in [
                r for r, stay, its_row, *_ in step.ran if its_row == row and r.row == row and r.stay == stay
            ]:
                self._speculation.take_accepted(request, step.speculating[row], num_proposed, tokens, delivered, ended)
        return delivered, ended

    def sampling_rows(self) -> list[int]:
        """Rows of the oldest step in flight that bring a token, ascending."""
        return sorted(row for _, _, row, _, samples in self._state.in_flight[0].ran if samples)

    def _cache_prompt(self, request: SpecRequest) -> None:
        # Output blocks are registered only when the request leaves: until then nobody is likely to ask for them.
        if self._state.limits.enable_prefix_caching and request.confirmed <= request.prompt_end:
            self._state.pool.register(request, request.confirmed)
