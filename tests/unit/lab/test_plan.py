"""The parts of ``headway plan``: bounds, searches, hand-offs and choices against numbers worked out by hand."""

import msgspec
import numpy as np
import pytest

from headway_lab.plan.algorithms import need, num_executors_for
from headway_lab.plan.bounds import CEILING_MARGIN, alone, ceiling
from headway_lab.plan.cluster import Cluster, Degrees, hand_off
from headway_lab.plan.executors import make_instance
from headway_lab.plan.goodput import TOLERANCE, Goal, Trial, appraise, highest_rate, keeps_up, searched
from headway_lab.plan.instance import Phase
from headway_lab.plan.options import PlanOptions
from headway_lab.plan.system import handed_over
from headway_lab.plan.workload import make_workload
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.workload.requests import PlannedRequest

NO_TRANSFER = 0.0


def options_of(**changes):
    given = {"model": "llama-2-13b", "hardware": "a100-80g", "rate": 5.0, "ttft_slo_ms": 400, "itl_slo_ms": 60}
    return PlanOptions(**{**given, "num_requests": 200, **changes})


def cluster_of(options, *, most_devices=64):
    return Cluster(
        accelerator=ACCELERATORS[options.hardware],
        shape=MODEL_SHAPES[options.model],
        most_devices=most_devices,
        devices_per_node=options.devices_per_node,
        most_stages=options.most_stages,
        node_bandwidth=50e9,
        block_size=options.block_size,
    )


def goal_of(options, transfer_token_s=NO_TRANSFER):
    workload = make_workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        variation=options.variation,
        objectives=options.objectives,
        context_length=MODEL_SHAPES[options.model].context_length,
        seed=options.seed,
    )
    return Goal(workload, options.attainment, options.gaps, options.num_requests, transfer_token_s, 0.01)


def instance_of(options, phase, *degrees):
    chosen = Degrees(*degrees)
    return make_instance(phase, chosen, cluster_of(options).roofline(chosen), options, goal_of(options).workload)


def goodput_of(options, phase, *degrees):
    instance, goal = instance_of(options, phase, *degrees), goal_of(options)
    return searched(instance, appraise(instance, goal), goal, lambda trial: None).goodput or 0.0


# ------------------------------------------------------------------------------------------------------------ hand-off


def test_a_hand_off_costs_what_the_source_says():
    """80 layers, 8 KV heads of 128, 2 bytes, 4,096 tokens, 50 GiB/s: 1.25 GiB and 25 ms, before any protocol."""
    assert hand_off(MODEL_SHAPES["llama-3-70b"], 4096, 50 * 2**30) == (1_342_177_280, 0.025)
    assert 1_342_177_280 == 1.25 * 2**30


def test_hand_offs_of_one_executor_follow_each_other():
    requests = [PlannedRequest(number=n, num_prompt_tokens=10, num_output_tokens=2) for n in range(4)]
    came_s = np.array([0.0, 0.5, 5.0, np.inf])
    assert handed_over(requests, came_s, 1, 0.1).tolist() == [1.0, 2.0, 6.0, np.inf]
    assert handed_over(requests, came_s, 2, 0.1).tolist() == [1.0, 1.5, 6.0, np.inf]
    short = [msgspec.structs.replace(request, num_output_tokens=1) for request in requests]
    assert handed_over(short, came_s, 1, 0.1).tolist() == came_s.tolist()  # nothing is left to decode


# ---------------------------------------------------------------------------------------------------- what is searched


def test_degrees_stay_within_a_node_and_divide_the_layers():
    found = {tuple(degrees) for degrees in cluster_of(options_of(devices_per_node=2), most_devices=8).all_degrees()}
    assert found == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4)}  # 40 layers
    alone = cluster_of(options_of(devices_per_node=1, most_stages=1))
    assert [tuple(degrees) for degrees in alone.all_degrees()] == [(1, 1)]


