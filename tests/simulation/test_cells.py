"""Several executors behind one scheduler: whatever happens to one of them, every stream brings the undisturbed tokens."""

from collections.abc import Callable

import msgspec
import pytest

from headway_proto.columns import decode_column, encode_column
from headway_proto.ingress import PRIORITY_LOW, PRIORITY_REALTIME, Finished
from headway_proto.sampling import SamplingParams
from headway_scheduler.cells.brake import LOSSES_ALONE, LOSSES_BEFORE_TRIAL
from headway_scheduler.cells.cell import Cell
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from simulation.test_nothing_is_lost import CONFIG, LIMITS, assert_undisturbed, submit_some
from simulation.world import Trouble, World

SEEDS = range(4)


def world_of(num_executors: int, seed: int = 1, **limits: object) -> World:
    settings = msgspec.structs.replace(LIMITS, **limits)
    world = World(settings, CONFIG, num_gateways=2, seed=seed, num_executors=num_executors)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == num_executors, 2)
    return world


def num_started(cell: Cell) -> int:
    return 0 if cell.core is None else cell.core.counters.num_finished + cell.core.num_running


def finish(world: World) -> None:
    """Everything ends well, and nothing is left of it anywhere."""
    world.run_until(world.all_ended, 120)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    fleet = world.engine.fleet
    world.run_until(
        lambda: all(core.num_in_flight == 0 for core in [cell.core for cell in fleet.open_cells] if core), 5
    )
    assert fleet.num_unfinished == 0
    assert not len(fleet.placement)
    assert not fleet.placement._placed
    assert not fleet.placement._waiting.room.num_requests
    assert not len(world.engine.live)
    for cell in fleet.open_cells:
        assert cell.core is not None
        assert cell.core.pool.num_free == cell.core.pool.num_blocks
        assert not cell.core.num_unfinished


def undisturbed_until(world: World, num_tokens: int) -> None:
    """Run until the streams have brought so many tokens in all."""
    sequences = [sequence for gateway in world.gateways for sequence in gateway.sequences]
    world.run_until(lambda: sum(len(sequence.tokens) for sequence in sequences) >= num_tokens, 30)


@pytest.mark.parametrize("num_executors", [2, 3, 8])
def test_all_executors_work(num_executors: int) -> None:
    world = world_of(num_executors)
    submit_some(world, 60)
    finish(world)
    assert all(num_started(cell) > 0 for cell in world.engine.fleet.cells)


@pytest.mark.parametrize(
    ("order", "batching"),
    [(order, "chunked") for order in sorted(ORDERS)] + [("fcfs", name) for name in sorted(BATCHING_POLICIES)],
)
def test_every_policy_works_with_several_executors(order: str, batching: str) -> None:
    world = world_of(2, order=order, batching=batching)
    submit_some(world, 30)
    undisturbed_until(world, 60)
    world.start_executor(1)
    submit_some(world, 10)
    finish(world)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_tokens", [5, 200, 500])
def test_a_killed_executor_loses_nothing(seed: int, num_tokens: int) -> None:
    world = world_of(2, seed)
    submit_some(world, 40)
    undisturbed_until(world, num_tokens)
    world.kill_executor(seed % 2)
    finish(world)
    assert len(world.engine.fleet.open_cells) == 1


def test_both_executors_are_killed_and_one_returns() -> None:
    world = world_of(2)
    submit_some(world, 40)
    undisturbed_until(world, 100)
    for number in (0, 1):
        world.kill_executor(number)
    world.run_until(lambda: not world.engine.fleet.open_cells, 20)
    submit_some(world, 10)
    world.start_executor(0)
    finish(world)


def test_an_executor_that_joins_later_takes_its_part() -> None:
    world = world_of(2)
    world.kill_executor(1)
    submit_some(world, 60)
    undisturbed_until(world, 100)
    world.start_executor(1)
    finish(world)
    assert all(num_started(cell) > 5 for cell in world.engine.fleet.cells)


def test_more_executors_than_are_wanted_are_spare() -> None:
    world = World(LIMITS, CONFIG, num_gateways=1, seed=3, num_executors=2)
    world.executors.append(None)
    world.start_executor(2)
    submit_some(world, 10)
    finish(world)
    assert len(world.engine.fleet.cells) == 2


