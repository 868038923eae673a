"""What the scheduler tells operators of latencies, rates, waste and tenants, against what the gateways have seen."""

import msgspec
import pytest

from core_driver import CoreDriver
from headway_executor.backend import BackendConfig
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import operations
from headway_proto.operations import Status
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.state.counters import Preemption, PreemptionMode, PreemptionReason, WasteReason
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.figures.serving_statistics import MAX_TENANTS, ServingStatistics
from headway_scheduler.operators import status_report
from simulation.world import World

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=4, max_num_waiting=100)
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=40,
    max_model_len=100,
    max_num_seqs=4,
    options={"vocab_size": "97", "context_length": "100", "real_time": "false"},
)


def ready_world(**limits: object) -> World:
    world = World(msgspec.structs.replace(LIMITS, **limits), CONFIG, num_gateways=1, seed=1)
    world.run_until(lambda: world.gateways[0].link.model is not None, 2)
    return world


def status_of(world: World) -> Status:
    return status_report.status_of(world.engine, world.now)


def submit(world: World, name: str, num_tokens: int, *, tenant: str = "") -> LiveSequence:
    return world.gateways[0].submit(name, [1, 2, 3, 4, 5], num_tokens, SamplingParams(), tenant=tenant)


def run_all(world: World, sequences: list[LiveSequence]) -> None:
    world.run_until(lambda: all(sequence.end is not None for sequence in sequences), 20)


def test_who_ends_with_the_first_token_has_no_gap_that_another_could_be_given():
    """The next request that decodes, half a second later, has its own gap and not the half second."""
    world = ready_world()
    run_all(world, [submit(world, f"short {n}", 1) for n in range(6)])
    world.now += 0.5
    run_all(world, [submit(world, "long", 5)])
    gaps = world.engine.statistics.gap_s.snapshot()
    assert gaps.num_values == 4
    assert gaps.total < 0.4


def test_every_token_is_a_first_one_or_has_one_gap():
    world = ready_world()
    sequences = [submit(world, str(n), 7 + n) for n in range(9)]
    run_all(world, sequences)
    statistics = world.engine.statistics
    num_tokens = sum(len(sequence.tokens) for sequence in sequences)
    assert statistics.first_token_s.snapshot().num_values == 9
    assert statistics.gap_s.snapshot().num_values == num_tokens - 9
    assert statistics.output_tokens.snapshot().total == num_tokens
    assert statistics.prompt_tokens.snapshot().total == 9 * 5
    # Gaps and first tokens fill the time between arrival and end.
    spent_s = statistics.request_s.snapshot().total
    parts = (statistics.first_token_s, statistics.gap_s)
    assert sum(part.snapshot().total for part in parts) == pytest.approx(spent_s, rel=0.05)
    assert status_of(world).ends == (operations.EndCount(reason="length", count=9),)


def test_a_new_executor_costs_what_was_computed_and_one_long_gap():
    world = ready_world()
    sequence = submit(world, "a", 60)
    world.run_until(lambda: len(sequence.tokens) >= 10, 5)
    assert status_of(world).wasted_tokens == ()
    world.start_executor()
    run_all(world, [sequence])
    status = status_of(world)
    (wasted,) = status.wasted_tokens
    assert wasted.reason == "new_epoch"
    assert 14 <= wasted.count <= 20
    assert (status.num_epochs, status.num_executor_losses) == (2, 1)
    assert world.engine.statistics.gap_s.snapshot().num_values == 59
    assert status.itl.p99_ms > 10 * status.itl.p50_ms


def test_recent_figures_come_and_go():
    world = ready_world()
    run_all(world, [submit(world, str(n), 50) for n in range(30)])
    status = status_of(world)
    assert status.ttft.count == status.queue.count == status.e2e.count == 30
    assert 0 < status.itl.p50_ms <= status.itl.p90_ms <= status.itl.p99_ms
    assert status.output_tokens_per_s > 0
    assert status.executor is not None
    assert status.executor.last_step_age_s >= 0
    ended = world.now
    world.run_until(lambda: world.now > ended + 15, 20)
    assert status_of(world).output_tokens_per_s == 0
    assert status_of(world).ttft.count == 30
    world.run_until(lambda: world.now > ended + 70, 80)
    assert status_of(world).ttft.count == 0
    assert status_of(world).uptime_s > 70


