"""Admission: the checks before a waiting request starts.

Owns: these checks, and the newest refusal. Must not know: the queue's order, or how a running row is served.
"""

import msgspec

from headway_proto.columns import encode_column
from headway_proto.sampling import NO_LOGPROBS, SamplingParams
from headway_proto.step import NewRequest
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.lane_balance import LaneBalance
from headway_scheduler.core.admission.making_way import MakingWay
from headway_scheduler.core.admission.prefix_wait import PrefixWait
from headway_scheduler.core.admission.refusals import Reason, Refused
from headway_scheduler.core.admission.running_requests import NUM_COMPARED_PREFIXES, RunningRequests
from headway_scheduler.core.admission.starts import Starts
from headway_scheduler.core.admission.waiting_queue import Lane
from headway_scheduler.core.memory.cached_prefixes import CachedPrefixes
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.policies.batching import PromptCut, StepRules
from headway_scheduler.core.policies.reservations import Books, ForeseenBlocks, PoolState
from headway_scheduler.core.policies.token_budget import JoiningRow
from headway_scheduler.core.state.indices import NO_BLOCKS
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_plan import StepPlan

MAX_PASSED_OVER = 16
MAX_DOUBLINGS = 16


class Admission:
    """Starts waiting requests. ``refused`` says why it stopped; None if no request was left."""

    def __init__(
        self,
        state: CoreState,
        epoch: Epoch,
        prefixes: CachedPrefixes,
        running: RunningRequests,
        making_way: MakingWay,
    ) -> None:
        self._state = state
        self._is_prefix_aware = state.limits.prefix_aware
        self._waiting = state.waiting
        self._losses = state.losses
        self._epoch = epoch
        self._rows = epoch.rows
        self._pool = epoch.pool
        self._prefixes = prefixes
        self._offloads = epoch.swapping.offloads
        self._prefix_wait = PrefixWait(state, epoch, prefixes, running)
        self._running = running
        self._making_way = making_way
        self._balance = LaneBalance(state, epoch)
        self.starts = Starts(state, epoch)
        self.refused: Refused | None = None
        # The head of the queue when a forecast refused a request, and the step in which to ask again.
        self._foreseen: Request | None = None
        self._joining: Request | None = None
        """The request about which the budget is asked; a closure for each would cost more."""
        self._ask_again_at = 0

    def cut_of(self, rules: StepRules) -> PromptCut | None:
        """Return where a starting prompt may be cut; None if no request may start."""
        if not self._state.is_paused and rules.admits:
            return rules.cut
        self.refuse_all(Reason.PAUSED if self._state.is_paused else Reason.BATCH)
        return None

    def hurry(self, plan: StepPlan, rules: StepRules) -> None:
        """Make the next request urgent, since prompts have waited for too many steps."""
        if self._state.is_paused or not rules.admits:
            return
        plan.is_prompt_due = True
        queue = self._waiting.queue
        for request in queue.first_few(1) if self._waiting else ():
            if request.lane > Lane.URGENT:
                queue.move(request, Lane.URGENT)

    def refuse_all(self, reason: Reason) -> None:
        """Let no request start in this step."""
        self.refused = Refused(reason)

    def is_decode_next(self) -> bool:
        """Whether the next request only decodes: prompts under way would be a gap for its client.

        The question promotes nobody, as asking for the one to start may.
        """
        return any(request.only_decodes for request in (self._waiting.queue.first_few(1) if self._waiting else ()))

    def admit_waiting(self, plan: StepPlan, cut: PromptCut, *, before: Request | None = None) -> None:
        """Start waiting requests in order until one is refused, only those that go ``before`` a running prompt."""
        books: Books | None = None
        self.refused = None
        while not plan.short_of_blocks and plan.may_start_more:
            first = self._next_to_start(plan.now)
            if first is None:
                return
            if first is self._foreseen and self._is_soon_after_refusal():
                self.refused = Refused(Reason.BLOCKS, first)
                return
            passed_over, request = self._choose(first)
            if request is None:
                self.refused = Refused(Reason.ADAPTERS, first)
                return
            budget = self._epoch.budget_left(plan)
            is_behind = before is not None and not (
                request.only_decodes or self._waiting.queue.goes_before(request, before)
            )
            if request.num_unreturned or budget <= 0 or is_behind:
                self.refused = Refused(Reason.TURN, request)
                return
            lacks_row = self._lacks_row(request)
            if lacks_row and not self._making_way.may_preempt_for(request):
                self.refuse_all(Reason.ROWS)
                return
            if books is None:
                books = self._open_books()
            self.refused = self._admit(plan, request, cut, budget, books, lacks_row=lacks_row)
            if self.refused is not None:
                return
            for other in passed_over:
                other.num_passed_over += 1
        self.refuse_all(Reason.BLOCKS if plan.short_of_blocks else Reason.TURN)

    def _next_to_start(self, now: float) -> Request | None:
        """A request that runs alone waits until nothing else runs or is in flight."""
        losses = self._losses
        if losses.alone is None:
            first = self._waiting.queue.first(now)
            if first is None or losses.window.has_place_for(first):
                return first
            self.refuse_all(Reason.LOSS)
            return None
        is_free = not self._epoch.in_flight and not self._rows.num_live
        if is_free and losses.alone.row < 0:
            return losses.alone
        self.refuse_all(Reason.ALONE)
        return None

    def _is_soon_after_refusal(self) -> bool:
        """Never if nothing runs, since the answer would not change."""
        return self._epoch.next_step < self._ask_again_at and self._rows.num_live > 0

    def _lacks_row(self, request: Request) -> bool:
        num_rows = self._epoch.max_running
        return self._rows.num_live >= num_rows - self._waiting.queue.num_kept_rows(request, num_rows)

    def _choose(self, first: Request) -> tuple[list[Request], Request | None]:
        """Of the next few, one whose adapter has a place, and the requests that it passes over.

        With ``prefix_aware``, the one with the longest cached prefix. Each is passed over at most ``MAX_PASSED_OVER`` times.
        """
        adapters = self._running.adapters
        if not self._is_prefix_aware and adapters.has_place_for(first):
            return [], first
        if self._losses.is_active or first.num_passed_over >= MAX_PASSED_OVER:
            return [], first if adapters.has_place_for(first) else None
        few = self._waiting.queue.first_few(NUM_COMPARED_PREFIXES)
        places = [place for place, other in enumerate(few) if adapters.has_place_for(other)]
        if not places:
            return [], None
        best = max(places, key=lambda place: self._num_cached(few[place])) if self._is_prefix_aware else places[0]
        return few[:best], few[best]

    def _num_cached(self, request: Request) -> int:
        most_blocks = self._prefixes.most_blocks(request)
        return len(self._prefixes.find(request, request.token_ids.tobytes(), most_blocks)[0])

    def _admit(
        self, plan: StepPlan, request: Request, cut: PromptCut, budget: int, books: Books, *, lacks_row: bool
    ) -> Refused | None:
        """Give ``request`` a row, its cached blocks and a first chunk; None: it has started."""
        rows, pool = self._rows, self._pool
        num_tokens = len(request.token_ids)
        token_bytes = request.token_ids.tobytes()
        most_blocks = self._prefixes.most_blocks(request)
        shared, node = self._prefixes.find(request, token_bytes, most_blocks)
        offloaded = NO_BLOCKS
        if self._offloads:
            offloaded = self._prefixes.find_offloaded(request, token_bytes, len(shared), most_blocks)
        num_kept_tokens = self._epoch.swapping.num_kept_tokens(request)
        start = max((len(shared) + len(offloaded)) * rows.block_size, num_kept_tokens)
        if self._prefix_wait.waits(plan, request, start, most_blocks):
            return Refused(Reason.PREFIX, request)
        num_free = pool.num_free - (pool.num_free_among(shared) if len(shared) else 0)
        chunk = cut.first_chunk(
            num_tokens - start,
            budget=budget,
            step_budget=plan.budget,
            room=(len(shared) + num_free - books.owed_blocks) * rows.block_size - start,
        )
        if not lacks_row and (most := self._balance.most_of(plan, chunk, num_tokens - start)) < chunk:
            chunk = 0 if cut is PromptCut.NOWHERE else most
        missing = books.num_missing(request, start + max(chunk, 1), len(shared), num_free)
        if request.num_preemptions:
            missing += self.headroom(request)
        if missing > 0 or (lacks_row and chunk > 0):
            return self._admit_in_place_of_others(plan, request, cut, books, missing, lacks_row=lacks_row)
        if chunk <= 0:
            return Refused(Reason.TURN, request)
        if not self._keeps_objective(plan, request):
            return Refused(Reason.OBJECTIVE, request)
        self._waiting.leave(request)
        self._waiting.queue.record_start(request)
        self._losses.window.record_start(request)
        table = pool.allocate_behind(shared, -(-(start + chunk) // rows.block_size))
        if request.stored is not None:
            self._state.counters.num_pulled_tokens += max(0, num_kept_tokens - len(shared) * rows.block_size)
        row = self._running.take_row(request, table, len(shared))
        if len(offloaded):
            self._epoch.swapping.restore(request, offloaded, table[len(shared) : len(shared) + len(offloaded)])
            self._state.counters.num_restored_tokens += len(offloaded) * rows.block_size
        request.cache_node = node
        plan.add_request(
            request,
            NewRequest(
                row=row,
                token_ids=token_bytes,
                num_prompt_tokens=request.new.num_prompt_tokens,
                block_ids=encode_column(table),
                num_computed_tokens=start,
                sampling=_sampling_for_row(request),
            ),
        )
        self._running.advance_prompt(plan, request, start + chunk, chunk)
        self.starts.count(request, start, shared, plan.now)
        books.record_start(request, start + chunk, len(table))
        return None

    def _admit_in_place_of_others(
        self, plan: StepPlan, request: Request, cut: PromptCut, books: Books, num_missing: int, *, lacks_row: bool
    ) -> Refused | None:
        refused = Refused(Reason.BLOCKS if num_missing > 0 else Reason.ROWS, request)
        if not self._making_way.make_room(plan, request, num_blocks=num_missing, needs_row=lacks_row):
            if books.retry_after_steps and num_missing > 0:
                self._foreseen = self._waiting.queue.first(plan.now)
                self._ask_again_at = self._epoch.next_step + books.retry_after_steps
            return refused
        if num_missing > 0 and self._epoch.in_flight:
            return refused  # the blocks come free when the steps in flight have returned
        budget = self._epoch.budget_left(plan)  # preempted rows may have decoded in this step
        return self._admit(plan, request, cut, budget, self._open_books(), lacks_row=False)

    def headroom(self, request: Request) -> int:
        """Return the blocks that must stay free when a preempted request starts, or it would soon be preempted again.

        One block per row lasts about ``block_size`` steps. The number doubles with each preemption, up to an eighth of
        the pool: those steps then yield more tokens than a preemption wastes. Alone, a request needs none.
        """
        if not request.num_preemptions or not self._rows.num_live:
            return 0
        doubled = self._rows.num_live << min(request.num_preemptions - 1, MAX_DOUBLINGS)
        return min(doubled, self._pool.num_blocks // 8)

    def _keeps_objective(self, plan: StepPlan, request: Request) -> bool:
        is_due = plan.is_prompt_due and not plan.chunks
        is_first = not self._epoch.decoding.num_decoding
        if is_due or is_first or request.stored is not None:
            return True  # for a client whose stream goes on here, waiting would be a longer gap than any step
        self._joining = request
        admits = self._state.budget.admits_more(self._joining_row)
        self._joining = None
        return admits

    def _joining_row(self) -> JoiningRow:
        request = self._joining
        assert request is not None
        objectives = [self._running.tightest.tightest_ms or 0, request.itl_slo_ms]
        tightest_ms = min((objective for objective in objectives if objective), default=None)
        return JoiningRow(
            decoding=self._epoch.decoding.shape(),
            objective_s=None if tightest_ms is None else tightest_ms / 1e3,
            num_context_tokens=len(request.token_ids),
        )

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        if request is self._foreseen:
            self._foreseen = None
        if self.refused is not None and request is self.refused.request:
            self.refused = None

    # ------------------------------------------------------------------------------------------------- for operators

    def reason_for(self, request: Request) -> Reason:
        """Return why a waiting request has not started."""
        return Reason.TURN if self.refused is None else self.refused.reason_for(request)

    def blocks_for_start(self, request: Request) -> tuple[int, int]:
        """Return its blocks without the prefix cache, and the free blocks not promised."""
        first_chunk = min(len(request.token_ids), request.num_swapped_tokens + self._epoch.max_num_batched_tokens)
        books = self._open_books()
        num_needed = books.num_needed(request, first_chunk) + self.headroom(request)
        return num_needed, self._pool.num_free - books.owed_blocks

    def steps_until_shortage(self) -> int | None:
        """Return the steps until running requests probably lack blocks; O(running).

        None means never, or that output lengths are not learned.
        """
        return ForeseenBlocks(self._rows, self._state.lengths, self._pool_state()).steps_until_shortage()

    def _open_books(self) -> Books:
        state = self._state
        return state.reservation.open_books(self._rows, self._epoch.prefilling, state.lengths, self._pool_state)

    def _pool_state(self) -> PoolState:
        return PoolState(self._pool.num_blocks, self._pool.num_free + self._pool.num_fenced)


def _sampling_for_row(request: Request) -> SamplingParams:
    sampling = request.new.sampling
    if sampling.prompt_logprobs == NO_LOGPROBS or request.is_owed_prompt_logprobs:
        return sampling
    return msgspec.structs.replace(sampling, prompt_logprobs=NO_LOGPROBS)
