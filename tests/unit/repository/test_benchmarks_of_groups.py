"""Benchmarks of executors that are groups: divisions of devices, costs of meetings, bubbles on processes."""

import json
from pathlib import Path

import pytest

import pipeline_processes
import rank_costs
import splits_70b
from headway_kernels.cpu.library import installed_variants, runs_here
from headway_lab.plan.options import MEAN_GAP, PlanOptions
from headway_lab.plan.search import make_cluster
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.meetings import Meetings, all_reduces, gathers
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from staged_backend import Busy, bubble_share

SHAPE = MODEL_SHAPES["llama-3-70b"]
NVLINK = rank_costs.Link(10e-6, 360e9)


def options(**more):
    return PlanOptions(
        model="llama-3-70b", rate=2.0, ttft_slo_ms=2000, itl_slo_ms=40, gaps=MEAN_GAP, num_requests=50,
        devices=8, devices_per_node=8, **more,
    )  # fmt: skip


def test_every_division_uses_all_devices_and_none_comes_twice():
    found = list(splits_70b.divisions(make_cluster(options())))
    assert len(found) == len(set(found)) == 80
    for division in found:
        assert sum(part.num_executors * part.degrees.num_devices for part in division.parts) == 8
    assert {one.kind for one in found} == set(splits_70b.KINDS)


def test_a_division_that_does_not_fit_says_which_weights_and_which_memory():
    cluster = make_cluster(options())
    assert splits_70b.why_not(cluster, splits_70b.Degrees(2)) == ""
    assert splits_70b.why_not(cluster, splits_70b.Degrees(1)) == "weights of 141.1 GB leave no block of 72.0 GB"


@pytest.mark.parametrize("kind", splits_70b.KINDS)
def test_a_division_of_each_kind_is_run(kind, tmp_path):
    given = options(prompt_tokens="200", output_tokens="8")
    bench = splits_70b.Bench(make_cluster(given), given)
    division = next(
        one
        for one in splits_70b.divisions(bench.cluster)
        if one.kind == kind and {part.degrees for part in one.parts} == {(2, 2)}
    )
    check = bench.check(division, 2.0)
    assert check.share == 1.0
    assert check.keeps_up
    assert 0 < check.ttft_ms.p50 <= check.ttft_ms.p99 < 2000
    assert 0 < check.gap_ms.p50 < 40
    assert all(0 < share < 1 for share in check.bubble_shares.values())
    assert (check.hand_off_ms > 0) == (kind == "split")
    row = {
        "kind": kind, "division": division.label, "goodput": 2.0, "per_device": 0.25,
        "at_rate": splits_70b.msgspec.to_builtins(check),
    }  # fmt: skip
    assert division.label in splits_70b.table({"rows": [row], "impossible": []}, 2.0)
    picture = tmp_path / "picture.png"
    splits_70b.draw(picture, "title", [row], 2.0)
    assert picture.stat().st_size > 0


def test_meetings_take_their_latency_and_their_bytes():
    meetings = Meetings(10, 100.0, 50.0)
    assert meetings.seconds(3, 2, latency_s=1e-3, bandwidth=1e6) == pytest.approx(10e-3 + 400e-6)
    assert all_reduces(SHAPE, 1, 80).number == gathers(SHAPE, 1, 80).number == 0
    assert all_reduces(SHAPE, 4, 80) == Meetings(160, 160 * 2 * 3 / 4 * 8192 * 2)
    exact = gathers(SHAPE, 4, 80)
    assert exact.number == 324
    assert exact.token_bytes == 3 / 4 * 2 * (80 * (3 * 8192 + 28672) + 8192)


def test_a_measured_step_over_a_link_is_its_arithmetic_and_its_meetings():
    path = Path(rank_costs.__file__).parent / "results" / "rank_transports.json"
    record = json.loads(path.read_text())
    for row in rank_costs.over_link(record, NVLINK):
        assert row["meetings_over_link_ms"] == pytest.approx(row["meetings"] * 10e-3, rel=0.05)
        arithmetic_ms = row["group_ms"] - row["waiting_ms"]
        assert row["step_over_link_ms"] == pytest.approx(arithmetic_ms + row["meetings_over_link_ms"], abs=0.01)


def test_over_nvlink_more_devices_make_a_step_shorter_in_both_forms():
    rows = rank_costs.expected("llama-3-70b", "h100", NVLINK, [1, 64], 1024)
    for num_rows in (1, 64):
        steps = [row for row in rows if row["rows"] == num_rows]
        for form in ("fast", "exact"):
            times = [row[f"{form}_step_ms"] for row in steps]
            assert times == sorted(times, reverse=True)
        assert all(row["fast_step_ms"] <= row["exact_step_ms"] for row in steps)
    assert ACCELERATORS["h100"].link_bandwidth * ACCELERATORS["h100"].link_share == NVLINK.bandwidth


def test_bubbles_are_idle_time_of_stages_while_a_step_is_among_them():
    stages = [
        [Busy(1, 0.0, 1.0), Busy(2, 1.0, 2.0), Busy(3, 10.0, 11.0)],
        [Busy(1, 1.0, 2.0), Busy(2, 2.0, 3.0), Busy(3, 11.0, 12.0)],
    ]
    assert bubble_share(stages, 0.0) == pytest.approx(1 - 6 / 10)
    assert bubble_share(stages, 5.0) == pytest.approx(1 - 2 / 4)
    assert bubble_share(stages, 1.0) == pytest.approx(1 - 5 / 8)


def test_the_same_load_runs_on_processes_and_in_virtual_time():
    if not any(runs_here(path) for path in installed_variants()):
        pytest.skip("no CPU kernels that run here")
    load = pipeline_processes.ProcessLoad(
        num_requests=6, users=3, seed=0, base_us=4000, token_us=10, prompt_tokens="40", output_tokens="6"
    )
    measured = pipeline_processes.on_processes(load, {"max_num_batched_tokens": 64}, 2)
    virtual = pipeline_processes.expected(load, {"max_num_batched_tokens": 64}, 2)
    for figures in (measured, virtual):
        assert 0 < figures["bubble_share"] < 1
        # Three users, and 4 ms for each step: single gaps may be shorter where a client is late.
        assert 0 < figures["output_tokens_per_s"] <= 3 / 0.004
    assert virtual["gap_ms"]["p50"] >= 4.0
    assert measured["output_tokens_per_s"] < 3 * virtual["output_tokens_per_s"]
