"""Making a step. Must not know: why a part decides as it does."""

from specification.admission import Admission
from specification.gaps import Gaps
from specification.host_blocks import HostBlocks
from specification.lanes import Lanes
from specification.losses import Losses
from specification.objectives import Objectives
from specification.requests import SpecStep
from specification.serving import Serving
from specification.speculation import Speculation
from specification.state import SpecState


class Steps:
    """The order in which all parts have their say about a step."""

    def __init__(
        self,
        state: SpecState,
        host_blocks: HostBlocks,
        gaps: Gaps,
        lanes: Lanes,
        losses: Losses,
        objectives: Objectives,
        admission: Admission,
        serving: Serving,
        speculation: Speculation,
    ) -> None:
        self._state = state
        self._host_blocks = host_blocks
        self._gaps = gaps
        self._lanes = lanes
        self._losses = losses
        self._objectives = objectives
        self._admission = admission
        self._serving = serving
        self._speculation = speculation
        self._owed: set[int] = set()
        """Lanes that decode before another prompt runs alone, since prompts had no block left."""

    def schedule(self, now: float) -> dict[str, object] | None:
        state = self._state
        if len(state.in_flight) >= state.max_in_flight:
            return None
        if state.in_flight and state.in_flight[-1].speculating:
            return None  # what follows depends on what was right
        state.now = now
        state.begin_step()
        self._losses.clear_the_way()
        self._losses.count_window()
        if not state.running:
            state.batch_is_closed = False
        self._objectives.mind_first_tokens(now)
        for lane in self._lanes.lanes_in_turn():
            state.lane = lane
            message = self._schedule_in_lane(now)
            if message is not None:
                return message
        return None

    def _schedule_in_lane(self, now: float) -> dict[str, object] | None:
        state = self._state
        state.begin_step()
        self._objectives.hurry()
        state.draft.start_of_step = self._gaps.start_of_step() if state.protects_gaps else now
        state.draft.may_run = self._lanes.who_may_run()
        state.draft.num_chosen = len(state.draft.may_run)
        state.draft.most_tokens = state.capacity.most_batched_tokens(state.limits.max_num_batched_tokens)
        if state.limits.batching in {"static", "prefill_first"}:
            self._owed &= {r.step_lane for r in state.running if not r.stalled and r.computed < r.limit - 1}
            if not any(request.stalled for request in state.running) and not self._owed:
                self._serving.serve_prompts()
                self._admission.admit()
                if state.draft.short and not state.draft.tokens:
                    self._owed = set(range(state.capacity.num_lanes))
            if not state.draft.tokens:  # decodes run only in a step without a prompt
                self._gaps.protect_gaps()
                self._serving.serve_decoding()
        else:
            self._gaps.protect_gaps()
            self._serving.serve_decoding()
            self._serving.serve_prompts()
            self._admission.admit()
        if not state.draft.tokens and any(r.row is not None for r in state.draft.held_back):
            state.draft.held_back = []  # those for which others sat out lack blocks
            self._serving.serve_decoding()
        for blocks in self._host_blocks.to_come:
            self._host_blocks.free[:0] = blocks  # the last that were given up are taken first
        self._host_blocks.to_come = []
        total = sum(state.draft.tokens.values())
        if total:
            self._speculation.speculate()
        return self._commit(total) if total else None

    def _commit(self, total: int) -> dict[str, object]:
        state, draft = self._state, self._state.draft
        expected_s = None
        prompts = [r for r in state.running if r.computed < r.prompt_end]
        runs_prompts = any(r.row in draft.tokens for r in prompts)
        if state.protects_gaps:
            expected_s = self._gaps.expected_s() if self._gaps.predict_s is not None else 0.0
            self._gaps.prompts_kept_out_since = None if runs_prompts else self._gaps.prompts_kept_out_since
        is_decode_only = not runs_prompts and bool(prompts or state.waiting)
        state.num_decode_only_steps = state.num_decode_only_steps + 1 if is_decode_only else 0
        exceptions = self._lanes.exceptions()
        ran = []
        by_row = {request.row: request for request in state.running}
        for row, count in draft.tokens.items():  # in the order of service
            request = by_row[row]
            state.batch_is_closed |= request.computed >= request.prompt_end
            request.computed += count
            samples = request.computed == request.expected
            request.sampled_ahead += samples
            if samples and request.step_lane is None:
                request.step_lane = state.lane
            ran.append((request, request.stay, row, request.computed, samples))
        message: dict[str, object] = {
            "step": state.step,
            "new": draft.new_requests,
            "finished_rows": sorted(state.finished_rows),
            "new_blocks": sorted(draft.new_blocks, key=lambda entry: entry[0]),
            "exceptions": exceptions,
            "lane": state.lane if state.has_lanes else None,
            "swap_out": [pair for _, pairs in self._host_blocks.swap_out for pair in pairs],
            "swap_in": self._host_blocks.swap_in,
            "adapters": draft.new_adapters,
            "pooled": draft.new_pooled,
            "total": total,
            "speculative": sorted(draft.speculating.items()),
        }
        self._host_blocks.swap_out, self._host_blocks.swap_in = [], []
        state.in_flight.append(SpecStep(state.step, ran, message, draft.speculating, state.lane, state.now, expected_s))
        self._lanes.newest_lane = state.lane
        self._owed.discard(state.lane)
        state.finished_rows = []
        state.step += 1
        return message
