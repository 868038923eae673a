"""Whatever goes wrong, what every life of the scheduler has recorded is replayed to the byte."""

import pytest

from flight_logs import replay_of
from simulation.fault_schedule import draw
from simulation.fault_world import FaultWorld, small_constants

SEEDS = range(7000, 7040)


@pytest.mark.parametrize("num_executors", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_of_faults_replays_identically(seed: int, num_executors: int):
    schedule = draw(seed, num_executors)
    world = FaultWorld(schedule, records=True)
    assert world.run() is None
    assert world.flights
    num_steps = 0
    with small_constants(schedule):
        for flight in world.flights:
            flight.recorder.flush(world.now, None, is_final=True)
            num_steps += replay_of(flight.log, flight.limits).num_steps
    assert num_steps == world.num_steps
