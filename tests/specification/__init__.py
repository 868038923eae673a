"""The scheduler's rules, written to be read: plain lists, every request looked at in every step.

Owns: the executable specification that ``headway_scheduler.core`` must equal, decision for decision. Each module holds the
rules of one thing; ``steps`` says in which order they have their say.
Must not know: columns, due ticks, or any other means by which the core avoids looking at every request.
"""

from collections.abc import Callable

from headway_proto.pooling import POOL_CLS, POOL_MEAN
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from specification.admission import Admission
from specification.answers import Answers
from specification.candidates import Candidates
from specification.demand import Demand
from specification.endings import Endings
from specification.gaps import Gaps
from specification.host_blocks import HostBlocks
from specification.lanes import Lanes
from specification.losses import Losses
from specification.objectives import Objectives
from specification.queue import Queue
from specification.requests import SpecRequest
from specification.room import Room
from specification.serving import Serving
from specification.speculation import Speculation
from specification.state import SpecState
from specification.steps import Steps
from specification_of_learning import SpecifiedRecord


class Specification:
    """The O(n) scheduler. ``schedule`` answers with the parts of the message as plain lists."""

    def __init__(
        self,
        limits: SchedulerLimits,
        capacity: ExecutorCapacity,
        predict_s: Callable[[int, int, int, int], float] | None = None,
    ) -> None:
        self.state = state = SpecState(limits, capacity)
        self._host_blocks = HostBlocks(state)
        self._queue = Queue(state)
        self._demand = Demand(state)
        self._gaps = Gaps(state, self._queue, predict_s)
        self._lanes = Lanes(state, self._gaps)
        self._room = Room(state, self._demand, self._host_blocks, self._queue)
        self._losses = Losses(state, self._room)
        self._endings = Endings(state, self._host_blocks, self._losses, self._queue, self._room)
        self._objectives = Objectives(state, self._endings, self._queue)
        self._candidates = Candidates(state, self._losses, self._queue)
        self._admission = Admission(
            state, self._candidates, self._demand, self._host_blocks, self._lanes, self._losses, self._queue, self._room
        )
        self._serving = Serving(state, self._admission, self._lanes, self._room)
        self._speculation = Speculation(state, self._endings, self._losses, self._room)
        self._answers = Answers(state, self._endings, self._gaps, self._speculation)
        self._steps = Steps(
            state,
            self._host_blocks,
            self._gaps,
            self._lanes,
            self._losses,
            self._objectives,
            self._admission,
            self._serving,
            self._speculation,
        )
        self._num_arrivals = 0

    def add(self, new: NewRequestEvent, now: float) -> None:
        tokens = new.token_ids.tolist()
        objective_ms = new.ttft_slo_ms or self.state.limits.default_ttft_slo_ms
        has_objective = objective_ms and len(tokens) == new.num_prompt_tokens and not new.has_run
        request = SpecRequest(
            origin=new.origin,
            arrival=self._num_arrivals,
            arrival_time=now,
            priority=new.priority,
            tenant=new.tenant,
            rank=2 * new.priority - 1 if self.state.ranks_classes else 3,
            # What a prefill takes is not known here: nothing has a duration.
            latest_start=now + objective_ms / 1e3 if has_objective else None,
            tokens=tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            limit=min(new.num_prompt_tokens + new.max_tokens, self.state.capacity.max_request_tokens),
            stops=new.stop_token_ids,
            min_tokens=new.sampling.min_tokens,
            adapter=new.adapter,
            pooling=new.pooling,
            scope=(f"adapter {new.adapter} " if new.adapter else "")
            + (new.tenant if self.state.limits.prefix_cache_scope == "tenant" else ""),
        )
        request.objective_s = objective_ms / 1e3
        request.itl_slo_s = (new.itl_slo_ms or self.state.limits.default_itl_slo_ms) / 1e3
        request.wants_prompt_logprobs = new.sampling.prompt_logprobs >= 0
        request.told = new.num_prompt_logprobs
        request.runs_whole = new.pooling in {POOL_MEAN, POOL_CLS}
        # What a constraint allows behind a proposal is not known before that has been drawn.
        request.speculation = SpecifiedRecord(may_speculate=new.max_tokens > 1 and new.sampling.constraint is None)
        if self.state.predicts:
            request.curve = self.state.lengths.curve_of(new.tenant, new.num_prompt_tokens)
        self._num_arrivals += 1
        if new.tenant not in self._queue.tenants_seen:
            self._queue.tenants_seen.append(new.tenant)
        self._queue.lift(new.tenant)
        request.work = self._demand.expected_work(request)
        self.state.waiting.append(request)

    def abort(self, origin: Origin) -> bool:
        for request in self.state.waiting + self.state.running:
            if request.origin == origin:
                self._endings.end(request)
                return True
        return False

    def take_shed(self) -> list[Origin]:
        return self._objectives.take_shed()

    def run_alone(self, origin: Origin | None) -> None:
        self._losses.run_alone(origin)

    def start_slowly(self, origins: list[Origin]) -> None:
        self._losses.start_slowly(origins)

    def schedule(self, now: float) -> dict[str, object] | None:
        return self._steps.schedule(now)

    def sampling_rows(self) -> list[int]:
        return self._answers.sampling_rows()

    def update(
        self, sampled: list[int], accepted: dict[int, tuple[int, list[int]]] | None = None, now: float = 0.0
    ) -> tuple[list[tuple[Origin, int, int]], list[tuple[Origin, str, int]]]:
        return self._answers.update(sampled, accepted, now)
