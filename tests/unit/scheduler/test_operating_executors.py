"""Several executors as operators see and command them: status, list, Explain, drain, caches, pins, metrics."""

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import encode_column
from headway_proto.operations import AdminCall, AdminReply, ExecutorStatus, PrefixToPin, SequenceState, Status
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.choosing.cell_load import Lack, Shortage
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.metrics import families_of, take_snapshot
from headway_scheduler.operators.wait_sentences import sentence_for_unplaced
from simulation.world import World
from unit.scheduler.test_scheduler_engine import CONFIG, LIMITS


def world_of(num_executors: int, num_waiting: int = 60, **limits: object) -> World:
    settings: SchedulerLimits = msgspec.structs.replace(LIMITS, max_num_waiting=num_waiting, **limits)
    world = World(settings, CONFIG, num_gateways=1, seed=1, num_executors=num_executors)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == num_executors, 2)
    world.run_until(lambda: world.gateways[0].link.model is not None, 2)
    return world


def submit(world: World, count: int, max_tokens: int = 60, num_prompt_tokens: int = 3) -> list[LiveSequence]:
    gateway = world.gateways[0]
    first = len(gateway.sequences)
    prompt = [1 + place % 90 for place in range(num_prompt_tokens)]
    return [
        gateway.submit(f"r{number}", prompt, max_tokens, SamplingParams()) for number in range(first, first + count)
    ]


def call(
    world: World,
    method: str,
    executor: int = 0,
    request_id: str = "",
    prefix: PrefixToPin | None = None,
    role: str = "",
) -> AdminReply:
    link = world.gateways[0].link
    link.call_admin(AdminCall(method=method, request_id=request_id, prefix=prefix, executor=executor, role=role))
    replies: list[AdminReply] = []

    def answered() -> bool:
        replies.extend(link.take_admin_replies())
        return bool(replies)

    world.run_until(answered, 2)
    return replies[0]


def status_of(world: World) -> Status:
    status = call(world, "status").status
    assert status is not None
    return status


def listed(world: World) -> dict[str, SequenceState]:
    return {state.request_id: state for state in call(world, "list").sequences}


def run_until_started(sequences: list[LiveSequence], world: World) -> None:
    world.run_until(lambda: all(sequence.tokens for sequence in sequences), 5)


def finish(world: World) -> None:
    world.run_until(world.all_ended, 60)


def test_without_an_executor_the_status_lists_none() -> None:
    world = World(LIMITS, CONFIG, num_gateways=1, seed=1)
    world.kill_executor(0)
    assert status_of(world).executors == ()


def test_one_executor_is_listed_as_it_is_told_alone() -> None:
    world = world_of(1)
    submit(world, 6)
    run_until_started(world.gateways[0].sequences[:4], world)
    status = status_of(world)
    assert status.executor is not None
    expected = ExecutorStatus(
        number=0,
        state=status.executor_state,
        epoch=status.epoch,
        is_draining=False,
        details=status.executor,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_total_blocks=status.num_total_blocks,
        num_free_blocks=status.num_free_blocks,
        num_cached_blocks=status.num_cached_blocks,
        kv_usage=1 - status.num_free_blocks / status.num_total_blocks,
        num_steps=status.num_steps,
        role="both",
    )
    assert status.executors == (expected,)
    assert (status.num_running, status.num_waiting, status.num_unplaced, status.num_moved) == (4, 2, 0, 0)
    assert {state.executor for state in listed(world).values()} == {0}
    finish(world)


