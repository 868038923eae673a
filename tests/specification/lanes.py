"""Who may run in the step of a lane, and which lanes may have one."""

from specification.gaps import Gaps
from specification.requests import SpecRequest
from specification.state import SpecState


class Lanes:
    def __init__(self, state: SpecState, gaps: Gaps) -> None:
        self._state = state
        self._gaps = gaps
        self.newest_lane = -1

    def lanes_in_turn(self) -> list[int]:
        """Each lane once, from the one behind that of the newest step; not who has its share of the steps in flight."""
        state = self._state
        num_lanes = state.capacity.num_lanes
        if num_lanes == 1:
            return [0]
        most = 1 if state.limits.batching == "orca" else -(-state.max_in_flight // num_lanes)
        in_turn = [(self.newest_lane + 1 + place) % num_lanes for place in range(num_lanes)]
        return [lane for lane in in_turn if sum(step.lane == lane for step in state.in_flight) < most]

    def who_may_run(self) -> list[SpecRequest]:
        state = self._state
        if state.has_lanes:
            # Who decodes has a lane. Who is in its prompt may run in a step of any.
            return [r for r in state.running if r.step_lane in {None, state.lane}]
        if state.limits.batching != "orca":
            return list(state.running)
        # A request is in one batch at a time, and a batch has a size.
        ready = [r for r in state.running if not state.is_in_flight(r)]
        in_order = sorted(ready, key=self._gaps.urgency) if state.protects_gaps else ready
        return [r for r in ready if r in in_order[: state.max_batch]]

    def within_lane(self, chunk: int, left: int) -> int:
        """How much of a chunk may run in this step: nothing of it in a full one, and not the end of the prompt in a lane
        that has its share of those that run or soon will."""
        state = self._state
        if not state.has_lanes:
            return chunk
        decoding = sum(r.step_lane == state.lane for r in state.running)
        if decoding + sum(map(state.is_planned, state.running)) >= state.max_batch:
            return 0
        coming = 0
        if state.waiting:
            coming = max(1, min(len(state.waiting), state.max_running - len(state.running), state.pool.num_free))
        share = -(-min(state.max_running, len(state.running) + coming) // state.capacity.num_lanes)
        ending = [
            r for r in state.running if state.is_planned(r) and r.computed + state.draft.tokens[r.row] == r.prompt_end
        ]
        return chunk if chunk < left or decoding + len(ending) < share else chunk - 1

    def exceptions(self) -> list[tuple[int, int]]:
        """Rows, of those that the step would run anyway, that do not run one token; with lanes, all prompts that run."""
        state, draft = self._state, self._state.draft
        if not state.has_lanes:
            return sorted((r.row, draft.tokens.get(r.row, 0)) for r in state.running if draft.tokens.get(r.row, 0) != 1)
        prompts = [(r.row, draft.tokens[r.row]) for r in state.running if r.step_lane is None and r.row in draft.tokens]
        return sorted(
            prompts + [(r.row, 0) for r in state.running if r.step_lane == state.lane and r.row not in draft.tokens]
        )
