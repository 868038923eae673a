"""What the memory policies promise, with the real scheduler in virtual time on pools that are far too small."""

import itertools
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from headway_lab.simulate.cases import Case
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.report import CaseResult
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.state.limits import SchedulerLimits

CONTEXTS = {
    "short": {
        "prompt_tokens": "lognormal:256,0.6,1500",
        "output_tokens": "lognormal:256,0.6,1500",
        "num_kv_blocks": 700,
        "users": 48,
        "num_requests": 200,
    },
    "medium": {
        "prompt_tokens": "lognormal:1500,0.5,5000",
        "output_tokens": "lognormal:400,0.6,2000",
        "num_kv_blocks": 2500,
        "users": 48,
        "num_requests": 140,
    },
    "growing": {
        "prompt_tokens": "lognormal:500,0.5,2000",
        "output_tokens": "lognormal:2500,0.4,6000",
        "num_kv_blocks": 2500,
        "users": 32,
        "num_requests": 56,
    },
}
QUICK = {("short", 10.0), ("growing", 1.0), ("growing", 100.0)}
"""What says most of the others; `make deep` has all."""

HEAVY_TAILS = {
    "lognormal": {"output_tokens": "lognormal:300,1.0,4000", "max_tokens": 4096, "num_kv_blocks": 4000, "users": 192},
    "pareto": {"output_tokens": "pareto:100,1.2,4000", "max_tokens": 4096, "num_kv_blocks": 4000, "users": 192},
    "lognormal, cut": {
        "output_tokens": "lognormal:300,1.0,8000",
        "max_tokens": 512,
        "num_kv_blocks": 2500,
        "users": 128,
    },
    "pareto, cut": {"output_tokens": "pareto:100,1.2,8000", "max_tokens": 512, "num_kv_blocks": 2500, "users": 128},
}


class Run(NamedTuple):
    """``throughput`` in tokens per second between the arrival of a fifth of the requests and the last arrival;
    ``recomputed`` tokens as a share of those that had to be computed.
    """

    throughput: float
    num_preemptions: int
    most_preemptions: int
    recomputed: float
    result: CaseResult


