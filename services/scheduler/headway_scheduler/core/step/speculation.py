"""For which requests speculation pays, and how far ahead.

Owns: what is learned of proposals, and the decision. Must not know: rows, blocks.

A request *tries* speculation at first and after each pause. If no proposal is found, it tries again after
``SHORTEST_SEARCH_PAUSE`` tokens, then after twice as many, up to ``LONGEST_SEARCH_PAUSE``. After ``TRIES`` steps with
only wrong proposals it pauses for ``SHORTEST_PAUSE`` tokens, then twice as many, up to ``LONGEST_PAUSE``. First pauses
double in the same way from request to request while none succeeds. The step after one that speculates waits for its
answer, which slows all rows. So requests try together, once in ``STEPS_BETWEEN_TRIES`` steps, or beside requests for
which it pays.

After a right proposal a request *speculates* as long as it pays. It asks for twice as many tokens after all were right,
otherwise for one more than were right. Two conditions must hold:

- Its running mean of accepted tokens per step is at least ``LEAST_MEAN``.
- The batch gains. A step of n rows takes t, and t' with proposals. Accepted tokens are worth t / n each, together at
  least ``MARGIN`` times t' - t, since other rows wait. In a large batch a proposal costs as much as a token, so
  speculation ends by itself.
"""

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from headway_scheduler.core.policies.step_time import StepTimeModel, is_step_time
from headway_scheduler.core.state.speculation_record import SHORTEST_SEARCH_PAUSE, SpeculationRecord
from headway_scheduler.core.state.step_shape import StepShape

TRIES = 2
SHORTEST_PAUSE = 16
LONGEST_PAUSE = 512
STEPS_BETWEEN_TRIES = 16
LEAST_MEAN = 0.2
EARNING_MEAN = 0.5
"""From this mean of accepted tokens on, the next pause is short again."""
MARGIN = 1.5
_GAIN = 0.3
_COST_GAIN = 0.2
_LARGEST_COST = 2.0
"""The most that one proposal may cost, in steps; a step that took longer waited for something else."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SpeculationPolicy:
    """At most ``max_tokens`` proposals a row."""

    def __init__(self, max_tokens: int, step_times: StepTimeModel) -> None:
        self.max_tokens = max_tokens
        self._step_times = step_times
        self._first_pause = SHORTEST_PAUSE
        self._proposal_s = -1.0  # cost of a proposal; below 0 before the first measurement

    def is_time_to_try(self, step: int, num_rows: int) -> bool:
        """Whether requests may try in ``step``."""
        return step % min(STEPS_BETWEEN_TRIES, num_rows) == 0

    def choose(
        self,
        candidates: Sequence[tuple[SpeculationRecord, int]],
        decoding: StepShape,
        step: int,
        objective_s: float | None,
    ) -> list[int]:
        """How many tokens each candidate (record, computed tokens) may speculate in ``step``.

        ``decoding`` is the step without proposals; ``objective_s`` bounds its time.
        """
        proven = [(record, position) for record, position in candidates if record.is_proven]
        if proven and not self._pays([record for record, _ in proven], decoding, objective_s):
            for record, position in proven:
                self._pause(record, position)
            proven = []
        if not proven and not self.is_time_to_try(step, decoding.num_rows):
            return [0] * len(candidates)
        return [
            min(record.num_wanted, self.max_tokens) if record.resumes_at <= position else 0
            for record, position in candidates
        ]

    def _pays(self, proven: list[SpeculationRecord], decoding: StepShape, objective_s: float | None) -> bool:
        num_proposed = round(sum(record.mean_proposed for record in proven))
        step_s = self._step_times.predict_s(decoding)
        if step_s is not None:
            proposing_s = step_s + num_proposed * self._proposal_s
            if self._proposal_s < 0.0:
                with_proposals = decoding._replace(num_tokens=decoding.num_tokens + num_proposed)
                proposing_s = self._step_times.predict_s(with_proposals) or step_s
            gain = sum(record.mean_accepted for record in proven)
            if gain * step_s < MARGIN * (proposing_s - step_s) * decoding.num_rows:
                return False
            if objective_s is not None and step_s <= objective_s < proposing_s:
                return False
        for record in proven:
            if record.mean_accepted >= EARNING_MEAN:
                record.pause = self._first_pause = SHORTEST_PAUSE
                record.search_pause = SHORTEST_SEARCH_PAUSE
        return True

    def record_step(self, shape: StepShape, duration_s: float, num_proposed: int) -> None:
        """Learn from the duration of a step with proposals."""
        alone_s = self._step_times.predict_s(shape)
        if not num_proposed or alone_s is None or not is_step_time(duration_s):
            return
        cost_s = min(max(duration_s - alone_s, 0.0) / num_proposed, _LARGEST_COST * alone_s)
        if self._proposal_s < 0.0:
            self._proposal_s = cost_s
        else:
            self._proposal_s += _COST_GAIN * (cost_s - self._proposal_s)

    def learn(
        self,
        record: SpeculationRecord,
        num_computed_tokens: int,
        *,
        num_allowed: int,
        num_proposed: int,
        num_accepted: int,
    ) -> None:
        """Learn from one row of an answered step."""
        record.num_proposed_tokens += num_proposed
        record.num_accepted_tokens += num_accepted
        record.mean_accepted += _GAIN * (num_accepted - record.mean_accepted)
        record.mean_proposed += _GAIN * (num_proposed - record.mean_proposed)
        if num_accepted:
            record.is_proven = True
            record.num_misses = 0
            if num_accepted < num_proposed:
                record.num_wanted = num_accepted + 1
            elif num_proposed == num_allowed:
                record.num_wanted = min(max(2 * num_allowed, record.num_wanted), self.max_tokens)
        elif num_proposed:
            record.num_misses += 1
            record.num_wanted = max(record.num_wanted // 2, 1)
        if record.is_proven:
            if record.mean_accepted < LEAST_MEAN:
                self._pause(record, num_computed_tokens)
        elif not num_proposed:
            record.search_again_after(num_computed_tokens)
        elif record.num_misses >= TRIES:
            self._pause(record, num_computed_tokens)

    def _pause(self, record: SpeculationRecord, num_computed_tokens: int) -> None:
        if not record.pause:
            record.pause = self._first_pause
            self._first_pause = min(2 * self._first_pause, LONGEST_PAUSE)
        record.resumes_at = num_computed_tokens + record.pause
        record.pause = min(2 * record.pause, LONGEST_PAUSE)
        record.is_proven = False
        record.num_misses = 0
