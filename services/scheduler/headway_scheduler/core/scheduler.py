"""The scheduler's core: ``schedule()`` decides the next step, ``update()`` takes in an answer.

Owns: the parts, and what callers may ask of them. Must not know: sockets, clocks, processes.

One rule: each step hands out tokens from one budget so that a request's ``num_computed_tokens`` catches up with its
``num_tokens`` (vLLM's rule; chunks of prompts beside undelayed decodes are Sarathi-Serve's stall-free batching).
``num_computed_tokens`` advances when a step is scheduled, so that the next one need not wait for its answer.

``step.passes`` asks the batching policy which parts fill the plan of a step (``state.step_plan``):

- ``step.decode_pass`` runs one token per decoding row, ``step.prefill_pass`` chunks of prompts.
- ``admission.admission`` starts waiting requests; ``admission.making_way`` preempts.
- ``step.speculation_pass`` adds proposals.
- ``step.sending`` sends the plan; ``step.answers`` takes in the answer.

Cost follows change, not size: only array operations touch a row that decodes, until its *due tick*, the step (of its
lane) in which it needs a block or has nothing left to compute. Property tests hold this equal to ``tests/specification``.

With several steps in flight:

- ``BlockPool`` fences a block that a step in flight may write.
- A request that stops at step k may be in step k + 1; its surplus token is dropped.
- A preempted request restarts only after the steps in flight that bring it tokens.
- Blocks enter the prefix cache when their step has returned without error.
- A step that speculates is answered before the next is sent.

With several *lanes*, which an executor with a pipeline of stages announces, all of this stays as it is, and:

- Each step is of one lane; lanes take turns, and one without anything to do is passed over.
- A row decodes in the lane in whose step its prompt ended (``admission.lane_balance``). So the rows that decode are
  divided among the lanes, and steps in flight run different ones. Chunks of a prompt run in steps of any lane, the next
  one while the last is in flight.
- ``Epoch.decoding`` is the lane of the step that is planned. A row of another lane may be preempted for one of this lane.
- Preemption, swaps, exports and pulls follow the order of steps, which every stage keeps; answers come in this order too.
- Nothing is speculated: every stage would wait for the answer.
"""

from collections.abc import Iterable

from headway_proto.step import ExecutorOutput, SchedulerOutput
from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.door import limit_of, why_not_here
from headway_scheduler.core.admission.endings import Endings
from headway_scheduler.core.admission.intake import take_in
from headway_scheduler.core.admission.making_way import MakingWay
from headway_scheduler.core.admission.moving import Moving
from headway_scheduler.core.admission.objectives import Danger
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.admission.waiting_queue import Lane
from headway_scheduler.core.memory.cached_prefixes import CachedPrefixes
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefixes
from headway_scheduler.core.memory.preemption import PreemptionCosts
from headway_scheduler.core.memory.swapping import Swapping, books_for
from headway_scheduler.core.memory.transfers import Transfers
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request
from headway_scheduler.core.step.answer_checks import StateMismatch
from headway_scheduler.core.step.answers import Answers
from headway_scheduler.core.step.decode_pass import DecodePass
from headway_scheduler.core.step.gap_guard import GapGuard
from headway_scheduler.core.step.handing_off import HandingOff
from headway_scheduler.core.step.passes import Passes
from headway_scheduler.core.step.prefill_pass import PrefillPass
from headway_scheduler.core.step.sending import Sending
from headway_scheduler.core.step.speculation_pass import SpeculationPass

__all__ = ["Scheduler", "StateMismatch"]


