"""The latencies and objectives of a run's requests, for bench, simulate and replay.

A request meets its objectives if its first token and each further gap came within them, and a request without an
objective meets it. Goodput is the rate of those that do (Zhong et al., DistServe, OSDI 2024).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.percentiles import Percentiles, percentiles, ratio, rounded
from headway_lab.workload.requests import PRIORITY_NAMES, PlannedRequest
from headway_proto.columns import Int32Array

GroupT = TypeVar("GroupT")


class RequestFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are in seconds, gaps in milliseconds."""

    number: int
    tenant: str
    priority: str
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: float | None
    end_to_end_s: float
    itl_ms: tuple[float, ...]
    meets_objectives: bool


class GroupTotals(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's or a priority's part of a run."""

    output_tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures. Rates are per second, latencies in milliseconds, shares from 0 to 1."""

    num_requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    asked_requests_per_s: float | None
    goodput_requests_per_s: float | None
    ttft_ms: Percentiles
    itl_ms: Percentiles
    end_to_end_ms: Percentiles


class TimeColumns(NamedTuple):
    """Times in seconds, float64, shape ``[requests]``, NaN if unknown; gaps have shape ``[gaps]``."""

    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    is_answered: NDArray[np.bool_]
    gap_owners: Int32Array
    gaps_s: NDArray[np.float64]


class Measurement:
    """A run's requests and times."""

    def __init__(self, requests: Mapping[int, PlannedRequest], times: TimeColumns) -> None:
        self._requests = requests
        order = np.argsort(times.gap_owners, kind="stable")
        self.times = times._replace(gap_owners=times.gap_owners[order], gaps_s=times.gaps_s[order])

    @cached_property
    def meets_objectives(self) -> NDArray[np.bool_]:
        """Return a value per ended request."""
        times = self.times
        longest_s = np.zeros(len(times.arrival_s))
        np.maximum.at(longest_s, times.gap_owners, times.gaps_s)
        limits_s = np.full((2, len(times.arrival_s)), np.inf)
        for number, request in self._requests.items():
            limits_s[:, number] = request.objectives.limits_s
        is_late = times.first_token_s - times.arrival_s > limits_s[0]
        meets: NDArray[np.bool_] = times.is_answered & ~is_late & (longest_s <= limits_s[1])
        return meets

    def num_meeting(self, numbers: Sequence[int]) -> int | None:
        """Return how many meet their objectives, if any has one."""
        if not any(self._requests[number].objectives.are_some for number in numbers):
            return None
        return int(np.count_nonzero(self.meets_objectives[numbers]))

    def goodput(self, numbers: Sequence[int], window_s: float) -> float | None:
        """Return the requests per second that meet their objectives."""
        num_meeting = self.num_meeting(numbers)
        return None if num_meeting is None else ratio(num_meeting, window_s)

    def attainment(self, numbers: Sequence[int]) -> float | None:
        """Return the share of requests that meet their objectives."""
        num_meeting = self.num_meeting(numbers)
        return None if num_meeting is None else ratio(num_meeting, len(numbers))

    def ttft_ms(self, numbers: Sequence[int]) -> Percentiles:
        """Return percentiles of TTFT."""
        return percentiles((self.times.first_token_s[numbers] - self.times.arrival_s[numbers]) * 1e3)

    def end_to_end_ms(self, numbers: Sequence[int]) -> Percentiles:
        """Return percentiles of the whole time."""
        return percentiles((self.times.end_s[numbers] - self.times.arrival_s[numbers]) * 1e3)

    def itl_ms(self, numbers: Sequence[int]) -> Percentiles:
        """Return percentiles of the gaps between tokens."""
        is_own = np.zeros(len(self.times.arrival_s), dtype=np.bool_)
        is_own[numbers] = True
        return percentiles(self.times.gaps_s[is_own[self.times.gap_owners]] * 1e3)

    def figures(self, number: int, *, num_prompt_tokens: int, num_output_tokens: int) -> RequestFigures:
        """Return one request's figures."""
        times, request = self.times, self._requests[number]
        owners = times.gap_owners
        gaps_s = times.gaps_s[owners.searchsorted(number) : owners.searchsorted(number, side="right")]
        ttft_s = float(times.first_token_s[number] - times.arrival_s[number])
        return RequestFigures(
            number=number,
            tenant=request.tenant,
            priority=PRIORITY_NAMES[request.priority],
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            ttft_s=None if np.isnan(ttft_s) else rounded(ttft_s),
            end_to_end_s=rounded(float(times.end_s[number] - times.arrival_s[number])),
            itl_ms=tuple((gaps_s * 1e3).round(6).tolist()),
            meets_objectives=bool(self.meets_objectives[number]),
        )

    def by_tenant(self, numbers: Iterable[int], make: Callable[[list[int]], GroupT]) -> dict[str, GroupT]:
        """Make a group of each tenant's requests."""
        groups: dict[str, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._requests[number].tenant, []).append(number)
        return {name: make(groups[name]) for name in sorted(groups) if name}

    def by_priority(self, numbers: Iterable[int], make: Callable[[list[int]], GroupT]) -> dict[str, GroupT]:
        """Make a group per priority, the most urgent first."""
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._requests[number].priority, []).append(number)
        return {PRIORITY_NAMES[priority]: make(groups[priority]) for priority in sorted(groups)}