def test_each_executor_of_several_is_listed_and_they_add_up() -> None:
    world = world_of(2)
    sequences = submit(world, 11)
    run_until_started(sequences[:8], world)
    status = status_of(world)
    first, second = status.executors
    assert [executor.number for executor in status.executors] == [0, 1]
    assert [executor.state for executor in status.executors] == ["ready", "ready"]
    assert first.epoch != second.epoch
    assert all(executor.details is not None and executor.num_steps for executor in status.executors)
    for name in ("num_running", "num_total_blocks", "num_free_blocks", "num_cached_blocks", "num_steps"):
        assert getattr(status, name) == getattr(first, name) + getattr(second, name), name
    assert (first.num_running, second.num_running) == (4, 4)
    assert status.num_waiting == first.num_waiting + second.num_waiting + status.num_unplaced
    assert status.num_unplaced == 3
    states = listed(world)
    assert list(states) == [f"r{number}" for number in range(11)], "in the order of arrival"
    assert sorted(states[f"r{number}"].executor for number in range(8)) == [0] * 4 + [1] * 4
    assert [states[f"r{number}"].executor for number in range(8, 11)] == [-1] * 3
    for number in range(8):
        cell = world.engine.fleet.cells[states[f"r{number}"].executor]
        assert cell.core is not None
        assert f"r{number}" in {request.new.request_id for request in cell.core.requests()}
    finish(world)


def test_an_executor_that_is_gone_stays_listed_and_its_blocks_no_longer_count() -> None:
    world = world_of(2)
    sequences = submit(world, 8)
    run_until_started(sequences, world)
    world.kill_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    status = status_of(world)
    assert [(executor.state, executor.details is None) for executor in status.executors] == [
        ("ready", False),
        ("absent", True),
    ]
    assert status.num_total_blocks == CONFIG.num_kv_blocks == status.executors[0].num_total_blocks
    assert status.executors[1].num_running == status.executors[1].num_waiting == 0
    finish(world)
    assert status_of(world).num_moved > 0


def test_a_drained_executor_gives_its_requests_away_and_gets_none_until_that_is_undone() -> None:
    world = world_of(2)
    sequences = submit(world, 4)
    run_until_started(sequences, world)
    assert {state.executor for state in listed(world).values()} == {0, 1}
    num_to_move = sum(state.executor == 1 for state in listed(world).values())
    assert call(world, "drain_executor", 1) == AdminReply(call_id=3)
    assert call(world, "drain_executor", 1).error == "", "it may be repeated"
    world.run_until(lambda: {state.executor for state in listed(world).values()} == {0}, 5)
    status = status_of(world)
    assert [executor.is_draining for executor in status.executors] == [False, True]
    assert status.scheduler_state == "serving"
    assert status.num_moved == num_to_move
    run_until_started(submit(world, 2, max_tokens=3), world)
    assert status_of(world).executors[1].num_running == 0
    assert call(world, "undrain_executor", 1).error == ""
    run_until_started(submit(world, 2), world)
    assert status_of(world).executors[1].num_running > 0
    finish(world)


@pytest.mark.parametrize("method", ["drain_executor", "undrain_executor", "set_executor_role", "cache", "pins"])
def test_a_number_that_is_none_is_refused(method: str) -> None:
    world = world_of(2)
    assert call(world, method, 2).error == "executor: 2 is not known; allowed: 0, 1"
    assert call(world, method, -1).error == "executor: -1 is not known; allowed: 0, 1"


def test_the_only_executor_that_takes_requests_is_not_drained() -> None:
    refusal = "executor: {} cannot drain, because no other executor takes requests"
    world = world_of(1)
    assert call(world, "drain_executor", 0).error == refusal.format(0)
    world = world_of(2)
    assert call(world, "drain_executor", 0).error == ""
    assert call(world, "drain_executor", 1).error == refusal.format(1)
    call(world, "undrain_executor", 0)
    world.kill_executor(0)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    assert call(world, "drain_executor", 1).error == refusal.format(1)
    submit(world, 1)
    finish(world)


def test_no_executor_no_drain() -> None:
    world = World(LIMITS, CONFIG, num_gateways=1, seed=1)
    world.kill_executor(0)
    assert call(world, "drain_executor", 0).error == "no executor has joined yet"


def explained(world: World, request_id: str) -> str:
    reply = call(world, "explain", request_id=request_id)
    assert not reply.error
    assert reply.sequences[0].executor == listed(world)[request_id].executor
    return reply.explanation


