"""Virtual time around the real core: latencies worked out by hand, and what must hold of every run."""

import time

import numpy as np
import pytest

from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import Disturbance, VirtualDevice, parse_slowdowns
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.loop import NoProgress, Simulation
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import Roofline, StepTime
from headway_lab.simulate.stations import InTurn, Station
from headway_lab.simulate.world import make_world, simulate
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import STEP_NOISE, Objectives, PlannedRequest, PromptSource, rng_of
from headway_proto.columns import encode_columns
from headway_proto.step import SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits


class OneSecondSteps(Roofline):
    """Every step takes a second."""

    def step_time(self, num_scheduled_tokens, num_computed_tokens, num_samples):
        return StepTime(linear_s=1.0, attention_s=0.0, elementwise_s=0.0, all_reduce_s=0.0, sampling_s=0.0, fixed_s=0.0)


class Stages(Roofline):
    """A pipeline whose stages take so many seconds each."""

    def __init__(self, *stages_s):
        super().__init__(ACCELERATORS["h100"], MODEL_SHAPES["llama-3-8b"], 1)
        self.stages_s = stages_s

    def step_time(self, num_scheduled_tokens, num_computed_tokens, num_samples):
        return StepTime(sum(self.stages_s), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, stages_s=self.stages_s)


def measured(
    limits,
    requests,
    times_s,
    *,
    num_blocks=64,
    paused=False,
    objectives=None,
    make_scheduler=Scheduler,
    costs=None,
):
    """Run ``requests``, (prompt tokens, output tokens) each, with steps of one second."""
    capacity = ExecutorCapacity(num_blocks=num_blocks, block_size=4, max_model_len=64, vocab_size=100, max_num_rows=8)
    planned = [
        PlannedRequest(
            number=number,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            objectives=Objectives(ttft_slo_ms=ttft_slo_ms, itl_slo_ms=itl_slo_ms),
        )
        for number, ((prompt, output), (ttft_slo_ms, itl_slo_ms)) in enumerate(
            zip(requests, objectives or [(0, 0)] * len(requests), strict=True)
        )
    ]
    scheduler = make_scheduler(limits, capacity)
    scheduler.paused = paused
    roofline = OneSecondSteps(ACCELERATORS["h100"], MODEL_SHAPES["llama-3-8b"], 1)
    device = VirtualDevice(costs or roofline, capacity, rng_of(0, 0), host_bandwidth=1e9)
    measurement = RunCollector(len(planned))
    Simulation(
        InTurn([Station(scheduler, device)]), OpenArrivals(planned, times_s), PromptSource(0, 100), measurement
    ).run()
    return measurement, measurement.totals(scheduler.counters, None)


def result_of(case=None, **options):
    limits = SchedulerLimits(**(case or {}))
    return simulate(make_world(SimulationOptions(**options)), Case(label="", limits=limits))


PIPELINED = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_steps_in_flight=3)


@pytest.mark.parametrize(("stages_s", "ends_s"), [((1.0, 1.0), [2.0, 3.0, 4.0]), ((1.0, 3.0), [4.0, 7.0, 10.0])])
def test_prompts_follow_each_other_through_the_stages_at_the_slowest_ones_pace(stages_s, ends_s):
    measurement, totals = measured(PIPELINED, [(8, 1)] * 3, [0.0] * 3, costs=Stages(*stages_s))
    assert [request.end_to_end_s for request in measurement.requests()] == ends_s
    assert totals.device_busy_share == 1.0


def test_chunks_of_one_prompt_follow_each_other_and_decodes_wait_for_the_token():
    """Chunks end at 2 s and 3 s. Each decode needs the token before it, so it starts when the last stage is done."""
    measurement, totals = measured(PIPELINED, [(16, 3)], [0.0], costs=Stages(1.0, 1.0))
    (request,) = measurement.requests()
    assert (request.ttft_s, request.itl_ms) == (3.0, (2000.0, 2000.0))
    assert [(step.start_s, step.end_s) for step in measurement.steps] == [(0, 2), (1, 3), (3, 5), (5, 7)]
    assert totals.mean_step_ms == 2000.0


