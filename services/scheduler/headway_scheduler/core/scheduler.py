"""Who runs in the next step, on which blocks: ``schedule()``, and its inverse, ``update()``.

Owns: the decisions. Must not know: sockets, clocks, processes; time is an argument, and nothing here is random.

One rule: a request has ``num_tokens`` and ``num_computed_tokens``, and every step hands out tokens from one budget so
that the second catches up with the first (the rule is vLLM's; chunking prompts so that decodes are never delayed is
Sarathi-Serve's stall-free batching). ``num_computed_tokens`` advances when a step is scheduled, so that the next step
can be scheduled before the first has returned.

Two passes. Running requests first: every decoding row runs one token; rows that need a block are served in service
order (by rank, then by first start), those that need a chunk of their prompt as the order places prompts. Then waiting
requests take what is left of the budget, unless the first pass ran short of blocks; those that the order puts before a
prompt under way start before it goes on. That is the batching policy ``chunked``; the others (``batching_policies``)
change what shares a step: its rules are looked at once per step, and decoding rows that it lets wait are *held back*:
out of the decoding column for this step, with what is due for them due one step later.

What the decisions rest on stands beside them: the queue's order (``orders``), what must be free before a request starts
(``reservations``), how many prompt tokens a step may have (``token_budget``), who makes way (``preemption``). Why it never
stops is told in the package's own words (``headway_scheduler.core``).

Cost follows change, not size. A row that only decodes is touched by array operations over all rows and by nothing
else, until its *due tick*, the number of the step in which it needs a block or has nothing left to compute.
``tests/specification.py`` states the same rules request by request, and property tests hold the two equal.

Steps in flight:

- A block that a step in flight may write is not reused before that step has returned (``BlockPool`` fences).
- A request that stops at step k may sit in step k + 1 already; the surplus token is dropped (``InFlightStep.leavers``).
- A request that is preempted with steps in flight still receives their tokens, and is admitted again only after them.
- What a preempted request had computed may go to the host (``swapping``), with the next step that is sent.
- Blocks enter the prefix cache when the step that filled them has returned without error. Until then, a request whose
  prompt begins like one under way does not start, if waiting saves enough (``prefix_wait_tokens``): so of many that arrive
  together with one long beginning, one computes it.
- Log probabilities of a prompt come with the steps that compute it. Each position is told once, in order, so a request that
  is owed some takes from the cache only what is before them.
- How far a row has come in a step that speculates is known with its answer: no step is sent before that. Whose turn it is,
  and for how many tokens, says ``speculation``; the tokens count against the budget after everything else, and a block
  is taken ahead of its time only while many are free.

A request that may have brought the executor down can be told to ``run_alone``: everyone else makes way, and it starts when
nothing is in flight, so that what happens next is its own doing. After a first loss those that ran ``start_slowly``, so
that a second one leaves few to be tried.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Int32Array, decode_column, encode_column
from headway_proto.sampling import NO_LOGPROBS, SamplingParams
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    ExecutorOutput,
    NewRequest,
    RowPromptLogprobs,
    SchedulerOutput,
    state_digest,
)
from headway_scheduler.core.admission.door import RequestRejected, asks_too_much, check_request, limit_of
from headway_scheduler.core.admission.fair_queue import burst_tokens_of
from headway_scheduler.core.admission.objectives import Danger, FirstTokenWatch, TightestObjective
from headway_scheduler.core.admission.orders import ORDERS, QueueSettings
from headway_scheduler.core.admission.start_window import StartWindow
from headway_scheduler.core.admission.waiting_queue import HEAD_RANK, UNRANKED, Lane, is_promoted, rank_of_class
from headway_scheduler.core.admission.waiting_room import WaitingRoom
from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefixes
from headway_scheduler.core.memory.preemption import PREEMPTIONS, PreemptionCosts, choose_victim, in_victim_order
from headway_scheduler.core.memory.prefix_cache import ROOT_NODE, PrefixCache
from headway_scheduler.core.memory.prefix_statistics import RECENT_QUERIES, PrefixStatistics
from headway_scheduler.core.memory.row_table import NEVER, RowTable
from headway_scheduler.core.memory.swapping import Swapping
from headway_scheduler.core.policies.batching import BATCHING_POLICIES, PromptCut, StepRules
from headway_scheduler.core.policies.output_lengths import OutputLengths
from headway_scheduler.core.policies.reservations import RESERVATIONS, Books, ForeseenBlocks, PoolState
from headway_scheduler.core.policies.step_time import StepShape, StepTimeFigures, StepTimeModel
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.counters import (
    Preemption,
    PreemptionMode,
    PreemptionReason,
    SchedulerCounters,
    WasteReason,
)
from headway_scheduler.core.state.events import (
    AdmittedEvent,
    FinishedEvent,
    FirstTokenEvent,
    LogprobsEvent,
    PromptLogprobsEvent,
    StepEvents,
)
from headway_scheduler.core.state.indices import NO_BLOCKS, NO_ROWS, BlockIndices, RowIndices
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import START_BITS, FinishReason, Request, RequestStatus
from headway_scheduler.core.step.accepted_tokens import AcceptedTokens, split_tokens
from headway_scheduler.core.step.speculation import SpeculationPolicy
from headway_scheduler.core.step.step_observer import StepObserver
from headway_scheduler.core.step.step_plan import InFlightStep, PrefillChunk, StepLoad, StepPlan
from headway_scheduler.core.step.stop_tokens import StopTokens
from headway_scheduler.core.step.token_columns import SamplingOrigins, TokenColumns

HIGHEST_CLASS = 1

STEPS_BETWEEN_FORECASTS = 2
"""Whoever was refused because of what is foreseen is not asked again sooner, since that is not cheap. With more steps,
requests would start in bunches, and decodes wait for those."""

MAX_PASSED_OVER = 16
NUM_COMPARED_PREFIXES = 8
MAX_WAYS_MADE = 4
MAX_DOUBLINGS = 16


class StateMismatch(Exception):  # noqa: N818 - named for what was found
    """What the executor reports cannot follow from what it was sent; only a new epoch helps."""


class Scheduler:
    """The core for one executor.

    Call ``add_request`` and ``abort`` as events arrive, ``schedule`` until it returns None, ``update`` with each answer
    in order, and ``begin_epoch`` when the executor lost its state.
    """

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity, epoch: int = 0) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self.prefix_statistics = PrefixStatistics(self.counters)
        self.pinned_prefixes = PinnedPrefixes(limits)
        self._caches_by_tenant = limits.prefix_cache_scope == "tenant"
        # Where a batch that runs has to end before the next, waiting for a prefix would mean waiting for that.
        may_join = BATCHING_POLICIES[limits.batching].rules(any_decoded=True).admits
        self._waits_for_prefixes = limits.enable_prefix_caching and limits.prefix_wait_tokens > 0 and may_join
        self.paused = False
        self._order = ORDERS[limits.order]
        self._batching = BATCHING_POLICIES[limits.batching]
        reservation = self._batching.reservation if limits.reserve == "auto" else limits.reserve
        self._reservation = RESERVATIONS[reservation]
        self._lengths = OutputLengths()
        self._predicts = self._reservation.predicts or self._order.predicts
        self._preemption = PREEMPTIONS[limits.preemption]
        self._step_times = StepTimeModel()
        self._budget = TOKEN_BUDGETS[limits.budget](limits.max_num_batched_tokens, self._step_times)
        # What depends on step times: the budget, the choice between kinds of preemption, and objectives on first tokens.
        self._bounds_prompts = limits.budget != "fixed"
        self._observer = StepObserver(
            self._budget,
            is_wanted=self._bounds_prompts or self._preemption.needs_costs,
            wants_each_prompt=self._bounds_prompts,
        )
        self._requests: dict[Origin, Request] = {}
        self._waiting = self._order.make_queue(
            QueueSettings(limits.aging_s, limits.tenant_weights, self._predicted_output, self._burst_tokens)
        )
        self._room = WaitingRoom(limits)
        self._num_preempted = 0
        self._first_tokens = FirstTokenWatch()
        self._shed: list[FinishedEvent] = []
        self._alone: Request | None = None
        self._num_tokens_alone = 0
        self._start_window = StartWindow()
        self._num_arrivals = 0
        self._num_started = 0
        self._begin(capacity, epoch)

    def _begin(self, capacity: ExecutorCapacity, epoch: int) -> None:
        self.capacity = capacity
        self._max_request_tokens = capacity.max_request_tokens
        self.max_num_batched_tokens = capacity.most_batched_tokens(self.limits.max_num_batched_tokens)
        self.budget_in_force = self.max_num_batched_tokens
        """Tokens that the newest step with prompts might have had, decodes included."""
        # More requests than tokens in the budget could not all decode in one step.
        self._max_rows_per_step = min(self.limits.max_num_seqs, self.max_num_batched_tokens)
        num_batches = 1 if self._batching.overlaps_own_steps else self.limits.max_steps_in_flight
        self.max_running = min(self._max_rows_per_step * num_batches, capacity.max_num_rows)
        self.epoch = epoch
        self.next_step = 0
        self.cache = PrefixCache(capacity.num_blocks, capacity.block_size)
        self.pool = BlockPool(capacity.num_blocks, self.cache, self.counters)
        self.pinned_prefixes.begin(capacity, self.cache, self.pool)
        self.rows = RowTable(self.max_running, capacity.max_model_len, capacity.block_size)
        costs = PreemptionCosts(self._step_times.prefill_s, capacity.swap_us_per_block)
        self.swapping = Swapping(capacity.num_host_blocks, self._preemption, costs)
        self._tightest = TightestObjective()
        self._in_flight: deque[InFlightStep] = deque()
        self._observer.begin_epoch()
        self.speculation = SpeculationPolicy(capacity.max_speculative_tokens, self._step_times)
        self._observer.is_wanted |= capacity.max_speculative_tokens > 0
        self._finished_rows: list[int] = []
        self._prefilling: set[int] = set()
        self._stalled: set[int] = set()  # decoding rows that found no block
        self._idle: set[int] = set()  # rows with nothing left to compute, waiting for their last token
        self._admitted: list[AdmittedEvent] = []
        # The first in the queue when a request was refused because of what is foreseen, and the step in which to ask again.
        self._refused: Request | None = None
        self._ask_again_at = 0
        self._ask_policy(any_decoded=False)
        self._decoding_rows = NO_ROWS
        self._decoding_changed = False
        self._origins = SamplingOrigins(self.rows)
        self._stop_tokens = StopTokens(capacity.vocab_size)

    # ------------------------------------------------------------------------------------------ requests come and go

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return self.rows.num_live

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return len(self._in_flight)

    @property
    def awaits_answer(self) -> bool:
        """Whether the newest step speculates: what follows it depends on its answer."""
        return bool(self._in_flight) and bool(self._in_flight[-1].speculating)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    @property
    def num_preempted(self) -> int:
        """Requests that wait because they lost their row."""
        return self._num_preempted

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of all requests that wait."""
        return self._room.num_tokens

    @property
    def step_time_figures(self) -> StepTimeFigures | None:
        """The model of step times; None while it has learned nothing."""
        return self._step_times.figures

    @property
    def budget_margin(self) -> float:
        """What predicted step times are multiplied by before they are held to an objective."""
        return self._budget.margin

    def service_counter_of(self, tenant: str) -> float | None:
        """The service that a tenant has had in the order's books, weighted; None under an order that keeps none."""
        return self._waiting.counter_of(tenant) if self._order.keeps_books else None

    def requests(self) -> list[Request]:
        """All live requests by arrival, for operators; O(n log n)."""
        return sorted(self._requests.values(), key=lambda request: request.arrival)

    @property
    def expected_prefill_s(self) -> float:
        """What computing all that waits would take, in seconds; 0 while step times are not known."""
        return self._step_times.prefill_s(self._room.num_tokens, 0) or 0.0

    def ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests that are to start before this one, in their order; O(n log n)."""
        in_order = self._waiting.in_order()
        return in_order[: in_order.index(request)]

    def num_ahead_of(self, request: Request) -> int:
        """How many waiting requests are to start before this one; O(n log n)."""
        return len(self.ahead_of(request))

    @property
    def is_admitting(self) -> bool:
        """Whether the batching policy would let a request start in the next step."""
        return not self.num_running or self._rules.admits

    def blocks_for_start(self, request: Request) -> tuple[int, int]:
        """The blocks that a waiting request must find, without the prefix cache, and those that nobody was promised."""
        first_chunk = min(len(request.token_ids), request.num_swapped_tokens + self.max_num_batched_tokens)
        books = self._open_books()
        num_needed = books.num_needed(request, first_chunk) + self._headroom(request)
        return num_needed, self.pool.num_free - books.owed_blocks

    def waits_for_prefix(self, request: Request) -> bool:
        """Whether somebody who runs is computing a beginning of this waiting request's prompt that it is to share."""
        if not self._waits_for_prefixes:
            return False
        shared, _ = self._find_cached(request, request.token_ids.tobytes(), len(request.token_ids))
        newest = self._newest_prompts(StepPlan(self.max_num_batched_tokens, now=0.0))
        return self._is_prefix_under_way(newest, request, len(shared) * self.rows.block_size)

    def steps_until_shortage(self) -> int | None:
        """After about how many steps those that run may want more blocks than there are, if nobody else starts; O(running).

        0 for at once. None if they probably never will, and where nothing is learned of outputs because neither the order
        nor the reservation asks for that.
        """
        return ForeseenBlocks(self.rows, self._lengths, self._pool_state()).steps_until_shortage()

    def _open_books(self) -> Books:
        return self._reservation.open_books(self.rows, self._prefilling, self._lengths, self._pool_state)

    def _pool_state(self) -> PoolState:
        return PoolState(self.pool.num_blocks, self.pool.num_free + self.pool.num_fenced)

    def find(self, origin: Origin) -> Request | None:
        """The live request of this origin."""
        return self._requests.get(origin)

    def add_request(self, new: NewRequestEvent, now: float) -> None:
        """Queue a request; ``now`` in seconds.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """
        limit = limit_of(new, self._max_request_tokens)
        if new.origin in self._requests:
            raise RequestRejected("already_exists", "handle", f"{new.origin.handle} is the handle of a live request")
        check_request(new, limit, self.capacity)
        self._room.check(new.tenant, len(new.token_ids))
        arrival = self._num_arrivals
        self._num_arrivals += 1
        rank = rank_of_class(new.priority) if self._order.ranks_classes else UNRANKED
        request = Request(new, arrival=arrival, rank=rank, limit=limit, now=now)
        request.itl_slo_ms = new.itl_slo_ms or self.limits.default_itl_slo_ms
        if self._predicts:
            request.curve = self._lengths.curve_of(new.tenant, new.num_prompt_tokens)
        self._requests[new.origin] = request
        ttft_slo_ms = new.ttft_slo_ms or self.limits.default_ttft_slo_ms
        # The first token may have come before, or be late already for what was not its own doing.
        if ttft_slo_ms and len(new.token_ids) == new.num_prompt_tokens and not new.has_run:
            self._watch_first_token(request, ttft_slo_ms / 1e3)
        self._wait(request)

    def _watch_first_token(self, request: Request, objective_s: float) -> None:
        """Note by when a request has to start for its first token to be in time."""
        self._observer.is_wanted = True
        prefill_s = self._step_times.prefill_s(request.new.num_prompt_tokens, 0) or 0.0
        request.latest_start = request.arrival_time + objective_s - prefill_s
        self._first_tokens.watch(request, objective_s)

    def _wait(self, request: Request) -> None:
        request.num_queued_tokens = len(request.token_ids)
        self._room.enter(request)
        self._num_preempted += request.status is RequestStatus.PREEMPTED
        self._waiting.push(request)

    def _no_longer_waits(self, request: Request) -> None:
        self._room.leave(request)
        self._num_preempted -= request.status is RequestStatus.PREEMPTED
        self._waiting.remove(request)

    def _predicted_output(self, request: Request) -> int:
        """Output tokens still to be expected; as many as it may have where nothing is known."""
        age = len(request.token_ids) - request.new.num_prompt_tokens
        most = request.limit - request.new.num_prompt_tokens
        predicted = self._lengths.predicted_output(request.curve, age, most)
        return (most if predicted is None else predicted) - age

    def _burst_tokens(self) -> int:
        return burst_tokens_of(self.capacity.max_request_tokens, self.capacity.num_blocks * self.capacity.block_size)

    def take_shed(self) -> tuple[FinishedEvent, ...]:
        """The requests that were ended since the last call because they could no longer meet their objective."""
        shed = tuple(self._shed)
        self._shed.clear()
        return shed

    def abort(self, origin: Origin) -> FinishedEvent | None:
        """End a request and release its blocks; None if it is unknown (it may just have ended)."""
        request = self._requests.get(origin)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def fail(self, origin: Origin, error: str) -> FinishedEvent | None:
        """End a request with an error that is its own; None if it is unknown."""
        request = self._requests.get(origin)
        return None if request is None else self._finish(request, FinishReason.ERROR, error=error)

    def run_alone(self, origin: Origin | None, num_tokens: int = 0) -> None:
        """Let nobody but this request run until it has ended or another call says otherwise; None: everybody may again.

        Once steps in flight bring it to ``num_tokens`` tokens, prompt and output, no more are sent before they are back:
        then it is probably somebody else's turn.
        """
        self._alone = None if origin is None else self._requests.get(origin)
        self._num_tokens_alone = num_tokens

    @property
    def alone(self) -> Request | None:
        """Who runs alone."""
        return self._alone

    def start_slowly(self, origins: Iterable[Origin]) -> None:
        """Steps were lost in which these ran: let few of them run at once until they have come as far as those steps would
        have brought them. Nothing changes where a batch that runs has to end before the next: it would be a small one.
        """
        if not self._batching.rules(any_decoded=True).admits:
            return
        requests = [self._requests[origin] for origin in origins if origin in self._requests]
        num_steps = self.limits.max_steps_in_flight
        self._start_window.narrow((request, self.num_tokens_of(request) + num_steps) for request in requests)

    @property
    def is_starting_slowly(self) -> bool:
        """Whether some of those who were in lost steps wait for others of them."""
        return self._start_window.is_narrow

    def requests_in_flight(self, step: int | None = None) -> list[tuple[Origin, int]]:
        """The live requests that are part of a step in flight, or of any, each with its number of tokens known here."""
        found: dict[Origin, int] = {}
        for in_flight in self._in_flight:
            if step is None or in_flight.step == step:
                for request in self._requests_in(in_flight):
                    found[request.new.origin] = self.num_tokens_of(request)
        return sorted(found.items(), key=lambda entry: (entry[0].owner, entry[0].handle))

    def num_tokens_of(self, request: Request) -> int:
        """The tokens of a live request, prompt and output, that have come back."""
        return len(request.token_ids) if request.row < 0 else int(self.rows.num_tokens[request.row])

    def _requests_in(self, step: InFlightStep) -> list[Request]:
        """The live requests that run in a step, whether or not they still have their row."""
        prompts = {chunk.row: chunk.request for chunk in step.chunks}
        requests = list(prompts.values())
        for row in step.sampling_rows.tolist():
            if row not in prompts:
                owner = step.leavers[row] if row in step.leavers else self.rows.requests[row]
                requests += [] if owner is None else [owner]
        return [request for request in requests if request.status is not RequestStatus.FINISHED]

    def begin_epoch(self, capacity: ExecutorCapacity, epoch: int, *, same_model: bool = True) -> StepEvents:
        """Start over with an executor that knows nothing: running requests go back to their place in the queue.

        Returns what had not been told yet, and the ends of requests that the new executor can never hold; of all
        requests, if it does not run the ``same_model``, whose tokens would not follow from theirs.
        """
        admitted = tuple(self._admitted)
        for row in self.rows.live_rows().tolist():
            request = self.rows.request_in(row)
            self._keep_tokens(request, WasteReason.NEW_EPOCH)
            self.rows.give_back(row)
            request.status = RequestStatus.PREEMPTED
            self._wait(request)
        if not same_model:
            self.pinned_prefixes.clear()
        self._begin(capacity, epoch)
        finished = []
        for request in self.requests():
            request.num_unreturned = 0
            request.num_cached_blocks = 0
            request.host_blocks = NO_BLOCKS
            request.num_swapped_tokens = 0
            request.lost_work = request.lost_work[0], WasteReason.NEW_EPOCH
            request.limit = limit_of(request.new, capacity.max_request_tokens)
            message = self._why_not_here(request, same_model=same_model)
            if message is not None:
                finished.append(self._finish(request, FinishReason.ERROR, error=message))
        return StepEvents(admitted=admitted, finished=tuple(finished))

    def _why_not_here(self, request: Request, *, same_model: bool) -> str | None:
        """What keeps a request that another executor ran from going on with this one; None if nothing does."""
        capacity = self.capacity
        largest_id = max(int(request.token_ids.max()), *request.new.stop_token_ids, 0)
        if not same_model:
            return "the executor that took over runs another model"
        if len(request.token_ids) >= request.limit or largest_id >= capacity.vocab_size:
            return "the executor that took over cannot hold this request"
        if request.is_owed_prompt_logprobs and not capacity.supports_prompt_logprobs:
            return "the executor that took over reports no log probabilities of prompts"
        if asks_too_much(request.new, capacity):
            return "the executor that took over cannot constrain outputs"
        return None

    # ------------------------------------------------------------------------------------------------------ schedule

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step; None if there is nothing to run or enough is in flight. ``now`` in seconds."""
        if len(self._in_flight) >= self.limits.max_steps_in_flight or self.awaits_answer or self._has_done_its_trial():
            return None
        plan = StepPlan(self.max_num_batched_tokens, now)
        if self._alone is not None or self._start_window.is_narrow:
            self._mind_losses(plan)
        if self._any_decoded and not self.rows.num_live:
            self._ask_policy(any_decoded=False)
        rules = self._rules
        if now >= self._first_tokens.next_due:
            self._mind_first_tokens(now)
        if not self._batching.overlaps_own_steps:
            self._choose_batch(plan)
        if not rules.prompts_run_alone:
            self._serve_decoding(plan)
            if self._prefilling or self._waiting:
                self._serve_prompts(plan, rules)
        elif not self._run_prompts_alone(plan, rules):
            self._serve_decoding(plan)
        self.swapping.complete_plan()
        total = len(self._decoding()) + plan.num_chunk_tokens
        if not total:
            self._let_decode(plan.held_back, in_this_step=True)
            return None
        self._speculate(plan)
        return self._commit(plan, total)

    def _mind_first_tokens(self, now: float) -> None:
        """Let requests that are about to miss their objective go first, and those that have missed it last, or end them."""
        for request, danger in self._first_tokens.due(now):
            if request.status is RequestStatus.FINISHED:
                continue  # it was too late for it before it was at risk
            if danger is Danger.AT_RISK:
                self._waiting.move(request, Lane.URGENT)
            elif self.limits.shed_late:
                self._shed.append(self._finish(request, FinishReason.SHED))
            else:
                self._waiting.move(request, Lane.LATE)

    def _has_done_its_trial(self) -> bool:
        """Whether the tokens that are wanted of who runs alone are all under way."""
        if self._alone is None or self._alone.row < 0:
            return False
        num_coming = int(self.rows.num_computed_tokens[self._alone.row]) + 1
        return self.num_tokens_of(self._alone) < self._num_tokens_alone <= num_coming

    def _mind_losses(self, plan: StepPlan) -> None:
        """What follows from steps that were lost: who runs alone, and how many start again at once; O(those who ran)."""
        if self._alone is not None:
            self._clear_the_way(plan, self._alone)
        for request in self._start_window.unproven():
            self._start_window.note_tokens(request, self.num_tokens_of(request))
        self._start_window.begin_step()

    def _clear_the_way(self, plan: StepPlan, alone: Request) -> None:
        """Send everybody but ``alone`` back to the queue."""
        for row in self.rows.live_rows().tolist():
            if self.rows.request_in(row) is not alone:
                self._preempt(plan, row, PreemptionReason.RUN_ALONE)
        plan.short_of_blocks = False

    def _next_to_start(self, now: float) -> Request | None:
        """Whose turn it is to start. Who is to run alone waits until nothing is left of the others, in flight included."""
        if self._alone is None:
            first = self._waiting.first(now)
            return first if first is None or self._start_window.has_place_for(first) else None
        is_free = not self._in_flight and not self.rows.num_live
        return self._alone if is_free and self._alone.row < 0 else None

    def _ask_policy(self, *, any_decoded: bool) -> None:
        """Note whether a decode has run since the last time that nothing ran, and the rules that follow from it."""
        self._any_decoded = any_decoded
        self._rules = self._batching.rules(any_decoded=any_decoded)

    def _choose_batch(self, plan: StepPlan) -> None:
        """Leave out what is part of a step in flight, and what is beyond the size of a batch; O(running)."""
        rows = self.rows
        in_flight = set[int]().union(*(step.ran_rows() for step in self._in_flight))
        ready = [row for row in rows.live_rows().tolist() if row not in in_flight]
        ready.sort(key=rows.order_key.__getitem__)
        batch = ready[: self._max_rows_per_step]
        plan.max_new_requests = self._max_rows_per_step - len(batch)
        plan.sits_out = in_flight.union(ready[len(batch) :])
        self._hold_back(plan, [row for row in self._decoding().tolist() if row in plan.sits_out])

    def _run_prompts_alone(self, plan: StepPlan, rules: StepRules) -> bool:
        """Fill the step with prompts while decodes sit out; whether there was one to run.

        Not while a decode waits for a block: prompts would take every block that comes free, fill the pool, be
        preempted, and start again, for ever.
        """
        if self._stalled:
            plan.exceptions += [(row, 0) for row in sorted(self._prefilling)]
            return False
        if not self._prefilling and not (rules.admits and self.num_waiting):
            return False
        self._hold_back(plan, self._decoding().tolist())
        self._serve_prompts(plan, rules)
        if not plan.chunks:
            self._let_decode([row for row in plan.held_back if row not in plan.sits_out], in_this_step=True)
            plan.held_back = [row for row in plan.held_back if row in plan.sits_out]
        return bool(plan.chunks)

    def _hold_back(self, plan: StepPlan, decoding: list[int]) -> None:
        """Take rows out of the decoding column until the step is made."""
        if decoding:
            self.rows.hold_back(decoding)
            plan.held_back = plan.held_back + decoding
            self._decoding_changed = True

    def _let_decode(self, held_back: list[int], *, in_this_step: bool) -> None:
        if held_back:
            self.rows.let_decode(held_back, in_this_step=in_this_step)
            self._decoding_changed = True

    def _serve_prompts(self, plan: StepPlan, rules: StepRules) -> None:
        """Prompts under way first, then waiting ones with what is left; before either, waiting ones that the order prefers."""
        cut = rules.cut if rules.admits and not self.paused else None
        if self._prefilling and self._order.ranks_classes:
            self._promote_starved(plan.now)
        if self._bounds_prompts and rules.cut is not PromptCut.NOWHERE:
            self._bound_prompts(plan)
        if self._prefilling:
            self._serve_prefilling(plan, cut)
        if cut is not None:
            self._admit_waiting(plan, cut)

    def _promote_starved(self, now: float) -> None:
        """Let a prompt of which nothing has run for ``aging_s`` seconds go before all classes.

        Requests of higher classes start before it goes on, and there might be some in every step.
        """
        for row in sorted(self._prefilling):
            request = self.rows.request_in(row)
            if request.rank != HEAD_RANK and now - request.served_time >= self.limits.aging_s:
                request.rank = HEAD_RANK
                self.rows.order_key[row] = request.order_key

    def _bound_prompts(self, plan: StepPlan) -> None:
        """Let the budget say how many prompt tokens may run beside the decodes."""
        rows, decoding = self.rows, self._decoding_shape()
        self.budget_in_force = plan.budget
        if not decoding.num_rows:
            return
        under_way = self._prompts_under_way()
        num_left = self._room.num_tokens
        for row in under_way:
            num_left += int(rows.num_tokens[row] - rows.num_computed_tokens[row])
        first = self._waiting.first(plan.now)
        num_prompt_tokens = self._budget.prompt_tokens(
            decoding=decoding,
            objective_s=self._objective_s(),
            num_computed_tokens=int(rows.num_computed_tokens[under_way[0]]) if under_way else 0,
            num_left=num_left,
            is_urgent=first is not None and first.lane == Lane.URGENT,
        )
        plan.budget = min(plan.budget, decoding.num_rows + num_prompt_tokens)
        self.budget_in_force = plan.budget

    def _objective_s(self) -> float | None:
        """The tightest inter-token objective of those that run."""
        tightest_ms = self._tightest.tightest_ms
        return None if tightest_ms is None else tightest_ms / 1e3

    def _decoding_shape(self) -> StepShape:
        decoding = self._decoding()
        num_context_tokens = int(self.rows.num_computed_tokens[decoding].sum())
        return StepShape(len(decoding), len(decoding), num_context_tokens, 0)

    def _decoding(self) -> RowIndices:
        """The rows that run one token in this step, ascending: the same array for as long as they are the same."""
        if self._decoding_changed:
            rows = self.rows
            self._decoding_rows = rows.decoding[: rows.end].nonzero()[0]
            self._decoding_changed = False
        return self._decoding_rows

    def _serve_decoding(self, plan: StepPlan) -> None:
        """First pass, part one: give a block to each decoding row that has come to the end of its last."""
        rows, tick = self.rows, np.array(self.next_step, dtype=np.int64)
        due = (rows.due_tick[: rows.end] == tick).nonzero()[0]
        if self._stalled:
            stalled = sorted(self._stalled.difference(plan.sits_out))
            due = np.sort(np.concatenate((due, np.asarray(stalled, dtype=np.intp))))
        if not len(due):
            return
        num_left = rows.last_position[due] - rows.num_computed_tokens[due]
        if np.count_nonzero(num_left) < len(due):
            for row in due[num_left == 0].tolist():
                self._stop_decoding(row)
                self._idle.add(row)
            due, num_left = due[num_left > 0], num_left[num_left > 0]
        if len(due) > self.pool.num_free:
            self._extend_decoding_one_by_one(plan, due[rows.order_key[due].argsort()].tolist())
        elif len(due):
            # There is a block for everyone: no need to ask who is served first.
            self._extend_decoding(plan, due, num_left, tick)

    def _extend_decoding(self, plan: StepPlan, due: RowIndices, num_left: Int32Array, tick: NDArray[np.int64]) -> None:
        rows = self.rows
        blocks = self.pool.allocate(len(due))
        rows.append_one_block_each(due, blocks)
        plan.add_blocks(due, blocks)
        rows.due_tick[due] = np.minimum(num_left, rows.tokens_per_block) + tick
        if self._stalled:
            rows.decoding[due] = 1
            self._decoding_changed = True
            self._stalled.difference_update(due.tolist())

    def _extend_decoding_one_by_one(self, plan: StepPlan, due: list[int]) -> None:
        for row in due:
            if self.rows.requests[row] is None:
                continue  # preempted for a row before it
            self._stop_decoding(row)
            self._stalled.add(row)
            if self._obtain_block(plan, row):
                blocks = self.pool.allocate(1)
                self.rows.append_blocks(row, blocks)
                plan.add_blocks(np.full(1, row), blocks)
                self._stalled.discard(row)
                self._start_decoding([row], self.next_step)

    def _obtain_block(self, plan: StepPlan, row: int) -> bool:
        """Whether a block is free for ``row`` now, after preempting requests that are served after it if need be.

        A row sits out rather than preempt, if a step in flight is about to give back a block for it, or if who is later in
        the service order has had its part of this step already.
        """
        while not self.pool.num_free:
            plan.short_of_blocks = True
            if self.pool.num_fenced > plan.num_promised_blocks:
                plan.num_promised_blocks += 1
                return False
            victim = choose_victim(self.rows, self.pool, row, plan.rows_in_prompt())
            if victim is None:
                return False
            self._preempt(plan, victim, PreemptionReason.NO_BLOCK)
            if victim == row:
                return False
        return True

    def _serve_prefilling(self, plan: StepPlan, cut: PromptCut | None) -> None:
        """First pass, part two: the next chunk of each prompt under way.

        Waiting requests start before prompts that the order puts behind them go on, if any may start (``cut``).
        """
        rows = self.rows
        under_way = [(row, rows.request_in(row)) for row in self._prompts_under_way()]
        is_overtaken = cut is not None and self._order.overtakes_prompts and not self._keeps_service_order
        for row, request in under_way:
            if cut is not None and is_overtaken:
                self._admit_waiting(plan, cut, before=request)
            if row not in self._prefilling or rows.requests[row] is not request:
                continue  # preempted for a request before it
            num_tokens = 0 if row in plan.sits_out else self._next_chunk(plan, row)
            if num_tokens:
                self._run_chunk(plan, row, num_tokens)
            elif row in self._prefilling:
                plan.exceptions.append((row, 0))

    @property
    def _keeps_service_order(self) -> bool:
        """Whether prompts are served in the service order, whatever the order of the queue would like better.

        Where both differ, they do while somebody who was preempted waits: memory is short then, and it is in the service
        order that it is taken away. Otherwise one could take what another must wait for, be preempted, and come back first.
        """
        return self._num_preempted > 0 and not self._order.ranks_classes

    def _prompts_under_way(self) -> list[int]:
        """Rows in their prompt, in the order in which they are served."""
        if self._keeps_service_order:
            return sorted(self._prefilling, key=self.rows.order_key.__getitem__)
        request_in, place = self.rows.request_in, self._waiting.prompt_place
        return sorted(self._prefilling, key=lambda row: place(request_in(row)))

    def _next_chunk(self, plan: StepPlan, row: int) -> int:
        """How many tokens of its prompt ``row`` can run: bounded by budget and by blocks."""
        rows = self.rows
        computed = int(rows.num_computed_tokens[row])
        wanted = min(int(rows.num_tokens[row]) - computed, self._budget_left(plan))
        if wanted <= 0:
            return 0
        room = int(rows.num_blocks[row]) * rows.block_size - computed
        if room < wanted and not room and not self._obtain_block(plan, row):
            return 0
        room += self.pool.num_free * rows.block_size
        plan.short_of_blocks |= room < wanted
        return min(wanted, room)

    def _run_chunk(self, plan: StepPlan, row: int, num_tokens: int) -> None:
        """Schedule ``num_tokens`` more tokens of a prompt and the blocks for them."""
        rows = self.rows
        end = int(rows.num_computed_tokens[row]) + num_tokens
        missing = -(-end // rows.block_size) - int(rows.num_blocks[row])
        blocks = self.pool.allocate(max(missing, 0))
        rows.append_blocks(row, blocks)
        plan.add_blocks(np.full(len(blocks), row), blocks)
        self._advance_prompt(plan, rows.request_in(row), end, num_tokens)

    def _advance_prompt(self, plan: StepPlan, request: Request, end: int, num_tokens: int) -> None:
        """Run ``num_tokens`` tokens of a prompt, those before position ``end``."""
        row = request.row
        request.served_time = plan.now
        self.rows.num_computed_tokens[row] = end
        completes = end == request.num_admitted_tokens
        plan.add_chunk(row, num_tokens)
        plan.chunks.append(PrefillChunk(request, row, end - num_tokens, end, completes))
        if plan.newest_prompts is not None:
            others = [other for other in plan.newest_prompts if other is not request]
            plan.newest_prompts = [request, *others[: NUM_COMPARED_PREFIXES - 1]]
        if completes:
            self._prefilling.discard(row)
        else:
            self._prefilling.add(row)

    def _admit_waiting(self, plan: StepPlan, cut: PromptCut, *, before: Request | None = None) -> None:
        """Second pass: waiting requests in order, those that go ``before`` a running one, until the first that does not fit."""
        rows = self.rows
        books: Books | None = None
        while not plan.short_of_blocks and len(plan.new_requests) < plan.max_new_requests:
            request = self._next_to_start(plan.now)
            if request is None or (request is self._refused and self._is_soon_after_refusal()):
                return
            passed_over: list[Request] = []
            if self.limits.prefix_aware and self._alone is None and not self._start_window.is_narrow:
                passed_over, request = self._with_longest_prefix(request)
            budget = self._budget_left(plan)
            is_behind = before is not None and not self._waiting.goes_before(request, before)
            if request.num_unreturned or budget <= 0 or is_behind:
                return
            most_running = self.max_running
            if self._order.keeps_books:
                most_running -= self._waiting.num_kept_rows(request, self.max_running)
            lacks_row = rows.num_live >= most_running
            if lacks_row and not self._may_preempt_for(request):
                return
            if books is None:
                books = self._open_books()
            if not self._admit(plan, request, cut, budget, books, lacks_row=lacks_row):
                return
            for other in passed_over:
                other.num_passed_over += 1

    def _is_soon_after_refusal(self) -> bool:
        """Whether it is too early to ask again for who was refused. Never while nobody runs, who could change the answer."""
        return self.next_step < self._ask_again_at and self.rows.num_live > 0

    def _with_longest_prefix(self, first: Request) -> tuple[list[Request], Request]:
        """The request with the longest cached prefix among the next few that the order does not care to tell apart from
        ``first``, and those that it passes over; nobody is passed over more than ``MAX_PASSED_OVER`` times.
        """
        if first.num_passed_over >= MAX_PASSED_OVER:
            return [], first
        few = self._waiting.first_few(NUM_COMPARED_PREFIXES)
        num_cached = [
            len(self._find_cached(other, other.token_ids.tobytes(), len(other.token_ids))[0]) for other in few
        ]
        best = num_cached.index(max(num_cached))
        return few[:best], few[best]

    def _budget_left(self, plan: StepPlan) -> int:
        """Tokens that may be added to the step."""
        return plan.budget - plan.num_chunk_tokens - len(self._decoding())

    def _admit(
        self,
        plan: StepPlan,
        request: Request,
        cut: PromptCut,
        budget: int,
        books: Books,
        *,
        lacks_row: bool,
    ) -> bool:
        """Give ``request`` a row, its cached blocks and a first chunk, if the policies let it: ``cut`` and the reservation."""
        rows, pool = self.rows, self.pool
        num_tokens = len(request.token_ids)
        token_bytes = request.token_ids.tobytes()
        shared, node = self._find_cached(request, token_bytes, num_tokens)
        start = max(len(shared) * rows.block_size, request.num_swapped_tokens)
        if self._waits_for_prefixes and self._is_prefix_under_way(self._newest_prompts(plan), request, start):
            return False
        num_free = pool.num_free - (pool.num_free_among(shared) if len(shared) else 0)
        chunk = cut.first_chunk(
            num_tokens - start,
            budget=budget,
            step_budget=plan.budget,
            room=(len(shared) + num_free - books.owed_blocks) * rows.block_size - start,
        )
        missing = books.num_missing(request, start + max(chunk, 1), len(shared), num_free)
        if request.num_preemptions:
            missing += self._headroom(request)
        if missing > 0 or (lacks_row and chunk > 0):
            return self._admit_in_place_of_others(plan, request, cut, missing, lacks_row=lacks_row)
        if chunk <= 0 or (self._bounds_prompts and not self.keeps_objective(request)):
            return False
        self._no_longer_waits(request)
        self._waiting.note_start(request)
        self._start_window.note_start(request)
        num_blocks = -(-(start + chunk) // rows.block_size)
        table = self._behind_shared(shared, num_blocks) if len(shared) else pool.allocate(num_blocks)
        if request.start < 0:
            request.start = self._num_started
            self._num_started += 1
        row = rows.take(request, table)
        if self.speculation.max_tokens:
            rows.note_speculation(row, request.speculation)
        if self._order.keeps_books:
            rows.tenant[row] = self._waiting.place_of_tenant(request)
        if request.num_swapped_tokens:
            self.swapping.swap_in(request, table, len(shared))
        if request.itl_slo_ms:
            self._tightest.change(request.itl_slo_ms, 1)
        request.num_cached_blocks = len(shared)
        request.cache_node = node
        request.status = RequestStatus.RUNNING
        self._stop_tokens.add(request.new.stop_token_ids)
        plan.new_requests.append(
            NewRequest(
                row=row,
                token_ids=token_bytes,
                num_prompt_tokens=request.new.num_prompt_tokens,
                block_ids=encode_column(table),
                num_computed_tokens=start,
                sampling=_sampling_for_row(request),
            )
        )
        self._advance_prompt(plan, request, start + chunk, chunk)
        self._note_admission(request, start, shared, plan.now)
        books.note_start(request, start + chunk, len(table))
        return True

    def _headroom(self, request: Request) -> int:
        """Blocks that must be free beside what a preempted request needs: twice as many after each preemption.

        So whoever was preempted does not come back to be preempted again after a few steps. With one block for each row
        nobody runs short for about ``block_size`` steps; an eighth of the pool is enough, because then more tokens come
        out of those steps than preempting one request undoes. Beside nobody it needs none: it always comes back.
        """
        if not request.num_preemptions or not self.rows.num_live:
            return 0
        doubled = self.rows.num_live << min(request.num_preemptions - 1, MAX_DOUBLINGS)
        return min(doubled, self.pool.num_blocks // 8)

    def keeps_objective(self, request: Request) -> bool:
        """Whether the decodes stay within the tightest objective with one more of them; yes, while nobody decodes."""
        if not self._bounds_prompts or not len(self._decoding()):
            return True
        objectives = [self._tightest.tightest_ms or 0, request.itl_slo_ms]
        tightest_ms = min((objective for objective in objectives if objective), default=None)
        return self._budget.admits_more(
            decoding=self._decoding_shape(),
            objective_s=None if tightest_ms is None else tightest_ms / 1e3,
            num_context_tokens=len(request.token_ids),
        )

    # ------------------------------------------------------------------------------------- in the place of lower classes

    def _admit_in_place_of_others(
        self, plan: StepPlan, request: Request, cut: PromptCut, num_missing_blocks: int, *, lacks_row: bool
    ) -> bool:
        """As ``_admit``, after preempting running requests of lower classes for the blocks or the row that it lacks."""
        if not self._make_room(plan, request, num_blocks=num_missing_blocks, needs_row=lacks_row):
            if self._reservation.predicts and num_missing_blocks > 0:
                self._refused = self._waiting.first(plan.now)
                self._ask_again_at = self.next_step + STEPS_BETWEEN_FORECASTS
            return False
        if num_missing_blocks > 0 and self._in_flight:
            return False  # they come free when the steps in flight have returned
        budget = self._budget_left(plan)  # those that made way may have decoded in this step
        return self._admit(plan, request, cut, budget, self._open_books(), lacks_row=False)

    def _may_preempt_for(self, request: Request) -> bool:
        """Whether requests of lower classes make way for this one: by the order, or because it is about to be late."""
        return self._order.ranks_classes or request.lane == Lane.URGENT

    def _make_room(self, plan: StepPlan, request: Request, *, num_blocks: int, needs_row: bool) -> bool:
        """Preempt running requests of lower classes so that ``request`` finds ``num_blocks`` more blocks, or a row.

        Once per step, and nobody at all if that would not be enough. Blocks behind a fence come free without it.
        """
        if plan.short_of_blocks or not self._may_preempt_for(request):
            return False
        num_blocks -= self.pool.num_fenced
        if num_blocks <= 0 and not needs_row:
            return False
        victims = self._victims_for(plan, request, num_blocks)
        reason = PreemptionReason.HIGHER_CLASS if self._order.ranks_classes else PreemptionReason.LATE_FIRST_TOKEN
        for row in victims:
            victim = self.rows.request_in(row)
            self._preempt(plan, row, reason)
            if not self._order.ranks_classes:
                # Or it would come back first and take what it has just made room for.
                self._waiting.move(victim, Lane.NORMAL)
        return bool(victims)

    def _victims_for(self, plan: StepPlan, request: Request, num_blocks: int) -> list[int]:
        """The rows to preempt for ``request``, the lowest class first; none if all of them were not enough."""
        rows = self.rows
        own_class = HIGHEST_CLASS if is_promoted(request.rank) else request.new.priority
        keys = rows.order_key[: rows.end]
        is_lower = (
            (keys >= 0) & ((keys >> START_BITS) % 2 != 0) & (rows.priority[: rows.end] > own_class)
        )  # none promoted
        is_lower &= rows.num_computed_tokens[: rows.end] < rows.last_position[: rows.end]  # or it is about to end
        planned = plan.rows_in_prompt()
        candidates = [row for row in is_lower.nonzero()[0].tolist() if row not in planned]
        victims = []
        for row in in_victim_order(rows, self.pool, candidates):
            victims.append(row)
            num_blocks -= self.pool.num_held_once(rows.blocks_of(row))
            if num_blocks <= 0:
                return victims
        return []

    # ----------------------------------------------------------------------------------------------------- speculation

    def _speculate(self, plan: StepPlan) -> None:
        """Let decoding rows run proposals with what is left of the budget; O(those that do)."""
        if not self.speculation.max_tokens or self._alone is not None or self._start_window.is_narrow:
            return
        rows, decoding = self.rows, self._decoding()
        if not 0 < len(decoding) <= self.limits.max_speculating_seqs:
            return
        of_now = rows.num_computed_tokens[decoding] >= rows.speculates_from[decoding]
        if not self.speculation.is_time_to_try(self.next_step, len(decoding)):
            of_now &= rows.is_proven[decoding].any()
        ready = decoding[of_now].tolist()
        if not ready:
            return
        records = [rows.request_in(row).speculation for row in ready]
        positions = rows.num_computed_tokens[ready].tolist()
        candidates = list(zip(records, positions, strict=True))
        counts = self.speculation.choose(candidates, self._decoding_shape(), self.next_step, self._objective_s())
        for row, record, count in zip(ready, records, counts, strict=True):
            rows.note_speculation(row, record)
            num_tokens = self._find_room(plan, row, count)
            if num_tokens > 0:
                plan.let_speculate(row, num_tokens)

    def _find_room(self, plan: StepPlan, row: int, count: int) -> int:
        """Of ``count`` tokens ahead of a decoding row, those that budget, limit and blocks allow; 0 or less for none.

        Blocks that are missing are taken now only if as many as there are rows stay free: the row would have come to them
        anyway, but not yet, and nobody is to be preempted for what may be wrong.
        """
        rows = self.rows
        end = int(rows.num_computed_tokens[row]) + 1
        count = min(count, int(rows.last_position[row]) - end, self._budget_left(plan) - plan.num_speculative_tokens)
        missing = -(-(end + count) // rows.block_size) - int(rows.num_blocks[row])
        if count <= 0 or missing <= 0:
            return count
        if plan.short_of_blocks or self.pool.num_free < missing + rows.num_live:
            return int(rows.num_blocks[row]) * rows.block_size - end
        blocks = self.pool.allocate(missing)
        rows.append_blocks(row, blocks)
        plan.add_blocks(np.full(missing, row), blocks)
        self._start_decoding([row], self.next_step)
        return count

    def _behind_shared(self, shared: BlockIndices, count: int) -> BlockIndices:
        """A table of ``count`` blocks, the first of which are shared with others."""
        self.pool.share(shared)
        return np.concatenate((shared, self.pool.allocate(count - len(shared))))

    def _find_cached(self, request: Request, token_bytes: bytes, num_tokens: int) -> tuple[BlockIndices, int]:
        if not self.limits.enable_prefix_caching:
            return NO_BLOCKS, ROOT_NODE
        scope = request.new.tenant if self._caches_by_tenant else ""
        return self.cache.find(token_bytes, self._most_cached_blocks(request, num_tokens), scope)

    def _most_cached_blocks(self, request: Request, num_tokens: int) -> int:
        """The blocks that a request may take from the cache."""
        # At least one token must run, or there would be nothing to sample from; and every one whose logits are asked for.
        most_tokens = num_tokens - 1
        if request.is_owed_prompt_logprobs:
            most_tokens = min(most_tokens, request.num_prompt_logprobs)
        return most_tokens // self.rows.block_size

    def _is_prefix_under_way(self, newest: list[Request], request: Request, start: int) -> bool:
        """Whether to wait for somebody who is computing tokens of this prompt from ``start`` on, enough to be worth it.

        Only for one of the ``newest``, who has some of its prompt in this step or in flight: so each step of waiting brings
        the other one forward, and the wait ends with that one's prompt.
        """
        rows, size = self.rows, self.rows.block_size
        end = -(-(start + self.limits.prefix_wait_tokens) // size) * size
        if request.num_swapped_tokens or end > self._most_cached_blocks(request, len(request.token_ids)) * size:
            return False
        mark = self._mark_of(request)
        for other in newest:
            if self._mark_of(other) != mark or other is request:
                continue
            if other.num_admitted_tokens // size * size < end:
                continue
            if self._caches_by_tenant and other.new.tenant != request.new.tenant:
                continue
            if np.array_equal(rows.token_ids[other.row, :end], request.token_ids[:end]):
                return True
        return False

    def _mark_of(self, request: Request) -> int:
        """A token that is the same for all who may wait for each other: most that differ, do so in any place. Looked up once.

        -1 for who has too few tokens to be waited for. It may have enough when it comes back with some of its output.
        """
        place = self.limits.prefix_wait_tokens - 1
        if request.mark < 0 and place < len(request.token_ids):
            request.mark = int(request.token_ids[place])
        return request.mark

    def _newest_prompts(self, plan: StepPlan) -> list[Request]:
        """Running requests with part of their prompt planned or in flight, the latest first, a few of them."""
        if plan.newest_prompts is None:
            newest: dict[int, Request] = {}
            for chunks in (plan.chunks, *(step.chunks for step in reversed(self._in_flight))):
                for chunk in reversed(chunks):
                    if chunk.holds_blocks and len(newest) < NUM_COMPARED_PREFIXES:
                        newest.setdefault(chunk.row, chunk.request)
            plan.newest_prompts = list(newest.values())
        return plan.newest_prompts

    def _note_admission(self, request: Request, start: int, shared: BlockIndices, now: float) -> None:
        """A request has a row; its tokens from ``start`` on are to be computed."""
        counters, new = self.counters, request.new
        num_tokens, num_cached_tokens = len(request.token_ids), len(shared) * self.rows.block_size
        if request.scheduled_time is not None:
            # It finds mostly what it computed itself, which tells nothing about how often others will.
            counters.num_prefix_resumed_tokens += num_cached_tokens
            num_once_computed, reason = request.lost_work
            num_lost_tokens = min(num_once_computed, num_tokens) - start
            if num_lost_tokens > 0:
                counters.wasted_tokens[reason] += num_lost_tokens
            return
        request.scheduled_time = now
        request.device_us_marks = counters.device_us, counters.device_us
        counters.num_prompt_tokens += new.num_prompt_tokens
        if self._predicts:
            most = request.limit - new.num_prompt_tokens
            request.num_predicted_tokens = self._lengths.predicted_output(
                request.curve, num_tokens - new.num_prompt_tokens, most
            )
        self._admitted.append(
            AdmittedEvent(new.origin, num_cached_tokens, new.num_prompt_tokens, new.tenant, request.arrival_time, now)
        )
        counters.num_prefix_queries += 1
        counters.num_prefix_query_tokens += num_tokens
        if len(shared):
            counters.num_prefix_hits += 1
            counters.num_prefix_hit_tokens += num_cached_tokens
            self.cache.note_reuse(shared)
        if not counters.num_prefix_queries % RECENT_QUERIES:
            self.prefix_statistics.mark()
        if request.new.tenant:
            self.prefix_statistics.note_tenant(request.new.tenant, num_tokens, num_cached_tokens)

    def _start_decoding(self, starting: list[int], tick: int) -> None:
        """From step ``tick`` on, these rows run one token a step, until they need a block or have nothing left to run."""
        rows = self.rows
        indices = np.asarray(starting)
        end = np.minimum(rows.num_blocks[indices] * rows.tokens_per_block, rows.last_position[indices])
        rows.due_tick[indices] = end - rows.num_computed_tokens[indices] + np.array(tick, dtype=np.int64)
        rows.decoding[indices] = 1
        self._decoding_changed = True

    def _stop_decoding(self, row: int) -> None:
        self.rows.decoding[row] = 0
        self.rows.due_tick[row] = NEVER
        self._decoding_changed = True

    def _preempt(self, plan: StepPlan, row: int, reason: PreemptionReason) -> None:
        """Take a row's blocks away; the request returns to its place in the queue and goes on later.

        Who has made way for another ``MAX_WAYS_MADE`` times does so no more.
        """
        request = self.rows.request_in(row)
        self._keep_tokens(request, WasteReason.RECOMPUTE)
        self._swap_out(request, row)
        self._release_row(row, owed_tokens=True)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        if reason.is_for_another:
            request.num_ways_made += 1
            if request.num_ways_made >= MAX_WAYS_MADE:
                request.rank = HEAD_RANK
        mode = PreemptionMode.SWAP if request.num_swapped_tokens else PreemptionMode.RECOMPUTE
        self.counters.num_preemptions += 1
        self.counters.preemptions[Preemption(mode, reason)] += 1
        self._wait(request)
        plan.drop_row(row)
        plan.short_of_blocks = True

    def _keep_tokens(self, request: Request, reason: WasteReason) -> None:
        """Copy what a request needs to know beyond its row; what it has computed may be lost for this ``reason``."""
        rows, row = self.rows, request.row
        request.token_ids = rows.tokens_of(row)
        request.lost_work = int(rows.num_computed_tokens[row]), reason
        if len(request.token_ids) > request.num_admitted_tokens:
            request.last_token_time = self._observer.last_answer_time

    def _swap_out(self, request: Request, row: int) -> None:
        """Let the next step copy what is computed to the host, if that is better than computing it again."""
        rows = self.rows
        num_tokens = int(rows.num_computed_tokens[row])
        if num_tokens == int(rows.last_position[row]):
            return  # it is about to end
        blocks = rows.blocks_of(row)[: -(-num_tokens // rows.block_size)]
        self.counters.num_swapped_out_blocks += self.swapping.swap_out(request, blocks, num_tokens)

    def _release_row(self, row: int, *, owed_tokens: bool, cache: bool = True) -> None:
        """Give up a row and its blocks. ``owed_tokens``: the steps in flight still owe the request their tokens."""
        rows = self.rows
        request = rows.request_in(row)
        num_tokens = int(rows.num_tokens[row])
        if cache and num_tokens > request.num_admitted_tokens:
            # Every token sampled in this stay has returned from a step that had computed all before it.
            self._cache_blocks(request, row, num_tokens - 1)
        fence = self._fence_of(row)
        for step in self._in_flight:
            if row not in step.leavers:
                samples = step.samples(row)
                step.leavers[row] = request if samples and owed_tokens else None
                if samples and owed_tokens:
                    request.num_unreturned += 1
                elif samples:
                    self._count_surplus(1)
        self.pool.release(rows.blocks_of(row), fence)
        if request.itl_slo_ms:
            self._tightest.change(request.itl_slo_ms, -1)
        self._decoding_changed = True
        rows.give_back(row)
        self._prefilling.discard(row)
        self._stalled.discard(row)
        self._idle.discard(row)
        self._finished_rows.append(row)
        self._stop_tokens.remove(request.new.stop_token_ids)

    def _fence_of(self, row: int) -> int | None:
        """The step that must return before the blocks of ``row`` can be used again; None if no step may write them."""
        if not self._in_flight:
            return None
        if not self._batching.overlaps_own_steps and not any(row in step.ran_rows() for step in self._in_flight):
            return None
        return self._in_flight[-1].step

    def _cache_blocks(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """Register the full blocks of a row's first ``num_computed_tokens`` tokens in the prefix cache."""
        rows = self.rows
        first, end = request.num_cached_blocks, num_computed_tokens // rows.block_size
        if end <= first or not self.limits.enable_prefix_caching:
            return
        token_bytes = rows.token_ids[row, first * rows.block_size : end * rows.block_size].tobytes()
        blocks = rows.block_table[row, first:end].copy()
        scope = request.new.tenant if self._caches_by_tenant else ""
        request.cache_node = self.cache.register(request.cache_node, token_bytes, blocks, scope)
        request.num_cached_blocks = end

    def _commit(self, plan: StepPlan, total: int) -> SchedulerOutput:
        """Make the plan a step in flight and the message for it."""
        rows, step = self.rows, self.next_step
        load = None
        if self._observer.is_worth_it(plan, step):
            load = self._observer.load(plan, self._decoding_shape(), self._objective_s())
        swap_out, swap_in, num_moved_blocks = self.swapping.take_moves()
        self.next_step += 1
        if not self._any_decoded and total > plan.num_chunk_tokens:
            self._ask_policy(any_decoded=True)
        rows.num_computed_tokens[: rows.end] += rows.decoding[: rows.end]
        completed = [chunk.row for chunk in plan.chunks if chunk.completes]
        if completed:
            self._start_decoding(completed, self.next_step)
        output = SchedulerOutput(
            epoch=self.epoch,
            step=step,
            scheduled_new_reqs=tuple(plan.new_requests),
            finished_rows=encode_column(sorted(self._finished_rows)) if self._finished_rows else b"",
            new_blocks=plan.new_blocks(),
            num_scheduled_tokens=plan.scheduled_tokens(self._idle, self._stalled, plan.held_back),
            swap_out=swap_out,
            swap_in=swap_in,
            total_num_scheduled_tokens=total,
            num_speculative_tokens=plan.speculative_tokens(),
        )
        self._finished_rows.clear()
        digest = self._digest() if step % DIGEST_INTERVAL_STEPS == 0 else None
        # What decodes in the next step is what samples in this one: rows that decode, and prompts that are complete.
        self._in_flight.append(
            InFlightStep(
                step,
                self._decoding(),
                plan.chunks,
                digest=digest,
                load=load,
                num_moved_blocks=num_moved_blocks,
                speculating=plan.speculating,
            )
        )
        if plan.held_back:
            self._let_decode(plan.held_back, in_this_step=False)
        self.counters.num_steps += 1
        return output

    def _digest(self) -> int:
        rows = self.rows
        live = rows.live_rows()
        return state_digest(live, rows.num_computed_tokens[live], rows.num_blocks[live], rows.block_table)

    # -------------------------------------------------------------------------------------------------------- update

    def update(self, output: ExecutorOutput, now: float) -> StepEvents:
        """Take in the answer to the oldest step in flight. ``now`` in seconds.

        Raises:
            StateMismatch: it cannot be the answer to that step; call ``begin_epoch``.
        """
        step, token_ids, stops_some, accepted = self._take_answer(output)
        self.pool.complete_step(step.step)
        # A step that moved blocks tells nothing of steps: its moves may have run before it, or beside the one before.
        if step.load is not None and not step.num_moved_blocks:
            self._learn(step.load, now, accepted if step.speculating else None)
        self._observer.last_answer_time = now
        self.counters.device_us += output.device_time_us
        if step.num_moved_blocks:
            self.swapping.costs.observe_moves(step.num_moved_blocks, output.move_time_us)
        finished: list[FinishedEvent] = []
        first_tokens: list[FirstTokenEvent] = []
        resumed_gaps_s: list[float] = []
        failed = {error.row: error.message for error in output.errors}
        prompt_logprobs: tuple[PromptLogprobsEvent, ...] = ()
        if step.chunks:
            prompt_logprobs = self._prompt_logprobs(step, output, failed)
            self._confirm_chunks(step, failed, now, first_tokens, resumed_gaps_s)
        logprobs = self._logprobs(step, output) if output.logprobs else ()
        sampling_rows = step.sampling_rows
        late: list[tuple[Request, int]] = []
        if failed or step.leavers:
            is_gone = np.zeros(self.rows.max_rows, dtype=np.bool_)
            is_gone[[*failed, *step.leavers]] = True
            stays = (~is_gone[sampling_rows]).nonzero()[0]
            late = self._late_tokens(step, token_ids, failed)
            self._fail_rows(step, failed, finished)
            sampling_rows, token_ids, stops_some = sampling_rows[stays], token_ids[stays], stops_some[stays]
        columns = self._append_tokens(sampling_rows, token_ids, stops_some, finished)
        if late:
            columns = self._append_late_tokens(columns, late, finished)
        if accepted:
            columns = self._append_accepted(step, accepted, columns, finished)
            ends = {end.origin: end.num_output_tokens for end in finished}
            logprobs = tuple(told for told in logprobs if told.index < ends.get(told.origin, told.index + 1))
        admitted = tuple(self._admitted)
        self._admitted.clear()
        self.counters.num_output_tokens += len(columns.token_ids)
        return StepEvents(
            admitted=admitted,
            owners=columns.owners,
            handles=columns.handles,
            indices=columns.indices,
            token_ids=columns.token_ids,
            logprobs=logprobs,
            finished=tuple(finished),
            first_tokens=tuple(first_tokens),
            resumed_gaps_s=tuple(resumed_gaps_s),
            prompt_logprobs=prompt_logprobs,
        )

    def _learn(self, load: StepLoad, now: float, accepted: list[AcceptedTokens] | None) -> None:
        """Learn from the time of a step; ``accepted`` is None where it did not speculate."""
        if accepted is None:
            self._observer.learn(load, now)
        else:
            num_proposed = sum(entry.num_proposed for entry in accepted)
            self.speculation.note_step(load.shape, self._observer.duration_s(load, now), num_proposed)

    def _take_answer(
        self, output: ExecutorOutput
    ) -> tuple[InFlightStep, Int32Array, NDArray[np.bool_], list[AcceptedTokens]]:
        """Check an answer against the oldest step in flight; return that step, a token for each row that samples, at which
        of them some running request stops, and what rows have beyond it.
        """
        if not self._in_flight or output.step != self._in_flight[0].step:
            raise StateMismatch(f"an answer to step {output.step}, which is not the oldest in flight")
        step = self._in_flight[0]
        self._require_rows(step, output)
        accepted: list[AcceptedTokens] = []
        if step.speculating:
            try:
                token_ids, accepted = split_tokens(output, step.sampling_rows, step.speculating)
            except ValueError as problem:
                raise StateMismatch(f"step {step.step}: {problem}") from None
        else:
            token_ids = decode_column(output.sampled_token_ids)
        if len(token_ids) != len(step.sampling_rows):
            raise StateMismatch(f"{len(token_ids)} sampled tokens in step {step.step}, not {len(step.sampling_rows)}")
        if step.digest is not None and output.state_digest != step.digest:
            raise StateMismatch(f"state digest {output.state_digest} in step {step.step}, not {step.digest}")
        if output.errors:
            token_ids = token_ids.copy()
            for error in output.errors:
                token_ids[step.places_of(error.row)] = 0  # nobody will see it
        try:
            # Seen as unsigned, a negative id is outside the vocabulary as well.
            stops_some = self._stop_tokens.ends_some.take(token_ids.view(np.uint32))
            for entry in accepted:
                self._stop_tokens.ends_some[np.asarray(entry.token_ids, dtype=np.int32).view(np.uint32)]
        except IndexError:
            raise StateMismatch(f"a sampled token in step {step.step} is outside the vocabulary") from None
        self._in_flight.popleft()
        return step, token_ids, stops_some, accepted

    def _require_rows(self, step: InFlightStep, output: ExecutorOutput) -> None:
        """A row that cannot be would be somebody else's, or end this process."""
        for error in output.errors:
            if not 0 <= error.row < self.rows.max_rows:
                raise StateMismatch(f"an error of row {error.row} in step {step.step}, which there is not")
        for values in output.logprobs:
            place = step.places_of(values.row) if 0 <= values.row < self.rows.max_rows else slice(0, 0)
            if place.start == place.stop:
                raise StateMismatch(f"log probabilities of row {values.row} in step {step.step}, which sampled nothing")
        if output.prompt_logprobs:
            self._require_prompts(step, output.prompt_logprobs)

    def _require_prompts(self, step: InFlightStep, reported: Iterable[RowPromptLogprobs]) -> None:
        """What is reported of prompts is what the step computed of them, once for each row."""
        chunks = {chunk.row: chunk for chunk in step.chunks}
        for row, values in ((entry.row, entry.values) for entry in reported):
            chunk = chunks.pop(row, None)
            if chunk is None:
                raise StateMismatch(
                    f"log probabilities of row {row}'s prompt in step {step.step}, which ran none of it"
                )
            problem = values.problem()
            if problem is None and (values.first_position, values.end) != (
                chunk.start + 1,
                chunk.end_of_prompt_logprobs,
            ):
                problem = f"positions {values.first_position} to {values.end - 1} follow from no tokens of it"
            if problem is not None:
                raise StateMismatch(f"log probabilities of row {row}'s prompt in step {step.step}: {problem}")

    def _prompt_logprobs(
        self, step: InFlightStep, output: ExecutorOutput, failed: dict[int, str]
    ) -> tuple[PromptLogprobsEvent, ...]:
        """What is new of what the step tells of prompts.

        How far each has been told follows from the step alone, so that a replay needs no values.
        """
        reported = {entry.row: entry.values for entry in output.prompt_logprobs}
        events = []
        for chunk in step.chunks:
            request = chunk.request
            if request.status is RequestStatus.FINISHED or chunk.row in failed or not request.is_owed_prompt_logprobs:
                continue
            first = request.num_prompt_logprobs + 1
            if chunk.end_of_prompt_logprobs > first:
                request.num_prompt_logprobs = chunk.end_of_prompt_logprobs - 1
                if chunk.row in reported:
                    events.append(PromptLogprobsEvent(request.new.origin, reported[chunk.row].behind(first)))
        return tuple(events)

    def _confirm_chunks(
        self,
        step: InFlightStep,
        failed: dict[int, str],
        now: float,
        first_tokens: list[FirstTokenEvent],
        resumed_gaps_s: list[float],
    ) -> None:
        for chunk in step.chunks:
            request = chunk.request
            if chunk.row in failed or request.status is RequestStatus.FINISHED:
                continue
            if chunk.completes and request.first_token_time is None:
                request.first_token_time = now
                request.device_us_marks = request.device_us_marks[0], self.counters.device_us
                assert request.scheduled_time is not None
                first_tokens.append(FirstTokenEvent(request.arrival_time, request.scheduled_time))
            elif chunk.completes and request.last_token_time is not None:
                resumed_gaps_s.append(now - request.last_token_time)
            if chunk.holds_blocks:
                self._cache_blocks(request, chunk.row, chunk.num_computed_tokens)

    def _logprobs(self, step: InFlightStep, output: ExecutorOutput) -> tuple[LogprobsEvent, ...]:
        events = []
        num_told: Counter[int] = Counter()
        for values in output.logprobs:
            request = step.leavers[values.row] if values.row in step.leavers else self.rows.requests[values.row]
            if request is not None:
                num_tokens = len(request.token_ids) if request.row < 0 else int(self.rows.num_tokens[request.row])
                index = num_tokens - request.new.num_prompt_tokens + num_told[values.row]
                num_told[values.row] += 1
                events.append(LogprobsEvent(request.new.origin, index, values))
        return tuple(events)

    def _late_tokens(
        self, step: InFlightStep, token_ids: Int32Array, failed: dict[int, str]
    ) -> list[tuple[Request, int]]:
        """The tokens for requests that lost their row after this step was scheduled, rows ascending."""
        late = []
        for row, request in sorted((row, request) for row, request in step.leavers.items() if request is not None):
            request.num_unreturned -= 1
            if row not in failed and request.status is not RequestStatus.FINISHED:
                late.append((request, int(token_ids[step.places_of(row)][0])))
        return late

    def _fail_rows(self, step: InFlightStep, failed: dict[int, str], finished: list[FinishedEvent]) -> None:
        for row, message in sorted(failed.items()):
            request = step.leavers[row] if row in step.leavers else self.rows.requests[row]
            if request is not None and request.status is not RequestStatus.FINISHED:
                finished.append(self._finish(request, FinishReason.ERROR, error=message))

    def _append_tokens(
        self,
        sampling_rows: RowIndices,
        token_ids: Int32Array,
        stops_some: NDArray[np.bool_],
        finished: list[FinishedEvent],
    ) -> TokenColumns:
        rows = self.rows
        self._origins.look_up(sampling_rows)
        positions = rows.append_tokens(sampling_rows, token_ids, self._origins.first_token)
        if self._order.keeps_books:
            self._waiting.charge_output(self._origins.num_by_tenant)
        at_end = stops_some | (positions == self._origins.last_position)
        for entry in at_end.nonzero()[0].tolist():
            request = rows.request_in(int(sampling_rows[entry]))
            end = self._end_at(request, int(positions[entry]) + 1, int(token_ids[entry]))
            if end is not None:
                finished.append(end)
        return self._origins.columns(positions, token_ids)

    def _append_late_tokens(
        self, columns: TokenColumns, late: list[tuple[Request, int]], finished: list[FinishedEvent]
    ) -> TokenColumns:
        for request, token_id in late:
            request.append_token(token_id)
            request.last_token_time = self._observer.last_answer_time
            if self._order.keeps_books:
                self._charge_token(self._waiting.place_of_tenant(request))
        for request, token_id in late:
            end = self._end_at(request, len(request.token_ids), token_id)
            if end is not None:
                finished.append(end)
        return columns.with_late(late)

    def _append_accepted(
        self,
        step: InFlightStep,
        accepted: list[AcceptedTokens],
        columns: TokenColumns,
        finished: list[FinishedEvent],
    ) -> TokenColumns:
        """Append what rows have beyond their first token, up to the end of their requests; learn from it."""
        rows, counters = self.rows, self.counters
        entries: list[tuple[int, int, int, int]] = []
        moved: list[int] = []
        for row, num_allowed, num_proposed, token_ids in accepted:
            counters.num_drafts += num_proposed > 0
            counters.num_draft_tokens += num_proposed
            counters.num_accepted_tokens += len(token_ids)
            request = None if row in step.leavers else rows.requests[row]
            if request is None:  # it has ended meanwhile, or with its first token
                self._count_surplus(len(token_ids))
                continue
            rows.num_computed_tokens[row] += len(token_ids)
            self.speculation.learn(
                request.speculation,
                int(rows.num_computed_tokens[row]),
                num_allowed=num_allowed,
                num_proposed=num_proposed,
                num_accepted=len(token_ids),
            )
            rows.note_speculation(row, request.speculation)
            num_taken, end = self._append_to(request, token_ids, entries)
            self._count_surplus(len(token_ids) - num_taken)
            if end is not None:
                finished.append(end)
            elif token_ids:
                moved.append(row)
        if moved:
            self._start_decoding(moved, self.next_step)
        return columns.with_further(entries) if entries else columns

    def _count_surplus(self, num_tokens: int) -> None:
        if num_tokens:
            self.counters.wasted_tokens[WasteReason.SURPLUS] += num_tokens

    def _append_to(
        self, request: Request, token_ids: list[int], entries: list[tuple[int, int, int, int]]
    ) -> tuple[int, FinishedEvent | None]:
        """Append tokens to a running request until one ends it: how many, and the end."""
        rows, row, origin = self.rows, request.row, request.new.origin
        for place, token_id in enumerate(token_ids):
            num_tokens = int(rows.num_tokens[row])
            rows.token_ids[row, num_tokens] = token_id
            rows.num_tokens[row] = num_tokens + 1
            entries.append((origin.owner, origin.handle, num_tokens - request.new.num_prompt_tokens, token_id))
            if self._order.keeps_books:
                self._charge_token(int(rows.tenant[row]))
            end = self._end_at(request, num_tokens + 1, token_id)
            if end is not None:
                return place + 1, end
        return len(token_ids), None

    def _charge_token(self, tenant: int) -> None:
        """Charge one output token to the tenant at this place in the order's books."""
        self._waiting.charge_output(np.arange(tenant + 1) == tenant)

    def _end_at(self, request: Request, num_tokens: int, token_id: int) -> FinishedEvent | None:
        """End ``request`` if its newest token, ``token_id``, stops it or is the last it may have."""
        new = request.new
        if token_id in new.stop_token_ids and num_tokens - new.num_prompt_tokens >= new.sampling.min_tokens:
            return self._finish(request, FinishReason.STOP, stop_token_id=token_id)
        if num_tokens == request.limit:
            return self._finish(request, FinishReason.LENGTH)
        return None

    def _finish(
        self, request: Request, reason: FinishReason, *, stop_token_id: int = -1, error: str = ""
    ) -> FinishedEvent:
        if request.status is RequestStatus.RUNNING:
            num_tokens = int(self.rows.num_tokens[request.row])
            self._release_row(request.row, owed_tokens=False, cache=reason is not FinishReason.ERROR)
        else:
            num_tokens = len(request.token_ids)
            self._no_longer_waits(request)
            if request.num_swapped_tokens:
                self.swapping.forget(request)
        request.status = RequestStatus.FINISHED
        if request is self._alone:
            self._alone = None
        if request is self._refused:
            self._refused = None
        self._start_window.forget(request)
        if self._order.keeps_books:
            self._waiting.forget(request)
        new = request.new
        del self._requests[new.origin]
        if self._predicts and num_tokens > new.num_prompt_tokens:
            is_censored = reason is not FinishReason.STOP
            self._lengths.observe(request.curve, num_tokens - new.num_prompt_tokens, is_censored=is_censored)
        self.counters.num_finished += 1
        return FinishedEvent(
            origin=new.origin,
            reason=reason,
            num_output_tokens=num_tokens - new.num_prompt_tokens,
            arrival_time=request.arrival_time,
            scheduled_time=request.scheduled_time,
            first_token_time=request.first_token_time,
            num_preemptions=request.num_preemptions,
            num_prompt_tokens=new.num_prompt_tokens,
            num_held_tokens=len(new.token_ids) - new.num_prompt_tokens,
            tenant=new.tenant,
            device_us=self._device_us_of(request),
            num_predicted_tokens=request.num_predicted_tokens,
            stop_token_id=stop_token_id,
            error=error,
        )

    def _device_us_of(self, request: Request) -> tuple[int, int]:
        """What steps took on the device until its first token, and from then on."""
        if request.scheduled_time is None:
            return 0, 0
        start, first = request.device_us_marks
        now = self.counters.device_us
        return (now - start, 0) if request.first_token_time is None else (first - start, now - first)


def _sampling_for_row(request: Request) -> SamplingParams:
    """A request's parameters, without what the executor need not do: report of a prompt what has been told."""
    sampling = request.new.sampling
    if sampling.prompt_logprobs == NO_LOGPROBS or request.is_owed_prompt_logprobs:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=NO_LOGPROBS)