@cache
def run(limits: tuple[tuple[str, str], ...], options: tuple[tuple[str, object], ...]) -> Run:
    world = make_world(SimulationOptions(**dict(options)))
    result = simulate(world, Case(label="", limits=SchedulerLimits(**dict(limits))))
    requests = result.requests
    assert len(requests) == len(world.load.requests)
    arrival_s = np.array([request.arrival_s for request in requests])
    start_s, end_s = float(np.sort(arrival_s)[len(requests) // 5]), float(arrival_s.max())
    token_s = np.concatenate(
        [request.arrival_s + request.ttft_s + np.cumsum([0.0, *request.itl_ms]) / 1e3 for request in requests]
    )
    num_needed = sum(request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests)
    num_surplus = sum(request.reason == "stop" for request in requests)
    return Run(
        throughput=float(np.count_nonzero((token_s > start_s) & (token_s <= end_s))) / (end_s - start_s),
        num_preemptions=result.totals.num_preemptions,
        most_preemptions=max(request.num_preemptions for request in requests),
        recomputed=(sum(result.steps.num_tokens) - num_surplus - num_needed) / num_needed,
        result=result,
    )


def preempting(context: str, mode: str, bandwidth_gb_s: float) -> Run:
    options = {**CONTEXTS[context], "host_bandwidth_gb_s": bandwidth_gb_s, "host_blocks": 1 << 15}
    return run((("preemption", mode), ("reserve", "none")), tuple(options.items()))


def reserving(workload: str, reserve: str) -> Run:
    options = {"prompt_tokens": "lognormal:256,0.6,1500", "num_requests": 640, **HEAVY_TAILS[workload]}
    return run((("preemption", "recompute"), ("reserve", reserve)), tuple(options.items()))


@pytest.mark.parametrize(
    ("context", "bandwidth_gb_s"),
    [
        pytest.param(context, bandwidth, marks=() if (context, bandwidth) in QUICK else pytest.mark.deep)
        for context, bandwidth in itertools.product(CONTEXTS, (1.0, 10.0, 100.0))
    ],
)
def test_the_automatic_kind_of_preemption_is_as_good_as_the_better_one(context: str, bandwidth_gb_s: float) -> None:
    recompute = preempting(context, "recompute", 1.0)  # it moves nothing
    swap = preempting(context, "swap", bandwidth_gb_s)
    auto = preempting(context, "auto", bandwidth_gb_s)
    assert min(recompute.num_preemptions, swap.num_preemptions) > 30
    assert auto.throughput >= max(recompute.throughput, swap.throughput) / 1.02


def test_slow_hosts_favour_recomputing_and_fast_ones_swapping() -> None:
    assert preempting("short", "swap", 1.0).throughput < 0.8 * preempting("short", "recompute", 1.0).throughput
    assert preempting("short", "swap", 100.0).throughput > preempting("short", "recompute", 1.0).throughput
    assert preempting("short", "auto", 1.0).result.totals.num_swapped_blocks == 0
    fast = preempting("short", "auto", 100.0)
    assert fast.result.totals.num_swapped_blocks > 0
    # Only what is preempted before the first prompt has been timed is computed again.
    assert fast.recomputed < preempting("short", "recompute", 1.0).recomputed / 4


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_nobody_is_preempted_again_and_again(context: str, mode: str) -> None:
    """Users are several times as many as fit, and nothing is reserved for what answers grow to."""
    measured = preempting(context, mode, 10.0)
    num_requests = len(measured.result.requests)
    assert measured.most_preemptions <= 8
    assert measured.num_preemptions <= 3 * num_requests
    assert measured.recomputed <= 0.75
    if mode == "swap":
        assert measured.recomputed == 0.0


@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=() if name == "pareto" else pytest.mark.deep) for name in HEAVY_TAILS],
)
def test_foresight_halves_preemptions_and_costs_no_throughput(workload: str) -> None:
    none, predicted = reserving(workload, "none"), reserving(workload, "predicted")
    assert none.num_preemptions > 100
    assert predicted.num_preemptions <= none.num_preemptions / 2
    assert predicted.recomputed <= none.recomputed / 2
    assert predicted.throughput >= none.throughput


def test_answers_stop_at_their_length_and_the_limit_cuts_the_rest() -> None:
    requests = reserving("pareto, cut", "none").result.requests
    assert {request.reason for request in requests} == {"stop", "length"}
    assert all((request.num_output_tokens == 512) == (request.reason == "length") for request in requests)
    same = reserving("pareto, cut", "predicted").result.requests
    assert [request.num_output_tokens for request in requests] == [request.num_output_tokens for request in same]


def test_a_full_reservation_never_preempts_and_pays_for_it() -> None:
    full = reserving("pareto, cut", "full")
    assert full.num_preemptions == 0
    assert full.throughput < 0.8 * reserving("pareto, cut", "predicted").throughput


def test_while_nothing_is_known_prediction_reserves_the_prompt() -> None:
    """All answers are equally long, and so many requests are there that none has ended when the pool is full."""
    options = {
        "prompt_tokens": "uniform:100,400",
        "output_tokens": "1500",
        "num_kv_blocks": 1000,
        "users": 64,
        "num_requests": 80,
    }
    runs = {
        reserve: run((("preemption", "recompute"), ("reserve", reserve)), tuple(options.items()))
        for reserve in ("prompt", "predicted")
    }
    first_end_s = min(request.arrival_s + request.end_to_end_s for request in runs["prompt"].result.requests)
    num_steps = np.searchsorted(runs["prompt"].result.steps.start_s, first_end_s)
    assert num_steps > 1000
    rows = {reserve: np.array(measured.result.steps.num_rows[:num_steps]) for reserve, measured in runs.items()}
    # A refusal holds for a step more.
    assert np.mean(rows["prompt"] != rows["predicted"]) < 0.02
    assert abs(rows["prompt"].mean() - rows["predicted"].mean()) < 0.2
