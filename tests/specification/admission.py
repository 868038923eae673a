"""Starting those that wait."""

from specification.candidates import Candidates
from specification.demand import Demand
from specification.host_blocks import HostBlocks
from specification.lanes import Lanes
from specification.losses import Losses
from specification.queue import Queue
from specification.requests import SpecRequest
from specification.room import Room
from specification.state import SpecState


class Admission:
    def __init__(
        self,
        state: SpecState,
        candidates: Candidates,
        demand: Demand,
        host_blocks: HostBlocks,
        lanes: Lanes,
        losses: Losses,
        queue: Queue,
        room: Room,
    ) -> None:
        self._state = state
        self._candidates = candidates
        self._demand = demand
        self._host_blocks = host_blocks
        self._lanes = lanes
        self._losses = losses
        self._queue = queue
        self._room = room
        self.num_started = 0
        self.refused: SpecRequest | None = None
        """The first in the queue when one was foreseen not to fit; nobody is asked again before ``ask_again_at``, a step."""
        self.ask_again_at = 0

    def admit(self, before: SpecRequest | None = None) -> None:
        state, draft = self._state, self._state.draft
        if state.limits.batching == "static" and state.batch_is_closed:
            return
        self._demand.forecast = None
        most_new = state.capacity.most_batched_tokens(state.limits.max_num_batched_tokens)
        if state.limits.batching == "orca" and not state.has_lanes:
            most_new = state.max_batch - draft.num_chosen
        while not draft.short and len(draft.new_requests) < most_new and not self._is_soon_after_refusal():
            passed_over, request = self._candidates.next_to_start(state.now)
            if (
                request is None
                or request.unreturned
                or state.budget() <= 0
                or not self._queue.goes_before(request, before)
            ):
                return
            lacks_row = len(state.running) >= state.max_running - self._num_kept_rows(request)
            if lacks_row and not self._room.may_preempt_for(request):
                return
            if self._demand.forecast is None:
                self._demand.look_ahead()
            if not self._start(request, lacks_row):
                return
            for other in passed_over:
                other.passed_over += 1

    def _is_soon_after_refusal(self) -> bool:
        state = self._state
        if self._losses.alone is not None:  # The queue is not asked, and nobody in it is promoted.
            return False
        return state.step < self.ask_again_at and bool(state.running) and self._queue.first(state.now) is self.refused

    def _num_kept_rows(self, request: SpecRequest) -> int:
        """fair: who runs its share of rows, as it would be with one tenant more, leaves a sixteenth of them alone."""
        state = self._state
        if state.limits.order != "fair":
            return 0
        num_tenants = len({r.tenant for r in state.running + state.waiting})
        num_own = sum(r.tenant == request.tenant for r in state.running)
        return state.max_running // 16 if num_own * (num_tenants + 1) >= state.max_running else 0

    def _start(self, request: SpecRequest, lacks_row: bool) -> bool:
        """Let a waiting request run its first chunk, if it may be cut so and if enough blocks are free."""
        state = self._state
        size = state.capacity.block_size
        shared, chain = self._candidates.find_cached(request)
        unshared = state.pool.num_free - sum(map(state.pool.is_evictable, shared))
        free = unshared - self._demand.owed()
        start = max(len(shared) * size, request.swapped)
        if self._candidates.waits_for_prefix(request, start):
            return False
        chunk = self._demand.first_chunk(len(request.tokens) - start, (len(shared) + free) * size - start)
        most = chunk if lacks_row else self._lanes.within_lane(chunk, len(request.tokens) - start)
        if most < chunk:
            chunk = most if state.limits.batching in {"chunked", "split_fuse"} else 0
        missing = self._demand.num_missing(request, start + max(chunk, 1), len(shared), unshared)
        missing += self._demand.headroom(request)
        if missing > 0 or (lacks_row and chunk > 0):
            if not self._room.make_room(request, missing, lacks_row):
                if state.reserve == "predicted" and missing > 0:
                    self.refused, self.ask_again_at = self._queue.first(state.now), state.step + 2
                return False
            if missing > 0 and state.in_flight:
                return False
            self._demand.look_ahead()
            return self._start(request, lacks_row=False)
        if chunk <= 0:
            return False
        if state.reserve == "predicted":
            self._demand.forecast.add(len(request.tokens), self._demand.chances(request))
        self._take_row(request, shared, chain, start, chunk)
        return True

    def _take_row(self, request: SpecRequest, shared: list[int], chain: list[int], start: int, count: int) -> None:
        state, draft = self._state, self._state.draft
        taken = {r.row for r in state.running}
        self._queue.leave_queue(request)
        if request.start < 0:
            request.start = self.num_started
            self.num_started += 1
        self._queue.starts_since_promotion += 1
        self._queue.highest_starts = self._queue.highest_starts + 1 if request.rank == 1 else 0
        if state.limits.order == "fair":
            request.place = self._queue.tenant_place(request.tenant)[:2]
            if not request.has_started:
                self._queue.served[request.tenant] += len(request.tokens)
        state.pool.share(shared, is_reuse=not request.has_started)
        state.num_hit_tokens += 0 if request.has_started else len(shared) * state.capacity.block_size
        request.has_started = True
        request.row = min(set(range(len(taken) + 1)) - taken)
        request.blocks, request.chain = list(shared), chain
        request.computed = start
        request.token_time = 0.0
        request.confirmed = len(shared) * state.capacity.block_size  # what is swapped in is there when the step has run
        request.prompt_end = len(request.tokens)
        state.running.append(request)
        self._losses.num_in_window += any(request is r for r, _ in self._losses.unproven)
        before = list(draft.new_blocks)
        self._room.extend(request, count)
        draft.new_blocks = before  # a new request carries its blocks itself
        if request.host_blocks:
            pairs = list(zip(request.host_blocks, request.blocks, strict=False))
            self._host_blocks.swap_in += pairs[len(shared) :]
            self._host_blocks.give_up(request)
        draft.tokens[request.row] = count
        request.served_time = state.now
        draft.new_requests.append(
            {
                "row": request.row,
                "token_ids": list(request.tokens),
                "block_ids": list(request.blocks),
                "num_computed_tokens": start,
                "scheduled": count,
            }
        )
        if request.adapter:
            draft.new_adapters.append((request.row, request.adapter))
        if request.pooling:
            draft.new_pooled.append((request.row, request.pooling))
