"""The figures of a load that was sent.

Owns: what is counted, and from when. Must not know: how requests were sent, or how figures are shown.

Latencies count from the intended time of sending, and are those of requests that were answered to their end; how many were
not is told by status. The window of throughputs begins with the first measured request's intended time and ends with the
last end; every output token that came in it counts, and the prompts of answered requests.

**ITL** is one gap between two tokens of a request as the client saw them: of tokens that came together, the first has the
gap since those before, and the others a gap of 0. All gaps of all requests count alike. **TPOT** is the time from first to
last token over the tokens after the first, one value per request.

A request meets its objectives if it was answered to its end, its first token came in time, and so did each further gap;
goodput is how many do per second, attainment the share that they are of all requests, refused ones included.

Whether open arrivals were answered as fast as they came is told by ``steady``. Of users who wait for their answers,
``all_at_work_s`` is the part of the window in which each has a request to send or to wait for: before and after it the server
has less to do, and throughputs count that time as well.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.bench.records import RequestRecord, ServerTimings
from headway_lab.bench.share import ShareResult
from headway_lab.bench.steady import SteadyPart, steady_part
from headway_lab.workload.load import Load
from headway_lab.workload.percentiles import Percentiles, percentiles, ratio
from headway_lab.workload.requests import PRIORITY_NAMES, PlannedRequest

_LEAST_FOR_A_RATE = 40
_EDGE = 0.05


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One measured request, in order of its number. Times in seconds, gaps in milliseconds; None where there is none."""

    number: int
    tenant: str
    priority: str
    status: str
    error: str
    num_prompt_tokens: int
    num_output_tokens: int
    intended_s: float
    late_s: float
    ttft_s: float | None
    end_to_end_s: float
    tpot_ms: float | None
    itl_ms: list[float]
    meets_objectives: bool
    server: ServerTimings | None
    """What the server itself says, if it does."""


class GroupTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's or a priority's part of a run, in the units of ``Totals``."""

    num_requests: int
    num_ok: int
    output_tokens_per_s: float
    attainment: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles


class ClientFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How much the client itself can be trusted. ``cpu_share`` is the busiest process's, of one core."""

    num_processes: int
    late_ms: Percentiles
    lag_ms: Percentiles
    cpu_share: float


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Rates per second; latencies in milliseconds; shares from 0 to 1.

    Goodput and attainment are None where no request has an objective; the asked, the arriving and the achieved rate where
    requests wait for answers, the arriving rate where there are too few requests to tell, and the achieved one where the
    load was too short.
    """

    num_requests: int
    num_ok: int
    num_shorter: int
    """Answers that ended before the length that was asked for."""
    statuses: dict[str, int]
    window_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    """Answered, in the window."""
    asked_requests_per_s: float | None
    arriving_requests_per_s: float | None
    achieved_requests_per_s: float | None
    keeps_up: bool | None
    """Whether requests were answered as fast as they came; None where they wait for answers, or the load was too short."""
    steady: SteadyPart | None
    all_at_work_s: float | None
    """Of users who wait for their answers: how long each of them had a request; None for open arrivals."""
    goodput_requests_per_s: float | None
    attainment: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    end_to_end_ms: Percentiles
    tokens_per_chunk: float
    tokens_without_time: int
    """Output tokens that the server counts beyond those that were seen to come."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    cached_share: float
    """Of prompt tokens, from the server's prefix cache."""
    tenants: dict[str, GroupTotals]
    priorities: dict[str, GroupTotals]
    client: ClientFigures