def test_tenants_have_what_they_were_given_and_the_latest_are_kept():
    world = ready_world(order="fair")
    first, second = submit(world, "a", 40, tenant="one"), submit(world, "b", 30, tenant="two")
    world.run_until(lambda: len(first.tokens) > 10, 5)
    one = status_of(world).tenant_services[0]
    assert (one.tenant, one.num_running, one.num_waiting, one.num_prompt_tokens) == ("one", 1, 0, 5)
    assert len(first.tokens) <= one.num_output_tokens <= len(first.tokens) + 4
    assert one.counter is not None
    assert one.counter >= 2 * 10
    run_all(world, [first, second])
    ended = {service.tenant: service for service in status_of(world).tenant_services}
    assert (ended["one"].num_output_tokens, ended["two"].num_output_tokens) == (40, 30)
    assert ended["one"].num_running == 0
    run_all(world, [submit(world, f"c{n}", 1, tenant=f"t{n}") for n in range(MAX_TENANTS)])
    kept = [service.tenant for service in status_of(world).tenant_services]
    assert sorted(kept) == sorted(f"t{n}" for n in range(MAX_TENANTS))


def test_predictions_are_held_against_what_came():
    world = ready_world(order="shortest")
    run_all(world, [submit(world, f"a{n}", 8) for n in range(40)])
    error = status_of(world).prediction_error
    assert error is not None
    assert 0 < error.count < 40  # nothing is predicted before something has ended
    assert error.sum_actual == 8 * error.count
    assert error.sum_absolute == error.sum_signed == 0
    assert world.engine.statistics.prediction_ratio.snapshot().num_values == error.count


def test_before_an_executor_there_is_little_to_tell():
    world = World(LIMITS, CONFIG, num_gateways=1, seed=1)
    status = status_of(world)
    assert (status.executor, status.step_time_model, status.prediction_error) == (None, None, None)
    assert status.ttft == operations.RecentPercentiles()


def test_the_model_of_step_times_is_told():
    world = ready_world(budget="slo", default_itl_slo_ms=1000)
    run_all(world, [submit(world, str(n), 50) for n in range(8)])
    status = status_of(world)
    assert status.step_time_model is not None
    assert status.step_time_model.num_observed > 3
    assert status.step_time_model.constant_s > 0
    assert 0 <= status.step_time_model.relative_error < 1
    assert 0 < status.num_budget_tokens <= 64
    assert status.budget_margin >= 1
    assert status.policies == operations.PolicyNames(
        order="fcfs", batching="chunked", budget="slo", preemption="auto", placement="aggregated"
    )


class TestCounters:
    def driver(self, *, num_host_blocks: int = 0, **limits: object) -> CoreDriver:
        capacity = ExecutorCapacity(
            num_blocks=8,
            block_size=4,
            max_model_len=100,
            vocab_size=97,
            max_num_rows=4,
            num_host_blocks=num_host_blocks,
        )
        return CoreDriver(SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=4, **limits), capacity)

    def run_short_of_blocks(self, run: CoreDriver) -> None:
        run.add(0, 14, 12)
        run.add(1, 14, 12, begins_with=2)
        run.all_steps()

    def test_a_recomputation_is_waste_and_told_by_mode_and_reason(self):
        run = self.driver(preemption="recompute", reserve="none", enable_prefix_caching=False)
        self.run_short_of_blocks(run)
        counters = run.core.counters
        kind = Preemption(PreemptionMode.RECOMPUTE, PreemptionReason.NO_BLOCK)
        assert counters.preemptions == {kind: counters.num_preemptions}
        assert counters.wasted_tokens[WasteReason.RECOMPUTE] >= 14

    def test_a_swap_wastes_nothing(self):
        run = self.driver(preemption="swap", reserve="none", num_host_blocks=20)
        self.run_short_of_blocks(run)
        counters = run.core.counters
        kind = Preemption(PreemptionMode.SWAP, PreemptionReason.NO_BLOCK)
        assert counters.preemptions == {kind: counters.num_preemptions}
        assert not counters.wasted_tokens[WasteReason.RECOMPUTE]

    def test_a_token_of_a_step_in_flight_when_its_request_stops_is_surplus(self):
        run = self.driver()
        run.add(0, 4, 20)
        run.schedule()
        run.schedule()
        run.update(stopping=[0])
        assert run.core.counters.wasted_tokens == {WasteReason.SURPLUS: 1}


def test_a_steady_step_is_one_observation():
    """Not one per row: the histogram is told how many had the gap."""
    world = ready_world()
    sequences = [submit(world, str(n), 60) for n in range(4)]
    world.run_until(lambda: all(len(sequence.tokens) > 5 for sequence in sequences), 5)
    statistics: ServingStatistics = world.engine.statistics
    observed = []
    original = statistics.gap_s.observe
    statistics.gap_s.observe = lambda value, count=1: (observed.append(count), original(value, count))[1]  # type: ignore[method-assign]
    before = world.engine.fleet.num_answers
    world.run_until(lambda: world.engine.fleet.num_answers >= before + 5, 5)
    assert observed == [4] * (world.engine.fleet.num_answers - before)
