"""What the source articles publish about batching policies and iterations, out of the real scheduler.

The figures are those of two articles: one compares static batching, Orca and Sarathi's chunks for Llama 70B and 128
users, the other prices iterations of Llama-2-7B on an H100.
"""

import msgspec
import pytest

from headway_lab.published_comparison import ORDERINGS, PUBLISHED, findings
from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.comparison import SETTINGS, figures_of, source_cases
from headway_lab.simulate.device import VirtualDevice
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import Roofline
from headway_lab.simulate.stations import InTurn, Station
from headway_lab.simulate.world import make_world, simulate
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import PlannedRequest, PromptSource, rng_of
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

H100 = {"hardware": "h100", "tensor_parallel": 4}
SHORT_ANSWERS = {"prompt_tokens": "lognormal:50,0.8,2000", "output_tokens": "lognormal:44,0.9,512"}
PROMPTS_DOMINATE = {"prompt_tokens": "lognormal:1000,0.5,2000", "output_tokens": "64"}


def simulated(**changes):
    """The figures of each case of the comparison, by its name."""
    options = SimulationOptions(**{**SETTINGS, **changes})
    world = make_world(options)
    return {case.label: figures_of(simulate(world, case).totals) for case in source_cases({}, options.users)}


@pytest.fixture(scope="module", params=[0, 1])
def short_answers(request):
    return simulated(num_requests=640, seed=request.param, **H100, **SHORT_ANSWERS)


def holding(figures):
    return {finding.text for finding in findings(figures) if finding.holds}


def test_the_published_figures_are_in_the_published_order():
    assert holding(PUBLISHED) == {ordering.text for ordering in ORDERINGS}


@pytest.mark.parametrize("seed", [0, 1])
def test_every_published_ordering_holds_on_the_device_that_the_article_assumes(seed):
    assert holding(simulated(seed=seed)) == {ordering.text for ordering in ORDERINGS}


def test_all_but_those_of_throughput_hold_on_a_real_device(short_answers):
    assert holding(short_answers) >= {
        "static batching has the lowest throughput",
        "static batching has the longest P99 TTFT",
        "static batching has the longest P99 ITL",
        "P99 ITL falls with smaller chunks",
        "P50 ITL rises with smaller chunks",
        "P99 TTFT rises with smaller chunks",
    }


def test_whole_prompts_have_longer_gaps_than_the_chunks_that_cut_them(short_answers):
    """Few prompts of this workload are longer than 512 tokens, so with some seeds that chunk size is even with them."""
    assert short_answers["orca"].itl_p99_ms > short_answers["chunk 256"].itl_p99_ms
    assert short_answers["orca"].itl_p99_ms > 0.9 * short_answers["chunk 512"].itl_p99_ms


def test_what_chunks_cost_in_throughput_is_less_than_published(short_answers):
    """The articles have 14% between whole prompts and the smallest chunk; here the four are within a few percent.

    Not by chance: a step of 128 decodes waits for the weights, so tokens of a prompt beside them cost little. Sarathi's
    own paper has chunks ahead of Orca for that reason. What is published follows if prompts are most of the work.
    """
    throughput = [short_answers[label].output_tokens_per_s for label in PUBLISHED if label != "static"]
    assert max(throughput) / min(throughput) < 1.05


def test_where_prompts_dominate_smaller_chunks_cost_throughput():
    figures = simulated(num_requests=384, **H100, **PROMPTS_DOMINATE)
    assert holding(figures) >= {
        "throughput falls with smaller chunks",
        "P99 TTFT rises with smaller chunks",
        "whole prompts have a longer P99 ITL than chunks",
    }
    assert figures["orca"].output_tokens_per_s > 0.99 * figures["chunk 512"].output_tokens_per_s
    assert figures["orca"].output_tokens_per_s > 1.1 * figures["chunk 256"].output_tokens_per_s


