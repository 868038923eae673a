"""The table and JSON of a simulation, and the knee of a sweep.

The same flags give the same bytes of JSON, so only the table has the simulation's speed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.terminal.tables import aligned
from headway_lab.reports import latency_cell, rate_cell, shown_groups
from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import SimulatedGroup, SimulatedRequest, SimulationTotals

JSON_SCHEMA = 1
_COLUMNS = (
    "case",
    "output tok/s",
    "total tok/s",
    "TTFT ms p50/p90/p99",
    "ITL ms p50/p90/p99",
    "goodput req/s",
    "preempted",
    "prefix hits",
    "mean batch",
    "answered/asked req/s",
    "x real time",
)
_GOODPUT_COLUMN = _COLUMNS.index("goodput req/s")


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run, one entry each."""

    start_s: list[float]
    step_ms: list[float]
    num_tokens: list[int]
    num_rows: list[int]
    num_decodes: list[int]
    num_swapped_blocks: list[int]


class QueueColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Running and waiting requests after each step."""

    time_s: list[float]
    num_running: list[int]
    num_waiting: list[int]


class ExecutorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One of several executors; shares from 0 to 1."""

    share_of_requests: float
    busy_share: float
    prefix_hit_rate: float


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case."""

    case: Case
    totals: SimulationTotals
    requests: list[SimulatedRequest]
    steps: StepColumns
    queue: QueueColumns
    wall_s: float
    executors: list[ExecutorFigures] = []
    """Each of them, if there are several."""

    @property
    def speed(self) -> float:
        """Virtual seconds per second of the wall clock."""
        return self.totals.virtual_s / self.wall_s if self.wall_s else float("inf")


def table(results: Sequence[CaseResult], knee: CaseResult | None) -> str:
    """Return a line per case; the knee has a star."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for result in results:
        rows.append(_row(result, is_knee=result is knee))
        rows.extend(
            _group_row(name, group) for name, group in shown_groups(result.totals.tenants, result.totals.priorities)
        )
    if all(result.totals.goodput_requests_per_s is None for result in results):
        rows = [row[:_GOODPUT_COLUMN] + row[_GOODPUT_COLUMN + 1 :] for row in rows]
    lines = aligned(rows)
    notes = [note for result in results if (note := _note(result))]
    notes += [f"{_name(result)}{_executors_note(result.executors)}" for result in results if result.executors]
    if knee is not None:
        notes.append("* the knee: beyond it, latency grows faster than throughput")
    return "\n".join((*lines, *notes, ""))


def _row(result: CaseResult, *, is_knee: bool) -> tuple[str, ...]:
    totals = result.totals
    return (
        (result.case.label or "as given") + " *" * is_knee,
        f"{totals.output_tokens_per_s:.0f}",
        f"{totals.total_tokens_per_s:.0f}",
        latency_cell(totals.ttft_ms, digits=0),
        latency_cell(totals.itl_ms, digits=1),
        rate_cell(totals.goodput_requests_per_s),
        str(totals.num_preemptions),
        f"{100 * totals.prefix_hit_rate:.1f}%",
        f"{totals.mean_batch_size:.1f}",
        f"{totals.requests_per_s:.2f}/{rate_cell(totals.asked_requests_per_s)}",
        f"{result.speed:.0f}",
    )


def _group_row(name: str, group: SimulatedGroup) -> tuple[str, ...]:
    figures = (
        f"  {name}",
        f"{group.output_tokens_per_s:.0f}",
        f"{group.total_tokens_per_s:.0f}",
        latency_cell(group.ttft_ms, digits=0),
        latency_cell(group.itl_ms, digits=1),
        rate_cell(group.goodput_requests_per_s),
        str(group.num_preemptions),
    )
    return figures + ("",) * (len(_COLUMNS) - len(figures))


def _note(result: CaseResult) -> str:
    totals = result.totals
    parts = []
    if totals.num_rejected:
        parts.append(
            f"{totals.num_rejected} of {totals.num_requests} requests were refused (the first: {totals.first_refusal})"
        )
    if totals.prefix_restore_rate:
        parts.append(f"{100 * totals.prefix_restore_rate:.1f}% of the prompts' tokens came back from the host")
    if totals.num_swapped_blocks:
        parts.append(f"{totals.num_swapped_blocks} blocks swapped in {100 * totals.swap_share:.1f}% of the busy time")
    if totals.num_moved:
        parts.append(
            f"{totals.num_moved} moves between executors with {totals.num_pulled_tokens} tokens, {totals.pull_ms:.1f} ms "
            "a pull"
        )
    if totals.num_stale_pulls:
        parts.append(f"{totals.num_stale_pulls} requests computed again, since their blocks took too long")
    return _name(result) + ", ".join(parts) if parts else ""


def _name(result: CaseResult) -> str:
    return f"{result.case.label}: " * bool(result.case.label)


def _executors_note(executors: Sequence[ExecutorFigures]) -> str:
    shares = "/".join(f"{100 * one.share_of_requests:.0f}" for one in executors)
    busy = "/".join(f"{100 * one.busy_share:.0f}" for one in executors)
    hits = "/".join(f"{100 * one.prefix_hit_rate:.0f}" for one in executors)
    return f"by executor: {shares}% of the requests, busy {busy}% of the time, prefix hits {hits}%"


def knee_of(results: Sequence[CaseResult]) -> CaseResult | None:
    """Return the case farthest above the line from the lowest to the highest P99 ITL, both axes scaled to 0 to 1.

    This is the knee of Satopaa et al., "Finding a Kneedle in a Haystack" (2011), for at least three cases.
    """
    points = sorted(
        (
            (result.totals.itl_ms.p99, result.totals.output_tokens_per_s, place)
            for place, result in enumerate(results)
            if result.totals.itl_ms.p99 is not None
        )
    )
    if len(points) < 3:
        return None
    latency, throughput = (np.array([point[axis] for point in points]) for axis in (0, 1))
    if latency[-1] == latency[0] or throughput.max() == throughput.min():
        return None
    rise = (throughput - throughput.min()) / (throughput.max() - throughput.min())
    run = (latency - latency[0]) / (latency[-1] - latency[0])
    return results[points[int((rise - run).argmax())][2]]


def as_json(
    world: Mapping[str, Any], results: Sequence[CaseResult], knee: CaseResult | None, added: Mapping[str, Any]
) -> bytes:
    """Return the whole result; ``world`` is the simulated one."""
    document = {
        "schema": JSON_SCHEMA,
        **world,
        "cases": [
            {
                "label": result.case.label,
                "limits": result.case.limits,
                "totals": result.totals,
                "requests": result.requests,
                "steps": result.steps,
                "queue": result.queue,
                **({"executors": result.executors, "placement": result.case.placement} if result.executors else {}),
            }
            for result in results
        ],
        "knee": None if knee is None else knee.case.label,
        **added,
    }
    return msgspec.json.encode(document) + b"\n"