def test_a_model_fits_by_tensor_parallelism_or_by_stages():
    """70B in bfloat16 are 141 GB: two devices of 80 GB hold them, one does not."""
    cluster = cluster_of(options_of(model="llama-3-70b", hardware="h100"), most_devices=4)
    assert {tuple(degrees) for degrees in cluster.fitting_degrees()} == {(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}


def test_stages_on_several_nodes_send_from_node_to_node():
    cluster = cluster_of(options_of())
    tokens, none = np.array([1000], dtype=np.int32), np.array([0], dtype=np.int32)
    inside, across = (
        cluster.roofline(Degrees(8, 2), crosses_nodes=crosses).step_time(tokens, none, 1).send_s
        for crosses in (False, True)
    )
    # 1000 x 5120 x 2 bytes, at 0.8 x 300 GB/s and at 50 GB/s.
    assert inside == pytest.approx(10e-6 + 10_240_000 / 240e9)
    assert across == pytest.approx(10e-6 + 10_240_000 / 50e9)
    assert cluster.crosses_nodes(16)
    assert not cluster.crosses_nodes(8)


def test_two_executors_share_nodes_part_by_part():
    cluster = cluster_of(options_of(devices_per_node=4))
    assert cluster.nodes_of_pair(Degrees(1), Degrees(2)) == 1
    assert cluster.nodes_of_pair(Degrees(1, 2), Degrees(2)) == 1
    assert cluster.nodes_of_pair(Degrees(2, 2), Degrees(2, 2)) == 2  # two stages of both, four devices each
    assert cluster.nodes_of_pair(Degrees(2, 2), Degrees(1, 4)) == 2  # one stage and two stages on each node
    assert cluster.nodes_of_pair(Degrees(4), Degrees(1)) is None
    assert cluster.nodes_of_pair(Degrees(2, 8), Degrees(2, 8)) == 8
    assert cluster_of(options_of(), most_devices=8).nodes_of_pair(Degrees(4, 2), Degrees(4, 2)) is None


# ----------------------------------------------------------------------------------------------------------- instances


@pytest.mark.parametrize(("degrees", "stages"), [((1, 1), 1), pytest.param((1, 2), 2, marks=pytest.mark.deep)])
def test_first_tokens_wait_as_queueing_theory_says(degrees, stages):
    """One prompt a step, prompts alike: an M/D/1 queue in front of the first stage (DistServe, equations 1 and 2).

    With D the time of a prompt and m that of the slowest stage, the mean is D + R m^2 / (2 (1 - R m)).
    """
    options = options_of(prompt_tokens="512", max_num_batched_tokens=512)
    instance, workload = instance_of(options, Phase.PREFILL, *degrees), goal_of(options).workload
    tokens, none = np.array([512], dtype=np.int32), np.array([0], dtype=np.int32)
    time = instance.roofline.step_time(tokens, none, 1)
    slowest_s = max(time.stages_s, default=time.total_s)
    assert slowest_s == pytest.approx(time.total_s / stages, rel=0.05)
    rate = 0.6 / slowest_s
    run = instance.run(workload.requests[:4000], workload.times_s(rate, 4000), 0)
    expected_s = time.total_s + rate * slowest_s**2 / (2 * (1 - rate * slowest_s))
    assert run.first_s.mean() == pytest.approx(expected_s, rel=0.08)


def test_decode_begins_with_a_computed_prompt_and_a_first_token():
    options = options_of(prompt_tokens="500", output_tokens="4")
    instance, workload = instance_of(options, Phase.DECODE, 1), goal_of(options).workload
    run = instance.run(workload.requests[:1], np.array([2.0]), 0)

    def step_s(computed):
        rows = np.array([1], dtype=np.int32), np.array([computed], dtype=np.int32)
        return instance.roofline.step_time(*rows, 1).total_s

    assert run.first_s == pytest.approx([step_s(500)])
    assert run.longest_gap_s == pytest.approx([step_s(502)])
    assert run.gaps_s == pytest.approx([step_s(501) + step_s(502)])


def test_an_answer_of_one_token_has_nothing_to_decode():
    options = options_of(output_tokens="1")
    workload = goal_of(options).workload
    run = instance_of(options, Phase.DECODE, 1).run(workload.requests[:3], np.zeros(3), 0)
    assert run.first_s.tolist() == run.gaps_s.tolist() == [0.0] * 3


def test_a_request_that_decode_preempts_misses_its_objective():
    """24 blocks of 16 tokens hold the prompts of four requests, and not what these answer."""
    options = options_of(prompt_tokens="64", output_tokens="100")
    instance, workload = instance_of(options, Phase.DECODE, 1), goal_of(options).workload
    capacity = msgspec.structs.replace(instance.capacity, num_blocks=24)
    small = msgspec.structs.replace(instance, capacity=capacity)
    gaps_s = small.run(workload.requests[:4], np.zeros(4), 0).gaps_s
    assert 1 <= np.count_nonzero(np.isinf(gaps_s)) < 4
    assert np.isfinite(instance.run(workload.requests[:4], np.zeros(4), 0).gaps_s).all()


def test_settings_are_those_that_keep_stages_busy():
    options = options_of()
    for phase in Phase:
        instance = instance_of(options, phase, 1, 4)
        assert instance.num_batches == instance.capacity.num_lanes == 4
        assert instance.limits.steps_in_flight(instance.capacity.num_lanes) == 5
        assert instance.limits.max_num_seqs <= options.max_num_seqs
    assert instance_of(options, Phase.BOTH, 2).limits.budget == "slo"


# ------------------------------------------------------------------------------------------------------------- goodput


def rates_up_to(limit, tried):
    def take(rate):
        tried.append(rate)
        return Trial(rate=rate, num_requests=1, share=1.0 if rate <= limit else 0.0)

    return take


@pytest.mark.parametrize("first_rate", [0.3, 7.0, 100.0])
def test_the_highest_rate_is_found_from_below_and_from_above(first_rate):
    tried = []
    found, trials = highest_rate(first_rate, 0.01, 0.9, rates_up_to(7.3, tried), lambda trial: None)
    assert 7.3 / (1 + TOLERANCE) <= found <= 7.3
    assert [trial.rate for trial in trials] == tried
    assert len(tried) <= 12


def test_a_wait_that_grows_does_not_keep_up_whatever_the_objective():
    times_s = np.arange(300.0)
    noise_s = np.random.default_rng(0).exponential(3.0, 300)
    assert keeps_up(times_s, noise_s)
    assert not keeps_up(times_s, noise_s + 0.1 * times_s)
    assert not keeps_up(times_s, np.full(300, np.inf))


def test_a_search_ends_where_a_rate_is_of_no_use():
    tried = []
    assert highest_rate(8.0, 3.0, 0.9, rates_up_to(1.0, tried), lambda trial: None)[0] is None
    assert tried == [8.0, 4.0, 3.0]


@pytest.mark.deep
def test_a_short_objective_wants_tensor_parallel_prefill_and_a_long_one_stages():
    """DistServe, section 3.1 and figure 4: intra-operator parallelism at low rates, inter-operator at high ones."""
    lengths = {"prompt_tokens": "lognormal:512,0.8,2048"}
    short, long = options_of(ttft_slo_ms=200, **lengths), options_of(ttft_slo_ms=1500, **lengths)
    assert goodput_of(short, Phase.PREFILL, 2) > 1.3 * goodput_of(short, Phase.PREFILL, 1, 2)
    assert goodput_of(long, Phase.PREFILL, 1, 2) > 1.05 * goodput_of(long, Phase.PREFILL, 2)


def test_goodput_of_decode_grows_with_tensor_parallelism():
    options = options_of(output_tokens="20", num_requests=100)
    found = [goodput_of(options, Phase.DECODE, degree) for degree in (1, 2, 4)]
    assert found[0] < found[1] < found[2]


def test_an_objective_on_the_mean_gap_forgives_a_hand_off():
    """A prompt of 512 tokens takes 512 x 0.2 ms to hand over: one gap of 100 ms, among 40 of 20."""
    found = {}
    for gaps in ("each", "mean"):
        options = options_of(output_tokens="41", gaps=gaps)
        instance = instance_of(options, Phase.DECODE, 1)
        found[gaps] = appraise(instance, goal_of(options, transfer_token_s=0.2e-3))
    assert (found["each"].missed, found["mean"].missed) == ("itl", "")
    assert found["each"].alone_ms[1] - found["mean"].alone_ms[1] == pytest.approx(102.4 * 39 / 40, rel=0.01)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("degrees", [(1, 1), pytest.param((2, 2), marks=pytest.mark.deep)])
def test_no_executor_is_much_better_than_its_ceiling(phase, degrees):
    options = options_of(output_tokens="lognormal:40,0.5,200", prompt_tokens="lognormal:400,0.6,2000", gaps="mean")
    instance, goal = instance_of(options, phase, *degrees), goal_of(options)
    found = searched(instance, appraise(instance, goal), goal, lambda trial: None).goodput
    assert found is None or 0.2 * ceiling(instance, goal.workload) < found
    assert found is None or found < CEILING_MARGIN * ceiling(instance, goal.workload)


def test_a_request_alone_is_as_fast_as_in_an_idle_run():
    options = options_of(prompt_tokens="uniform:3000,4000", output_tokens="3", max_num_batched_tokens=1024)
    instance, workload = instance_of(options, Phase.PREFILL, 1, 2), goal_of(options).workload
    run = instance.run(workload.requests[:5], workload.times_s(0.1, 5), 0)
    assert alone(instance, workload, "each", 0.0).first_s[:5] == pytest.approx(run.first_s, rel=0.02)


# ------------------------------------------------------------------------------------------------------------- choices


def test_fewest_devices_for_the_rate_then_most_goodput_per_device():
    assert [num_executors_for(10.0, goodput) for goodput in (4.9, 5.0, 10.0, 11.0)] == [3, 2, 1, 1]
    assert num_executors_for(3 * 1.1, 1.1) == 3  # 3.3000000000000003 / 1.1 is a little more
    assert need(10.0, 5.0, 2) < need(10.0, 4.0, 2)
    assert need(10.0, 5.0, 2) < need(10.0, 20.0, 8)  # four devices, though two executors
    assert need(10.0, 12.0, 4) < need(10.0, 5.0, 2)  # four devices each, but more for each of them
