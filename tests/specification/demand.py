"""What requests will need: blocks, and the work that is expected of them."""

from specification.requests import SpecRequest
from specification.state import SpecState
from specification_of_learning import SpecifiedForecast, specified_horizons


class Demand:
    def __init__(self, state: SpecState) -> None:
        self._state = state
        self.forecast: SpecifiedForecast | None = None

    def look_ahead(self) -> None:
        """Foresee what those that run will come to hold."""
        state = self._state
        size = state.capacity.block_size
        self.horizons = specified_horizons(size, state.capacity.max_model_len)
        self.forecast = SpecifiedForecast(size, self.horizons)
        for r in state.running:
            self.forecast.add(len(r.tokens), self.chances(r))
        num_used = sum(count > 0 for count in state.pool.references)
        num_counted_again = sum(len(r.blocks) for r in state.running) - num_used
        self.num_usable = len(state.pool.references) + max(num_counted_again, 0)

    def chances(self, request: SpecRequest) -> list[float]:
        age = len(request.tokens) - request.num_prompt_tokens
        limit = request.limit - request.num_prompt_tokens
        return self._state.lengths.chances_to_go_on(request.curve, age, limit, self.horizons)

    def expected_work(self, request: SpecRequest) -> int:
        """Tokens still to be computed, those of the output counted eightfold, when it takes its place in the queue."""
        age = len(request.tokens) - request.num_prompt_tokens
        most = request.limit - request.num_prompt_tokens
        predicted = self._state.lengths.predicted_output(request.curve, age, most)
        return len(request.tokens) + 8 * ((most if predicted is None else predicted) - age)

    def headroom(self, request: SpecRequest) -> int:
        state = self._state
        if not request.preemptions or not state.running:
            return 0
        return min(len(state.running) << min(request.preemptions - 1, 16), len(state.pool.references) // 8)

    def owed(self) -> int:
        """Blocks that running requests have been promised and do not hold."""
        state = self._state
        size = state.capacity.block_size
        if state.reserve == "full":
            return sum(-(-(r.limit - 1) // size) - len(r.blocks) for r in state.running)
        if state.reserve == "prompt":
            return sum(-(-r.prompt_end // size) - len(r.blocks) for r in state.running if r.computed < r.prompt_end)
        return 0

    def num_missing(self, request: SpecRequest, chunk_end: int, num_shared: int, unshared: int) -> int:
        """Blocks that ``request`` lacks to start; ``unshared`` are free beside those that it shares."""
        state = self._state
        size = state.capacity.block_size
        if state.reserve == "predicted":
            peak = 0  # beside nobody, everything fits that was accepted
            if state.running:
                peak = self.forecast.peak_with(len(request.tokens), self.chances(request))
            return max(peak - self.num_usable, -(-chunk_end // size) - unshared) - num_shared
        wanted = {
            "none": chunk_end,
            "prompt": min(len(request.tokens) + 1, request.limit - 1),
            "full": request.limit - 1,
        }[state.reserve]
        return -(-wanted // size) - num_shared - (unshared - self.owed())

    def first_chunk(self, left: int, room: int) -> int:
        """Of the tokens that are left of a prompt, those that may run, ``room`` having blocks."""
        state = self._state
        chunk = min(left, state.budget())
        if state.limits.batching == "split_fuse":
            return min(chunk, room)
        if state.limits.batching == "chunked" or chunk == min(left, state.draft.most_tokens):
            return chunk
        return 0  # the prompt is whole, or as much of it as a step can have
