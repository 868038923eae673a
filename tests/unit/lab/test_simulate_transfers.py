"""Requests that go from one simulated executor to another: the times worked out by hand, and what must hold of every run."""

import numpy as np
import pytest

from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import PATIENCE_S
from headway_lab.simulate import world as world_module
from headway_lab.simulate.cases import Case
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import VirtualDevice
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import Roofline, StepTime
from headway_lab.simulate.stations import OneQueue, Station
from headway_lab.simulate.transfers import TransferCosts, VirtualPool, VirtualTransfers
from headway_lab.simulate.world import make_world, simulate, transfer_costs
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import PlannedRequest, PromptSource, rng_of
from headway_scheduler.core.choosing.policies import POLICIES
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

BY_ROLE = POLICIES["disaggregated"]
STAGED = TransferCosts(host_block_s=0.02, link_block_s=0.05, latency_s=0.03)
DIRECT = STAGED._replace(host_block_s=0.0)
NUM_HOST_BLOCKS = 64


class OneSecondSteps(Roofline):
    """Every step takes a second."""

    def step_time(self, num_scheduled_tokens, num_computed_tokens, num_samples):
        return StepTime(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def run_by_roles(costs, requests, times_s, limits=None):
    """Prompts on one executor, decoding on another; ``requests`` are (prompt tokens, output tokens) each."""
    planned = [
        PlannedRequest(number=number, num_prompt_tokens=prompt, num_output_tokens=output)
        for number, (prompt, output) in enumerate(requests)
    ]
    pools, stations = {}, []
    limits = limits or SchedulerLimits(max_num_seqs=8)
    for number, role in enumerate((Role.PREFILL, Role.DECODE)):
        capacity = ExecutorCapacity(
            num_blocks=64,
            block_size=4,
            max_model_len=64,
            vocab_size=100,
            max_num_rows=8,
            num_host_blocks=NUM_HOST_BLOCKS,
            host_pool=f"pool-{number}",
            block_addresses=("virtual:",),
        )
        transfers = VirtualTransfers(costs, pools, capacity.host_pool, NUM_HOST_BLOCKS)
        roofline = OneSecondSteps(ACCELERATORS["h100"], MODEL_SHAPES["llama-3-8b"], 1)
        device = VirtualDevice(roofline, capacity, rng_of(0, number), host_bandwidth=1e9, transfers=transfers)
        stations.append(Station(Scheduler(limits, capacity, 1), device, number, role))
    measurement = RunCollector(len(planned))
    router = OneQueue(stations, limits, BY_ROLE)
    Simulation(router, OpenArrivals(planned, times_s), PromptSource(0, 100), measurement).run()
    return measurement, router


def assert_blocks_are_conserved(stations):
    for station in stations:
        core = station.core
        pool = core.swapping.books.pool
        assert core.pool.num_free == core.capacity.num_blocks
        assert pool.num_free + pool.num_released == core.capacity.num_host_blocks
        assert core.swapping.books.num_leased == 0
        assert not core.requests()


def pull_of(pool, host_blocks, first_block=0):
    blocks = np.stack((host_blocks, np.zeros_like(host_blocks), np.arange(len(host_blocks)) + first_block))
    return Pull(pool, ("virtual:",), 1, blocks.astype(np.int32))


def two_executors(costs, num_host_blocks=NUM_HOST_BLOCKS):
    pools: dict[str, VirtualPool] = {}
    return [VirtualTransfers(costs, pools, name, num_host_blocks) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("costs", "copy_s"), [(STAGED, 2 * 0.02 + 0.03 + 2 * 0.05 + 2 * 0.02), (DIRECT, 0.03 + 2 * 0.05)]
)
def test_the_first_token_comes_before_the_transfer_and_the_second_after_it_and_one_step(costs, copy_s):
    """Two blocks: 0-1 s the prompt; then to the host, over the link, to the device, and a step."""
    measurement, router = run_by_roles(costs, [(8, 3)], [0.0])
    (request,) = measurement.requests()
    assert request.ttft_s == 1.0
    assert request.itl_ms == pytest.approx((1e3 * (copy_s + 1.0), 1000.0))
    assert (router.num_moved, request.num_output_tokens, request.num_preemptions) == (1, 3, 0)
    assert router.stations[1].core.counters.num_pulled_tokens == 8
    assert_blocks_are_conserved(router.stations)


def test_an_export_runs_beside_the_next_prompt():
    """The second prompt does not wait for the first one's copy."""
    measurement, router = run_by_roles(STAGED, [(8, 2), (8, 2)], [0.0, 0.5])
    first, second = measurement.requests()
    assert (first.ttft_s, second.ttft_s) == (1.0, 1.5)
    assert router.num_moved == 2


def test_rows_that_decode_already_wait_for_the_blocks_of_one_that_joins_them():
    """A decodes from 1.21 s on. B's first token comes at 3 s; its step follows those in flight and its blocks."""
    limits = SchedulerLimits(max_num_seqs=8, max_steps_in_flight=1)
    measurement, _ = run_by_roles(STAGED, [(8, 5), (8, 2)], [0.0, 2.0], limits)
    first, second = measurement.requests()
    assert second.ttft_s == 1.0
    # Steps with A end at 2.21 and 3.21 s. There B's copies begin: exported long ago, over the link, to the device.
    assert first.itl_ms == pytest.approx((1210.0, 1000.0, 1170.0, 1000.0))
    assert second.itl_ms == pytest.approx((1380.0,))


def test_blocks_that_take_too_long_are_given_up_and_computed_again():
    """By the executor for prompts, which then keeps the request."""
    measurement, router = run_by_roles(STAGED._replace(link_block_s=1.0), [(8, 3)], [0.0])
    (request,) = measurement.requests()
    decoding = router.stations[1].core
    assert (decoding.counters.num_stale_pulls, decoding.counters.num_pulled_tokens) == (1, 8)
    assert request.num_output_tokens == 3
    assert request.ttft_s == 1.0
    assert request.itl_ms[0] >= 1e3 * (
        PATIENCE_S + 2.0
    )  # a step for nothing, and the one that computes the prompt again
    assert_blocks_are_conserved(router.stations)


def test_a_link_carries_one_pull_at_a_time_and_copies_follow_each_other():
    a, b = two_executors(STAGED)
    first, second = np.arange(3), np.arange(3, 5)
    a.export(first, 1.0)
    a.export(second, 1.0)
    fetched = b.fetch([pull_of("a", first)], 1.0)
    # To the host until 1.06 and 1.10 s; over the link until 1.06 + 0.03 + 0.15 = 1.24 s.
    assert (fetched.arrived_s, fetched.ready_s) == pytest.approx((1.24, 1.30))
    behind = b.fetch([pull_of("a", second)], 1.0)
    assert (behind.arrived_s, behind.ready_s) == pytest.approx((1.24 + 0.03 + 0.10, 1.41))
    assert len(fetched.blocks.blocks) == 3
    assert not len(fetched.blocks.missing)


def test_blocks_of_two_pools_come_one_after_the_other():
    pools: dict[str, VirtualPool] = {}
    a, b, c = [VirtualTransfers(DIRECT, pools, name, NUM_HOST_BLOCKS) for name in ("a", "b", "c")]
    a.export(np.arange(2), 1.0)
    b.export(np.arange(2), 1.0)
    fetched = c.fetch([pull_of("a", np.arange(2)), pull_of("b", np.arange(2), 2)], 1.0)
    assert fetched.ready_s == pytest.approx(1.0 + 2 * (0.03 + 0.10))
    assert fetched.blocks.blocks.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_a_published_estimate_of_a_transfer(tensor_parallel):
    """4,096 tokens of 80 layers with 8 heads of 128 in two bytes: 1.25 GiB, 25 ms at 50 GiB a second in all."""
    roofline = Roofline(ACCELERATORS["h200"], MODEL_SHAPES["llama-2-70b"], tensor_parallel)
    gib = 1024**3
    assert 4096 * roofline.shape.kv_bytes_per_token() == 1.25 * gib
    link_block_s = roofline.swap_time(1, 16, 50 * gib / tensor_parallel)
    a, b = two_executors(TransferCosts(0.0, link_block_s, 0.0), 256)
    a.export(np.arange(256), 1.0)
    assert b.fetch([pull_of("a", np.arange(256))], 1.0).ready_s - 1.0 == pytest.approx(0.025)


def test_options_say_what_a_transfer_costs():
    given = {"executors": 2, "roles": "prefill,decode", "model": "llama-3-8b"}
    link = ACCELERATORS["h100"].link_bandwidth * ACCELERATORS["h100"].link_share
    block_bytes = 16 * MODEL_SHAPES["llama-3-8b"].kv_bytes_per_token()
    assert transfer_costs(make_world(SimulationOptions(**given))) == pytest.approx(
        (block_bytes / (64e9 * 0.78), block_bytes / link, 0.0)
    )
    slow = SimulationOptions(**given, transfer_bandwidth_gb_s=3.125, transfer_latency_us=50.0, transfer_direct=True)
    assert transfer_costs(make_world(slow)) == pytest.approx((0.0, block_bytes / 3.125e9, 50e-6))


@pytest.mark.parametrize("placement", ["aggregated", "disaggregated", "hybrid"])
@pytest.mark.parametrize("bandwidth_gb_s", [0.0, 0.05])
def test_every_request_ends_with_its_tokens_and_every_block_is_free_again(placement, bandwidth_gb_s, monkeypatch):
    """Under memory pressure, on three executors, over a link that is fast or gives pulls up."""
    stations: list[Station] = []
    router_of = world_module.router_of
    monkeypatch.setattr(
        world_module, "router_of", lambda given, *rest: stations.extend(given) or router_of(given, *rest)
    )
    options = SimulationOptions(
        executors=3,
        roles="prefill,decode",
        num_kv_blocks=200,
        max_model_len=1024,
        arrivals="gamma",
        rate=60.0,
        num_requests=120,
        prompt_tokens="lognormal:150,0.7",
        output_tokens="pareto:30,1.5",
        prefixes=3,
        prefix_tokens=40,
        tenants={"a": "2:high", "b": "1:low:300:12"},
        transfer_bandwidth_gb_s=bandwidth_gb_s,
        seed=4,
    )
    world = make_world(options)
    limits = SchedulerLimits(max_num_batched_tokens=256, max_num_seqs=32, order="priority")
    result = simulate(world, Case(label="", limits=limits, placement=placement))
    assert [request.num_output_tokens for request in result.requests] == [
        planned.num_output_tokens for planned in world.load.requests
    ]
    assert_blocks_are_conserved(stations)
    counters = [station.core.counters for station in stations]
    assert result.totals.num_pulled_tokens == sum(counted.num_pulled_tokens for counted in counters)
    if placement != "aggregated":
        assert result.totals.num_moved > 0
        assert result.totals.pull_ms > 0
    assert (result.totals.num_stale_pulls > 0) == (placement != "aggregated" and bandwidth_gb_s > 0)


def test_the_same_options_give_the_same_run():
    world = make_world(SimulationOptions(executors=2, roles="prefill,decode", num_requests=30))
    one, other = (simulate(world, Case(label="", limits=SchedulerLimits())) for _ in range(2))
    assert (one.totals, one.requests, one.steps) == (other.totals, other.requests, other.steps)
