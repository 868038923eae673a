"""Blocks and rows for those that run: who gets some, and who is preempted for them."""

from specification.demand import Demand
from specification.host_blocks import HostBlocks
from specification.queue import Queue
from specification.requests import SpecRequest
from specification.state import SpecState


class Room:
    def __init__(self, state: SpecState, demand: Demand, host_blocks: HostBlocks, queue: Queue) -> None:
        self._state = state
        self._demand = demand
        self._host_blocks = host_blocks
        self._queue = queue

    def extend(self, request: SpecRequest, num_tokens: int) -> None:
        state = self._state
        missing = -(-(request.computed + num_tokens) // state.capacity.block_size) - len(request.blocks)
        blocks = state.pool.allocate(max(0, missing))
        request.blocks += blocks
        state.draft.new_blocks += [(request.row, block) for block in blocks]

    def obtain_block(self, request: SpecRequest) -> bool:
        state, draft = self._state, self._state.draft
        while not state.pool.num_free:
            draft.short = True
            if len(state.pool.fenced) > draft.promised:
                draft.promised += 1
                return False
            victim = self._victim_for(request)
            if victim is None:
                return False
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _victim_for(self, request: SpecRequest) -> SpecRequest | None:
        later = [r for r in self._state.running if r.key > request.key]
        if not later:
            return request
        later = [r for r in later if not self._state.is_planned(r)]
        if not later:
            return None
        lowest = max(r.priority for r in later)
        candidates = sorted((r for r in later if r.priority == lowest), key=lambda r: r.key)[-16:]
        return self._in_victim_order(candidates)[0]

    def _in_victim_order(self, candidates: list[SpecRequest]) -> list[SpecRequest]:
        def place(r: SpecRequest) -> tuple[int, int, tuple[int, ...]]:
            freed = self._num_freed(r)
            lost = 4 * r.computed // (freed * self._state.capacity.block_size) if freed else 1 << 63
            return (-r.priority, lost, tuple(-part for part in r.key))

        return sorted(candidates, key=place)

    def _num_freed(self, request: SpecRequest) -> int:
        return sum(self._state.pool.references[block] == 1 for block in request.blocks)

    def may_preempt_for(self, request: SpecRequest) -> bool:
        return self._state.ranks_classes or request.lane == 1

    def make_room(self, request: SpecRequest, num_blocks: int, needs_row: bool) -> bool:
        """Preempt running requests of lower classes, if all that is missing comes free by that."""
        state = self._state
        if state.draft.short or not self.may_preempt_for(request):
            return False
        num_blocks -= len(state.pool.fenced)
        if num_blocks <= 0 and not needs_row:
            return False
        own_class = 1 if request.rank % 2 == 0 else request.priority
        victims = []
        for r in self._in_victim_order(
            [
                r
                for r in state.running
                if r.rank % 2 and r.priority > own_class and r.computed < r.limit - 1 and not state.is_planned(r)
            ]
        ):
            victims.append(r)
            num_blocks -= self._num_freed(r)
            if num_blocks <= 0:
                break
        else:
            return False
        for victim in victims:
            victim.ways_made += 1
            if victim.ways_made >= 4:
                victim.rank = 0
            self.preempt(victim)
            if not state.ranks_classes:
                victim.lane = 2
        return bool(victims)

    def preempt(self, victim: SpecRequest) -> None:
        state, draft = self._state, self._state.draft
        draft.tokens.pop(victim.row, None)
        draft.new_blocks = [(row, block) for row, block in draft.new_blocks if row != victim.row]
        num_blocks = -(-victim.computed // state.capacity.block_size)
        is_idle = victim.computed >= victim.limit - 1
        may_swap = state.limits.preemption == "swap" and not victim.runs_whole
        if may_swap and not is_idle and 0 < num_blocks <= len(self._host_blocks.free):
            victim.host_blocks = self._host_blocks.free[:num_blocks]
            del self._host_blocks.free[:num_blocks]
            victim.swapped = victim.computed
            self._host_blocks.swap_out.append((victim, list(zip(victim.blocks, victim.host_blocks, strict=False))))
        self.leave(victim, cache=True)
        victim.lane = 0
        victim.preemptions += 1
        draft.short = True
        victim.unreturned = victim.sampled_ahead
        victim.sampled_ahead = 0
        victim.stay += 1
        state.num_preemptions += 1
        victim.work = self._demand.expected_work(victim)
        self._queue.lift(victim.tenant)
        state.waiting.append(victim)

    def leave(self, request: SpecRequest, *, cache: bool) -> None:
        state = self._state
        state.running.remove(request)
        if cache and state.limits.enable_prefix_caching:
            state.pool.register(request, request.confirmed)
        # Under orca, and with lanes, what is not in flight is written by nobody; otherwise nearly everything is in flight.
        looks = state.limits.batching == "orca" or state.has_lanes
        is_written = bool(state.in_flight) and (not looks or state.is_in_flight(request))
        state.pool.release(request.blocks, state.in_flight[-1].number if is_written else None)
        state.finished_rows.append(request.row)
        request.row, request.blocks, request.computed, request.chain = None, [], 0, []
        request.stalled = False
        request.step_lane = None
