"""One queue for many executors: a request waits here until a cell can start it soon (late binding).

Owns: the waiting requests that no core has, and the choice of a cell. Must not know: steps, rows, or frames.

The order of the queue is the operator's, the same as within a core. The next request goes to the cell with the shortest
predicted time to its first token: the prompts ahead of it there, its own tokens that are not cached there, and the steps
that they are in, by that cell's own model of step times. Of cells that are level, it takes the one with the fewest
requests. So nothing piles up on one executor while another idles, and prompts that share a prefix meet where it is cached.

Where executors have roles, requests that go on with stored blocks stand in a line of their own, by rank and arrival:
they need another executor than prompts do, so neither may keep the other waiting.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway_scheduler.core.admission.endings import end_of
from headway_scheduler.core.admission.fair_queue import burst_tokens_of
from headway_scheduler.core.admission.intake import arrived, first_token_objective_s
from headway_scheduler.core.admission.objectives import Danger, FirstTokenWatch
from headway_scheduler.core.admission.orders import ORDERS, QueueSettings
from headway_scheduler.core.admission.waiting_queue import Lane
from headway_scheduler.core.admission.waiting_requests import WaitingRequests
from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.choosing.choice import able_cells, accepting_cells, best_of, cells_with_room
from headway_scheduler.core.choosing.policies import POLICIES, PlacementPolicy
from headway_scheduler.core.memory.cached_prefixes import PrefixQuery
from headway_scheduler.core.policies.output_lengths import OutputLengths
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus

AGGREGATED = POLICIES["aggregated"]


class Placed(NamedTuple):
    """A request goes to a cell, chosen among ``num_choices``. The figures say why, in tokens.

    ``leaves``: it goes on elsewhere behind its prompt.
    """

    request: Request
    cell: int
    num_choices: int
    num_cached_tokens: int
    num_tokens_ahead: int
    leaves: bool = False


class Placement:
    """The queue above the cells. Times in seconds."""

    def __init__(self, limits: SchedulerLimits, policy: PlacementPolicy = AGGREGATED) -> None:
        self.policy = policy
        self._limits = limits
        order = ORDERS[limits.order]
        self._lengths = OutputLengths(is_used=order.predicts)
        self._capacity: ExecutorCapacity | None = None
        queue = order.make_queue(
            QueueSettings(limits.aging_s, limits.tenant_weights, self._predicted_output, self._burst_tokens)
        )
        self._waiting = WaitingRequests(limits, queue)
        self._going_on: list[Request] = []
        """Requests with stored blocks; only where executors have roles."""
        self._requests: dict[Origin, Request] = {}
        self._homeless: dict[Origin, Request] = {}
        """Requests that no open cell can hold: they must not keep others waiting."""
        self._placed: dict[Origin, Placed] = {}
        self._first_tokens = FirstTokenWatch()
        self._shed: list[FinishedEvent] = []
        self.num_arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests that wait here."""
        return self._waiting.room.num_tokens

    def requests(self) -> list[Request]:
        """The requests that wait here, by arrival."""
        return sorted(self._requests.values(), key=lambda request: request.arrival)

    def find(self, origin: Origin) -> Request | None:
        """The request of this origin, if it waits here."""
        return self._requests.get(origin)

    def placed(self, origin: Origin) -> Placed | None:
        """Where a request that waits here no more went, and why."""
        return self._placed.get(origin)

    def num_ahead_of(self, request: Request) -> int:
        """The requests that are to be placed before this one; O(n log n)."""
        in_order = self._going_on if request in self._going_on else self._waiting.queue.in_order()
        return in_order.index(request) if request in in_order else 0

    # -------------------------------------------------------------------------------------------- requests come and go

    def add(self, new: NewRequestEvent, cells: Callable[[], Sequence[CellLoad]], now: float) -> Request:
        """Queue a request that at least one of ``cells`` can hold; the caller has checked that.

        Raises:
            RequestRejected: the queue is full.
        """
        self._waiting.room.check(new.tenant, len(new.token_ids))
        rank = self._waiting.queue.rank_of(new.priority)
        request = arrived(new, self._limits, rank, self.num_arrivals, now)
        self.num_arrivals += 1
        self._watch_first_token(request, cells)
        self._enter(request)
        return request

    def take_back(self, request: Request) -> None:
        """A cell released this request; it keeps its place by arrival, and goes first if it ran."""
        queue = self._waiting.queue
        if self._placed.pop(request.new.origin, None) is None:
            queue.adopt(request)
        else:
            self._forget_to_enter_again(request)
        self.number_after([request])
        self._enter(request)

    def forget_stored(self, request: Request) -> None:
        """A request that waits here goes on without its stored blocks: from now on it needs what a prompt needs."""
        is_in_line = request.new.origin not in self._homeless
        if is_in_line:
            self._leave_line(request)
        request.forget_stored()
        if is_in_line:
            self._enter_line(request)

    def cell_opened(self, capacity: ExecutorCapacity) -> None:
        """A cell has an executor: requests that no other can hold may try again."""
        if self._capacity is None or capacity.max_request_tokens > self._capacity.max_request_tokens:
            self._capacity = capacity
        for request in self._homeless.values():
            self._forget_to_enter_again(request)
            self._enter_line(request)
        self._homeless.clear()

    def number_after(self, requests: Sequence[Request]) -> None:
        """Number later arrivals after these."""
        for request in requests:
            self.num_arrivals = max(self.num_arrivals, request.arrival + 1)

    def finish(self, origin: Origin, reason: FinishReason, error: str = "") -> FinishedEvent | None:
        """End a request that waits here; None if it does not."""
        request = self._requests.get(origin)
        if request is None:
            return None
        self._leave(request)
        self._waiting.queue.forget(request)
        return end_of_moving(request, reason, error)

    def take_shed(self) -> tuple[FinishedEvent, ...]:
        """The requests that were ended since the last call because their first token could only be late."""
        shed = tuple(self._shed)
        self._shed.clear()
        return shed

    def count_end(self, end: FinishedEvent) -> None:
        """A placed request has ended in its cell."""
        placed = self._placed.pop(end.origin, None)
        if placed is None:
            return
        queue, request = self._waiting.queue, placed.request
        num_new_tokens = end.num_output_tokens - end.num_held_tokens
        if num_new_tokens > 0:
            queue.charge_token(queue.place_of_tenant(request), num_new_tokens)
        queue.forget(request)
        if end.num_output_tokens > 0:
            curve = self._lengths.curve_of(end.tenant, end.num_prompt_tokens)
            is_censored = end.reason is not FinishReason.STOP
            self._lengths.observe(curve, end.num_output_tokens, is_censored=is_censored)

    # ---------------------------------------------------------------------------------------------------- the choice

    def place_next(self, cells: Sequence[CellLoad], now: float) -> Placed | None:
        """Take the next request out of the queue and say where it goes; None if no cell could start it soon."""
        if now >= self._first_tokens.next_due:
            self._check_first_tokens(now, cells)
        going_on, queue = self._going_on, self._waiting.queue
        if not going_on:
            return self._place_first(lambda: queue.first(now), cells)
        lines = [lambda: going_on[0] if going_on else None, lambda: queue.first(now)]
        first = queue.first(now)
        if first is not None and first.rank < going_on[0].rank:
            lines.reverse()
        return self._place_first(lines[0], cells) or self._place_first(lines[1], cells)

    def _place_first(self, first: Callable[[], Request | None], cells: Sequence[CellLoad]) -> Placed | None:
        while (request := first()) is not None:
            able = able_cells(request, cells)
            if not able:
                self._leave_line(request)
                self._homeless[request.new.origin] = request
                continue
            accepting = accepting_cells(request, able, self.policy)
            choices = cells_with_room(request, accepting)
            if not choices and self._waiting.queue.reason_to_preempt_for(request) is not None:
                choices = [cell for cell in accepting if cell.may_make_room_for(request)]
            return self._place(request, choices, able) if choices else None
        return None

    def would_place_beside(self, request: Request, cells: Sequence[CellLoad], here: CellLoad) -> bool:
        """Whether one of ``cells`` other than ``here`` could start this request soon, if it were the next."""
        accepting = accepting_cells(request, able_cells(request, cells), self.policy)
        return any(cell is not here for cell in cells_with_room(request, accepting))

    def _place(self, request: Request, choices: Sequence[CellLoad], able: Sequence[CellLoad]) -> Placed:
        best = best_of(request, choices, self.policy, PrefixQuery(request, self._limits))
        cell = best.cell
        placed = Placed(request, cell.number, len(choices), best.num_cached_tokens, best.num_tokens_ahead)
        if self.policy.has_roles:
            # Over a way that is always too slow, it would compute its prompt anew for every token.
            accepting = [other for other in able if other.accepts]
            leaves = not request.has_lost_blocks and self.policy.leaves(request, cell, accepting)
            placed = placed._replace(leaves=leaves)
            request.is_leaving = leaves
        self._leave(request)
        self._waiting.queue.record_start(request)
        self._placed[request.new.origin] = placed
        return placed

    def _check_first_tokens(self, now: float, cells: Sequence[CellLoad]) -> None:
        """As in a core: requests at risk go first; those that are too late go last, or end."""
        is_untried = any(cell.is_idle for cell in cells)
        for request, danger in self._first_tokens.due(now):
            origin = request.new.origin
            if self._requests.get(origin) is not request or origin in self._homeless:
                continue
            if danger is Danger.AT_RISK:
                self._waiting.queue.move(request, Lane.URGENT)
            elif self._limits.shed_late and not is_untried:
                end = self.finish(origin, FinishReason.SHED)
                assert end is not None
                self._shed.append(end)
            else:
                self._waiting.queue.move(request, Lane.LATE)
                is_untried = False

    def _watch_first_token(self, request: Request, cells: Callable[[], Sequence[CellLoad]]) -> None:
        objective_s = first_token_objective_s(request, self._limits)
        if objective_s:
            known = [cell.prefill_s(request.new.num_prompt_tokens, 0) or 0.0 for cell in cells()]
            request.latest_start = request.arrival_time + objective_s - min(known, default=0.0)
            self._first_tokens.watch(request, objective_s)

    def _enter(self, request: Request) -> None:
        request.curve = self._lengths.curve_of(request.new.tenant, request.new.num_prompt_tokens)
        self._requests[request.new.origin] = request
        self._enter_line(request)

    def _enter_line(self, request: Request) -> None:
        if self.policy.has_roles and request.stored is not None:
            self._waiting.room.enter(request)
            insort(self._going_on, request, key=_place_of)
        else:
            self._waiting.enter(request)

    def _leave_line(self, request: Request) -> None:
        if request in self._going_on:
            self._going_on.remove(request)
            self._waiting.room.leave(request)
        else:
            self._waiting.leave(request)

    def _forget_to_enter_again(self, request: Request) -> None:
        """As it enters the queue again, a request that has not run is counted anew."""
        if request.status is RequestStatus.WAITING:
            self._waiting.queue.forget(request)

    def _leave(self, request: Request) -> None:
        del self._requests[request.new.origin]
        if self._homeless.pop(request.new.origin, None) is None:
            self._leave_line(request)

    def _predicted_output(self, request: Request) -> int:
        age = len(request.token_ids) - request.new.num_prompt_tokens
        predicted = self._lengths.predicted_output(request.curve, age, request.new.max_tokens)
        return (request.new.max_tokens if predicted is None else predicted) - age

    def _burst_tokens(self) -> int:
        capacity = self._capacity
        if capacity is None:
            return 0
        return burst_tokens_of(capacity.max_request_tokens, capacity.num_blocks * capacity.block_size)


def end_of_moving(request: Request, reason: FinishReason, error: str = "") -> FinishedEvent:
    """The end of a request that no core has."""
    request.status = RequestStatus.FINISHED
    return end_of(request, reason, len(request.token_ids) - request.new.num_prompt_tokens, error=error)


def _place_of(request: Request) -> tuple[int, bool, int]:
    """Who made way for another is not at the head again at once."""
    return request.rank, request.num_ways_made > 0, request.arrival
