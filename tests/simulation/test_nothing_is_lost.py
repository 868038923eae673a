"""Whatever happens on the wires or to a process, every stream brings exactly the undisturbed tokens."""

import msgspec
import numpy as np
import pytest

from headway_executor.backend import BackendConfig
from headway_gateway.ingress_link import LiveSequence
from headway_proto.columns import decode_column
from headway_proto.ingress import FINISH_LENGTH, Finished
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.batching_policies import BATCHING_POLICIES
from headway_scheduler.core.limits import SchedulerLimits
from headway_scheduler.core.reservations import RESERVATIONS
from headway_scheduler.core.scheduler import Scheduler
from simulation.world import SimulatedGateway, Trouble, World

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=12, max_steps_in_flight=2)
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=60,
    max_model_len=128,
    max_num_seqs=12,
    options={"vocab_size": "97", "context_length": "128", "real_time": "false"},
)


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
    world.run_until(lambda: world.engine.core is not None, 2)
    core = world.engine.core
    assert core is not None
    world.run_until(lambda: core.num_in_flight == 0, 5)
    assert core.num_unfinished == 0
    assert core.pool.num_free == core.pool.num_blocks
    assert world.engine._names == {}
    assert world.engine._origin_of == {}


def run_undisturbed(world: World, count: int) -> Scheduler:
    """Run ``count`` requests to their ends and check every stream; returns the core they ran in."""
    submit_some(world, count)
    world.run_until(world.all_ended, 60)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    assert_quiet(world)
    core = world.engine.core
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


@pytest.mark.parametrize("reserve", sorted(RESERVATIONS))
@pytest.mark.parametrize("batching", sorted(BATCHING_POLICIES))
def test_no_policy_changes_a_token(batching: str, reserve: str) -> None:
    limits = msgspec.structs.replace(LIMITS, batching=batching, reserve=reserve, max_num_seqs=6)
    config = msgspec.structs.replace(CONFIG, num_kv_blocks=36)
    world = World(limits, config, num_gateways=2, seed=1)
    core = run_undisturbed(world, 30)
    assert (core.counters.num_preemptions == 0) == (reserve == "full")


@pytest.mark.parametrize("seed", range(12))
def test_executor_and_scheduler_die_on_bad_wires(seed: int) -> None:
    batching = sorted(BATCHING_POLICIES)[seed % len(BATCHING_POLICIES)]
    world = World(msgspec.structs.replace(LIMITS, batching=batching), CONFIG, num_gateways=2, seed=seed)
    submit_some(world, 30)
    for _ in range(6):
        world.trouble = Trouble(
            drop=float(world.rng.choice([0, 0.02])),
            duplicate=float(world.rng.choice([0, 0.05])),
            corrupt=float(world.rng.choice([0, 0.02])),
            delay=float(world.rng.choice([0, 0.05])),
        )
        for _ in range(int(world.rng.integers(10, 400))):
            world.beat()
        if world.rng.random() < 0.5:
            world.start_executor()
        if world.rng.random() < 0.4:
            world.start_scheduler()
        if world.rng.random() < 0.3:
            for sequence in list(world.gateways[0].link.live_sequences)[:2]:
                world.gateways[0].aborted.append(sequence)
                world.gateways[0].link.abort([sequence])
    world.trouble = Trouble()
    world.run_until(world.all_ended, 120)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
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
            core = world.engine.core
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
