"""The figures of a finished load, as docs/bench.md defines them. Must not know: sending or layout.

Latencies are those of requests that were answered to their end; statuses count the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.bench.records import OK, TOO_MUCH_LOAD, RequestRecord, ServerTimings
from headway_lab.bench.share import ShareResult
from headway_lab.bench.steady import SteadyPart, steady_part
from headway_lab.measurement import GroupTotals, Measurement, RequestFigures, TimeColumns, Totals
from headway_lab.percentiles import Percentiles, percentiles, ratio
from headway_lab.workload.load import Load
from headway_lab.workload.requests import PlannedRequest

_LEAST_FOR_A_RATE = 40
_EDGE = 0.05


class BenchedRequest(RequestFigures, frozen=True, kw_only=True):
    """A measured request. Times are in seconds, gaps in milliseconds."""

    status: str
    error: str
    intended_s: float
    late_s: float
    tpot_ms: float | None
    server: ServerTimings | None
    """The server's own timings, if it sends them."""


class BenchedGroup(GroupTotals, frozen=True, kw_only=True):
    """A group's measured requests."""

    num_requests: int
    num_ok: int
    attainment: float | None


class ClientFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own delays. ``cpu_share`` is of one core."""

    num_processes: int
    late_ms: Percentiles
    lag_ms: Percentiles
    cpu_share: float


class BenchTotals(Totals, frozen=True, kw_only=True):
    """A run in figures. Users who wait for answers have no asked, arriving or achieved rate."""

    num_ok: int
    num_unmeasured: int
    """Requests that had not ended, or were not sent, when Ctrl-C ended the load."""
    num_shorter: int
    """Answers that ended before the requested length."""
    statuses: dict[str, int]
    window_s: float
    arriving_requests_per_s: float | None
    achieved_requests_per_s: float | None
    keeps_up: bool | None
    """Whether the server kept up; None for users who wait, or if the load was too short."""
    steady: SteadyPart | None
    all_at_work_s: float | None
    """The time in which each user had a request; None for open arrivals. Outside it the server has less to do."""
    attainment: float | None
    tpot_ms: Percentiles
    tokens_per_chunk: float
    tokens_without_time: int
    """Output tokens that the server counts beyond those that the client saw."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float
    """The share of prompt tokens from the server's prefix cache."""
    tenants: dict[str, BenchedGroup]
    priorities: dict[str, BenchedGroup]
    client: ClientFigures


class BenchFigures:
    """A load and its records."""

    def __init__(self, load: Load, result: ShareResult, num_processes: int) -> None:
        self._load = load
        self._result = result
        self._num_processes = num_processes
        self._planned = {request.number: request for request in load.requests}
        first = load.options.warmup_requests
        self._measured = {record.number: record for record in result.records if record.number >= first}
        self._times = Measurement(self._planned, _times_of(list(self._measured.values()), max(self._planned) + 1))

    def requests(self) -> list[BenchedRequest]:
        """Return the measured requests."""
        return [self._figures(record) for record in self._measured.values()]

    def totals(self) -> BenchTotals:
        """Return the figures without the warm-up."""
        records, times = self._measured, self._times
        ok = [record for record in records.values() if record.is_ok]
        answered = [record.number for record in ok]
        is_open = self._load.times_s is not None
        start_s = min((record.intended_s for record in records.values()), default=0.0)
        window_s = max((record.end_s for record in self._result.records), default=start_s) - start_s
        steady = steady_part(self._result.records, start_s) if is_open else None
        num_tokens = sum(_num_tokens_after(record, start_s) for record in self._result.records)
        num_prompt_tokens = sum(record.num_prompt_tokens for record in ok)
        num_chunks = sum(len(record.chunk_tokens) for record in ok)
        num_seen = sum(sum(record.chunk_tokens) for record in ok)
        num_output_tokens = sum(record.num_output_tokens for record in ok)
        return BenchTotals(
            num_requests=len(records),
            num_ok=len(ok),
            num_unmeasured=0 if self._result.is_whole else len(self._planned) - len(self._result.records),
            num_shorter=sum(record.num_output_tokens < self._of(record).num_output_tokens for record in ok),
            statuses=dict(sorted(Counter(record.status for record in records.values()).items())),
            window_s=window_s,
            output_tokens_per_s=ratio(num_tokens, window_s),
            total_tokens_per_s=ratio(num_tokens + num_prompt_tokens, window_s),
            requests_per_s=ratio(len(ok), window_s),
            asked_requests_per_s=self._load.asked_requests_per_s,
            arriving_requests_per_s=rate_of([record.intended_s for record in records.values()]) if is_open else None,
            achieved_requests_per_s=None if steady is None else steady.answered_per_s,
            keeps_up=None if steady is None else steady.keeps_up,
            steady=steady,
            all_at_work_s=None if is_open else self._all_at_work_s(start_s),
            goodput_requests_per_s=times.goodput(list(records), window_s),
            attainment=times.attainment(list(records)),
            ttft_ms=times.ttft_ms(answered),
            itl_ms=times.itl_ms(answered),
            tpot_ms=percentiles([1e3 * tpot for record in ok if (tpot := tpot_of(record)) is not None]),
            end_to_end_ms=times.end_to_end_ms(answered),
            tokens_per_chunk=ratio(num_seen, num_chunks),
            tokens_without_time=num_output_tokens - num_seen,
            mean_prompt_tokens=ratio(num_prompt_tokens, len(ok)),
            mean_output_tokens=ratio(num_output_tokens, len(ok)),
            cached_share=ratio(sum(record.num_cached_tokens for record in ok), num_prompt_tokens),
            tenants=times.by_tenant(records, lambda numbers: self._group(numbers, window_s)),
            priorities=times.by_priority(records, lambda numbers: self._group(numbers, window_s)),
            client=self._client(),
        )

    def _figures(self, record: RequestRecord) -> BenchedRequest:
        figures = self._times.figures(
            record.number, num_prompt_tokens=record.num_prompt_tokens, num_output_tokens=record.num_output_tokens
        )
        tpot_s = tpot_of(record)
        return BenchedRequest(
            **msgspec.structs.asdict(figures),
            status=record.status,
            error=record.error,
            intended_s=record.intended_s,
            late_s=record.sent_s - record.intended_s,
            tpot_ms=None if tpot_s is None else tpot_s * 1e3,
            server=record.server,
        )

    def _of(self, record: RequestRecord) -> PlannedRequest:
        return self._planned[record.number]

    def _group(self, numbers: Sequence[int], window_s: float) -> BenchedGroup:
        records = [self._measured[number] for number in numbers]
        answered = [record.number for record in records if record.is_ok]
        return BenchedGroup(
            num_requests=len(records),
            num_ok=len(answered),
            output_tokens_per_s=ratio(sum(sum(record.chunk_tokens) for record in records), window_s),
            attainment=self._times.attainment(numbers),
            ttft_ms=self._times.ttft_ms(answered),
            itl_ms=self._times.itl_ms(answered),
        )

    def _all_at_work_s(self, start_s: float) -> float:
        # It ends when the first user of a client process finds no further request. Each process has its own requests.
        ends = [
            sorted(record.end_s for record in self._result.records if record.number % self._num_processes == index)
            for index in range(self._num_processes)
        ]
        idle_s = min(
            (
                of_one[max(0, len(of_one) - self._load.share(index, self._num_processes).options.users)]
                for index, of_one in enumerate(ends)
                if of_one
            ),
            default=start_s,
        )
        return max(0.0, idle_s - max(start_s, self._load.options.ramp_s))

    def _client(self) -> ClientFigures:
        return ClientFigures(
            num_processes=self._num_processes,
            late_ms=percentiles([1e3 * (record.sent_s - record.intended_s) for record in self._measured.values()]),
            lag_ms=percentiles(np.array(self._result.lags_s) * 1e3),
            cpu_share=ratio(self._result.cpu_s, self._result.wall_s),
        )


