"""Whatever happens on the wires or to a process, every stream brings exactly the undisturbed tokens."""

from collections import Counter
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from headway_executor.backend import BackendConfig
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import step
from headway_proto.columns import decode_column
from headway_proto.ingress import (
    FINISH_LENGTH,
    PRIORITY_LOW,
    PRIORITY_REALTIME,
    REJECT_OVERLOADED,
    Finished,
    Rejected,
)
from headway_proto.sampling import SamplingParams
from headway_scheduler.cells import cell
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import SchedulerLimits
from simulation.world import SimulatedGateway, Trouble, World

SEEDS = range(15)
LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=12, max_steps_in_flight=2)
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=60,
    max_model_len=128,
    max_num_seqs=12,
    options={"vocab_size": "97", "context_length": "128", "real_time": "false"},
)

# Little more than the largest request needs: whoever runs beside another is soon preempted.
TIGHT_CONFIG = msgspec.structs.replace(CONFIG, num_kv_blocks=34)


def submit_some(world: World, count: int) -> None:
    for number in range(count):
        gateway = world.gateways[number % len(world.gateways)]
        shared = list(range(20)) if number % 3 == 0 else []
        prompt = shared + world.rng.integers(0, 97, size=int(world.rng.integers(1, 40))).tolist()
        sampling = SamplingParams(temperature=float(number % 2), seed=number)
        gateway.submit(
            f"{number}-{gateway.name!r}-{len(gateway.sequences)}", prompt, int(world.rng.integers(1, 50)), sampling
        )


def assert_undisturbed(world: World, gateway: SimulatedGateway) -> None:
    for sequence in gateway.sequences:
        if sequence in gateway.aborted:
            continue
        assert isinstance(sequence.end, Finished), sequence.end
        assert sequence.end.reason == FINISH_LENGTH
        assert sequence.tokens == oracle(world, sequence)


def oracle(world: World, sequence: LiveSequence) -> list[int]:
    submission = sequence.submission
    prompt = decode_column(submission.token_ids).tolist()
    return world.executor.backend.token_hash.continuation(prompt, submission.max_tokens, submission.sampling)


def assert_quiet(world: World) -> None:
    world.run_until(lambda: world.engine.fleet.cells[0].core is not None, 2)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    world.run_until(lambda: core.num_in_flight == 0, 5)
    assert core.num_unfinished == 0
    assert core.pool.num_free == core.pool.num_blocks
    assert world.engine.live._by_origin == {}
    assert world.engine.live._by_name == {}


def run_undisturbed(world: World, count: int) -> Scheduler:
    """Run ``count`` requests to their ends and check every stream; returns the core they ran in."""
    submit_some(world, count)
    world.run_until(world.all_ended, 60)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    assert_quiet(world)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    return core


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [32, 60, 400])
def test_undisturbed(depth: int, num_blocks: int) -> None:
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=12, max_steps_in_flight=depth)
    config = BackendConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | {"num_kv_blocks": num_blocks}
    )
    world = World(limits, config, num_gateways=2, seed=depth)
    core = run_undisturbed(world, 40)
    assert (core.counters.num_preemptions > 0) == (num_blocks < 400)
    assert core.counters.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("num_executors", [1, 2])
def test_no_step_has_a_number_that_columns_cannot_hold(monkeypatch: pytest.MonkeyPatch, num_executors: int) -> None:
    most = (1 << 31) - 1
    most_of_ranges = {name: largest for name, _, largest in step._RANGES}
    assert cell.MOST_STEPS_OF_EPOCH + 2 * most_of_ranges["max_model_len"] <= most + 1
    monkeypatch.setattr(cell, "MOST_STEPS_OF_EPOCH", 20)
    world = World(LIMITS, CONFIG, num_gateways=2, seed=1, num_executors=num_executors)
    submit_some(world, 12)
    world.run_until(world.all_ended, 60)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    reasons = [notice.details.get("reason") for notice in world.engine.notices.take() if notice.event == "epoch opened"]
    assert reasons.count("its steps are numbered anew") > 2
    assert all(core.next_step <= 20 + LIMITS.max_steps_in_flight for core in world.engine.fleet.cores)
    assert_quiet(world)


