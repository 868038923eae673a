"""The goodput of one kind of executor: the highest rate at which the required share keeps its objectives.

The search is ``headway bench capacity``'s: rates double until one misses, then come geometric means. A trial is long
enough for its load to settle, and its first third is not counted.
"""

from collections.abc import Callable, Collection, Sequence
from math import ceil
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.bench.capacity import Search
from headway_lab.percentiles import rounded
from headway_lab.plan.bounds import alone, ceiling
from headway_lab.plan.cluster import Degrees
from headway_lab.plan.instance import FloatArray, Instance, Phase, Run
from headway_lab.plan.options import MEAN_GAP
from headway_lab.plan.workload import MOST_REQUESTS, Workload
from headway_lab.workload.requests import PlannedRequest

BoolArray = NDArray[np.bool_]

TOLERANCE = 0.05
FIRST_SHARE_OF_CEILING = 0.7
_MOST_RATE = 1e6
WARM_UP_SHARE = 3
_QUEUE_OBJECTIVES = 20
"""A trial lasts so many times the objective on first tokens: an overload of five percent then makes a tenth late."""

Missed = Literal["", "ttft", "itl", "load"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One rate, in requests per second: the share from 0 to 1 of ``num_requests`` that kept the phase's objectives.

    ``keeps_up``: whether the wait for a first token did not grow with the trial.
    """

    rate: float
    num_requests: int
    share: float
    keeps_up: bool = True

    def meets(self, attainment: float) -> bool:
        """Whether the executor can bear the rate for long."""
        return self.keeps_up and self.share >= attainment


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has found.

    ``crosses_nodes``: whether its stages send from node to node. ``goodput``: requests per second, None if no rate keeps the objectives or if it was not searched. ``missed``: the
    objective that one request alone misses, or ``load`` if any load does. ``alone_ms``: both latencies of a request
    alone that the required share keeps. ``ceiling``: an estimate of the highest rate that it cannot exceed by far.
    """

    phase: Phase
    degrees: Degrees
    alone_ms: tuple[float, float]
    ceiling: float
    crosses_nodes: bool = False
    missed: Missed = ""
    goodput: float | None = None
    trials: list[Trial] = []

    @property
    def per_device(self) -> float:
        """Goodput per device; 0 without one."""
        return (self.goodput or 0.0) / self.degrees.num_devices


class Goal(NamedTuple):
    """What is asked of every executor.

    ``transfer_token_s``: seconds per token of a prompt that is handed over. ``gaps``: see ``PlanOptions``. ``least_rate``:
    requests per second and device below which an executor is of no use.
    """

    workload: Workload
    attainment: float
    gaps: str
    least_requests: int
    transfer_token_s: float
    least_rate: float

    def keeps_gaps(self, requests: Sequence[PlannedRequest], run: Run, handed_s: FloatArray | float = 0.0) -> BoolArray:
        """Return whether each request's gaps keep the objective; ``handed_s``: its gap at the hand-off, bool, ``[requests]``."""
        judged_s = np.maximum(run.longest_gap_s, handed_s)
        if self.gaps == MEAN_GAP:
            num_gaps = np.array([max(one.num_output_tokens - 1, 1) for one in requests])
            judged_s = (run.gaps_s + handed_s) / num_gaps
        keeps: BoolArray = judged_s <= self.workload.objectives.limits_s[1]
        return keeps


def appraise(instance: Instance, goal: Goal) -> Outcome:
    """Return an outcome without a search: only what the costs say."""
    latencies = alone(instance, goal.workload, goal.gaps, goal.transfer_token_s)
    limits_s = goal.workload.objectives.limits_s
    missed: Missed = ""
    if float(np.mean(latencies.first_s <= limits_s[0])) < goal.attainment:
        missed = "ttft"
    elif float(np.mean(latencies.gap_s <= limits_s[1])) < goal.attainment:
        missed = "itl"
    first_s, gap_s = (
        float(np.quantile(values, goal.attainment, method="inverted_cdf"))
        for values in (latencies.first_s, latencies.gap_s)
    )
    return Outcome(
        phase=instance.phase,
        degrees=instance.degrees,
        alone_ms=(rounded(first_s * 1e3), rounded(gap_s * 1e3)),
        ceiling=rounded(ceiling(instance, goal.workload)),
        missed=missed,
    )


def searched(instance: Instance, outcome: Outcome, goal: Goal, on_trial: Callable[[Trial], None]) -> Outcome:
    """Return the outcome with the executor's goodput."""

    def take(rate: float) -> Trial:
        num_requests = requests_to_settle({instance.phase}, goal, rate)
        requests = goal.workload.requests[:num_requests]
        times_s = goal.workload.times_s(rate, num_requests)
        run = instance.run(requests, times_s, goal.workload.seed)
        return Trial(
            rate=rounded(rate),
            num_requests=num_requests,
            share=share_counted(_keeps(instance, goal, requests, run)),
            keeps_up=keeps_up(times_s, run.first_s),
        )

    least_rate = goal.least_rate * instance.degrees.num_devices
    first_rate = max(FIRST_SHARE_OF_CEILING * outcome.ceiling, least_rate)
    goodput, trials = highest_rate(first_rate, least_rate, goal.attainment, take, on_trial)
    return msgspec.structs.replace(outcome, goodput=goodput, trials=trials, missed="" if goodput else "load")


def _keeps(instance: Instance, goal: Goal, requests: Sequence[PlannedRequest], run: Run) -> BoolArray:
    if instance.phase is Phase.DECODE:
        # The first token came from another executor, so this one's first token ends the gap at the hand-off.
        transfer_s = goal.transfer_token_s * np.array([one.num_prompt_tokens for one in requests])
        is_handed = np.array([one.num_output_tokens > 1 for one in requests])
        return goal.keeps_gaps(requests, run, is_handed * (run.first_s + transfer_s))
    is_in_time: BoolArray = run.first_s <= goal.workload.objectives.limits_s[0]
    return is_in_time & goal.keeps_gaps(requests, run)


def highest_rate(
    first_rate: float,
    least_rate: float,
    attainment: float,
    take: Callable[[float], Trial],
    on_trial: Callable[[Trial], None],
) -> tuple[float | None, list[Trial]]:
    """Return the highest rate whose share is at least ``attainment``, to ``TOLERANCE``, and all trials.

    None: even ``least_rate`` has a smaller share, or what is left above it does not matter.
    """
    search = Search(first_rate, _MOST_RATE, TOLERANCE)
    trials: list[Trial] = []
    while (rate := search.next_rate()) is not None:
        if search.met is None and trials:
            if trials[-1].rate <= least_rate:
                break
            rate = max(rate, least_rate)
        trials.append(take(rate))
        search.record(rate, meets=trials[-1].meets(attainment))
        on_trial(trials[-1])
    return search.met and rounded(search.met), trials


def requests_to_settle(phases: Collection[Phase], goal: Goal, rate: float) -> int:
    """Return how many requests let the queues and batches of these phases settle."""
    ttft_s, itl_s = goal.workload.objectives.limits_s
    longest_s = 0.0
    if phases != {Phase.DECODE}:
        longest_s = _QUEUE_OBJECTIVES * ttft_s
    if phases != {Phase.PREFILL}:
        longest_s = max(longest_s, WARM_UP_SHARE * goal.workload.mean_output_tokens * itl_s)
    return min(max(goal.least_requests, ceil(rate * longest_s)), MOST_REQUESTS)


def keeps_up(times_s: FloatArray, first_s: FloatArray) -> bool:
    """Return whether waits grow by less than ``TOLERANCE`` of the time, by the line of least squares.

    In a queue that gets e times what it can serve, the wait grows by 1 - 1 / e of each second. An objective that forgives
    long waits would not show it within a trial.
    """
    counted = np.isfinite(first_s)
    counted[: len(counted) // WARM_UP_SHARE] = False
    if np.count_nonzero(counted) < 2:
        return False
    return float(np.polyfit(times_s[counted], first_s[counted], 1)[0]) < TOLERANCE


def share_counted(meets: BoolArray) -> float:
    """Return the share of those that are not warm-up."""
    return rounded(float(np.mean(meets[len(meets) // WARM_UP_SHARE :])))
