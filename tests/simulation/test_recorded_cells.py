"""What several executors did replays to the byte, from the beginning and from every checkpoint."""

import msgspec
import pytest

from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.flight.records import InCell, Released
from simulation.recorded_cells import RecordedCells
from simulation.test_cells import undisturbed_until
from simulation.test_nothing_is_lost import LIMITS, submit_some


def check(world: RecordedCells) -> None:
    """All end; every replay decides the same and has the same counters at the end."""
    world.run_until(world.all_ended, 120)
    world.run_until(lambda: not world.engine.fleet.num_unfinished, 5)
    for _ in range(20):
        world.beat()
    counters = {cell.number: cell.core.counters for cell in world.engine.fleet.cells if cell.core is not None}
    assert len(world.checkpoints) > 3
    for replay in world.replays():
        assert {number: core.counters for number, core in replay.cores.items()} == counters
        assert not replay.moving


@pytest.mark.parametrize("num_executors", [1, 2, 3])
def test_an_undisturbed_run(num_executors: int) -> None:
    world = RecordedCells(num_executors, seed=1)
    submit_some(world, 80)
    check(world)
    assert any(world.num_moving) == (num_executors > 1), "some requests wait above the cores"
    assert any(isinstance(record, InCell) for record in world.log.records) == (num_executors > 1)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_every_order(order: str) -> None:
    world = RecordedCells(2, seed=2, limits=msgspec.structs.replace(LIMITS, order=order))
    submit_some(world, 60)
    check(world)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_an_executor_is_killed_and_returns(seed: int, victim: int) -> None:
    world = RecordedCells(2, seed, beats=25)
    submit_some(world, 40)
    undisturbed_until(world, 200)
    world.kill_executor(victim)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    submit_some(world, 10)
    world.start_executor(victim)
    submit_some(world, 10)
    check(world)


def test_an_executor_is_drained_and_requests_are_cancelled() -> None:
    world = RecordedCells(2, seed=5, beats=30)
    submit_some(world, 60)
    undisturbed_until(world, 100)
    world.engine.fleet.drain_cell(1, is_draining=True)
    gateway = world.gateways[0]
    for sequence in gateway.sequences[::3]:
        if sequence.end is None:
            gateway.link.abort([sequence])
            gateway.aborted.append(sequence)
    undisturbed_until(world, 400)
    world.engine.fleet.drain_cell(1, is_draining=False)
    submit_some(world, 20)
    check(world)
    assert any(isinstance(record, Released) for record in world.log.records)