@pytest.mark.parametrize("reserve", sorted(RESERVATIONS))
@pytest.mark.parametrize("batching", sorted(BATCHING_POLICIES))
def test_no_policy_changes_a_token(batching: str, reserve: str) -> None:
    limits = msgspec.structs.replace(LIMITS, batching=batching, reserve=reserve, max_num_seqs=6)
    config = msgspec.structs.replace(CONFIG, num_kv_blocks=36)
    world = World(limits, config, num_gateways=2, seed=1)
    core = run_undisturbed(world, 30)
    assert (core.counters.num_preemptions == 0) == (reserve == "full")


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_no_order_and_no_preemption_changes_a_token(order: str, preemption: str) -> None:
    limits = msgspec.structs.replace(
        LIMITS, order=order, preemption=preemption, reserve="none", budget="slo", prefix_aware=True, aging_s=0.02
    )
    world = World(limits, TIGHT_CONFIG, num_gateways=2, seed=2)
    core = run_undisturbed(world, 30)
    assert core.counters.num_preemptions > 0
    if preemption != "auto":
        assert (core.counters.num_swapped_out_blocks > 0) == (preemption == "swap")


class Story(NamedTuple):
    """What came about in the course of one seed, over all lives of the scheduler."""

    num_preemptions: int
    num_swapped_out_blocks: int
    num_ways_made: int
    num_promoted: int


