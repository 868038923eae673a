"""Requests as queues see them, made from the few things that matter there."""

from collections.abc import Callable, Mapping

import numpy as np

from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.orders import QueueSettings
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.request import Request, RequestStatus


def make_request(
    arrival: int,
    *,
    rank: int = 3,
    priority: int = 3,
    num_tokens: int = 4,
    max_tokens: int = 8,
    tenant: str = "",
    now: float = 0.0,
) -> Request:
    """A request that waits for the first time; those that run started in the order of their arrival."""
    request = Request(
        NewRequestEvent(
            origin=Origin(0, arrival),
            request_id=str(arrival),
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            num_prompt_tokens=num_tokens,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            priority=priority,
            tenant=tenant,
        ),
        arrival=arrival,
        rank=rank,
        limit=num_tokens + max_tokens,
        now=now,
    )
    request.start = arrival
    return request


def preempted(request: Request) -> Request:
    """The same request, as it comes back to the queue."""
    request.status = RequestStatus.PREEMPTED
    return request


def queue_settings(
    *,
    aging_s: float = 10.0,
    tenant_weights: Mapping[str, float] | None = None,
    predicted_output: Callable[[Request], int] = lambda _: 0,
    burst_tokens: int = 0,
) -> QueueSettings:
    """What orders make their queues from."""
    return QueueSettings(aging_s, tenant_weights or {}, predicted_output, lambda: burst_tokens)