class Scheduler:
    """Call ``schedule`` until it returns None, and ``update`` with each answer in order."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity, epoch: int = 0) -> None:
        self.limits = limits
        self._state = CoreState(limits, capacity)
        self.counters = self._state.counters
        self.prefix_statistics = self._state.prefix_statistics
        self.step_times = self._state.step_times
        self.ended_leases = self._state.ended_leases
        self.pinned_prefixes = PinnedPrefixes(limits)
        self._requests = self._state.requests
        self._shed: list[FinishedEvent] = []
        self._begin(capacity, epoch, None)

    def _begin(self, capacity: ExecutorCapacity, number: int, former: Swapping | None) -> None:
        """``former``: whose books go on if the executor's host pool does."""
        state = self._state
        state.limits = limits = self.limits.fitting(capacity)
        state.serve(capacity)
        offload = state.offload if limits.enable_prefix_caching else None
        books = books_for(capacity, former, keeps_prefixes=offload is not None)
        swapping = Swapping(
            books,
            state.preemption,
            PreemptionCosts(state.step_times.prefill_s, capacity.swap_us_per_block),
            Transfers(books, number, state.ended_leases),
            epoch=number,
            block_size=capacity.block_size,
            offload=offload,
        )
        self._epoch = epoch = Epoch(
            limits,
            capacity,
            state.counters,
            swapping,
            number=number,
            overlaps_own_steps=state.batching.overlaps_own_steps,
        )
        self.capacity, self.epoch = capacity, number
        self.in_flight, self.max_in_flight = epoch.in_flight, epoch.max_in_flight
        self.cache, self.pool, self.rows, self.swapping = epoch.cache, epoch.pool, epoch.rows, epoch.swapping
        self.max_num_batched_tokens, self.max_running = epoch.max_num_batched_tokens, epoch.max_running
        self.pinned_prefixes.begin(limits, capacity, self.cache, self.pool)
        state.observer.begin_epoch(capacity.num_lanes)
        state.observer.is_wanted |= capacity.max_speculative_tokens > 0
        self.prefilling, self.lanes, self.leaving_rows = epoch.prefilling, epoch.lanes, epoch.leaving
        self.prefixes = prefixes = CachedPrefixes(limits, epoch)
        self._running = RunningRequests(state, epoch, prefixes)
        self.tightest = self._running.tightest
        self._making_way = MakingWay(state, epoch, self._running)
        self.admission = Admission(state, epoch, prefixes, self._running, self._making_way)
        self.moving = Moving(state, epoch, self._running, self.admission)
        self._endings = Endings(state, epoch, self._running, self.admission)
        decode = DecodePass(epoch, self._making_way)
        self._prefill = PrefillPass(state, epoch, self._running, self._making_way, self.admission)
        gaps = GapGuard(state, epoch, self._running)
        self._passes = Passes(state, epoch, self.admission, decode, self._prefill, gaps)
        self._speculation = SpeculationPass(state, epoch, self._running)
        self.speculation = self._speculation.policy
        handing_off = HandingOff(state, epoch, self._running)
        self._sending = Sending(state, epoch, self._running, handing_off)
        self._answers = Answers(
            state, epoch, prefixes, self._running, self.admission, self._endings, self.speculation, gaps, handing_off
        )

    # ------------------------------------------------------------------------------------------------------ schedule

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step; None if there is none now. ``now`` in seconds."""
        state, epoch = self._state, self._epoch
        losses = state.losses
        if len(epoch.in_flight) >= epoch.max_in_flight or self.awaits_answer:
            return None
        if losses.has_done_its_trial(epoch.rows):
            return None
        plan = epoch.new_plan(now)
        if losses.is_active:
            if losses.alone is not None:
                self._making_way.clear_for(plan, losses.alone)
            losses.begin_step(epoch.rows)
        self._passes.begin_step()
        if now >= state.first_tokens.next_due:
            self._check_first_tokens(now)
        for lane in epoch.lanes_in_turn():
            epoch.decoding = lane
            total = self._passes.run(plan)
            if total:
                self._speculation.serve(plan)
                self._passes.end_step(plan, has_decoded=total > plan.num_chunk_tokens)
                return self._sending.commit(plan, total)
            plan = epoch.new_plan(now)
        return None

    def update(self, output: ExecutorOutput, now: float) -> StepEvents:
        """Take in the answer to the oldest step in flight.

        Raises:
            StateMismatch: it cannot be that answer; call ``begin_epoch``.
            ValueError: it cannot be read; the same.
        """
        try:
            return self._answers.take(output, now)
        except (StateMismatch, ValueError):
            self._epoch.distrusted.add(self.epoch)
            raise

    @property
    def awaits_answer(self) -> bool:
        """Whether no step may be scheduled before the newest is answered."""
        return self._epoch.awaits_answer

    def _check_first_tokens(self, now: float) -> None:
        """Who is at risk goes first; who is too late goes last, or ends.

        While nothing runs, one is tried: a prediction that ended all would never be put right by a step.
        """
        state = self._state
        is_untried = not self.rows.num_live
        for request, danger in state.first_tokens.due(now):
            if self._requests.get(request.new.origin) is not request:
                continue  # it has ended, or another core has it
            if danger is Danger.AT_RISK:
                state.waiting.queue.move(request, Lane.URGENT)
            elif self.limits.shed_late and not is_untried:
                self._shed.append(self._endings.finish(request, FinishReason.SHED))
            else:
                state.waiting.queue.move(request, Lane.LATE)
                is_untried = False

    # ------------------------------------------------------------------------------------------ requests come and go

    def add_request(self, new: NewRequestEvent, now: float) -> None:
        """Queue a request.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """
        take_in(self._state, new, now)

    def find(self, origin: Origin) -> Request | None:
        """The live request of this origin."""
        return self._requests.get(origin)

    def requests(self) -> list[Request]:
        """All live requests by arrival; O(n log n)."""
        return sorted(self._requests.values(), key=lambda request: request.arrival)

    def take_shed(self) -> tuple[FinishedEvent, ...]:
        """The ends of requests shed since the last call."""
        shed = tuple(self._shed)
        self._shed.clear()
        return shed

    def abort(self, origin: Origin) -> FinishedEvent | None:
        """End a request; None if it is unknown."""
        request = self._requests.get(origin)
        return None if request is None else self._endings.finish(request, FinishReason.ABORT)

    def fail(self, origin: Origin, error: str) -> FinishedEvent | None:
        """End a request with its own error; None if it is unknown."""
        request = self._requests.get(origin)
        return None if request is None else self._endings.finish(request, FinishReason.ERROR, error=error)

    def run_alone(self, origin: Origin | None, num_tokens: int = 0) -> None:
        """Run only this request until it ends or until the next call; None: all may run.

        Sending pauses once steps in flight bring it to ``num_tokens`` tokens, since the caller may then choose another.
        """
        self._state.losses.run_alone(None if origin is None else self._requests.get(origin), num_tokens)

    def start_slowly(self, origins: Iterable[Origin]) -> None:
        """Let few of these requests run at once until each has replaced the tokens of its lost steps.

        It does nothing if a batch must end before the next one.
        """
        if self._state.batching.rules(any_decoded=True).admits:
            requests = [self._requests[origin] for origin in origins if origin in self._requests]
            self._state.losses.start_slowly(requests, self.rows, self._epoch.max_in_flight)

    def requests_in_flight(self, step: int | None = None) -> tuple[list[tuple[Origin, int]], bool]:
        """The live requests of one step in flight, or of all, with their tokens; and whether others are gone."""
        live, has_gone = self._epoch.requests_in_flight(step)
        found = [(request.new.origin, self.rows.num_tokens_of(request)) for request in live]
        return sorted(found, key=lambda entry: (entry[0].owner, entry[0].handle)), has_gone

    def begin_epoch(self, capacity: ExecutorCapacity, epoch: int, *, same_model: bool = True) -> StepEvents:
        """Start over with an empty executor; running requests wait again.

        Returns unreported admissions, and the ends of requests that cannot run there: all, if it is not the
        ``same_model``.
        """
        admitted = self.admission.starts.take_admitted()
        if not same_model:
            self.pinned_prefixes.clear()
        self._begin(capacity, epoch, self.moving.recall())
        finished = []
        for request in self.requests():
            request.forget_executor()
            request.limit = limit_of(request.new, capacity.max_request_tokens)
            message = why_not_here(request, capacity, same_model=same_model)
            if message is not None:
                finished.append(self._endings.finish(request, FinishReason.ERROR, error=message))
        return StepEvents(admitted=admitted, finished=tuple(finished))

    def release_all(self) -> list[Request]:
        """The executor is lost, with all that it computed: give up every request, by arrival, and all that was in flight."""
        self._begin(self.capacity, self.epoch, self.moving.recall())
        return self.moving.release_all()

    # ------------------------------------------------------------------------------------------------- for operators

    @property
    def paused(self) -> bool:
        """Whether no request may start."""
        return self._state.is_paused

    @paused.setter
    def paused(self, is_paused: bool) -> None:
        self._state.is_paused = is_paused

    @property
    def next_step(self) -> int:
        """The number of this epoch's next step."""
        return self._epoch.next_step

    @property
    def budget_in_force(self) -> int:
        """Tokens allowed in the newest step with prompts, decodes included."""
        return self._prefill.budget_in_force

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._state.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return self.rows.num_live

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._epoch.in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    @property
    def num_preempted(self) -> int:
        """Waiting requests that lost their row."""
        return self._state.waiting.num_preempted

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of waiting requests."""
        return self._state.waiting.room.num_tokens

    @property
    def alone(self) -> Request | None:
        """The request that runs alone."""
        return self._state.losses.alone

    def drop_cached(self) -> None:
        """Drop the cached blocks that no request holds, and what the host keeps of prefixes."""
        self.pool.drop_cached()
        self.swapping.drop_offloaded()

    @property
    def budget_margin(self) -> float:
        """The factor on predicted step times."""
        return self._state.budget.margin

    @property
    def expected_prefill_s(self) -> float:
        """Seconds to compute all waiting tokens; 0 while unknown."""
        return self._state.step_times.prefill_s(self._state.waiting.room.num_tokens, 0) or 0.0

    def service_counter_of(self, tenant: str) -> float | None:
        """A tenant's weighted service, if the order keeps books."""
        return self._state.waiting.queue.counter_of(tenant)

    def num_tokens_of(self, request: Request) -> int:
        """The tokens of a live request."""
        return self.rows.num_tokens_of(request)

    def waiting(self) -> list[Request]:
        """The waiting requests in service order, for operators; O(n log n)."""
        return self._state.waiting.queue.in_order()

    def steps_until_shortage(self) -> int | None:
        """See ``Admission``."""
        return self.admission.steps_until_shortage()