class Measurement:
    """A load and what came of it."""

    def __init__(self, load: Load, result: ShareResult, num_processes: int) -> None:
        self._load = load
        self._result = result
        self._num_processes = num_processes
        self._planned = {request.number: request for request in load.requests}
        first = load.options.warmup_requests
        self._measured = [record for record in result.records if record.number >= first]
        self._gaps_s = {record.number: gaps_of(record) for record in self._measured}

    def requests(self) -> list[RequestFigures]:
        """The measured requests."""
        return [self._figures(record) for record in self._measured]

    def totals(self) -> Totals:
        """The whole run, warm-up left out."""
        records, ok = self._measured, [record for record in self._measured if record.is_ok]
        is_open = self._load.times_s is not None
        start_s = min((record.intended_s for record in records), default=0.0)
        window_s = max((record.end_s for record in self._result.records), default=start_s) - start_s
        steady = steady_part(self._result.records, start_s) if is_open else None
        num_tokens = sum(_num_tokens_after(record, start_s) for record in self._result.records)
        num_prompt_tokens = sum(record.num_prompt_tokens for record in ok)
        num_chunks = sum(len(record.chunk_tokens) for record in ok)
        num_seen = sum(sum(record.chunk_tokens) for record in ok)
        num_output_tokens = sum(record.num_output_tokens for record in ok)
        return Totals(
            num_requests=len(records),
            num_ok=len(ok),
            num_shorter=sum(record.num_output_tokens < self._of(record).num_output_tokens for record in ok),
            statuses=dict(sorted(Counter(record.status for record in records).items())),
            window_s=window_s,
            output_tokens_per_s=ratio(num_tokens, window_s),
            total_tokens_per_s=ratio(num_tokens + num_prompt_tokens, window_s),
            requests_per_s=ratio(len(ok), window_s),
            asked_requests_per_s=self._load.asked_requests_per_s,
            arriving_requests_per_s=rate_of([record.intended_s for record in records]) if is_open else None,
            achieved_requests_per_s=None if steady is None else steady.answered_per_s,
            keeps_up=None if steady is None else steady.keeps_up,
            steady=steady,
            all_at_work_s=None if is_open else self._all_at_work_s(start_s),
            goodput_requests_per_s=self._goodput(records, window_s),
            attainment=self._attainment(records),
            ttft_ms=percentiles([1e3 * ttft for record in ok if (ttft := ttft_of(record)) is not None]),
            itl_ms=self._itl(ok),
            tpot_ms=percentiles([1e3 * tpot for record in ok if (tpot := tpot_of(record)) is not None]),
            end_to_end_ms=percentiles([1e3 * (record.end_s - record.intended_s) for record in ok]),
            tokens_per_chunk=ratio(num_seen, num_chunks),
            tokens_without_time=num_output_tokens - num_seen,
            mean_prompt_tokens=ratio(num_prompt_tokens, len(ok)),
            mean_output_tokens=ratio(num_output_tokens, len(ok)),
            cached_share=ratio(sum(record.num_cached_tokens for record in ok), num_prompt_tokens),
            tenants=self._tenants(window_s),
            priorities=self._priorities(window_s),
            client=self._client(),
        )

    def _figures(self, record: RequestRecord) -> RequestFigures:
        request, tpot_s = self._of(record), tpot_of(record)
        return RequestFigures(
            number=record.number,
            tenant=request.tenant,
            priority=PRIORITY_NAMES[request.priority],
            status=record.status,
            error=record.error,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
            intended_s=record.intended_s,
            late_s=record.sent_s - record.intended_s,
            ttft_s=ttft_of(record),
            end_to_end_s=record.end_s - record.intended_s,
            tpot_ms=None if tpot_s is None else tpot_s * 1e3,
            itl_ms=(self._gaps_s[record.number] * 1e3).round(6).tolist(),
            meets_objectives=self._meets_objectives(record),
            server=record.server,
        )

    def _of(self, record: RequestRecord) -> PlannedRequest:
        return self._planned[record.number]

    def _meets_objectives(self, record: RequestRecord) -> bool:
        ttft_s, gaps_s = ttft_of(record), self._gaps_s[record.number]
        most_ttft_s, most_gap_s = self._of(record).objectives.limits_s
        return record.is_ok and (ttft_s or 0.0) <= most_ttft_s and float(gaps_s.max(initial=0.0)) <= most_gap_s

    def _num_meeting(self, records: Sequence[RequestRecord]) -> int | None:
        if not any(self._of(record).objectives.are_some for record in records):
            return None
        return sum(map(self._meets_objectives, records))

    def _goodput(self, records: Sequence[RequestRecord], window_s: float) -> float | None:
        num_meeting = self._num_meeting(records)
        return None if num_meeting is None else ratio(num_meeting, window_s)

    def _attainment(self, records: Sequence[RequestRecord]) -> float | None:
        num_meeting = self._num_meeting(records)
        return None if num_meeting is None else ratio(num_meeting, len(records))

    def _itl(self, records: Sequence[RequestRecord]) -> Percentiles:
        gaps = [self._gaps_s[record.number] for record in records]
        return percentiles(np.concatenate(gaps) * 1e3 if gaps else [])

    def _tenants(self, window_s: float) -> dict[str, GroupTotals]:
        groups: dict[str, list[RequestRecord]] = {}
        for record in self._measured:
            groups.setdefault(self._of(record).tenant, []).append(record)
        return {name: self._group(groups[name], window_s) for name in sorted(groups) if name}

    def _priorities(self, window_s: float) -> dict[str, GroupTotals]:
        groups: dict[int, list[RequestRecord]] = {}
        for record in self._measured:
            groups.setdefault(self._of(record).priority, []).append(record)
        return {PRIORITY_NAMES[priority]: self._group(groups[priority], window_s) for priority in sorted(groups)}

    def _group(self, records: Sequence[RequestRecord], window_s: float) -> GroupTotals:
        ok = [record for record in records if record.is_ok]
        return GroupTotals(
            num_requests=len(records),
            num_ok=len(ok),
            output_tokens_per_s=ratio(sum(sum(record.chunk_tokens) for record in records), window_s),
            attainment=self._attainment(records),
            ttft_ms=percentiles([1e3 * ttft for record in ok if (ttft := ttft_of(record)) is not None]),
            itl_ms=self._itl(ok),
        )

    def _all_at_work_s(self, start_s: float) -> float:
        """Until the first user of a client process finds no further request; each process has requests of its own."""
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
            late_ms=percentiles([1e3 * (record.sent_s - record.intended_s) for record in self._measured]),
            lag_ms=percentiles(np.array(self._result.lags_s) * 1e3),
            cpu_share=ratio(self._result.cpu_s, self._result.wall_s),
        )


