"""The gateway's metrics for Prometheus."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headway_gateway.scheduler_client import SchedulerClient
from headway_gateway.servicer import GenerationServicer
from headway_gateway.statistics import GatewayStatistics
from headway_process.histogram import HistogramSnapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class GatewaySnapshot(NamedTuple):
    """All figures, for another thread."""

    model_name: str
    num_streams: int
    lag_s: float
    pause_s: float
    is_linked: bool
    link: dict[str, int]
    calls: dict[tuple[str, str], int]
    refusals: dict[tuple[str], int]
    ends: dict[tuple[str], int]
    num_deltas: int
    num_tokens: int
    num_joined_tokens: int
    histograms: dict[str, HistogramSnapshot]


_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", "From the arrival of a call until its first token is written."),
    "inter_token_latency_seconds": ("gap_s", "Gaps between tokens as they are written to clients."),
    "tokenization_seconds": ("encoding_s", "Time to turn a prompt into tokens, the wait for a thread included."),
    "constraint_check_seconds": ("constraint_s", "Time to see whether a constraint can be followed, waits included."),
}


def take_snapshot(
    client: SchedulerClient, generation: GenerationServicer, statistics: GatewayStatistics
) -> GatewaySnapshot:
    """Copy the current figures."""
    return GatewaySnapshot(
        model_name="" if client.model is None else client.model.name,
        num_streams=generation.streams.num_open,
        lag_s=generation.pace.lateness_s,
        pause_s=generation.pace.pause_s,
        is_linked=client.model is not None,
        link=msgspec.structs.asdict(client.link.counters),
        calls=dict(statistics.calls),
        refusals=dict(statistics.refusals),
        ends=dict(statistics.ends),
        num_deltas=statistics.num_deltas,
        num_tokens=statistics.num_tokens,
        num_joined_tokens=statistics.num_joined_tokens,
        histograms={name: getattr(statistics, field).snapshot() for name, (field, _) in _HISTOGRAMS.items()},
    )


def families_of(snapshot: GatewaySnapshot) -> "Iterable[Metric]":
    """Return the metrics of ``snapshot``."""
    from headway_process.metric_families import MetricFamilies

    families = MetricFamilies(model_name=snapshot.model_name)
    families.counter("headway_gateway_calls", "Calls that have ended.", snapshot.calls, "method", "code")
    families.counter("headway_gateway_refusals", "Calls that were refused.", snapshot.refusals, "reason")
    families.counter("headway_gateway_outputs", "Outputs that have ended.", snapshot.ends, "finished_reason")
    families.gauge("headway_gateway_streams", "Generate calls that are open.", snapshot.num_streams)
    families.gauge("headway_gateway_event_loop_lag_seconds", "How late the event loop is.", snapshot.lag_s)
    families.gauge("headway_gateway_write_pause_seconds", "What streams wait between writes.", snapshot.pause_s)
    families.gauge(
        "headway_gateway_model_ready", "Whether a scheduler with a model is there.", float(snapshot.is_linked)
    )
    families.counter("headway_gateway_deltas", "Deltas written.", snapshot.num_deltas)
    families.counter("headway_gateway_tokens", "Tokens written.", snapshot.num_tokens)
    families.counter(
        "headway_gateway_coalesced_tokens", "Tokens that shared a delta with one before.", snapshot.num_joined_tokens
    )
    events = {(name,): count for name, count in snapshot.link.items()}
    families.counter("headway_gateway_link_events", "What happened on the link to the scheduler.", events, "event")
    for name, histogram in snapshot.histograms.items():
        families.histogram(f"headway_gateway_{name}", _HISTOGRAMS[name][1], histogram)
    return families.families
