"""The bench sends when it is meant to, whatever the server does, and counts latencies from then."""

import asyncio
import re

import msgspec
import numpy as np
import pytest

from headway_lab.bench.figures import BenchFigures, num_failed
from headway_lab.bench.options import BenchOptions
from headway_lab.bench.records import OK, TIMEOUT, RequestFailed
from headway_lab.bench.report import text, warnings
from headway_lab.bench.share import run_share
from headway_lab.bench.target import TargetInfo
from headway_lab.workload.load import make_load
from virtual_time import run_in_virtual_time

CONTEXT = 4096
TICK = 0.011  # The lag meter's steps and the sleeps' rounding.


def ttft_of(record):
    return record.chunk_times_s[0] - record.intended_s


class FakeTarget:
    """Answers ``num_output_tokens`` tokens, ``gap_s`` apart, the first after ``wait(request)``."""

    def __init__(self, wait=lambda request: 0.1, gap_s=0.01):
        self._wait = wait
        self._gap_s = gap_s
        self.sent = []

    async def open(self):
        raise AssertionError("whoever sends a share neither opens nor closes the target")

    async def close(self):
        raise AssertionError("whoever sends a share neither opens nor closes the target")

    def prepare(self, request):
        return request

    async def send(self, prepared, answer):
        self.sent.append((asyncio.get_running_loop().time(), prepared.number))
        await asyncio.sleep(self._wait(prepared))
        answer.tokens_came(1)
        for _ in range(prepared.num_output_tokens - 1):
            await asyncio.sleep(self._gap_s)
            answer.tokens_came(1)


def bench(target, *, timeout_s=100.0, **options):
    load = make_load(BenchOptions(**{"output_tokens": "5", "prompt_tokens": "8", **options}), CONTEXT)
    result = run_in_virtual_time(run_share(target, load, start=1.0, timeout_s=timeout_s, on_end=lambda _: None))
    return load, result


def totals_of(load, result):
    return BenchFigures(load, result, 1).totals()


def test_open_arrivals_are_sent_at_their_times_though_no_answer_comes():
    target = FakeTarget(wait=lambda request: 60.0)
    load, result = bench(target, arrivals="poisson", rate=10.0, num_requests=50)
    assert [number for _, number in target.sent] == list(range(50))
    late = np.array([time for time, _ in target.sent]) - 1.0 - np.array(load.times_s)
    assert abs(late).max() < 1e-6
    assert [ttft_of(record) for record in result.records] == pytest.approx([60.0] * 50, abs=TICK)


def test_a_server_that_stalls_is_seen_by_every_request_that_was_meant_to_come_meanwhile():
    stalls_s, until_s = 2.0, 4.0

    class Stalling(FakeTarget):
        async def send(self, prepared, answer):
            now = asyncio.get_running_loop().time() - 1.0
            self._wait = lambda request: 0.1 + (until_s - now if stalls_s <= now < until_s else 0.0)
            await super().send(prepared, answer)

    load, result = bench(Stalling(), arrivals="poisson", rate=20.0, num_requests=120)
    for record in result.records:
        expected = 0.1 + (until_s - record.intended_s if stalls_s <= record.intended_s < until_s else 0.0)
        assert ttft_of(record) == pytest.approx(expected, abs=TICK)
    stalled = [record for record in result.records if stalls_s <= record.intended_s < until_s]
    assert len(stalled) > 25
    assert totals_of(load, result).ttft_ms.p90 > 1000


def test_a_client_that_is_held_up_does_not_hide_it():
    class HoldsUp(FakeTarget):
        def prepare(self, request):
            if request.number == 20:
                asyncio.get_running_loop().hold_up(3.0)
            return request

    load, result = bench(HoldsUp(), arrivals="poisson", rate=10.0, num_requests=60)
    late = [record.sent_s - record.intended_s for record in result.records]
    assert max(late) == pytest.approx(3.0, abs=0.2)
    for record in result.records:
        assert ttft_of(record) > 0.1 + record.sent_s - record.intended_s - 1e-6
    totals = totals_of(load, result)
    assert totals.ttft_ms.p99 > 2000
    assert totals.client.late_ms.p99 > 2000
    assert totals.client.lag_ms.p99 > 0 or max(result.lags_s) > 2.9


