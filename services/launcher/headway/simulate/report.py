"""How the result of a simulation is shown: the table, the JSON, and which case is the knee of a sweep.

Owns: their layout. Must not know: how a run came about.

The JSON depends on the flags and nothing else: the same command writes the same bytes. How fast the simulation itself
was is therefore only in the table.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headway.simulate.cases import Case
from headway.simulate.measurement import Percentiles, RequestFigures, TenantTotals, Totals

JSON_SCHEMA = 1
_COLUMNS = (
    "case",
    "output tok/s",
    "total tok/s",
    "TTFT ms p50/p90/p99",
    "ITL ms p50/p90/p99",
    "preempted",
    "prefix hits",
    "mean batch",
    "achieved/asked req/s",
    "x real time",
)


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a run, one entry each: when it started, how long it took, and what it ran."""

    start_s: list[float]
    step_ms: list[float]
    num_tokens: list[int]
    num_rows: list[int]
    num_decodes: list[int]


class QueueColumns(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests run and wait after each step."""

    time_s: list[float]
    num_running: list[int]
    num_waiting: list[int]


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one case."""

    case: Case
    totals: Totals
    requests: list[RequestFigures]
    steps: StepColumns
    queue: QueueColumns
    wall_s: float

    @property
    def speed(self) -> float:
        """Virtual seconds per second of the wall clock."""
        return self.totals.virtual_s / self.wall_s if self.wall_s else float("inf")


def table(results: Sequence[CaseResult], knee: CaseResult | None) -> str:
    """Return the table: a line per case, the tenants of each below it; the knee has a star."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for result in results:
        rows.append(_row(result, is_knee=result is knee))
        rows.extend(_tenant_row(name, tenant) for name, tenant in result.totals.tenants.items())
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    notes = [note for result in results if (note := _note(result))]
    if knee is not None:
        notes.append("* the knee: beyond it, latency grows faster than throughput")
    return "\n".join((*(line.rstrip() for line in lines), *notes, ""))


def _row(result: CaseResult, *, is_knee: bool) -> tuple[str, ...]:
    totals = result.totals
    asked = "-" if totals.asked_requests_per_s is None else f"{totals.asked_requests_per_s:.2f}"
    return (
        (result.case.label or "as given") + " *" * is_knee,
        f"{totals.output_tokens_per_s:.0f}",
        f"{totals.total_tokens_per_s:.0f}",
        _percentiles(totals.ttft_ms, digits=0),
        _percentiles(totals.itl_ms, digits=1),
        str(totals.num_preemptions),
        f"{100 * totals.prefix_hit_rate:.1f}%",
        f"{totals.mean_batch_size:.1f}",
        f"{totals.requests_per_s:.2f}/{asked}",
        f"{result.speed:.0f}",
    )


def _tenant_row(name: str, tenant: TenantTotals) -> tuple[str, ...]:
    figures = (
        f"  {name}",
        f"{tenant.output_tokens_per_s:.0f}",
        f"{tenant.total_tokens_per_s:.0f}",
        _percentiles(tenant.ttft_ms, digits=0),
        _percentiles(tenant.itl_ms, digits=1),
    )
    return figures + ("",) * (len(_COLUMNS) - len(figures))


def _percentiles(values: Percentiles, digits: int) -> str:
    return "/".join("-" if value is None else f"{value:.{digits}f}" for value in (values.p50, values.p90, values.p99))


def _note(result: CaseResult) -> str:
    if not result.totals.num_rejected:
        return ""
    name = f"{result.case.label}: " * bool(result.case.label)
    return f"{name}{result.totals.num_rejected} of {result.totals.num_requests} requests were refused"


def knee_of(results: Sequence[CaseResult]) -> CaseResult | None:
    """The case farthest above the line from the lowest to the highest P99 ITL, both axes scaled to 0 to 1.

    That is the knee of Satopaa et al., "Finding a Kneedle in a Haystack" (2011). None if fewer than three cases have an
    ITL, or if latency does not differ.
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


def as_json(world: dict[str, Any], results: Sequence[CaseResult], knee: CaseResult | None) -> bytes:
    """Return the whole result; ``world`` says what was simulated."""
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
            }
            for result in results
        ],
        "knee": None if knee is None else knee.case.label,
    }
    return msgspec.json.encode(document) + b"\n"
