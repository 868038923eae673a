"""Roles of executors as operators see and change them: the call, its refusals, the status, Explain, the metric."""

import msgspec
import pytest

from headway_proto.operations import EXECUTOR_ROLES, PolicyNames
from headway_scheduler.core.choosing.policies import PlacementSettings
from headway_scheduler.core.choosing.roles import Role, roles_of
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.metrics import families_of, take_snapshot
from simulation.sharing_executors import HostPools
from simulation.world import World
from unit.scheduler.test_operating_executors import (
    call,
    explained,
    finish,
    listed,
    run_until_started,
    status_of,
    submit,
)
from unit.scheduler.test_scheduler_engine import CONFIG, LIMITS


def world_of(roles: str, policy: str = "disaggregated", **limits: object) -> World:
    settings: SchedulerLimits = msgspec.structs.replace(LIMITS, max_num_waiting=60, **limits)
    number = len(roles.split(","))
    placement = PlacementSettings(policy, roles_of(roles, number))
    make = HostPools().executor
    world = World(settings, CONFIG, 1, seed=1, num_executors=number, placement=placement, make_executor=make)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == number, 2)
    world.run_until(lambda: world.gateways[0].link.model is not None, 2)
    return world


def roles_in(world: World) -> list[str]:
    return [executor.role for executor in status_of(world).executors]


def test_the_wire_names_the_roles_of_placement() -> None:
    assert tuple(Role) == EXECUTOR_ROLES


def test_a_role_is_seen_and_changed() -> None:
    world = world_of("prefill,decode,both")
    assert roles_in(world) == ["prefill", "decode", "both"]
    policies = status_of(world).policies
    assert isinstance(policies, PolicyNames)
    assert policies.placement == "disaggregated"
    assert call(world, "set_executor_role", 2, role="decode").error == ""
    assert call(world, "set_executor_role", 2, role="decode").error == "", "it may be repeated"
    assert roles_in(world) == ["prefill", "decode", "decode"]
    told = [notice.details for notice in world.engine.notices.take() if notice.event == "executor has another role"]
    assert told == [{"executor": 2, "role": "decode"}]


def test_a_role_outlives_its_executor_and_not_its_scheduler() -> None:
    world = world_of("prefill,decode")
    call(world, "set_executor_role", 1, role="both")
    world.kill_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    world.start_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 2, 20)
    assert roles_in(world) == ["prefill", "both"]
    world.start_scheduler()
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 2, 20)
    assert roles_in(world) == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("policy", "executor", "role", "error"),
    [
        ("disaggregated", 0, "cook", "role: 'cook' is not allowed; allowed: prefill, decode, both"),
        ("disaggregated", 2, "both", "executor: 2 is not known; allowed: 0, 1"),
        (
            "disaggregated",
            0,
            "decode",
            "role: 'decode' would leave no executor for prompts, of those that take requests",
        ),
        ("hybrid", 1, "prefill", "role: 'prefill' would leave no executor for decoding, of those that take requests"),
        (
            "aggregated",
            0,
            "both",
            "role: it means nothing with --placement aggregated; allowed: disaggregated, hybrid",
        ),
    ],
)
def test_what_is_refused_changes_nothing(policy: str, executor: int, role: str, error: str) -> None:
    world = world_of("prefill,decode", policy)
    assert call(world, "set_executor_role", executor, role=role).error == error
    assert roles_in(world) == ["prefill", "decode"]


def test_executors_that_take_no_requests_do_not_count() -> None:
    world = world_of("prefill,decode,decode")
    call(world, "drain_executor", 1)
    assert "no executor for decoding" in call(world, "set_executor_role", 2, role="prefill").error
    call(world, "undrain_executor", 1)
    world.kill_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 2, 20)
    assert "no executor for decoding" in call(world, "set_executor_role", 2, role="prefill").error
    assert call(world, "set_executor_role", 2, role="both").error == ""


def test_two_executors_exchange_their_roles_by_way_of_both() -> None:
    world = world_of("prefill,decode")
    for executor, role in ((0, "both"), (1, "prefill"), (0, "decode")):
        assert call(world, "set_executor_role", executor, role=role).error == ""
    assert roles_in(world) == ["decode", "prefill"]


def test_the_metric_has_one_sample_for_each_executor() -> None:
    def samples() -> dict[str, str]:
        families = families_of(take_snapshot(world.engine, world.now))
        found = [sample.labels for one in families for sample in one.samples if sample.name == "headway_executor_role"]
        return {labels["executor"]: labels["role"] for labels in found}

    world = world_of("prefill,decode")
    assert samples() == {"0": "prefill", "1": "decode"}
    call(world, "set_executor_role", 1, role="both")
    assert samples() == {"0": "prefill", "1": "both"}


def test_explain_follows_a_hand_off() -> None:
    world = world_of("prefill,decode", max_num_batched_tokens=4, max_num_seqs=4)
    submit(world, 1, max_tokens=20, num_prompt_tokens=75)
    world.run_until(lambda: "r0" in listed(world), 2)
    assert explained(world, "r0").endswith(" It leaves this executor with its first token, and goes on elsewhere.")
    world.run_until(lambda: listed(world)["r0"].executor == 1, 2)
    moved = explained(world, "r0")
    assert "and runs on executor 1: " in moved
    assert "leaves" not in moved
    finish(world)


def test_explain_of_a_request_that_waits_for_an_executor_that_decodes() -> None:
    world = world_of("prefill,decode", max_num_seqs=2)
    first = submit(world, 2, max_tokens=60)
    run_until_started(first, world)
    world.run_until(lambda: all(state.executor == 1 for state in listed(world).values()), 2)
    third = submit(world, 1, max_tokens=9)
    run_until_started(third, world)
    world.run_until(lambda: listed(world)["r2"].executor < 0, 2)
    text = explained(world, "r2")
    assert "executor 0 has the role prefill; executor 1 has 2 requests in 2 rows." in text
    assert text.endswith(" 3 of its tokens are computed and kept in the host pool of executor 0.")
    finish(world)


def test_explain_of_a_request_that_could_not_take_its_blocks_along() -> None:
    world = world_of("prefill,decode")
    cell = world.engine.fleet.cells[0]
    assert cell.core is not None
    books = cell.core.swapping.books
    taken = books.pool.allocate(books.pool.num_free)
    (sequence,) = submit(world, 1, max_tokens=40)
    run_until_started([sequence], world)
    world.run_until(lambda: len(sequence.tokens) > 3, 2)
    assert listed(world)["r0"].executor == 0
    text = "It was to leave behind its prompt, and stays: there was no room for its blocks where others can read."
    assert explained(world, "r0").endswith(text)
    books.pool.release(taken)
    finish(world)
