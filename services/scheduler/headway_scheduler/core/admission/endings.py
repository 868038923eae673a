"""The end of a request in any state.

Owns: the release of what it holds. Must not know: why requests end.
"""

from headway_scheduler.core.admission.admission import Admission
from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus


class Endings:
    """Ends requests."""

    def __init__(self, state: CoreState, epoch: Epoch, running: RunningRequests, admission: Admission) -> None:
        self._state = state
        self._epoch = epoch
        self._running = running
        self._admission = admission

    def finish(
        self, request: Request, reason: FinishReason, *, stop_token_id: int = -1, error: str = ""
    ) -> FinishedEvent:
        """End a live request and release what it holds."""
        state = self._state
        num_tokens = self._epoch.rows.num_tokens_of(request)
        if request.status is RequestStatus.RUNNING:
            self._running.release_row(request.row, owed_tokens=False, cache=reason is not FinishReason.ERROR)
        else:
            state.waiting.leave(request)
        if request.num_swapped_tokens or request.stored is not None:
            self._epoch.swapping.forget(request)
        request.status = RequestStatus.FINISHED
        state.losses.forget(request)
        self._admission.forget(request)
        state.waiting.queue.forget(request)
        new = request.new
        del state.requests[new.origin]
        num_output_tokens = num_tokens - new.num_prompt_tokens
        state.lengths.observe(request.curve, num_output_tokens, is_censored=reason is not FinishReason.STOP)
        state.counters.num_finished += 1
        return end_of(
            request,
            reason,
            num_output_tokens,
            device_us=self._device_us_of(request),
            stop_token_id=stop_token_id,
            error=error,
        )

    def _device_us_of(self, request: Request) -> tuple[int, int]:
        """Device time before and after its first token, microseconds."""
        if request.scheduled_time is None:
            return 0, 0
        start, first = request.device_us_marks
        now = self._state.counters.device_us
        return (now - start, 0) if request.first_token_time is None else (first - start, now - first)


def end_of(
    request: Request,
    reason: FinishReason,
    num_output_tokens: int,
    *,
    device_us: tuple[int, int] = (0, 0),
    stop_token_id: int = -1,
    error: str = "",
) -> FinishedEvent:
    """The end of a request, with what it knows of itself."""
    new = request.new
    return FinishedEvent(
        origin=new.origin,
        reason=reason,
        num_output_tokens=num_output_tokens,
        arrival_time=request.arrival_time,
        scheduled_time=request.scheduled_time,
        first_token_time=request.first_token_time,
        num_preemptions=request.num_preemptions,
        num_prompt_tokens=new.num_prompt_tokens,
        num_held_tokens=len(new.token_ids) - new.num_prompt_tokens,
        tenant=new.tenant,
        device_us=device_us,
        num_predicted_tokens=request.num_predicted_tokens,
        stop_token_id=stop_token_id,
        error=error,
    )
