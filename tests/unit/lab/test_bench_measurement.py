"""The bench's figures are what their definitions say, and its schedule is what was asked for."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_lab.bench.figures import BenchFigures, gaps_of, rate_of, tpot_of
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.pipe_messages import Begin, Done, Job, body_bytes, frame, from_client, read_to_client
from headway_lab.bench.records import RequestRecord
from headway_lab.bench.report import CSV_COLUMNS, as_csv, as_json, text, warnings
from headway_lab.bench.share import ShareResult
from headway_lab.bench.target import TargetInfo
from headway_lab.workload.load import make_load

INFO = TargetInfo(model="m", address="a:1", runs_on="x", context_length=4096, counted_by="token ids")


def record(number=0, *, intended=0.0, times=(1.0,), counts=None, end=None, **other):
    counts = [1] * len(times) if counts is None else list(counts)
    return RequestRecord(
        **{
            "number": number,
            "intended_s": intended,
            "sent_s": intended,
            "end_s": times[-1] if end is None else end,
            "status": "OK",
            "chunk_times_s": list(times),
            "chunk_tokens": counts,
            "num_prompt_tokens": 10,
            "num_output_tokens": sum(counts),
            **other,
        }
    )


def measured(records, *, lags=(0.0,), **options):
    load = make_load(BenchOptions(num_requests=len(records), output_tokens="3", prompt_tokens="10", **options), 4096)
    result = ShareResult(records=list(records), lags_s=list(lags), cpu_s=1.0, wall_s=4.0)
    return BenchFigures(load, result, 1)


def test_of_tokens_that_come_together_the_first_has_the_gap():
    together = record(times=(1.0, 1.5, 2.5), counts=(2, 3, 1))
    assert gaps_of(together).tolist() == [0.0, 0.5, 0.0, 0.0, 1.0]
    assert measured([together]).requests()[0].ttft_s == 1.0
    assert tpot_of(together) == pytest.approx(1.5 / 5)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 6)), min_size=1, max_size=20))
def test_gaps_add_up_to_the_time_from_first_to_last_token(chunks):
    times = np.cumsum([gap for gap, _ in chunks]).tolist()
    gaps = gaps_of(record(times=times, counts=[count for _, count in chunks]))
    assert len(gaps) == sum(count for _, count in chunks) - 1
    assert gaps.sum() == pytest.approx(times[-1] - times[0], abs=1e-9)


def test_what_the_server_counts_beyond_the_chunks_is_counted_and_told():
    records = [record(times=(1.0, 2.0), num_output_tokens=4)]
    totals = measured(records).totals()
    assert totals.tokens_without_time == 2
    assert totals.tpot_ms.p50 == pytest.approx(1000 / 3)
    assert totals.output_tokens_per_s == pytest.approx(4 / 2.0)
    assert "2 tokens more than chunks" in text(INFO, totals, 10.0)


def test_totals_are_those_of_the_definitions():
    rng = np.random.default_rng(1)
    records = []
    for number in range(100):
        intended = number * 0.1
        times = (intended + 0.2 + rng.exponential(0.1, 8).cumsum()).tolist()
        records.append(record(number, intended=intended, times=times))
    totals = measured(records, ttft_slo_ms=400, itl_slo_ms=250).totals()
    gaps = np.concatenate([np.diff(one.chunk_times_s) for one in records]) * 1e3
    assert totals.itl_ms.p50 == pytest.approx(np.percentile(gaps, 50))
    assert totals.itl_ms.p99 == pytest.approx(np.percentile(gaps, 99))
    first = np.array([one.chunk_times_s[0] - one.intended_s for one in records])
    assert totals.ttft_ms.p90 == pytest.approx(np.percentile(first, 90) * 1e3)
    end = max(one.end_s for one in records)
    assert totals.output_tokens_per_s == pytest.approx(800 / end)
    assert totals.total_tokens_per_s == pytest.approx(1800 / end)
    longest = np.array([np.diff(one.chunk_times_s).max() for one in records])
    assert totals.attainment == pytest.approx(np.mean((first <= 0.4) & (longest <= 0.25)))
    assert 0 < totals.attainment < 1


def test_tenants_and_priorities_have_figures_of_their_own():
    records = [record(number, intended=number * 0.1, times=(number * 0.1 + 1.0,)) for number in range(40)]
    totals = measured(records, tenants={"a": "1:high:2000", "b": "3:low:500"}).totals()
    assert totals.tenants["a"].num_requests + totals.tenants["b"].num_requests == 40
    assert totals.tenants["a"].attainment == 1.0
    assert totals.priorities["low"].attainment == 0.0
    assert "0.0%" in text(INFO, totals, 10.0)


def test_a_rate_is_not_told_of_few_requests():
    assert rate_of([0.1 * place for place in range(39)]) is None
    assert rate_of([0.1 * place for place in range(100)]) == pytest.approx(10.0)


def test_warnings_name_what_cannot_be_trusted():
    late = [record(number, sent_s=0.5) for number in range(3)]
    failed = [record(3, status="HTTP 429", times=(), end=1.0), record(4, status="HTTP 429", times=(), end=1.0)]
    lines = warnings(measured([*late, *failed], lags=[0.001] * 10).totals(), 10.0)
    assert lines[0] == "WARNING: 2 requests were not answered: 2 HTTP 429"
    assert "the client was late by 500 ms at p99, its figures are not to be trusted" in lines[1]
    assert not warnings(measured([record(0)]).totals(), 10.0)
    assert "late by 70 ms" in warnings(measured([record(0)], lags=[0.07] * 10).totals(), 10.0)[0]


def test_a_rate_that_is_not_reached_is_told():
    options = {"arrivals": "poisson", "rate": 10.0, "seed": 3}
    load = make_load(BenchOptions(num_requests=100, **options), 4096)
    records = [
        record(number, intended=time_s, times=(0.5 * number + 1.0,)) for number, time_s in enumerate(load.times_s)
    ]
    (line,) = warnings(measured(records, **options).totals(), 10.0)
    assert line == "WARNING: the asked rate, 10.00 requests/s, was not reached: 1.96 were answered per second"


def test_json_and_csv_hold_every_request():
    measurement = measured([record(0), record(1, status="TIMEOUT", times=(), end=3.0, error="no, end")])
    requests, totals = measurement.requests(), measurement.totals()
    document = json.loads(as_json(BenchOptions(), INFO, totals, requests, 10.0))
    assert [one["status"] for one in document["requests"]] == ["OK", "TIMEOUT"]
    assert document["totals"]["num_ok"] == 1
    assert document["options"]["seed"] == 0
    rows = list(csv.DictReader(io.StringIO(as_csv(requests))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert rows[1]["error"] == "no, end"
    assert rows[1]["ttft_ms"] == ""


def test_the_schedule_depends_on_the_seed_alone():
    options = {"arrivals": "gamma", "rate": 50.0, "num_requests": 200, "output_tokens": "uniform:1,9"}
    one, same, other = (make_load(BenchOptions(seed=seed, **options), 4096) for seed in (1, 1, 2))
    assert (one.requests, one.times_s) == (same.requests, same.times_s)
    assert one.times_s != other.times_s
    assert one.requests != other.requests


@pytest.mark.parametrize(("arrivals", "variation"), [("poisson", 1.0), ("gamma", 3.0)])
def test_gaps_of_arrivals_have_the_mean_and_the_spread_asked_for(arrivals, variation):
    options = BenchOptions(arrivals=arrivals, rate=20.0, variation=3.0, num_requests=40_000, seed=5)
    gaps = np.diff(make_load(options, 4096).times_s)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("arrivals", ["closed", "poisson"])
def test_shares_of_a_load_are_the_load(arrivals):
    load = make_load(BenchOptions(arrivals=arrivals, rate=5.0, num_requests=50, users=7), 4096)
    shares = [load.share(index, 3) for index in range(3)]
    together = sorted((request for share in shares for request in share.requests), key=lambda request: request.number)
    assert together == list(load.requests)
    if load.times_s is None:
        assert sum(share.options.users for share in shares) == 7
    else:
        assert sorted(time_s for share in shares for time_s in share.times_s) == list(load.times_s)


def test_processes_understand_each_other():
    job = Job(options=BenchOptions(tenants={"a": "1"}), context_length=77, index=2)
    done = Done(result=ShareResult(records=[record(4)], lags_s=[0.1], cpu_s=1.0, wall_s=2.0))
    assert read_to_client(io.BytesIO(frame(job) + frame(Begin(at_s=1.5)))) == job
    sent = frame(done)
    assert body_bytes(sent[:4]) == len(sent) - 4
    assert from_client(sent[4:]) == done
    with pytest.raises(EOFError):
        read_to_client(io.BytesIO(b""))