def test_explain_tells_where_a_request_runs_and_why_it_was_put_there() -> None:
    world = world_of(2)
    run_until_started(submit(world, 3), world)
    chosen = explained(world, "r0")
    assert "and runs on executor 0: " in chosen
    assert chosen.endswith(
        "Of 2 executors that could start it soon, number 0 was expected to be first: it had 0 of its tokens in the prefix "
        "cache and 0 tokens to compute before it."
    )
    assert "and runs on executor 1: " in explained(world, "r1")
    call(world, "drain_executor", 1)
    world.run_until(lambda: {state.executor for state in listed(world).values()} == {0}, 5)
    moved = explained(world, "r1")
    assert "and runs on executor 0: " in moved
    assert moved.endswith("Executor 0 was the only one that could start it soon.")
    finish(world)


def test_no_more_tokens_are_computed_than_are_known() -> None:
    """Steps are scheduled ahead of the tokens that they compute."""
    world = world_of(1)
    run_until_started(submit(world, 1), world)
    reply = call(world, "explain", request_id="r0")
    found = re.search(r": (\d+) of (\d+) known tokens are computed", reply.explanation)
    assert found is not None
    assert int(found[1]) == int(found[2])
    (state,) = reply.sequences
    assert state.num_computed_tokens == state.num_prompt_tokens + state.num_output_tokens
    finish(world)


def test_explain_of_one_executor_names_none() -> None:
    world = world_of(1)
    run_until_started(submit(world, 1), world)
    assert "executor" not in explained(world, "r0")


def test_explain_tells_why_no_executor_could_start_it() -> None:
    world = world_of(2)
    run_until_started(submit(world, 8), world)
    submit(world, 2)
    world.run_until(lambda: "r9" in listed(world), 2)
    full = "executor 0 has 4 requests in 4 rows; executor 1 has 4 requests in 4 rows."
    assert explained(world, "r8").endswith(f"and waits for an executor behind 0 others: {full}")
    assert explained(world, "r9").endswith(f"and waits for an executor behind 1 others: {full}")
    call(world, "pause")
    assert explained(world, "r9").endswith("behind 1 others: admission is paused.")
    call(world, "resume")
    finish(world)


def test_explain_gives_the_blocks_that_are_missing_and_names_what_is_drained() -> None:
    world = world_of(2)
    call(world, "drain_executor", 0)
    run_until_started(submit(world, 1, max_tokens=20, num_prompt_tokens=75), world)
    submit(world, 1, max_tokens=20, num_prompt_tokens=75)
    submit(world, 1, max_tokens=20, num_prompt_tokens=75)
    world.run_until(lambda: "r2" in listed(world), 2)
    why = r"executor 0 is draining; executor 1 must find 19 blocks for all that waits, and 1\d are free\.$"
    assert re.search(why, explained(world, "r2"))
    finish(world)


@pytest.mark.parametrize(
    ("can_hold", "accepts", "shortage", "why"),
    [
        (False, True, None, "cannot run its 3 tokens"),
        (True, False, None, "is draining"),
        (True, True, None, "has room, and it starts there when its turn comes"),
        (True, True, Shortage(Lack.ROWS, 5, 4), "has 4 requests in 4 rows"),
        (True, True, Shortage(Lack.TOKENS, 70, 64), "has 67 waiting tokens, and a step takes 64"),
        (True, True, Shortage(Lack.BLOCKS, 9, 8), "must find 9 blocks for all that waits, and 8 are free"),
    ],
)
def test_what_each_executor_lacks(*, can_hold: bool, accepts: bool, shortage: Shortage | None, why: str) -> None:
    request = SimpleNamespace(token_ids=[1, 2, 3])
    cells: list[Any] = [
        SimpleNamespace(number=number, accepts=accepts, can_hold=lambda _: can_hold, shortage_for=lambda _: shortage)
        for number in range(10)
    ]
    told: Any = request
    policy: Any = SimpleNamespace(cells_for=lambda _, accepting: accepting)  # the compiled ones take no played cells
    assert sentence_for_unplaced(told, cells[:2], policy, is_paused=False) == f"executor 0 {why}; executor 1 {why}"
    assert sentence_for_unplaced(told, cells, policy, is_paused=False).endswith(
        f"; executor 7 {why}; and 2 more executors"
    )
    assert sentence_for_unplaced(told, cells, policy, is_paused=True) == "admission is paused"