def test_batches_that_alternate_fill_the_stages():
    """Orca's batches of one row each: A decodes in one stage while B decodes in the other."""
    limits = SchedulerLimits(
        max_num_batched_tokens=8, max_num_seqs=1, max_steps_in_flight=2, batching="orca", reserve="none"
    )
    measurement, _ = measured(limits, [(4, 3), (4, 3)], [0.0, 0.0], costs=Stages(1.0, 1.0))
    assert [request.end_to_end_s for request in measurement.requests()] == [6.0, 7.0]


def test_latencies_of_two_requests_worked_out_by_hand():
    """Budget 8, one step in flight. A (4 + 3 tokens) at 0 s, B (10 + 2) at 0.5 s.

    0-1 s: A's prompt. 1-2 s: A decodes, 7 tokens of B. 2-3 s: A decodes its last, 3 tokens of B. 3-4 s: B decodes.
    """
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_steps_in_flight=1)
    measurement, totals = measured(limits, [(4, 3), (10, 2)], [0.0, 0.5])
    first, second = measurement.requests()
    assert (first.ttft_s, first.itl_ms, first.end_to_end_s) == (1.0, (1000.0, 1000.0), 3.0)
    assert (second.arrival_s, second.ttft_s, second.itl_ms, second.end_to_end_s) == (0.5, 2.5, (1000.0,), 3.5)
    assert [(step.start_s, step.num_tokens, step.num_rows, step.num_decodes) for step in measurement.steps] == [
        (0.0, 4, 1, 0),
        (1.0, 8, 2, 1),
        (2.0, 4, 2, 1),
        (3.0, 1, 1, 1),
    ]
    assert totals.output_tokens_per_s == 5 / 4
    assert totals.total_tokens_per_s == 19 / 4
    assert totals.requests_per_s == 2 / 4
    assert totals.mean_batch_size == 6 / 4
    assert totals.mean_concurrency == 6.5 / 4
    assert totals.device_busy_share == 1.0
    assert totals.ttft_ms.p50 == 1750.0
    assert totals.itl_ms.p99 == 1000.0


def test_with_two_steps_in_flight_an_arrival_waits_for_both():
    """As above, but A's first decode was sent at 0 s, before B came, and no third step may be sent before 1 s."""
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_steps_in_flight=2)
    measurement, totals = measured(limits, [(4, 3), (10, 2)], [0.0, 0.5])
    first, second = measurement.requests()
    assert (first.ttft_s, first.itl_ms) == (1.0, (1000.0, 1000.0))
    assert (second.ttft_s, second.itl_ms) == (3.5, (1000.0,))
    assert totals.virtual_s == 5.0


def test_an_idle_device_waits_for_the_next_arrival():
    measurement, totals = measured(SchedulerLimits(max_num_seqs=4), [(4, 1), (4, 1)], [0.0, 10.0])
    assert [step.start_s for step in measurement.steps] == [0.0, 10.0]
    assert totals.device_busy_share == pytest.approx(2 / 11)


def test_a_request_that_can_never_run_is_refused_and_the_others_go_on():
    measurement, totals = measured(SchedulerLimits(max_num_seqs=4), [(64, 4), (4, 2)], [0.0, 0.0])
    assert (totals.num_rejected, totals.num_finished) == (1, 1)
    assert [request.number for request in measurement.requests()] == [1]


