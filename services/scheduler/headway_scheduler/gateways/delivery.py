"""Messages to gateways: a step's tokens and ends, and the state.

Owns: each event's link and form. Must not know: transport.
"""

from collections.abc import Iterable

from headway_proto import ingress
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import INT32
from headway_proto.ingress import (
    Admitted,
    Finished,
    ModelInfo,
    PromptLogprobs,
    SchedulerLoad,
    Submit,
    TokenLogprobs,
    Vector,
)
from headway_proto.step import BackendInfo
from headway_scheduler.core.state.events import FinishedEvent, LogprobsEvent, StepEvents
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.figures.fleet_view import FleetView
from headway_scheduler.links.ingress_link import GatewayLink, IngressLinks


def deliver(links: IngressLinks, events: StepEvents) -> None:
    """Hold each gateway's part of ``events``, without the ends."""
    for admitted in events.admitted:
        link = links.get(admitted.origin.owner)
        if link is not None:
            link.hold(admitted=(Admitted(admitted.origin.handle, admitted.num_cached_tokens),))
    for prompt in events.prompt_logprobs:
        link = links.get(prompt.origin.owner)
        if link is not None:
            link.hold(prompt_logprobs=(PromptLogprobs(prompt.origin.handle, prompt.values),))
    for vector in events.vectors:
        link = links.get(vector.origin.owner)
        if link is not None:
            link.hold_vector(Vector(vector.origin.handle, vector.values))
    if len(events.owners):
        _deliver_tokens(links.links(), events)
    for logprobs in events.logprobs:
        link = links.get(logprobs.origin.owner)
        if link is not None:
            link.hold(logprobs=(_token_logprobs(logprobs),))


def deliver_end(links: IngressLinks, end: FinishedEvent, now: float) -> None:
    """Hold an end."""
    link = links.get(end.origin.owner)
    if link is not None:
        link.hold(finished=(_finished(end, now),))


def deliver_verdict(links: IngressLinks, owner: int, submit: Submit, error: str) -> None:
    """Hold the end of a sequence that was found guilty on an earlier link of its gateway."""
    link = links.get(owner)
    if link is not None:
        num_output_tokens = len(submit.token_ids) // INT32.itemsize - submit.num_prompt_tokens
        end = Finished(
            handle=submit.handle, reason=FinishReason.ERROR.value, num_output_tokens=num_output_tokens, error=error
        )
        link.hold(finished=(end,))


def _deliver_tokens(links: list[GatewayLink], events: StepEvents) -> None:
    for link in links:
        if len(links) == 1:
            link.hold_tokens(events.handles, events.indices, events.token_ids)
        else:
            mine = events.owners == link.owner
            link.hold_tokens(events.handles[mine], events.indices[mine], events.token_ids[mine])


def _token_logprobs(event: LogprobsEvent) -> TokenLogprobs:
    values = event.values
    return TokenLogprobs(event.origin.handle, event.index, values.logprob, values.top_token_ids, values.top_logprobs)


def _finished(end: FinishedEvent, now: float) -> Finished:
    scheduled = now if end.scheduled_time is None else end.scheduled_time
    first = end.arrival_time if end.first_token_time is None else end.first_token_time
    prefill_device_us, decode_device_us = end.device_us
    return Finished(
        handle=end.origin.handle,
        reason=end.reason.value,
        num_output_tokens=end.num_output_tokens,
        stop_token_id=end.stop_token_id,
        queue_ms=(scheduled - end.arrival_time) * 1e3,
        ttft_ms=(first - end.arrival_time) * 1e3,
        num_preemptions=end.num_preemptions,
        error=end.error,
        total_ms=(now - end.arrival_time) * 1e3,
        prefill_device_ms=prefill_device_us / 1e3,
        decode_device_ms=decode_device_us / 1e3,
    )


def load_of(view: FleetView | None, num_early: int) -> SchedulerLoad:
    """The load that gateways are sent. ``num_early`` requests wait for an executor."""
    if view is None:
        return SchedulerLoad(num_waiting=num_early)
    return SchedulerLoad(view.num_running, view.num_waiting, view.max_running, view.kv_usage)


def model_of(info: BackendInfo, view: FleetView, adapters: Iterable[LoadedAdapter]) -> ModelInfo:
    """The model that gateways are sent."""
    return ModelInfo(
        name=info.model_name,
        fingerprint=info.model_fingerprint,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_request_tokens=min(view.capacity.max_request_tokens, ingress.MAX_REQUEST_TOKENS),
        supports_prompt_logprobs=info.supports_prompt_logprobs,
        supports_constraints=info.supports_constraints,
        adapters=tuple(adapter.name for adapter in adapters),
        embedding_size=info.embedding_size,
        default_pooling=info.default_pooling,
        generates=info.generates,
    )