def _times_of(records: Sequence[RequestRecord], count: int) -> TimeColumns:
    """``count`` requests were planned."""
    arrival_s, first_token_s, end_s = np.full((3, count), np.nan)
    is_answered = np.zeros(count, dtype=np.bool_)
    gaps = [gaps_of(record) for record in records]
    for record in records:
        arrival_s[record.number] = record.intended_s
        first_token_s[record.number] = record.chunk_times_s[0] if record.chunk_times_s else np.nan
        end_s[record.number] = record.end_s
        is_answered[record.number] = record.is_ok
    owners = np.repeat(np.array([record.number for record in records], dtype=np.int32), [len(some) for some in gaps])
    return TimeColumns(
        arrival_s=arrival_s,
        first_token_s=first_token_s,
        end_s=end_s,
        is_answered=is_answered,
        gap_owners=owners,
        gaps_s=np.concatenate(gaps) if gaps else np.empty(0),
    )


def tpot_of(record: RequestRecord) -> float | None:
    """Mean seconds per token after the first."""
    if len(record.chunk_times_s) < 1 or record.num_output_tokens < 2:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)


def gaps_of(record: RequestRecord) -> NDArray[np.float64]:
    """Seconds between tokens, shape ``[tokens seen - 1]``; tokens that came together have a gap of 0."""
    gaps = np.zeros(max(sum(record.chunk_tokens) - 1, 0))
    if len(record.chunk_times_s) > 1:
        firsts = np.cumsum(record.chunk_tokens[:-1]) - 1
        gaps[firsts] = np.diff(record.chunk_times_s)
    return gaps


def rate_of(times_s: Sequence[float]) -> float | None:
    """Events per second between the 5th and the 95th percentile of their times."""
    if len(times_s) < _LEAST_FOR_A_RATE:
        return None
    first, last = np.quantile(times_s, (_EDGE, 1 - _EDGE)).tolist()
    return ratio((1 - 2 * _EDGE) * (len(times_s) - 1), last - first)


def _num_tokens_after(record: RequestRecord, start_s: float) -> int:
    seen = sum(
        count for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True) if time_s > start_s
    )
    # Tokens that only the server counts came in the same time as the others.
    total = sum(record.chunk_tokens)
    return seen if record.num_output_tokens <= total or not total else round(seen * record.num_output_tokens / total)


def num_failed(totals: BenchTotals) -> int:
    """Return how many requests had neither an answer nor a refusal for too much load, which is a result of its own."""
    return sum(count for status, count in totals.statuses.items() if status not in {OK, *TOO_MUCH_LOAD})


def by_status(statuses: Mapping[str, int]) -> str:
    """Return counts as ``3 RESOURCE_EXHAUSTED, 1 TIMEOUT``."""
    return ", ".join(f"{count} {status}" for status, count in statuses.items())