def test_pins_and_cache_are_those_of_the_executor_that_is_named() -> None:
    world = world_of(2)
    prefix = PrefixToPin(name="system", token_ids=encode_column(range(1, 9)))
    assert call(world, "pin", prefix=prefix).error == ""
    call(world, "drain_executor", 0)
    gateway = world.gateways[0]
    gateway.submit("r", [*range(1, 9), 50], 4, SamplingParams())
    finish(world)
    (first,), (second,) = (call(world, "pins", number).pinned_prefixes for number in (0, 1))
    assert (first.num_blocks, first.num_resident_blocks) == (2, 0)
    assert (second.num_blocks, second.num_resident_blocks) == (2, 2)
    caches = [call(world, "cache", number).cache for number in (0, 1)]
    cells = world.engine.fleet.cells
    for cache, cell in zip(caches, cells, strict=True):
        assert cache is not None
        assert cell.core is not None
        assert cache.position.life == cell.core.epoch
    assert sum(change.num_blocks for change in caches[0].changes) == 0
    assert sum(change.num_blocks for change in caches[1].changes) > 0


def samples_of(world: World) -> dict[tuple[str, str], float]:
    snapshot = take_snapshot(world.engine, world.now)
    return {
        (sample.name, sample.labels.get("executor", "")): sample.value
        for family in families_of(snapshot)
        for sample in family.samples
        if not {"le", "mode", "reason", "role", "term", "finished_reason"} & set(sample.labels)
    }


def test_one_executor_keeps_its_series() -> None:
    samples = samples_of(world_of(1))
    assert not [name for name, executor in samples if executor]
    assert ("headway_num_requests_unplaced", "") not in samples
    assert samples["headway_executor_up", ""] == 1


def test_metrics_of_several_executors_have_a_label() -> None:
    world = world_of(2)
    run_until_started(submit(world, 8), world)
    submit(world, 3)
    world.run_until(lambda: "r10" in listed(world), 2)
    samples, status = samples_of(world), status_of(world)
    for executor in status.executors:
        number = str(executor.number)
        assert samples["headway_executor_requests_running", number] == 4
        assert samples["headway_executor_requests_waiting", number] == 0
        assert 0 < samples["headway_executor_kv_cache_usage_perc", number] < 1
        assert samples["headway_executor_epoch", number] == executor.epoch
        assert samples["headway_executor_ready", number] == 1
        assert samples["headway_executor_draining", number] == 0
        assert samples["headway_executor_steps_total", number] > 0
    assert samples["headway_num_requests_running", ""] == 8
    assert samples["headway_num_requests_unplaced", ""] == 3
    assert samples["headway_requests_moved_total", ""] == 0
    call(world, "drain_executor", 1)
    world.kill_executor(1)
    world.run_until(lambda: len(world.engine.fleet.open_cells) == 1, 20)
    finish(world)
    samples = samples_of(world)
    assert samples["headway_executor_ready", "1"] == 0
    assert samples["headway_executor_draining", "1"] == 1
    assert samples["headway_requests_moved_total", ""] == 4


def test_nothing_is_kept_of_requests_that_ended_on_the_way() -> None:
    world = world_of(2)
    sequences = submit(world, 8)
    run_until_started(sequences, world)
    call(world, "pause")
    call(world, "drain_executor", 1)
    fleet = world.engine.fleet
    world.run_until(lambda: len(fleet.placement) == 4, 5)
    waiting = [name for name, state in listed(world).items() if state.executor < 0]
    assert call(world, "cancel", request_id=waiting[0]).error == ""
    call(world, "resume")
    finish(world)
    assert fleet.transit.num_moved == 3
    assert not fleet.transit.num_on_the_way
