"""Who is served first: the order policies by name.

Owns: the orders and their registry. Must not know: how a queue is kept, rows, or blocks.

- ``fcfs``: by arrival.
- ``priority``: by class, then by arrival. A waiting request may preempt running ones of lower classes where it lacks a
  row or blocks, so that a class never waits for one below it.
- ``shortest``: by the tokens that are still to be computed, prompt and predicted output together (shortest job first;
  where nothing is known of the output, its longest). An output token counts for ``OUTPUT_TOKEN_WORK`` prompt tokens,
  because it takes a step of its own.
- ``fair``: by what each tenant has had so far (``fair_queue``). A tenant that sends little starts before the prompts under
  way of one that floods, and finds a row that those who run their share may not take.
- ``deadline``: by the time at which a prompt has to start for its first token to be in time (least slack first);
  requests without an objective come after all that have one, by arrival.

All but ``fair``, which has a bound of its own, promote what has waited too long (``waiting_queue``). Among those that
run, the order is always by rank and first start: who started first keeps the blocks. By arrival, whoever an order lets
overtake would give its blocks to each of those that start after it.
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
    """What an order makes its queue from.

    ``aging_s``: seconds after which a request may be promoted; ``tenant_weights``: by name; ``predicted_output``: the output
    tokens still to be expected of a request; ``burst_tokens``: as ``FairQueue`` takes it.
    """

    aging_s: float
    tenant_weights: Mapping[str, float]
    predicted_output: Callable[[Request], int]
    burst_tokens: Callable[[], int]


class Order(NamedTuple):
    """``predicts``: its queue asks for predicted outputs, so they must be learned."""

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
}