def test_closed_arrivals_have_so_many_users_and_each_waits_and_thinks():
    target = FakeTarget(wait=lambda request: 1.0)
    _, result = bench(target, users=3, think_s=0.5, num_requests=9)
    records = sorted(result.records, key=lambda record: record.number)
    assert [round(record.intended_s, 2) for record in records] == [0.0] * 3 + [1.54] * 3 + [3.08] * 3
    assert all(record.is_ok for record in records)


def test_users_may_start_over_a_while():
    target = FakeTarget()
    bench(target, users=4, ramp_s=2.0, num_requests=4)
    assert [round(time - 1.0, 3) for time, _ in target.sent] == [0.0, 0.5, 1.0, 1.5]


def test_a_request_that_takes_too_long_is_given_up_and_counts_as_such():
    load, result = bench(
        FakeTarget(wait=lambda request: 50.0 if request.number == 3 else 0.1), timeout_s=5.0, num_requests=8, users=8
    )
    totals = totals_of(load, result)
    assert totals.statuses == {OK: 7, TIMEOUT: 1}
    (given_up,) = [record for record in result.records if not record.is_ok]
    assert given_up.end_s == pytest.approx(5.0, abs=TICK)


def test_failures_are_counted_by_status_and_never_good():
    class Refusing(FakeTarget):
        async def send(self, prepared, answer):
            if prepared.number % 3 == 0:
                raise RequestFailed("RESOURCE_EXHAUSTED", "too much\n work")
            if prepared.number % 3 == 1:
                answer.tokens_came(1)
                raise RequestFailed("CUT_SHORT", "half an answer")
            await super().send(prepared, answer)

    load, result = bench(Refusing(), users=4, num_requests=12, ttft_slo_ms=10_000)
    totals = totals_of(load, result)
    assert totals.statuses == {"CUT_SHORT": 4, OK: 4, "RESOURCE_EXHAUSTED": 4}
    assert totals.num_ok == 4
    assert totals.attainment == pytest.approx(1 / 3)
    assert totals.goodput_requests_per_s == pytest.approx(4 / totals.window_s)
    assert {record.error for record in result.records} == {"too much work", "half an answer", ""}


def test_the_achieved_rate_tells_a_server_that_is_too_slow_from_one_whose_answers_take_long():
    class OneAtATime(FakeTarget):
        def __init__(self):
            super().__init__()
            self._lock = asyncio.Lock()

        async def send(self, prepared, answer):
            async with self._lock:
                await asyncio.sleep(0.1)
                answer.tokens_came(1)

    options = {"arrivals": "poisson", "rate": 20.0, "num_requests": 200}
    slow = totals_of(*bench(OneAtATime(), **options))
    assert slow.asked_requests_per_s == 20.0
    assert slow.achieved_requests_per_s == pytest.approx(10.0, rel=0.02)
    assert slow.keeps_up is False
    long = totals_of(*bench(FakeTarget(wait=lambda request: 8.0), **options))
    assert (long.achieved_requests_per_s, long.keeps_up) == (None, None)  # All came within little more than one took.
    longer = totals_of(*bench(FakeTarget(wait=lambda request: 8.0), **{**options, "num_requests": 1200}))
    assert longer.achieved_requests_per_s == pytest.approx(longer.arriving_requests_per_s, rel=0.05)
    assert longer.keeps_up is True


class SharedByAll(FakeTarget):
    """Does ``work_s`` for each request; ``speed`` seconds of it in a second, shared by all that are under way."""

    def __init__(self, work_s, speed):
        super().__init__()
        self._work_s, self._speed, self._done = work_s, speed, {}

    async def send(self, prepared, answer):
        await asyncio.sleep(0.05)
        answer.tokens_came(1)
        self._done[prepared.number] = 0.0
        while self._done[prepared.number] < self._work_s:
            await asyncio.sleep(0.25)
            self._done[prepared.number] += 0.25 * min(1.0, self._speed / len(self._done))
        del self._done[prepared.number]
        answer.tokens_came(1)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_burst_that_is_over_before_an_answer_ends_tells_nothing_of_the_rate(processes):
    # 60 requests at 8/s, of which some two a second come back, once they are all there.
    options = {"arrivals": "poisson", "rate": 8.0, "num_requests": 60, "warmup_requests": 6, "processes": processes}
    load, result = bench(SharedByAll(work_s=2.0, speed=4.0), **options)
    totals = BenchFigures(load, result, processes).totals()
    assert totals.requests_per_s < 3
    assert (totals.achieved_requests_per_s, totals.keeps_up) == (None, None)
    printed = text(TargetInfo(model="m", address="a", runs_on="x", context_length=9, counted_by="ids"), totals, 1e6)
    assert re.search(r"^achieved +too short to tell$", printed, re.MULTILINE)
    assert (
        "WARNING: too short to tell whether the asked rate, 8.00 requests/s, was reached: requests came for " in printed
    )
    long = totals_of(*bench(SharedByAll(work_s=2.0, speed=8.0), **{**options, "num_requests": 240}))
    assert long.keeps_up is False
    fast = totals_of(*bench(SharedByAll(work_s=2.0, speed=40.0), **{**options, "num_requests": 300}))
    assert fast.keeps_up is True


