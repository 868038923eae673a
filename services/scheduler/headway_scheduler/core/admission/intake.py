"""The arrival of a request.

Owns: the fields of a new request. Must not know: rows or steps.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.door import RequestRejected, check_request, limit_of
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.request import Request


def take_in(state: CoreState, new: NewRequestEvent, now: float) -> None:
    """Queue a request.

    Raises:
        RequestRejected: it can never run, or the queue is full.
    """
    limit = limit_of(new, state.capacity.max_request_tokens)
    if new.origin in state.requests:
        raise RequestRejected("already_exists", "handle", f"{new.origin.handle} is the handle of a live request")
    check_request(new, limit, state.capacity)
    state.waiting.room.check(new.tenant, len(new.token_ids))
    rank = state.waiting.queue.rank_of(new.priority)
    request = Request(new, arrival=state.num_arrivals, rank=rank, limit=limit, now=now)
    state.num_arrivals += 1
    request.itl_slo_ms = new.itl_slo_ms or state.limits.default_itl_slo_ms
    request.curve = state.lengths.curve_of(new.tenant, new.num_prompt_tokens)
    state.requests[new.origin] = request
    ttft_slo_ms = new.ttft_slo_ms or state.limits.default_ttft_slo_ms
    # The first token may have come before, or be late already for what was not its own doing.
    if ttft_slo_ms and len(new.token_ids) == new.num_prompt_tokens and not new.has_run:
        _watch_first_token(state, request, ttft_slo_ms / 1e3)
    state.waiting.enter(request)


def _watch_first_token(state: CoreState, request: Request, objective_s: float) -> None:
    state.observer.is_wanted = True
    prefill_s = state.step_times.prefill_s(request.new.num_prompt_tokens, 0) or 0.0
    request.latest_start = request.arrival_time + objective_s - prefill_s
    state.first_tokens.watch(request, objective_s)
