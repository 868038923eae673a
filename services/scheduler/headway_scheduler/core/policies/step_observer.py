"""The measurement of step times.

Owns: which steps are measured, and how long each took. Must not know: what is learned.

A step's time begins when it is sent, or with the answer before, if that is later: requests see this gap. With several
lanes this is the answer before of its own lane, since its requests see no other. So it is the time of a step through the
whole pipeline, with what it waits for steps of other lanes.
"""

from headway_scheduler.core.policies.token_budget import TokenBudget
from headway_scheduler.core.state.step_plan import StepLoad, StepPlan
from headway_scheduler.core.state.step_shape import StepShape, prefill_pairs

PROMPTS_ALIKE = 8
"""One in so many steps with a prompt is measured, unless the budget needs each of them."""
DECODES_ALIKE = 32
"""One in so many steps without a prompt is measured, since they hardly differ."""
SPECULATIONS_ALIKE = 4
"""One in so many speculating steps without a prompt is measured."""


class StepObserver:
    """``is_wanted``: something besides the budget needs step times."""

    def __init__(self, budget: TokenBudget, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted or budget.needs_step_times
        self.last_answer_time = 0.0
        """When the newest answer came, in seconds."""
        self._answer_times = [0.0]
        self._budget = budget
        self._stride_with_prompt = 1 if budget.needs_step_times else PROMPTS_ALIKE
        self._stride_without_prompt = PROMPTS_ALIKE if budget.needs_step_times else DECODES_ALIKE
        self.begin_epoch(1)

    def begin_epoch(self, num_lanes: int) -> None:
        """Count steps from 0 again."""
        self._answer_times = [0.0] * num_lanes
        self._next_without_prompt = 0
        self._next_with_prompt = 0
        self._next_speculating = 0
        self.last_answer_time = 0.0

    def is_worth_it(self, plan: StepPlan, step: int) -> bool:
        """Whether to ask ``load`` for this step."""
        if not self.is_wanted:
            return False
        if plan.chunks:
            if step < self._next_with_prompt:
                return False
            self._next_with_prompt = step + self._stride_with_prompt
        elif plan.speculating:
            if step < self._next_speculating:
                return False
            self._next_speculating = step + SPECULATIONS_ALIKE
        else:
            if step < self._next_without_prompt:
                return False
            self._next_without_prompt = step + self._stride_without_prompt
        return True

    def shape(self, plan: StepPlan, decoding: StepShape) -> StepShape:
        """Return the shape of a step."""
        chunks = plan.chunks
        return StepShape(
            decoding.num_tokens + plan.num_chunk_tokens,
            decoding.num_rows + len(chunks),
            decoding.num_context_tokens + sum(chunk.start for chunk in chunks),
            sum(prefill_pairs(chunk.num_computed_tokens - chunk.start, chunk.start) for chunk in chunks),
        )

    def load(self, plan: StepPlan, decoding: StepShape, objective_s: float | None) -> StepLoad:
        """Return the work of a step."""
        return StepLoad(self.shape(plan, decoding), plan.now, objective_s if decoding.num_rows else None)

    def answer_time(self, lane: int) -> float:
        """When the newest answer to a step of this lane came, in seconds."""
        return self._answer_times[lane]

    def record_answer(self, lane: int, now: float) -> None:
        """A step of this lane has been answered."""
        self.last_answer_time = self._answer_times[lane] = now

    def duration_s(self, lane: int, load: StepLoad, now: float) -> float:
        """Return the time of a step, whose answer comes now."""
        return now - max(load.sent_time, self._answer_times[lane])

    def learn(self, lane: int, load: StepLoad, now: float) -> None:
        """Learn from a step that moved no blocks and did not speculate."""
        self._budget.observe(load.shape, self.duration_s(lane, load, now), load.objective_s)
