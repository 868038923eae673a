"""The arrival of a request.

Owns: the fields of a new request. Must not know: rows or steps.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.door import RequestRejected, check_request, limit_of
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus


def take_in(state: CoreState, new: NewRequestEvent, now: float) -> None:
    """Queue a request.

    Raises:
        RequestRejected: it can never run, or the queue is full.
    """
    limit = limit_of(new, state.max_request_tokens)
    if new.origin in state.requests:
        raise RequestRejected("already_exists", "handle", f"{new.origin.handle} is the handle of a live request")
    check_request(new, limit, state.capacity)
    state.waiting.room.check(new.tenant, len(new.token_ids))
    request = arrived(new, state.limits, state.waiting.queue.rank_of(new.priority), state.num_arrivals, now)
    request.limit = limit
    enter(state, request)


def arrived(new: NewRequestEvent, limits: SchedulerLimits, rank: int, arrival: int, now: float) -> Request:
    """A request that has just come as number ``arrival`` and that no executor's core has yet."""
    request = Request(new, arrival=arrival, rank=rank, limit=0, now=now)
    request.itl_slo_ms = new.itl_slo_ms or limits.default_itl_slo_ms
    return request


def enter(state: CoreState, request: Request) -> None:
    """Let a request wait here that has just come, or that another core released."""
    new = request.new
    state.num_arrivals = max(state.num_arrivals, request.arrival + 1)
    request.curve = state.lengths.curve_of(new.tenant, new.num_prompt_tokens)
    state.requests[new.origin] = request
    objective_s = first_token_objective_s(request, state.limits)
    if objective_s:
        _watch_first_token(state, request, objective_s)
    state.waiting.enter(request)


def first_token_objective_s(request: Request, limits: SchedulerLimits) -> float:
    """The objective on the first token, in seconds; 0 for none.

    None holds for a first token that came before, or that is late already for what was not its own doing.
    """
    new = request.new
    objective_ms = new.ttft_slo_ms or limits.default_ttft_slo_ms
    if not objective_ms or new.has_run or request.status is not RequestStatus.WAITING:
        return 0.0
    return objective_ms / 1e3 if len(new.token_ids) == new.num_prompt_tokens else 0.0


def _watch_first_token(state: CoreState, request: Request, objective_s: float) -> None:
    state.observer.is_wanted = True
    prefill_s = state.step_times.prefill_s(request.new.num_prompt_tokens, 0) or 0.0
    request.latest_start = request.arrival_time + objective_s - prefill_s
    state.first_tokens.watch(request, objective_s)