def test_a_scheduler_that_stops_for_ever_is_noticed():
    with pytest.raises(NoProgress, match="1 requests wait"):
        measured(SchedulerLimits(max_num_seqs=4), [(4, 1)], [0.0], paused=True)


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_every_request_ends_with_exactly_its_tokens(order, steps_in_flight):
    """Under memory pressure, with preemptions, shared beginnings, tenants and bursts."""
    options = SimulationOptions(
        num_kv_blocks=120,
        max_model_len=1024,
        arrivals="gamma",
        rate=60.0,
        num_requests=120,
        prompt_tokens="lognormal:100,0.7",
        output_tokens="pareto:30,1.5",
        prefixes=3,
        prefix_tokens=40,
        tenants={"a": "2:high", "b": "1:low"},
        seed=4,
    )
    world = make_world(options)
    limits = SchedulerLimits(
        max_num_batched_tokens=256, max_num_seqs=32, order=order, max_steps_in_flight=steps_in_flight
    )
    result = simulate(world, Case(label="", limits=limits))
    assert result.totals.num_preemptions > 0
    assert result.totals.prefix_hit_rate > 0
    assert [request.num_output_tokens for request in result.requests] == [
        planned.num_output_tokens for planned in world.load.requests
    ]
    for request, arrival_s in zip(result.requests, world.load.times_s, strict=True):
        assert request.arrival_s == pytest.approx(arrival_s, abs=1e-9)
        assert len(request.itl_ms) == request.num_output_tokens - 1
        assert request.reason == "length"
        assert request.ttft_s + sum(request.itl_ms) / 1e3 == pytest.approx(request.end_to_end_s)
        assert request.ttft_s > 0
        assert all(gap > 0 for gap in request.itl_ms)


def test_objectives_travel_to_the_core_and_goodput_comes_back():
    """As in the first test: first tokens after 1.0 and 2.5 s, gaps of a second."""
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_steps_in_flight=1)
    seen = []

    class Watched:
        def __init__(self, limits, capacity):
            self.core = Scheduler(limits, capacity)

        def __getattr__(self, name):
            return getattr(self.core, name)

        def add_request(self, new, now):
            seen.append((new.ttft_slo_ms, new.itl_slo_ms))
            self.core.add_request(new, now)

    for objectives, expected in (
        ([(1000, 1000), (2500, 1000)], 2 / 4),
        ([(1000, 1000), (2499, 0)], 1 / 4),
        ([(0, 999), (2500, 0)], 1 / 4),
        ([(999, 0), (0, 0)], 1 / 4),
        ([(0, 0), (0, 0)], None),
    ):
        totals = measured(limits, [(4, 3), (10, 2)], [0.0, 0.5], objectives=objectives, make_scheduler=Watched)[1]
        assert totals.goodput_requests_per_s == expected, objectives
        assert seen[-2:] == objectives


def test_swapped_blocks_take_their_time():
    """Two blocks out and one in: three of 4 tokens x 131,072 bytes at 1 MB/s, before the step's own second."""
    capacity = ExecutorCapacity(
        num_blocks=8, block_size=4, max_model_len=64, vocab_size=100, max_num_rows=8, num_host_blocks=2
    )
    roofline = OneSecondSteps(ACCELERATORS["h100"], MODEL_SHAPES["llama-3-8b"], 1)
    device = VirtualDevice(roofline, capacity, rng_of(0, 0), host_bandwidth=1e6)
    moves = SchedulerOutput(
        epoch=0,
        step=0,
        swap_out=encode_columns(np.array([[1, 2], [0, 1]], dtype=np.int32)),
        swap_in=encode_columns(np.array([[1], [3]], dtype=np.int32)),
    )
    device.take(moves, now=0.0)
    step, answer = device.answer()
    swap_s = 3 * 4 * 131_072 / 1e6
    assert (step.num_swapped_blocks, step.swap_s) == (3, pytest.approx(swap_s))
    assert step.end_s == pytest.approx(1.0 + swap_s)
    assert answer.device_time_us == 1_000_000
    assert answer.move_time_us == pytest.approx(swap_s * 1e6, abs=1)


def test_noise_has_the_deviation_that_was_asked_for_and_a_mean_of_one():
    disturbance = Disturbance(0.3, (), rng_of(5, STEP_NOISE))
    factors = np.array([disturbance.factor(0.0) for _ in range(20_000)])
    assert factors.mean() == pytest.approx(1.0, rel=0.01)
    assert factors.std() == pytest.approx(0.3, rel=0.03)
    assert factors.min() > 0


def test_a_slowdown_lasts_until_the_next():
    disturbance = Disturbance(0.0, parse_slowdowns(("20:1", "10:2.5")), rng_of(0, 0))
    assert [disturbance.factor(start_s) for start_s in (9.9, 10.0, 19.9, 20.0)] == [1.0, 2.5, 2.5, 1.0]


