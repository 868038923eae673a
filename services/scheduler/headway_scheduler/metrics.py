"""The scheduler's figures for Prometheus, with vLLM's names and units.

Owns: the names. Must not know: the figures' sources, HTTP.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from headway_process.histogram import HistogramSnapshot
from headway_proto.operations import Status
from headway_scheduler.core.state.counters import PreemptionMode, PreemptionReason, WasteReason
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.operators.status_report import status_of

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from headway_process.metric_families import MetricFamilies


class SchedulerSnapshot(NamedTuple):
    """A copy of all figures, for another thread."""

    status: Status
    histograms: dict[str, HistogramSnapshot]
    block_size: int


_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token_s", "From a request's arrival at the scheduler to its first token."),
    "inter_token_latency_seconds": ("gap_s", "Gaps between the tokens of a request."),
    "request_time_per_output_token_seconds": ("time_per_output_token_s", "Mean gap between the tokens of a request."),
    "e2e_request_latency_seconds": ("request_s", "From a request's arrival to its end."),
    "request_queue_time_seconds": ("queue_s", "From a request's arrival to its first step."),
    "request_prefill_time_seconds": ("prefill_s", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode_s", "From a request's first token to its end."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that have ended."),
    "request_generation_tokens": ("output_tokens", "Output tokens of requests that have ended."),
    "iteration_tokens_total": ("step_tokens", "Tokens in a step."),
    "output_prediction_relative_error": (
        "prediction_ratio",
        "Absolute error of a predicted output length over the length.",
    ),
}

# Exported as 0 from the start, so that rates include the first event.
_NO_PREEMPTIONS = {(mode.value, reason.value): 0 for mode in PreemptionMode for reason in PreemptionReason}
_NO_WASTE = {(reason.value,): 0 for reason in WasteReason}
_NO_ENDS = {(reason.value,): 0 for reason in FinishReason}


def take_snapshot(engine: SchedulerEngine, now: float) -> SchedulerSnapshot:
    """Copy the current figures."""
    return SchedulerSnapshot(
        status=status_of(engine, now),
        histograms={name: getattr(engine.statistics, field).snapshot() for name, (field, _) in _HISTOGRAMS.items()},
        block_size=0 if engine.fleet.info is None else engine.fleet.info.block_size,
    )


def families_of(snapshot: SchedulerSnapshot) -> "Iterable[Metric]":
    """Convert to Prometheus families."""
    from headway_process.metric_families import MetricFamilies

    status = snapshot.status
    families = MetricFamilies(model_name="" if status.executor is None else status.executor.model_name)
    _queues(families, status)
    _memory(families, status, snapshot.block_size)
    _work(families, status)
    _step_times(families, status)
    _executor(families, status)
    if len(status.executors) > 1:
        _each_executor(families, status)
    _tenants(families, status)
    for name, histogram in snapshot.histograms.items():
        families.histogram(f"headway_{name}", _HISTOGRAMS[name][1], histogram)
    return families.families


def _queues(families: "MetricFamilies", status: Status) -> None:
    families.gauge("headway_num_requests_running", "Requests with a row.", status.num_running)
    families.gauge("headway_num_requests_waiting", "Requests without a row.", status.num_waiting)
    families.gauge("headway_num_requests_preempted", "Waiting requests that have run.", status.num_preempted)
    families.gauge("headway_num_waiting_tokens", "Tokens of waiting requests.", status.num_waiting_tokens)
    families.gauge("headway_num_gateways", "Connected gateways.", status.num_gateways)


def _memory(families: "MetricFamilies", status: Status, block_size: int) -> None:
    used = status.num_total_blocks - status.num_free_blocks
    share = used / status.num_total_blocks if status.num_total_blocks else 0.0
    families.gauge("headway_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", share)
    families.gauge("headway_kv_blocks", "KV blocks of the executor.", status.num_total_blocks)
    families.gauge("headway_kv_cached_blocks", "KV blocks in the prefix cache.", status.num_cached_blocks)
    families.gauge("headway_kv_block_tokens", "Tokens of a KV block.", block_size)
    families.gauge("headway_host_blocks", "KV blocks on the host.", status.num_host_blocks)
    families.gauge("headway_host_free_blocks", "Free KV blocks on the host.", status.num_free_host_blocks)
    families.counter("headway_evicted_blocks", "Cached blocks that were evicted.", status.num_evicted_blocks)
    families.counter("headway_swapped_out_blocks", "Blocks copied to the host.", status.num_swapped_out_blocks)
    families.counter(
        "headway_offloaded_blocks", "Blocks of prefixes that were copied to the host.", status.num_offloaded_blocks
    )
    families.counter(
        "headway_prefix_cache_restored", "Tokens of prefixes that came back from the host.", status.num_restored_tokens
    )
    families.counter(
        "headway_exported_blocks", "Blocks copied to the host for another executor.", status.num_exported_blocks
    )
    families.counter(
        "headway_pulled_tokens",
        "Tokens that came from a host pool, of another executor or of an earlier epoch, instead of being computed.",
        status.num_pulled_tokens,
    )
    families.counter(
        "headway_stale_pulls",
        "Requests whose pulled blocks were not right, so that they were computed again.",
        status.num_stale_pulls,
    )
    families.counter(
        "headway_prefix_cache_queries", "Tokens looked for in the prefix cache.", status.num_prefix_query_tokens
    )
    families.counter("headway_prefix_cache_hits", "Tokens found in the prefix cache.", status.num_prefix_hit_tokens)


def _work(families: "MetricFamilies", status: Status) -> None:
    families.counter("headway_steps", "Steps sent to the executor.", status.num_steps)
    families.counter("headway_prompt_tokens", "Prompt tokens of requests that have started.", status.num_prompt_tokens)
    families.counter("headway_generation_tokens", "Output tokens.", status.num_output_tokens)
    families.counter("headway_num_preemptions", "Preemptions.", status.num_preemptions)
    families.counter(
        "headway_preemptions",
        "Preemptions by mode and reason.",
        {**_NO_PREEMPTIONS, **{(entry.mode, entry.reason): entry.count for entry in status.preemptions}},
        *("mode", "reason"),
    )
    families.counter(
        "headway_wasted_tokens",
        "Computed tokens that were not used.",
        {**_NO_WASTE, **{(entry.reason,): entry.count for entry in status.wasted_tokens}},
        "reason",
    )
    families.counter(
        "headway_spec_decode_num_drafts", "How often tokens were proposed for a request.", status.num_drafts
    )
    families.counter("headway_spec_decode_num_draft_tokens", "Tokens that were proposed.", status.num_draft_tokens)
    families.counter(
        "headway_spec_decode_num_accepted_tokens", "Proposed tokens that were right.", status.num_accepted_tokens
    )
    families.counter(
        "headway_request_success",
        "Requests that have ended.",
        {**_NO_ENDS, **{(entry.reason,): entry.count for entry in status.ends}},
        "finished_reason",
    )
    error = status.prediction_error
    families.counter(
        "headway_output_predictions", "Ended requests whose output was predicted.", error.count if error else 0
    )
    families.gauge(
        "headway_output_prediction_bias_tokens",
        "Mean of predicted less actual output tokens.",
        error.sum_signed / error.count if error else 0.0,
    )


def _step_times(families: "MetricFamilies", status: Status) -> None:
    families.gauge("headway_step_token_budget", "Token budget of the newest step.", status.num_budget_tokens)
    families.gauge("headway_max_step_tokens", "Most tokens of any step.", status.max_num_batched_tokens)
    families.gauge("headway_step_budget_margin", "Factor on predicted step times.", status.budget_margin)
    families.gauge("headway_steps_in_flight", "Unanswered steps.", status.num_in_flight_steps)
    model = status.step_time_model
    terms = {} if model is None else {
        ("constant",): model.constant_s,
        ("row",): model.row_s,
        ("token",): model.token_s,
        ("token_beyond_128",): model.token_beyond_128_s,
        ("token_beyond_256",): model.token_beyond_256_s,
        ("context_token",): model.context_token_s,
        ("prefill_pair",): model.prefill_pair_s,
    }  # fmt: skip
    families.gauge("headway_step_time_model_seconds", "Learned step times, per unit.", terms, "term")
    families.gauge(
        "headway_step_time_model_relative_error",
        "Recent mean of the model's absolute error over the time.",
        0.0 if model is None else model.relative_error,
    )
    families.counter(
        "headway_step_time_model_shifts",
        "Detected changes of the device's speed.",
        0 if model is None else model.num_shifts,
    )


def _executor(families: "MetricFamilies", status: Status) -> None:
    families.gauge("headway_executor_up", "Whether an executor is connected.", float(status.executor is not None))
    families.counter("headway_executor_losses", "Lost executors.", status.num_executor_losses)
    families.counter("headway_epochs", "Epochs: each begins with an executor without state.", status.num_epochs)


def _each_executor(families: "MetricFamilies", status: Status) -> None:
    """Only where there are several: the figures without this label are those of all."""
    by_number = {(str(executor.number),): executor for executor in status.executors}
    for name, description, field in (
        ("headway_executor_requests_running", "Requests with a row of an executor.", "num_running"),
        ("headway_executor_requests_waiting", "Requests that wait for a row of an executor.", "num_waiting"),
        ("headway_executor_kv_cache_usage_perc", "Share of an executor's KV blocks in use, 0 to 1.", "kv_usage"),
        ("headway_executor_epoch", "The epoch of an executor.", "epoch"),
        ("headway_executor_draining", "Whether an executor is drained.", "is_draining"),
    ):
        values = {label: float(getattr(executor, field)) for label, executor in by_number.items()}
        families.gauge(name, description, values, "executor")
    ready = {label: float(executor.state == "ready") for label, executor in by_number.items()}
    families.gauge("headway_executor_ready", "Whether an executor is connected and heard.", ready, "executor")
    steps = {label: executor.num_steps for label, executor in by_number.items()}
    families.counter("headway_executor_steps", "Steps sent to an executor.", steps, "executor")
    roles = {(str(executor.number), executor.role): 1.0 for executor in status.executors}
    families.gauge("headway_executor_role", "1 for the role that an executor has.", roles, "executor", "role")
    families.gauge("headway_num_requests_unplaced", "Waiting requests without an executor.", status.num_unplaced)
    families.counter("headway_requests_moved", "Moves of requests between executors.", status.num_moved)


def _tenants(families: "MetricFamilies", status: Status) -> None:
    services = {(service.tenant,): service for service in status.tenant_services}
    for name, description, field in (
        ("headway_tenant_requests_running", "Requests of a tenant with a row.", "num_running"),
        ("headway_tenant_requests_waiting", "Requests of a tenant without a row.", "num_waiting"),
    ):
        values = {label: float(getattr(service, field)) for label, service in services.items()}
        families.gauge(name, description, values, "tenant")
    for name, description, field in (
        ("headway_tenant_prompt_tokens", "Prompt tokens of a tenant that have started.", "num_prompt_tokens"),
        ("headway_tenant_generation_tokens", "Output tokens of a tenant.", "num_output_tokens"),
    ):
        values = {label: float(getattr(service, field)) for label, service in services.items()}
        families.counter(name, description, values, "tenant")
    counters = {label: service.counter for label, service in services.items() if service.counter is not None}
    families.gauge("headway_tenant_service", "A tenant's counter under the order fair, weighted.", counters, "tenant")
