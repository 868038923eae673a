"""Prefixes that the device's pool gives up come back from the host, and no token changes by it."""

import msgspec
import pytest

from headway_proto.sampling import SamplingParams
from headway_scheduler.core.memory.preemption import PREEMPTIONS
from headway_scheduler.core.scheduler import Scheduler
from simulation.test_nothing_is_lost import CONFIG, LIMITS, assert_quiet, assert_undisturbed, submit_some
from simulation.world import World

SMALL = msgspec.structs.replace(CONFIG, num_kv_blocks=33, swap_space_mib=100)
"""A device pool of a quarter of what the prompts below need."""


def asked_again(offload: str, **limits: object) -> Scheduler:
    """Twelve prompts of ten blocks, one after the other, four times."""
    settings = msgspec.structs.replace(LIMITS, prefix_offload=offload, **limits)
    world = World(settings, SMALL, num_gateways=1, seed=1)
    gateway = world.gateways[0]
    for turn in range(4):
        for number in range(12):
            gateway.submit(f"{turn}-{number}", [number] * 40 + [turn], 4, SamplingParams())
            world.run_until(world.all_ended, 10)
    assert_undisturbed(world, gateway)
    assert_quiet(world)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    return core


def test_a_working_set_beyond_the_device_is_found_again() -> None:
    without, kept = asked_again("off").counters, asked_again("always").counters
    assert without.num_restored_tokens == without.num_offloaded_blocks == 0
    num_asked_again = 3 * 12 * 10
    found = (kept.num_restored_tokens + kept.num_prefix_hit_tokens) // 4
    assert found >= 0.9 * num_asked_again
    assert without.num_prefix_hit_tokens // 4 < 0.1 * num_asked_again


def test_what_is_forgotten_on_the_device_by_command_is_forgotten_on_the_host() -> None:
    core = asked_again("always")
    core.drop_cached()
    request = next(iter(core.requests()), None)
    assert request is None
    assert not len(core.swapping.find_offloaded(b"\0" * 160, 0, 10, ""))


@pytest.mark.parametrize("preemption", sorted(PREEMPTIONS))
@pytest.mark.parametrize("seed", range(4))
def test_requests_and_prefixes_share_the_host(seed: int, preemption: str) -> None:
    config = msgspec.structs.replace(CONFIG, num_kv_blocks=34, swap_space_mib=20 + 10 * (seed % 2))
    limits = msgspec.structs.replace(LIMITS, prefix_offload="always", preemption=preemption)
    world = World(limits, config, num_gateways=2, seed=seed)
    for _ in range(3):
        submit_some(world, 20)
        world.run_until(world.all_ended, 60)
    for gateway in world.gateways:
        assert_undisturbed(world, gateway)
    assert_quiet(world)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    assert core.counters.num_restored_tokens > 0
    assert core.swapping.num_free_host_blocks == core.swapping.num_host_blocks


def test_nothing_is_believed_of_an_executor_that_is_gone() -> None:
    limits = msgspec.structs.replace(LIMITS, prefix_offload="always")
    world = World(limits, SMALL, num_gateways=1, seed=2)
    gateway = world.gateways[0]
    for turn in range(4):
        for number in range(8):
            gateway.submit(f"{turn}-{number}", [number] * 40 + [turn], 4, SamplingParams())
        if turn % 2:
            world.start_executor()
        world.run_until(world.all_ended, 60)
    assert_undisturbed(world, gateway)