def test_what_is_refused_is_not_achieved():
    class Refusing(FakeTarget):
        async def send(self, prepared, answer):
            if prepared.number % 3 == 0:
                raise RequestFailed("RESOURCE_EXHAUSTED", "too much work")
            await super().send(prepared, answer)

    totals = totals_of(*bench(Refusing(), arrivals="poisson", rate=20.0, num_requests=120))
    assert totals.keeps_up is False
    assert totals.achieved_requests_per_s == pytest.approx(2 / 3 * totals.arriving_requests_per_s, rel=0.1)


def test_users_who_are_soon_out_of_requests_tell_no_throughput():
    def run(num_requests, processes=1):
        load, result = bench(FakeTarget(gap_s=0.1), users=8, num_requests=num_requests, output_tokens="uniform:5,40")
        return BenchFigures(load, result, processes).totals()

    for processes in (1, 2):
        short, long = run(9, processes), run(80, processes)
        assert short.all_at_work_s < 0.5 * short.window_s
        assert any(
            "too short to tell a throughput: all users were at work for" in line for line in warnings(short, 1e6)
        )
        assert 0.5 * long.window_s < long.all_at_work_s < long.window_s
        assert warnings(long, 1e6) == []


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 8))])
def test_answers_of_very_different_lengths_are_no_sign_of_a_server_that_is_too_slow(seed):
    lengths = {"output_tokens": "lognormal:60,0.8"}
    load, result = bench(FakeTarget(gap_s=0.02), arrivals="poisson", rate=20.0, num_requests=600, seed=seed, **lengths)
    assert totals_of(load, result).keeps_up is True


def test_warm_up_is_left_out():
    target = FakeTarget(wait=lambda request: 9.0 if request.number < 4 else 0.1)
    load, result = bench(target, arrivals="poisson", rate=5.0, num_requests=40, warmup_requests=4)
    totals = totals_of(load, result)
    assert totals.num_requests == 36
    assert totals.ttft_ms.p99 < 150
    assert len(BenchFigures(load, result, 1).requests()) == 36


def test_a_cancelled_share_has_what_was_measured():
    load = make_load(BenchOptions(output_tokens="5", prompt_tokens="8", users=2, num_requests=50), CONTEXT)

    async def cancelled():
        running = asyncio.create_task(
            run_share(FakeTarget(wait=lambda _: 1.0), load, start=1.0, timeout_s=100.0, on_end=lambda _: None)
        )
        await asyncio.sleep(8.0)
        running.cancel()
        return await running

    result = run_in_virtual_time(cancelled())
    totals = totals_of(load, result)
    assert not result.is_whole
    assert 0 < totals.num_ok == len(result.records) < 50
    assert totals.num_unmeasured == 50 - len(result.records)
    assert warnings(totals, 1e9)[0].startswith("WARNING: cancelled: the figures are of what had ended; ")


@pytest.mark.parametrize(
    ("statuses", "failed"),
    [(["OK"], 0), (["OK", "RESOURCE_EXHAUSTED", "HTTP 429"], 0), (["OK", "TIMEOUT", "UNAVAILABLE", "HTTP 500"], 3)],
)
def test_what_failed_is_neither_answered_nor_refused_for_too_much_load(statuses, failed):
    load, result = bench(FakeTarget(wait=lambda _: 1.0), users=1, num_requests=len(statuses))
    records = [
        msgspec.structs.replace(record, status=status) for record, status in zip(result.records, statuses, strict=True)
    ]
    assert num_failed(totals_of(load, msgspec.structs.replace(result, records=records))) == failed
