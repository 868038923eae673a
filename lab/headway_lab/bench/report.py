"""The result of a bench as text, JSON and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headway.terminal.tables import aligned
from headway_lab.bench.capacity import Search, Trial
from headway_lab.bench.figures import BenchedGroup, BenchedRequest, BenchTotals, by_status
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.target import TargetInfo
from headway_lab.reports import latency_cell, latency_cells, rate_cell, shown_groups
from headway_lab.workload.load import Load

JSON_SCHEMA = 2
_OUTPUTS = frozenset({"json", "csv", "png"})
_TOGETHER_TOLD_FROM = 1.02
_LEAST_AT_WORK = 0.5
"""A share of the window: below it, throughputs are mostly those of the beginning and the end."""
CSV_COLUMNS = (
    "number",
    "tenant",
    "priority",
    "status",
    "prompt_tokens",
    "output_tokens",
    "intended_s",
    "late_ms",
    "ttft_ms",
    "tpot_ms",
    "longest_itl_ms",
    "end_to_end_ms",
    "meets_objectives",
    "error",
)


def title(info: TargetInfo, load: Load) -> str:
    """Return server and load in one line."""
    return f"{info.model} at {info.address} ({info.runs_on}); {load.title}; seed {load.options.seed}"


def text(info: TargetInfo, totals: BenchTotals, max_late_ms: float) -> str:
    """Return the result as text."""
    lines = [*aligned(_rates(totals)), "", *aligned(_latencies(totals))]
    if groups := shown_groups(totals.tenants, totals.priorities):
        lines += ["", *aligned(_group_rows(groups))]
    lines += ["", *_notes(info, totals), *warnings(totals, max_late_ms)]
    return "\n".join((*lines, ""))


def _rates(totals: BenchTotals) -> list[tuple[str, str]]:
    rows = [
        ("requests answered", f"{totals.num_ok} of {totals.num_requests} in {totals.window_s:.2f} s"),
        ("output tokens/s", f"{totals.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{totals.total_tokens_per_s:.1f}"),
        ("requests/s", f"{totals.requests_per_s:.2f}"),
    ]
    if totals.asked_requests_per_s is not None:
        rows += [
            ("asked rate, requests/s", f"{rate_cell(totals.asked_requests_per_s)}"),
            ("drawn to arrive", f"{rate_cell(totals.arriving_requests_per_s)}"),
            ("achieved", _achieved(totals)),
        ]
    if totals.attainment is not None:
        rows += [
            ("goodput requests/s", rate_cell(totals.goodput_requests_per_s)),
            ("objectives kept", f"{100 * totals.attainment:.1f}% of requests"),
        ]
    return rows


def _achieved(totals: BenchTotals) -> str:
    if totals.keeps_up is None:
        return "too short to tell"
    return rate_cell(totals.achieved_requests_per_s) + " (not the asked rate)" * (not totals.keeps_up)


def _latencies(totals: BenchTotals) -> list[tuple[str, ...]]:
    return [
        ("ms", "p50", "p90", "p99"),
        ("TTFT", *latency_cells(totals.ttft_ms)),
        ("ITL", *latency_cells(totals.itl_ms)),
        ("TPOT", *latency_cells(totals.tpot_ms)),
        ("end to end", *latency_cells(totals.end_to_end_ms)),
    ]


def _group_rows(groups: Iterable[tuple[str, BenchedGroup]]) -> list[tuple[str, ...]]:
    return [
        ("", "answered", "objectives kept", "output tok/s", "TTFT ms p50/p90/p99", "ITL ms p50/p90/p99"),
        *(
            (
                name,
                f"{group.num_ok} of {group.num_requests}",
                "-" if group.attainment is None else f"{100 * group.attainment:.1f}%",
                f"{group.output_tokens_per_s:.1f}",
                latency_cell(group.ttft_ms),
                latency_cell(group.itl_ms),
            )
            for name, group in groups
        ),
    ]


def _notes(info: TargetInfo, totals: BenchTotals) -> list[str]:
    client = totals.client
    processes = f"{client.num_processes} process{'es' * (client.num_processes > 1)}"
    late, lag = latency_cells(client.late_ms)[2], latency_cells(client.lag_ms)[2]
    lengths = f"{totals.mean_prompt_tokens:.1f} per prompt, {totals.mean_output_tokens:.1f} per answer"
    notes = [
        f"client: {processes}, {100 * client.cpu_share:.0f}% of a core; at p99 {late} ms late to send, {lag} ms to see",
        f"tokens counted by {info.counted_by}: {lengths}",
    ]
    if totals.cached_share:
        notes.append(f"{100 * totals.cached_share:.1f}% of prompt tokens came from the server's prefix cache")
    if totals.tokens_per_chunk >= _TOGETHER_TOLD_FROM:
        notes.append(
            f"tokens came {totals.tokens_per_chunk:.2f} at a time: of those that come together, the first has the gap, "
            "the others 0"
        )
    if totals.tokens_without_time:
        notes.append(
            f"the server counts {totals.tokens_without_time} tokens more than chunks with text came: an ITL here is a gap "
            "between chunks"
        )
    if totals.num_shorter:
        notes.append(f"{totals.num_shorter} answers were shorter than asked for")
    return notes


def warnings(totals: BenchTotals, max_late_ms: float) -> list[str]:
    """Return the reasons to doubt the figures."""
    lines = []
    if totals.num_unmeasured:
        lines.append(f"cancelled: the figures are of what had ended; {totals.num_unmeasured} requests are missing")
    if totals.num_ok < totals.num_requests:
        failed = {status: count for status, count in totals.statuses.items() if status != "OK"}
        lines.append(f"{totals.num_requests - totals.num_ok} requests were not answered: {by_status(failed)}")
    if totals.asked_requests_per_s is not None and totals.keeps_up is not True:
        lines.append(_asked_rate(totals))
    if totals.all_at_work_s is not None and totals.all_at_work_s < _LEAST_AT_WORK * totals.window_s:
        lines.append(
            f"too short to tell a throughput: all users were at work for {totals.all_at_work_s:.2f} of {totals.window_s:.2f} s; "
            "give it more --num-requests, or fewer --users"
        )
    if not is_trustworthy(totals, max_late_ms):
        late = max(totals.client.late_ms.p99 or 0.0, totals.client.lag_ms.p99 or 0.0)
        lines.append(
            f"the client was late by {late:.0f} ms at p99, its figures are not to be trusted: give it more --processes, or "
            "a machine of its own"
        )
    return [f"WARNING: {line}" for line in lines]


def _asked_rate(totals: BenchTotals) -> str:
    asked = totals.asked_requests_per_s or 0.0
    if totals.keeps_up is False:
        return (
            f"the asked rate, {rate_cell(asked)} requests/s, was not reached: "
            f"{rate_cell(totals.achieved_requests_per_s)} were answered per second"
        )
    steady = totals.steady
    beginning = f"too short to tell whether the asked rate, {rate_cell(asked)} requests/s, was reached: "
    if steady is None:
        return f"{beginning}nothing was answered"
    enough = max(steady.num_requests_to_tell(asked), 2 * totals.num_requests)
    since = f"; while the {steady.num_arrived} after that came, {steady.num_answered} were answered"
    return (
        f"{beginning}requests came for {steady.span_s:.1f} s, and the first took {steady.run_in_s:.1f} s"
        + since * bool(steady.num_arrived)
        + f"; some {enough} requests will do"
    )


def is_trustworthy(totals: BenchTotals, max_late_ms: float) -> bool:
    """Return whether the client was in time."""
    client = totals.client
    return max(client.late_ms.p99 or 0.0, client.lag_ms.p99 or 0.0) <= max_late_ms


def trial_text(trial: Trial) -> str:
    """Return one line of the search."""
    verdict = "meets" if trial.meets else "misses"
    reasons = [
        "requests arrive faster than they are answered" * (trial.keeps_up is False),
        "too short to tell whether they are answered as fast as they arrive: try --probe-s" * (trial.keeps_up is None),
        "close: chance may have decided" * trial.close,
        "the client was late" * (not trial.trustworthy),
    ]
    because = "; ".join(reason for reason in reasons if reason)
    return (
        f"{trial.rate:10.2f} requests/s  {verdict:6}  {100 * trial.share:5.1f}% kept their objectives "
        f"(95%: {100 * trial.low:.1f} to {100 * trial.high:.1f}, of {trial.num_requests})"
        + f"  {because}"
        * bool(because)
    )


def capacity_text(search: Search, attainment: float) -> str:
    """Return the search's result as text."""
    wanted = f"{100 * attainment:g}% of requests keep their objectives"
    if search.met is None:
        return f"capacity: none; not even at {search.missed:.4g} requests/s is it that {wanted}\n"
    beyond = "no higher rate was tried" if search.missed is None else f"missed at {search.missed:.2f}"
    return f"capacity: {search.met:.2f} requests/s: {wanted} ({beyond})\n"