def test_a_disturbed_run_is_the_same_every_time_and_slower():
    options = {"num_requests": 60, "users": 8, "output_tokens": "16"}
    plain, noisy, again = (result_of(noise=noise, **options) for noise in (0.0, 0.2, 0.2))
    slow = result_of(slowdown=("0:2",), **options)
    assert noisy.steps == again.steps
    assert noisy.steps != plain.steps
    assert slow.totals.mean_step_ms == pytest.approx(2 * plain.totals.mean_step_ms, rel=0.05)


def test_priorities_have_figures_of_their_own():
    totals = result_of(
        {"order": "priority", "max_num_seqs": 4},
        users=24,
        num_requests=120,
        output_tokens="20",
        tenants={"a": "1:high", "b": "1:low", "c": "1:low"},
    ).totals
    assert list(totals.priorities) == ["high", "low"]
    assert sum(group.num_finished for group in totals.priorities.values()) == 120
    assert totals.priorities["high"].ttft_ms.p99 < totals.priorities["low"].ttft_ms.p50


@pytest.mark.parametrize("think_s", [0.0, 0.5])
def test_littles_law_in_the_closed_loop(think_s):
    """Users = rate x (time in the system + time to think), but for the end, when users run out of requests."""
    result = result_of(
        users=8, think_s=think_s, num_requests=400, prompt_tokens="uniform:50,300", output_tokens="uniform:10,60"
    )
    mean_s = sum(request.end_to_end_s for request in result.requests) / len(result.requests)
    assert result.totals.requests_per_s * (mean_s + think_s) == pytest.approx(8, rel=0.05)
    assert max(result.queue.num_running) <= 8


def test_an_overloaded_server_falls_behind_what_is_asked():
    options = {"arrivals": "poisson", "num_requests": 150, "prompt_tokens": "400", "output_tokens": "20"}
    easy, hard = (result_of({"max_num_seqs": 8}, rate=rate, **options).totals for rate in (5.0, 500.0))
    assert easy.requests_per_s == pytest.approx(5.0, rel=0.25)
    assert hard.requests_per_s < 0.5 * hard.asked_requests_per_s
    assert hard.ttft_ms.p99 > 20 * easy.ttft_ms.p99


def test_a_shared_beginning_is_found_in_the_cache_unless_it_is_switched_off():
    options = {"num_requests": 60, "users": 4, "prompt_tokens": "64", "prefix_tokens": 448, "output_tokens": "8"}
    on, off = (result_of({"enable_prefix_caching": enabled}, **options).totals for enabled in (True, False))
    assert off.prefix_hit_rate == 0.0
    # All but the request that comes first find 448 of their 512 tokens: those that come with it wait for that one.
    assert on.prefix_hit_rate == pytest.approx(59 / 60 * 448 / 512, rel=0.001)
    assert on.ttft_ms.p50 < off.ttft_ms.p50


def test_a_smaller_budget_shortens_the_longest_gaps_and_costs_throughput():
    """Below the tokens that one reading of the weights could serve, most of each step is that reading."""
    options = {"num_requests": 100, "users": 16, "prompt_tokens": "2000", "output_tokens": "50"}
    small, large = (result_of({"max_num_batched_tokens": n}, **options).totals for n in (64, 4096))
    assert small.itl_ms.p99 < large.itl_ms.p99 / 2
    assert small.output_tokens_per_s < large.output_tokens_per_s


def test_warm_up_is_left_out():
    options = {"num_requests": 60, "users": 20, "prompt_tokens": "1000", "output_tokens": "20"}
    cold, warm = (result_of(warmup_requests=count, **options).totals for count in (0, 20))
    assert warm.num_finished == cold.num_finished == 60
    assert warm.ttft_ms.p99 < cold.ttft_ms.p99
    assert warm.virtual_s == cold.virtual_s


def test_a_large_model_runs_at_least_fifty_times_faster_than_real_time():
    """Counted in processor time, so that whatever else runs on the machine does not matter."""
    started = time.process_time()
    result = result_of(
        model="llama-3-70b", hardware="h100", tensor_parallel=4, users=128, num_requests=256, output_tokens="128"
    )
    assert result.totals.virtual_s > 50 * (time.process_time() - started)