def ttft_of(record: RequestRecord) -> float | None:
    """Seconds from the intended time of sending to the first token."""
    return record.chunk_times_s[0] - record.intended_s if record.chunk_times_s else None


def tpot_of(record: RequestRecord) -> float | None:
    """Mean seconds per token after the first; None if there are none."""
    if len(record.chunk_times_s) < 1 or record.num_output_tokens < 2:
        return None
    return (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)


def gaps_of(record: RequestRecord) -> NDArray[np.float64]:
    """Seconds between tokens, shape ``[tokens seen - 1]``; see above for those that come together."""
    gaps = np.zeros(max(sum(record.chunk_tokens) - 1, 0))
    if len(record.chunk_times_s) > 1:
        firsts = np.cumsum(record.chunk_tokens[:-1]) - 1
        gaps[firsts] = np.diff(record.chunk_times_s)
    return gaps


def rate_of(times_s: Sequence[float]) -> float | None:
    """Events per second between the 5th and the 95th percentile of their times; None for too few of them."""
    if len(times_s) < _LEAST_FOR_A_RATE:
        return None
    first, last = np.quantile(times_s, (_EDGE, 1 - _EDGE)).tolist()
    return ratio((1 - 2 * _EDGE) * (len(times_s) - 1), last - first)


def _num_tokens_after(record: RequestRecord, start_s: float) -> int:
    seen = sum(
        count for time_s, count in zip(record.chunk_times_s, record.chunk_tokens, strict=True) if time_s > start_s
    )
    # What the server counts beyond them came in the same time as they did.
    total = sum(record.chunk_tokens)
    return seen if record.num_output_tokens <= total or not total else round(seen * record.num_output_tokens / total)


def by_status(statuses: Mapping[str, int]) -> str:
    """``3 RESOURCE_EXHAUSTED, 1 TIMEOUT``."""
    return ", ".join(f"{count} {status}" for status, count in statuses.items())