class Chronicle:
    """Looks at the core after every beat, because what it counted is gone when its process is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._core: Scheduler | None = None
        self._life = 0
        self._earlier = np.zeros(2, dtype=np.int64)
        self._current = np.zeros(2, dtype=np.int64)
        self._made_way: dict[tuple[int, Origin], int] = {}
        self._first_rank: dict[tuple[int, Origin], int] = {}
        self._promoted: set[tuple[int, Origin]] = set()

    def beat(self) -> None:
        self._world.beat()
        core = self._world.engine.fleet.cells[0].core
        if core is not self._core:
            self._core = core
            self._life += 1
            self._earlier += self._current
            self._current = np.zeros(2, dtype=np.int64)
        if core is None:
            return
        self._current[:] = core.counters.num_preemptions, core.counters.num_swapped_out_blocks
        for origin, request in core._requests.items():
            if request.num_ways_made:
                self._made_way[self._life, origin] = request.num_ways_made
            elif request.rank < self._first_rank.setdefault((self._life, origin), request.rank):
                self._promoted.add((self._life, origin))

    def told(self) -> Story:
        num_preemptions, num_swapped = (self._earlier + self._current).tolist()
        return Story(num_preemptions, num_swapped, sum(self._made_way.values()), len(self._promoted))


def policies(seed: int) -> SchedulerLimits:
    """Policies of every axis, the axes out of step with each other."""
    rng = np.random.default_rng(seed)
    return msgspec.structs.replace(
        LIMITS,
        order=sorted(ORDERS)[seed % len(ORDERS)],
        batching=sorted(BATCHING_POLICIES)[seed % len(BATCHING_POLICIES)],
        reserve=str(rng.choice([*sorted(RESERVATIONS), "auto"])),
        preemption=("swap", "recompute", "auto")[seed % 3],
        budget=str(rng.choice(["fixed", "slo"])),
        default_itl_slo_ms=int(rng.choice([0, 20])),
        aging_s=float(rng.choice([0.02, 30.0])),
        tenant_weights={"a": 3.0},
        prefix_aware=bool(rng.random() < 0.5),
        prefix_cache_scope=str(rng.choice(["shared", "tenant"])),
        max_num_seqs=int(rng.choice([4, 12])),
        max_steps_in_flight=int(rng.integers(1, 4)),
    )


def submit_of_all_kinds(world: World, count: int) -> None:
    """Requests of mixed classes, tenants and objectives, some of which begin alike."""
    rng = world.rng
    for number in range(count):
        gateway = world.gateways[number % len(world.gateways)]
        shared = list(range(20)) if number % 3 == 0 else []
        gateway.submit(
            f"{number}-{gateway.name!r}-{len(gateway.sequences)}",
            shared + rng.integers(0, 97, size=int(rng.integers(1, 40))).tolist(),
            int(rng.integers(1, 50)),
            SamplingParams(temperature=float(number % 2), seed=number),
            priority=int(rng.integers(PRIORITY_REALTIME, PRIORITY_LOW + 1)),
            tenant=str(rng.choice(["", "a", "b"])),
            ttft_slo_ms=int(rng.choice([0, 30, 5000])),
            itl_slo_ms=int(rng.choice([0, 10])),
        )


@cache
def deaths_on_bad_wires(seed: int, shed_late: bool = False) -> tuple[World, Story]:
    """A world in which frames go astray and processes die, at its end, and what came about."""
    config = msgspec.structs.replace(TIGHT_CONFIG, num_kv_blocks=33 + seed % 4)
    world = World(msgspec.structs.replace(policies(seed), shed_late=shed_late), config, num_gateways=2, seed=seed)
    chronicle = Chronicle(world)
    submit_of_all_kinds(world, 15)
    for episode in range(6):
        world.trouble = Trouble(
            drop=float(world.rng.choice([0, 0.02])),
            duplicate=float(world.rng.choice([0, 0.05])),
            corrupt=float(world.rng.choice([0, 0.02])),
            delay=float(world.rng.choice([0, 0.05])),
        )
        if episode < 5:
            submit_of_all_kinds(world, 3)
        for _ in range(int(world.rng.integers(10, 400))):
            chronicle.beat()
        if world.rng.random() < 0.5:
            world.start_executor()
        if world.rng.random() < 0.4:
            world.start_scheduler()
        if world.rng.random() < 0.3:
            for sequence in list(world.gateways[0].link.live_sequences)[:2]:
                world.gateways[0].aborted.append(sequence)
                world.gateways[0].link.abort([sequence])
    world.trouble = Trouble()
    limit = world.now + 120
    while not world.all_ended():
        assert world.now < limit, "no end in sight"
        chronicle.beat()
    return world, chronicle.told()


@pytest.mark.parametrize("seed", SEEDS)
def test_executor_and_scheduler_die_on_bad_wires(seed: int) -> None:
    world, _ = deaths_on_bad_wires(seed)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    assert_quiet(world)


def test_the_bad_wires_met_every_way_to_preempt_and_promotions() -> None:
    """What the test above proves is worth as much as what came about in it."""
    totals = Story(*np.sum([deaths_on_bad_wires(seed)[1] for seed in SEEDS], axis=0).tolist())
    assert totals.num_preemptions > 50
    assert totals.num_swapped_out_blocks > 50
    assert totals.num_ways_made > 5
    assert totals.num_promoted > 5


@pytest.mark.parametrize("seed", [100, 101, 102, 104, 105])
def test_a_shed_request_ends_with_one_refusal_and_nothing_else(seed: int) -> None:
    world, _ = deaths_on_bad_wires(seed, shed_late=True)
    num_shed = 0
    for gateway in world.gateways:
        told = Counter(id(sequence) for sequence in gateway.ended)
        for sequence in gateway.sequences:
            if sequence in gateway.aborted:
                continue
            assert told[id(sequence)] == 1
            if isinstance(sequence.end, Finished):
                assert sequence.tokens == oracle(world, sequence)
                continue
            num_shed += 1
            assert isinstance(sequence.end, Rejected)
            assert sequence.end.reason == REJECT_OVERLOADED
            assert "ttft_slo_ms" in sequence.end.message
            assert sequence.end.retry_after_ms >= 1000
            assert sequence.submission.ttft_slo_ms
            assert not sequence.has_run
    assert num_shed > 0
    assert_quiet(world)


def test_a_dead_gateway_frees_its_blocks_and_harms_nobody() -> None:
    world = World(LIMITS, CONFIG, num_gateways=2, seed=5)
    submit_some(world, 20)
    for _ in range(100):
        world.beat()
    world.restart_gateway(0)
    world.run_until(world.all_ended, 60)
    assert_undisturbed(world, world.gateways[1])
    world.run_until(lambda: world.engine.num_unfinished == 0, 5)
    assert_quiet(world)


def test_the_same_seed_gives_the_same_bytes() -> None:
    def story(seed: int) -> list[tuple[float, int, int]]:
        world = World(LIMITS, CONFIG, num_gateways=2, seed=seed)
        world.trouble = Trouble(drop=0.01, delay=0.02)
        submit_some(world, 20)
        log = []
        for _ in range(600):
            world.beat()
            core = world.engine.fleet.cells[0].core
            log.append((world.now, world._num_frames, 0 if core is None else core.counters.num_output_tokens))
        return log

    assert story(3) == story(3)
    assert story(3) != story(4)


def test_random_lengths_leave_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    world = World(LIMITS, CONFIG, num_gateways=1, seed=9)
    for _ in range(10):
        submit_some(world, int(rng.integers(1, 12)))
        for _ in range(int(rng.integers(1, 60))):
            world.beat()
        gateway = world.gateways[0]
        live = list(gateway.link.live_sequences)
        gone = [live[int(place)] for place in rng.choice(len(live), size=len(live) // 2, replace=False)] if live else []
        gateway.aborted += gone
        gateway.link.abort(gone)
    world.run_until(world.all_ended, 60)
    assert_undisturbed(world, world.gateways[0])
    assert_quiet(world)


def test_a_smaller_executor_takes_over() -> None:
    """What it can hold at once bounds what runs, whatever the one before it held."""
    world = World(LIMITS, CONFIG, num_gateways=1, seed=11)
    submit_some(world, 20)
    for _ in range(60):
        world.beat()
    world.config = msgspec.structs.replace(CONFIG, max_num_seqs=3)
    world.start_executor()
    world.run_until(world.all_ended, 60)
    assert_undisturbed(world, world.gateways[0])
    assert_quiet(world)
