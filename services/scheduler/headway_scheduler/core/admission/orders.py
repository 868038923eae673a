"""The order policies by name: which request is served first.

Owns: the orders and their registry. Must not know: how a queue is kept, rows, or blocks.

- ``fcfs``: by arrival.
- ``priority``: by class, then by arrival. A request may preempt lower classes for a row or blocks.
- ``shortest``: by the tokens still to compute. An output token counts as ``OUTPUT_TOKEN_WORK`` prompt tokens, because
  it takes its own step.
- ``fair``: by the service of each tenant.
- ``deadline``: by the latest start that keeps the first token in time.
- ``class_deadline``: by class as ``priority``, within a class as ``deadline``.

All but ``fair``, which has its own bound, promote requests that waited too long. Running requests are ordered by rank
and first start. By arrival, a request that overtook others would lose its blocks to them later.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headway_scheduler.core.admission.fair_queue import FairQueue
from headway_scheduler.core.admission.waiting_queue import (
    ClassQueue,
    KeyedQueue,
    ValueOf,
    WaitingQueue,
    by_arrival,
)
from headway_scheduler.core.state.request import Request

OUTPUT_TOKEN_WORK = 8
_NO_DEADLINE = 1 << 62
_MICROSECONDS = 1e6


class QueueSettings(NamedTuple):
    """``aging_s``: seconds until a request may be promoted. ``predicted_output``: expected tokens, or the limit if
    unknown.
    """

    aging_s: float
    tenant_weights: Mapping[str, float]
    predicted_output: Callable[[Request], int]
    burst_tokens: Callable[[], int]


class Order(NamedTuple):
    """``predicts``: its queue needs predicted outputs."""

    make_queue: Callable[[QueueSettings], WaitingQueue]
    predicts: bool = False


def _by_start_time(request: Request) -> int:
    return _NO_DEADLINE if request.latest_start is None else int(request.latest_start * _MICROSECONDS)


def _keyed(value_of: ValueOf) -> Callable[[QueueSettings], WaitingQueue]:
    return lambda settings: KeyedQueue(value_of, settings.aging_s)


def _shortest(settings: QueueSettings) -> WaitingQueue:
    def remaining_work(request: Request) -> int:
        return len(request.token_ids) + OUTPUT_TOKEN_WORK * settings.predicted_output(request)

    return KeyedQueue(remaining_work, settings.aging_s)


ORDERS: dict[str, Order] = {
    "fcfs": Order(_keyed(by_arrival)),
    "priority": Order(lambda settings: ClassQueue(by_arrival, settings.aging_s)),
    "shortest": Order(_shortest, predicts=True),
    "fair": Order(lambda settings: FairQueue(settings.tenant_weights, settings.burst_tokens)),
    "deadline": Order(_keyed(_by_start_time)),
    "class_deadline": Order(lambda settings: ClassQueue(_by_start_time, settings.aging_s)),
}
