"""What the policies promise, out of the real scheduler in virtual time: the benchmark's own runs, with fewer requests."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("policies_objectives")
    finally:
        sys.path.remove(str(BENCHMARKS))


COARSE_BUDGETS = {
    "a100 8b": (384, 448, 512, 576),
    "h100 70b x4": (512, 576, 640),
    "h200 8b": (512, 1536, 2048, 2304),
}
"""Around the best of each device's full sweep."""


@pytest.mark.parametrize("workload", ["chat", "long prompts", "bursts with prefixes"])
@pytest.mark.parametrize("device", sorted(COARSE_BUDGETS))
def test_the_gaps_keep_their_objective_and_throughput_is_that_of_the_best_fixed_budget(benchmark, device, workload):
    row = benchmark.keep_objective(device, workload, COARSE_BUDGETS[device], num_requests=200, seed=3)
    assert row["itl_p99_ms"] <= 1.1 * benchmark.OBJECTIVE_MS
    assert row["throughput_ratio"] >= 0.95


def test_the_highest_class_hardly_notices_three_times_what_can_be_served(benchmark):
    row = benchmark.overload_by_class(benchmark.LATENCY_SETUPS[0], num_requests=1000, seed=3, aging_s=10.0)
    assert row["num_realtime"] > 80
    assert row["ratio_p99"] <= 1.2
    # The overload lasts longer than it takes to age, and some of the lowest class get through while it does.
    assert row["overload_s"] > 60.0
    assert row["ended_in_overload"]["low"] >= 10


def test_a_modest_tenant_hardly_notices_a_flood(benchmark):
    row = benchmark.modest_beside_flood(benchmark.LATENCY_SETUPS[0], num_modest=60, seed=3)
    assert row["ratio_p99"] <= 1.3


def test_a_flood_that_fills_every_row_leaves_one_for_a_modest_tenant(benchmark):
    # Every row is taken: without a free one, the first token would wait for the end of somebody's answer.
    few_rows = benchmark.questions("h100 8b", max_num_batched_tokens=512, max_num_seqs=32)
    row = benchmark.modest_beside_flood(few_rows, num_modest=40, seed=3)
    assert row["ratio_p99"] <= 2.0
    assert benchmark.modest_beside_flood(few_rows, num_modest=20, seed=3, order="fcfs")["ratio_p99"] > 20.0


@pytest.mark.parametrize("weights", [{}, {"other": 3.0}, {"flood": 0.5, "other": 2.0}])
@pytest.mark.parametrize("place", [0, 1])
def test_two_tenants_that_both_wait_get_the_same_up_to_the_published_bound(benchmark, weights, place):
    row = benchmark.both_backlogged(benchmark.BACKLOG_SETUPS[place], weights, num_requests=500, seed=3)
    assert 0 < row["largest_difference"] <= row["bound"]
    flood, other = row["service_while_both_wait"].values()  # over their weights
    assert other == pytest.approx(flood, rel=0.25)


def test_without_fairness_the_bound_would_be_broken(benchmark):
    row = benchmark.both_backlogged(benchmark.BACKLOG_SETUPS[1], {}, num_requests=2400, seed=3, order="fcfs")
    assert row["largest_difference"] > row["bound"]