def test_the_gap_that_makes_static_batching_the_worst_is_the_one_before_the_second_token():
    world = make_world(SimulationOptions(**{**SETTINGS, **H100, **SHORT_ANSWERS, "num_requests": 384}))
    (static,) = [case for case in source_cases({}, 128) if case.label == "static"]
    result = simulate(world, static)
    p99 = result.totals.itl_ms.p99
    longest = [max(request.itl_ms) for request in result.requests if request.itl_ms]
    first = [request.itl_ms[0] for request in result.requests if request.itl_ms]
    assert sum(gap > p99 for gap in longest) > 0
    assert [gap for gap in longest if gap > p99] == [gap for gap in first if gap > p99]


ITERATION_MS = {0: 6, 1000: 30, 4000: 120, 16_000: 580, 100_000: 8000}
"""Published: eight decodes at 1k context and a prompt of so many tokens beside them, Llama-2-7B, H100, 500 TFLOP/s."""


def iteration_ms(prompt, accelerator):
    """The time of the step in which eight requests decode at 1k context and a prompt runs, as the scheduler makes it."""
    shape = msgspec.structs.replace(MODEL_SHAPES["llama-2-7b"], context_length=1 << 18)
    limits = SchedulerLimits(max_num_batched_tokens=max(prompt + 8, 8000), max_num_seqs=16, max_steps_in_flight=1)
    capacity = ExecutorCapacity(
        num_blocks=1 << 14, block_size=16, max_model_len=1 << 18, vocab_size=32_000, max_num_rows=16
    )
    planned = [PlannedRequest(number=number, num_prompt_tokens=1000, num_output_tokens=4) for number in range(8)]
    times_s = [0.0] * 8
    if prompt:
        planned.append(PlannedRequest(number=8, num_prompt_tokens=prompt, num_output_tokens=1))
        times_s.append(1e-3)  # while the eight prompts run, so that it joins their first decodes
    device = VirtualDevice(Roofline(accelerator, shape, 1), capacity, rng_of(0, 0), host_bandwidth=1e9)
    measurement = RunCollector(len(planned))
    scheduler = Scheduler(limits, capacity)
    Simulation(
        InTurn([Station(scheduler, device)]), OpenArrivals(planned, times_s), PromptSource(0, 32_000), measurement
    ).run()
    step = next(step for step in measurement.steps if step.num_decodes == 8)
    assert step.num_tokens == prompt + 8
    return (step.end_s - step.start_s) * 1e3


@pytest.mark.parametrize(("prompt", "published_ms"), ITERATION_MS.items())
def test_the_iterations_of_the_published_cost_table(prompt, published_ms):
    """At the published rate the cost model comes within a factor of 1.25, and of 1.06 where there is a prompt.

    The table has nothing for what happens between products and between steps, most of which is the millisecond that the
    decodes alone take longer here.
    """
    at_500 = msgspec.structs.replace(ACCELERATORS["h100"], gemm_share=500 / 989.4, attention_share=500 / 989.4)
    factor = 1.06 if prompt else 1.25
    assert 1 / factor < iteration_ms(prompt, at_500) / published_ms < factor


def test_the_swing_between_iterations_is_the_published_thousandfold():
    accelerator = ACCELERATORS["h100"]
    assert 500 < iteration_ms(100_000, accelerator) / iteration_ms(0, accelerator) < 2000


def test_the_published_comparison_is_of_a_case_per_policy():
    cases = {case.label: case.limits for case in source_cases({}, 128)}
    assert list(cases) == list(PUBLISHED)
    assert isinstance(source_cases({}, 128)[0], Case)
    assert (cases["orca"].batching, cases["orca"].max_num_batched_tokens) == ("orca", 2048)
    assert (cases["chunk 256"].batching, cases["chunk 256"].max_num_batched_tokens) == ("chunked", 384)
    assert {limits.max_num_seqs for limits in cases.values()} == {128}