def test_an_executor_of_another_model_is_refused() -> None:
    world = world_of(2)
    world.kill_executor(1)
    submit_some(world, 20)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    world.config = msgspec.structs.replace(CONFIG, options=dict(CONFIG.options) | {"vocab_size": "101"})
    world.start_executor(1)
    finish(world)
    assert len(world.engine.fleet.open_cells) == 1
    refusals = [notice.details for notice in world.engine.notices.take() if notice.event == "executor refused"]
    assert len(refusals) == 1
    assert "another model" in str(refusals[0]["reason"])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drained_executor_hands_over_and_is_used_again(seed: int) -> None:
    world = world_of(2, seed)
    submit_some(world, 40)
    undisturbed_until(world, 150)
    fleet = world.engine.fleet
    fleet.drain_cell(0, is_draining=True)
    drained = fleet.cells[0].core
    assert drained is not None
    world.run_until(lambda: not drained.num_unfinished, 1)
    num_before = drained.counters.num_steps
    undisturbed_until(world, 400)
    assert drained.counters.num_steps <= num_before + 2, "those that tell it which rows to forget"
    fleet.drain_cell(0, is_draining=False)
    submit_some(world, 20)
    finish(world)
    assert drained.counters.num_steps > num_before + 2


def test_an_executor_that_drains_alone_gets_nothing_before_it_is_used_again() -> None:
    world = world_of(1)
    submit_some(world, 20)
    undisturbed_until(world, 50)
    fleet = world.engine.fleet
    core = fleet.cells[0].core
    assert core is not None
    fleet.drain_cell(0, is_draining=True)
    submit_some(world, 5)
    world.run_until(lambda: not core.num_unfinished, 1)
    limit = world.now + 0.2
    world.run_until(lambda: world.now > limit, 1)
    assert not core.num_unfinished
    assert fleet.num_unfinished
    fleet.drain_cell(0, is_draining=False)
    finish(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_bad_wires(seed: int) -> None:
    world = world_of(3, seed)
    world.trouble = Trouble(drop=0.01, duplicate=0.01, corrupt=0.01, delay=0.05)
    submit_some(world, 40)
    world.run_until(lambda: False or world.num_troubled > 100, 60)
    world.trouble = Trouble()
    finish(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scheduler_that_restarts_finds_its_executors(seed: int) -> None:
    world = world_of(2, seed)
    submit_some(world, 30)
    undisturbed_until(world, 100)
    world.start_scheduler()
    finish(world)
    assert len(world.engine.fleet.open_cells) == 2


def test_prompts_with_the_same_beginning_meet_where_it_is_cached() -> None:
    world = world_of(2)
    gateway = world.gateways[0]
    sampling = SamplingParams(temperature=0.0)
    for number in range(12):
        begin = [number % 2] * 40
        gateway.submit(f"r{number}", [*begin, number], 4, sampling)
        world.run_until(world.all_ended, 5)
    finish(world)
    hits = [cell.core.counters.num_prefix_hit_tokens for cell in world.engine.fleet.cells if cell.core is not None]
    assert sum(hits) == 10 * 40


def test_nothing_piles_up_on_one_executor_while_another_is_idle() -> None:
    world = world_of(2)
    gateway = world.gateways[0]
    for number in range(24):
        gateway.submit(f"r{number}", [number] * 8, 100, SamplingParams())
    world.run_until(lambda: world.engine.fleet.num_unfinished == 24, 1)
    running = [cell.core.num_running for cell in world.engine.fleet.cells if cell.core is not None]
    waiting = [cell.core.num_waiting for cell in world.engine.fleet.cells if cell.core is not None]
    assert abs(running[0] - running[1]) <= 2
    assert sum(waiting) <= 4, "the others wait where they can still go either way"
    finish(world)


def test_a_higher_class_does_not_wait_above_full_cells() -> None:
    world = world_of(2, order="priority", max_num_seqs=4)
    gateway = world.gateways[0]
    for number in range(12):
        gateway.submit(f"low{number}", [number] * 8, 100, SamplingParams(), priority=PRIORITY_LOW)
    world.run_until(lambda: all(len(sequence.tokens) > 3 for sequence in gateway.sequences[:8]), 5)
    urgent = gateway.submit("urgent", [7] * 8, 5, SamplingParams(), priority=PRIORITY_REALTIME)
    world.run_until(lambda: urgent.end is not None, 1)
    assert sum(sequence.end is not None for sequence in gateway.sequences) == 1
    finish(world)


def test_requests_are_cancelled_wherever_they_wait() -> None:
    world = world_of(2, max_num_seqs=4)
    gateway = world.gateways[0]
    sequences = [gateway.submit(f"r{number}", [number] * 8, 60, SamplingParams()) for number in range(24)]
    undisturbed_until(world, 20)
    for sequence in sequences[::2]:
        gateway.link.abort([sequence])
        gateway.aborted.append(sequence)
    finish(world)


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_do_not_notice(victim: int) -> None:
    """The requests of the other executor go on without a pause."""
    world = world_of(2)
    gateway = world.gateways[0]
    for number in range(8):
        gateway.submit(f"r{number}", [number] * 8, 110, SamplingParams())
    undisturbed_until(world, 80)
    survivor = world.engine.fleet.cells[1 - victim].core
    assert survivor is not None
    theirs = {request.new.origin.handle for request in survivor.requests()}
    sequences = [sequence for sequence in gateway.sequences if sequence.submission.handle in theirs]
    longest = watch_gaps(world, [lambda sequence=sequence: len(sequence.tokens) for sequence in sequences])  # type: ignore[misc]
    before = longest(0.3)
    world.kill_executor(victim)
    assert longest(0.3) <= max(before * 1.2, before + 0.002)
    finish(world)


def watch_gaps(world: World, counts: list[Callable[[], int]]) -> Callable[[float], float]:
    """Give a function that runs so many seconds and returns the longest time without a new token in any stream."""

    def longest(seconds: float) -> float:
        since = [world.now] * len(counts)
        values = [count() for count in counts]
        worst, end = 0.0, world.now + seconds
        while world.now < end:
            world.beat()
            for place, count in enumerate(counts):
                if count() != values[place]:
                    worst = max(worst, world.now - since[place])
                    values[place], since[place] = count(), world.now
        return worst

    return longest


def test_a_pinned_prefix_is_pinned_in_executors_that_join_later() -> None:
    world = world_of(2)
    world.kill_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    world.executors.append(None)
    fleet = world.engine.fleet
    fleet.pin("system", "", encode_column([1] * 16))
    with pytest.raises(PinRefused):
        fleet.pin("system", "", encode_column([1]))
    world.start_executor(1)
    world.run_until(lambda: len(fleet.open_cells) == 2, 20)
    pins = [[pin.num_tokens for pin in cell.view.pinned_prefixes()] for cell in fleet.cells if cell.view is not None]
    assert pins == [[16], [16]]
    assert fleet.unpin("system")
    assert not any(cell.view.pinned_prefixes() for cell in fleet.cells if cell.view is not None)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_executors", [2, 3])
def test_one_bad_request_costs_a_few_executors_and_no_other_request(num_executors: int, seed: int) -> None:
    world = world_of(num_executors, seed)
    submit_some(world, 30)
    sequences = [sequence for gateway in world.gateways for sequence in gateway.sequences]
    begins = {int(decode_column(sequence.submission.token_ids)[0]) for sequence in sequences}
    world.poison = max(set(range(97)) - begins)
    for executor in world.executors:
        assert executor is not None
        executor.poison = world.poison
    gateway = world.gateways[0]
    bad = gateway.submit("bad", [world.poison, 1, 2], 20, SamplingParams())
    world.run_until(world.all_ended, 200)
    gateway.sequences.remove(bad)
    assert isinstance(bad.end, Finished)
    assert "the executor was lost 4 times" in bad.end.error
    assert world.engine.statistics.num_executor_losses <= LOSSES_BEFORE_TRIAL + LOSSES_ALONE + 1
    finish(world)


def test_a_preempted_request_goes_on_where_there_are_blocks() -> None:
    config = msgspec.structs.replace(CONFIG, num_kv_blocks=40)
    world = World(LIMITS, config, num_gateways=1, seed=1, num_executors=2)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 2, 2)
    gateway = world.gateways[0]
    for number in range(8):  # placed by turns: those with an even number grow long
        gateway.submit(f"r{number}", [number] * 8, 90 if number % 2 == 0 else 8, SamplingParams())
    finish(world)
    cores = [cell.core for cell in world.engine.fleet.cells if cell.core is not None]
    assert sum(core.counters.num_preemptions for core in cores) > 0
    assert all(core.counters.num_output_tokens > 100 for core in cores), "the long ones shared both"
