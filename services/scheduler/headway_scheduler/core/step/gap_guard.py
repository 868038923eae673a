"""Keeps the gaps between tokens of a class within their objectives, at the cost of lower classes.

Owns: which decodes sit out for those of higher classes, and how many prompt tokens run beside them. Must not know: blocks,
or which prompt runs.

A row's slack is the time from the expected start of the step to its newest token plus its objective. If the predicted
step is longer, rows of lower classes sit out: the lowest class first, within a class the most slack first. Rows without
an objective have the most slack; of these, the one with the newest token sits out first. None sits out if even all
would not be enough. Sitting out costs no recomputation, as a preemption would.

Nothing starves: a row without a token for ``aging_s`` runs, and so do prompts that were kept out for so long.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.waiting_queue import is_promoted
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.policies.token_budget import SMALL_TILE_TOKENS
from headway_scheduler.core.state.indices import RowIndices
from headway_scheduler.core.state.request import START_BITS, Request
from headway_scheduler.core.state.step_plan import StepPlan
from headway_scheduler.core.state.step_shape import StepShape

BEFORE_ALL_CLASSES = 0


class _Expected(NamedTuple):
    """A step that was sent; ``duration_s`` is predicted."""

    step: int
    sent_time: float
    duration_s: float


class _Decodes(NamedTuple):
    """Decoding rows in service order: by class, then by slack, then by the time of the newest token.

    Columns of shape ``[num_rows]``; ``slack_s`` is infinite without an objective, ``num_context_tokens`` cumulative.
    """

    rows: RowIndices
    classes: NDArray[np.int32]
    slack_s: NDArray[np.float64]
    num_context_tokens: NDArray[np.int64]

    def first(self, count: int) -> StepShape:
        """A step of the first ``count`` rows alone."""
        return StepShape(count, count, int(self.num_context_tokens[count - 1]) if count else 0, 0)


class GapGuard:
    """``is_on``: the operator wants it. Without an objective among the running requests it costs nothing."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests) -> None:
        self.is_on = state.limits.protect_itl
        self._aging_s = state.limits.aging_s
        self._budget = state.budget
        self._step_times = state.step_times
        self._observer = state.observer
        self._waiting = state.waiting
        self._epoch = epoch
        self._rows = epoch.rows
        self._running = running
        self._expected: deque[_Expected] = deque()
        self._prompts_kept_out_since: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether a running request has an objective on gaps."""
        return self.is_on and self._running.tightest.tightest_ms is not None

    def record_tokens(self, sampling_rows: RowIndices, now: float) -> None:
        """Record that these rows have received a token, with the answer to the oldest step."""
        in_flight, expected = self._epoch.in_flight, self._expected
        while expected and (not in_flight or expected[0].step < in_flight[0].step):
            expected.popleft()
        if self.is_active:
            self._rows.token_time[sampling_rows] = now

    def record_step(self, plan: StepPlan) -> None:
        """Record a complete plan, which is about to be sent."""
        if not self.is_active:
            return
        if plan.chunks:
            self._prompts_kept_out_since = None
        shape = self._observer.shape(plan, self._epoch.decoding.shape())
        duration_s = self._step_times.predict_s(shape) or 0.0
        self._expected.append(_Expected(self._epoch.next_step, plan.now, duration_s))

    def serve(self, plan: StepPlan) -> None:
        """Let rows sit out, and lower the budget for prompts unless one is due."""
        if not self.is_active or self._step_times.predict_s(StepShape(1, 1, 0, 0)) is None:
            return
        rows, decoding = self._rows, self._epoch.decoding.indices()
        decoding = decoding[rows.num_computed_tokens[decoding] < rows.last_position[decoding]]  # the others end
        if not len(decoding):
            return
        decodes = self._in_order(decoding, plan.now)
        num_running = self._num_that_run(decodes)
        self._epoch.decoding.hold_back(plan, decodes.rows[num_running:].tolist())
        if not plan.is_prompt_due:
            self._limit_prompts(plan, decodes, num_running)

    def most_urgent(self, ready: list[int], count: int, now: float) -> list[int]:
        """The ``count`` rows with the least slack, by class; a row in its prompt has no token and goes first."""
        chosen: list[int] = self._in_order(np.array(ready, dtype=np.intp), now).rows[:count].tolist()
        return chosen

    def _start_of_step(self, now: float) -> float:
        """When the lane's next step will start. Its rows in flight receive their tokens before."""
        lane, expected = self._epoch.decoding.lane, self._expected
        in_flight, end = [step for step in self._epoch.in_flight if step.lane == lane], self._observer.answer_time(lane)
        durations = {entry.step: entry for entry in expected}
        for step in in_flight:
            entry = durations.get(step.step)
            if entry is not None:
                end = max(end, entry.sent_time) + entry.duration_s
            end = max(end, now)
            sampling = step.sampling_rows
            if step.leavers:
                sampling = np.array([row for row in sampling.tolist() if row not in step.leavers], dtype=np.intp)
            self._rows.token_time[sampling] = end
        return end if in_flight else now

    def _in_order(self, decoding: RowIndices, now: float) -> _Decodes:
        rows, start = self._rows, self._start_of_step(now)
        token_time, order_key = rows.token_time[decoding], rows.order_key[decoding]
        objective_s = rows.itl_slo_ms[decoding] / 1e3
        slack_s = np.where(objective_s > 0, token_time + objective_s - start, np.inf)
        goes_first = (start - token_time >= self._aging_s) | ((order_key >> START_BITS) % 2 == 0)  # starved or promoted
        classes = np.where(goes_first, np.int32(BEFORE_ALL_CLASSES), rows.priority[decoding])
        order = np.lexsort((order_key, token_time, slack_s, classes))
        in_order = decoding[order]
        num_context_tokens = rows.num_computed_tokens[in_order].cumsum(dtype=np.int64)
        return _Decodes(in_order, classes[order], slack_s[order], num_context_tokens)

    def _duration_s(self, shape: StepShape) -> float:
        return (self._step_times.predict_s(shape) or 0.0) * self._budget.margin

    def _num_that_run(self, decodes: _Decodes) -> int:
        """Keep the objectives of each class with rows of lower classes only."""
        num_rows = num_running = len(decodes.rows)
        all_s = self._duration_s(decodes.first(num_rows))
        begin = 0
        while begin < num_rows:
            end = int(decodes.classes.searchsorted(decodes.classes[begin], side="right"))
            least_s = self._duration_s(decodes.first(end))
            keepable = decodes.slack_s[begin:end]
            keepable = keepable[keepable >= least_s]
            if end < num_rows and len(keepable) and float(keepable.min()) < all_s:
                num_running = min(num_running, self._most_within(decodes, end, float(keepable.min())))
            begin = end
        return num_running

    def _most_within(self, decodes: _Decodes, fitting: int, limit_s: float) -> int:
        """The most rows in order whose step takes ``limit_s`` at most; ``fitting`` rows do, and not all."""
        beyond = len(decodes.rows)
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            if self._duration_s(decodes.first(middle)) <= limit_s:
                fitting = middle
            else:
                beyond = middle
        return fitting

    def _limit_prompts(self, plan: StepPlan, decodes: _Decodes, num_running: int) -> None:
        """Prompts of lower classes get whole tiles within the least slack that can be kept."""
        prompts = self._prompts()
        if not prompts:
            self._prompts_kept_out_since = None
            return
        highest = min(_class_of(request) for request in prompts)
        shape = decodes.first(num_running)
        slack_s = decodes.slack_s[: int(decodes.classes[:num_running].searchsorted(highest))]
        slack_s = slack_s[slack_s < np.inf]
        keepable = slack_s[slack_s >= self._duration_s(shape)]
        num_tiles = 1  # if none can be kept: prompts go on, and small steps teach the model what decodes cost
        if len(keepable) or not len(slack_s):
            limit_s = float(keepable.min()) if len(keepable) else np.inf
            num_tiles = self._tiles_within(shape, plan.budget - num_running, limit_s)
        if num_tiles:
            self._prompts_kept_out_since = None
        elif self._prompts_kept_out_since is None:
            self._prompts_kept_out_since = plan.now
        since = self._prompts_kept_out_since
        if since is None or plan.now - since < self._aging_s:
            plan.budget = min(plan.budget, num_running + num_tiles * SMALL_TILE_TOKENS)

    def _prompts(self) -> list[Request]:
        """The prompts under way, and the first that waits."""
        under_way = [self._rows.request_in(row) for row in sorted(self._epoch.prefilling)]
        return under_way + (self._waiting.queue.first_few(1) if self._waiting else [])

    def _tiles_within(self, decoding: StepShape, budget: int, limit_s: float) -> int:
        """The most tiles of prompt tokens that run beside the decodes within ``limit_s``."""
        rows = self._rows
        num_computed = max((int(rows.num_computed_tokens[row]) for row in self._epoch.prefilling), default=0)
        fitting, beyond = 0, max(-(-budget // SMALL_TILE_TOKENS), 0) + 1
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            if self._duration_s(decoding.with_prompt(middle * SMALL_TILE_TOKENS, num_computed)) <= limit_s:
                fitting = middle
            else:
                beyond = middle
        return fitting


def _class_of(request: Request) -> int:
    return BEFORE_ALL_CLASSES if is_promoted(request.rank) else request.new.priority