def described(options: BenchOptions, info: TargetInfo) -> dict[str, Any]:
    """Return the benched options and server."""
    asked = msgspec.structs.asdict(options)
    return {
        "schema": JSON_SCHEMA,
        "options": {name: value for name, value in asked.items() if name not in _OUTPUTS},
        "target": info,
    }


def as_json(
    options: BenchOptions, info: TargetInfo, totals: BenchTotals, requests: Sequence[BenchedRequest], max_late_ms: float
) -> bytes:
    """Return the result of a load."""
    return _encoded(
        {
            **described(options, info),
            "totals": totals,
            "warnings": warnings(totals, max_late_ms),
            "requests": requests,
        }
    )


def capacity_json(options: BenchOptions, info: TargetInfo, search: Search, trials: Sequence[Trial]) -> bytes:
    """Return the result of a search."""
    return _encoded({**described(options, info), "capacity": search.met, "missed": search.missed, "trials": trials})


def _encoded(document: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def as_csv(requests: Iterable[BenchedRequest]) -> str:
    """Return a line per request."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(map(_csv_row, requests))
    return out.getvalue()


def _csv_row(request: BenchedRequest) -> tuple[object, ...]:
    return (
        request.number,
        request.tenant,
        request.priority,
        request.status,
        request.num_prompt_tokens,
        request.num_output_tokens,
        round(request.intended_s, 6),
        round(request.late_s * 1e3, 3),
        "" if request.ttft_s is None else round(request.ttft_s * 1e3, 3),
        "" if request.tpot_ms is None else round(request.tpot_ms, 3),
        max(request.itl_ms, default=""),
        round(request.end_to_end_s * 1e3, 3),
        request.meets_objectives,
        request.error,
    )
