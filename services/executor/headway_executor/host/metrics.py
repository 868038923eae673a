"""The executor's metrics for Prometheus.

Owns: their names. Must not know: counting, HTTP.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from headway_executor.host.statistics import ExecutorStatistics
from headway_process.histogram import HistogramSnapshot
from headway_proto.step import BackendInfo

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from headway_process.metric_families import MetricFamilies


class GroupFigures(NamedTuple):
    """Of rank 0: steps begun and digests answered, by rank from 1 on, and bytes sent to each of them."""

    steps: dict[int, int]
    answers: dict[int, int]
    num_relayed_bytes: int


class ExecutorSnapshot(NamedTuple):
    """A copy for another thread."""

    info: BackendInfo
    histograms: dict[str, HistogramSnapshot]
    moved_blocks: dict[str, int]
    failures: dict[str, int]
    num_epochs: int
    num_row_errors: int
    num_pending: int
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_exported_blocks: int = 0
    num_pulled_blocks: int = 0
    num_stale_blocks: int = 0
    num_pulled_bytes: int = 0
    group: GroupFigures | None = None


_HISTOGRAMS = {
    "step_device_seconds": ("device_s", "Time of a step on the device."),
    "step_wait_seconds": (
        "idle_s",
        "From the end of a step to the arrival of the next, with nothing to do in between.",
    ),
    "pull_seconds": ("pull_s", "Time in which the blocks that a step needs were pulled."),
    "step_tokens": ("tokens", "Tokens in a step."),
    "step_rows": ("rows", "Rows that run in a step."),
}


def take_snapshot(
    info: BackendInfo, statistics: ExecutorStatistics, group: GroupFigures | None = None
) -> ExecutorSnapshot:
    """Copy the figures."""
    return ExecutorSnapshot(
        info=info,
        histograms={name: getattr(statistics, field).snapshot() for name, (field, _) in _HISTOGRAMS.items()},
        moved_blocks=dict(statistics.num_moved_blocks),
        failures=dict(statistics.failures),
        num_epochs=statistics.num_epochs,
        num_row_errors=statistics.num_row_errors,
        num_pending=statistics.num_pending,
        num_proposed_tokens=statistics.num_proposed_tokens,
        num_accepted_tokens=statistics.num_accepted_tokens,
        num_exported_blocks=statistics.num_exported_blocks,
        num_pulled_blocks=statistics.num_pulled_blocks,
        num_stale_blocks=statistics.num_stale_blocks,
        num_pulled_bytes=statistics.num_pulled_bytes,
        group=group,
    )


def families_of(snapshot: ExecutorSnapshot) -> "Iterable[Metric]":
    """The metric families of a snapshot."""
    from headway_process.metric_families import MetricFamilies

    info = snapshot.info
    families = MetricFamilies(model_name=info.model_name)
    facts: tuple[str, ...] = (info.backend, info.device, info.dtype, info.model_fingerprint)
    families.gauge(
        "headway_executor_info",
        "Backend, device, dtype and model of this executor.",
        {facts: 1.0},
        *("backend", "device", "dtype", "fingerprint"),
    )
    families.gauge("headway_executor_kv_blocks", "Blocks of the KV pool.", info.num_blocks)
    families.gauge("headway_executor_host_blocks", "Blocks in main memory.", info.num_host_blocks)
    families.gauge("headway_executor_kv_block_tokens", "Tokens that a block holds.", info.block_size)
    families.gauge("headway_executor_max_rows", "Rows that may be live.", info.max_num_rows)
    families.gauge(
        "headway_executor_steps_pending", "Steps given to the backend and not reported.", snapshot.num_pending
    )
    families.counter(
        "headway_executor_moved_blocks",
        "Blocks that were moved.",
        {(kind,): count for kind, count in snapshot.moved_blocks.items()},
        "kind",
    )
    families.counter(
        "headway_executor_step_failures",
        "Steps that failed as a whole.",
        {(kind,): count for kind, count in snapshot.failures.items()},
        "error",
    )
    families.counter("headway_executor_row_errors", "Rows that could not be run.", snapshot.num_row_errors)
    families.counter(
        "headway_executor_proposed_tokens", "Tokens that were proposed and run.", snapshot.num_proposed_tokens
    )
    families.counter(
        "headway_executor_accepted_tokens", "Proposed tokens that were right.", snapshot.num_accepted_tokens
    )
    families.counter(
        "headway_executor_exported_blocks", "Blocks copied out for other executors.", snapshot.num_exported_blocks
    )
    families.counter("headway_executor_pulled_blocks", "Blocks brought from host pools.", snapshot.num_pulled_blocks)
    families.counter(
        "headway_executor_stale_blocks", "Blocks that were to be pulled and were not right.", snapshot.num_stale_blocks
    )
    families.counter("headway_executor_pulled_bytes", "Bytes of pulled blocks.", snapshot.num_pulled_bytes)
    families.counter("headway_executor_epochs", "Epochs that have begun.", snapshot.num_epochs)
    if snapshot.group is not None:
        _add_ranks(families, snapshot.group)
    for name, histogram in snapshot.histograms.items():
        families.histogram(f"headway_executor_{name}", _HISTOGRAMS[name][1], histogram)
    return families.families


def _add_ranks(families: "MetricFamilies", group: GroupFigures) -> None:
    families.gauge("headway_executor_ranks", "Ranks of this executor.", 1 + len(group.steps))
    for name, text, counts in (
        ("steps", "Steps that a rank has begun.", group.steps),
        ("answers", "Digests that a rank has answered.", group.answers),
    ):
        by_rank = {(str(rank),): count for rank, count in counts.items()}
        families.counter(f"headway_executor_rank_{name}", text, by_rank, "rank")
    families.counter("headway_executor_relayed_bytes", "Bytes sent to each other rank.", group.num_relayed_bytes)
