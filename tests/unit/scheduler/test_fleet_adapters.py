"""The adapters of several executors: who has which, who is asked for what, and what requests are told."""

import msgspec
import pytest

from headway_executor.backend import ModelFilesError, ReadAdapter
from headway_executor.backends.simulated import SimulatedBackend
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.adapters import LoadedAdapter
from headway_proto.ingress import REJECT_NOT_FOUND, Finished, Rejected
from headway_proto.operations import AdapterToLoad, AdminCall, AdminReply
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.state.limits import SchedulerLimits
from simulation.world import World
from unit.scheduler.test_scheduler_engine import CONFIG, LIMITS

BROKEN = "broken"
"""A directory that no executor can load."""


@pytest.fixture(autouse=True)
def _files_may_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SimulatedBackend.read_adapter

    def read_or_refuse(self: SimulatedBackend, name: str, directory: str) -> ReadAdapter:
        if directory == BROKEN:
            raise ModelFilesError(f"{directory}: no adapter_model.safetensors")
        return read(self, name, directory)

    monkeypatch.setattr(SimulatedBackend, "read_adapter", read_or_refuse)


def world_of(num_executors: int, adapters: dict[str, str] | None = None, **limits: object) -> World:
    settings: SchedulerLimits = msgspec.structs.replace(LIMITS, max_num_waiting=60, **limits)
    config = msgspec.structs.replace(CONFIG, adapters=adapters or {})
    world = World(settings, config, num_gateways=1, seed=1, num_executors=num_executors)
    wait_for_executors(world, num_executors)
    world.run_until(lambda: world.gateways[0].link.model is not None, 2)
    return world


def wait_for_executors(world: World, count: int) -> None:
    world.run_until(lambda: len(world.engine.fleet.open_cells) == count, 30)


def call(world: World, method: str, name: str = "", directory: str = "") -> AdminReply:
    link = world.gateways[0].link
    link.call_admin(AdminCall(method=method, adapter=AdapterToLoad(name, directory) if name else None))
    replies: list[AdminReply] = []

    def answered() -> bool:
        replies.extend(link.take_admin_replies())
        return bool(replies)

    world.run_until(answered, 2)
    return replies[0]


def names_of(world: World) -> list[str]:
    return [adapter.name for adapter in call(world, "adapters").adapters]


def submit(world: World, adapter: str, max_tokens: int = 8) -> LiveSequence:
    gateway = world.gateways[0]
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    number = len(gateway.sequences)
    return gateway.submit(f"r{number}", prompt, max_tokens, SamplingParams(temperature=0.0), adapter=adapter)


def tokens_of(world: World, *adapters: str) -> list[list[int]]:
    sequences = [submit(world, adapter) for adapter in adapters]
    world.run_until(world.all_ended, 30)
    assert all(isinstance(sequence.end, Finished) and not sequence.end.error for sequence in sequences)
    return [sequence.tokens for sequence in sequences]


def in_executors(world: World) -> list[set[str]]:
    return [set(executor.backend._adapters) for executor in world.executors if executor is not None]


def test_rows_of_different_adapters_run_together_and_share_no_blocks() -> None:
    world = world_of(1, {"a": "x", "b": "y"})
    plain, first, second = tokens_of(world, "", "a", "b")
    assert len({tuple(tokens) for tokens in (plain, first, second)}) == 3
    # The simulated backend checks that the blocks which a row finds cached were written for it.
    assert tokens_of(world, "b", "a", "", "a") == [second, first, plain, first]


def test_what_is_loaded_is_on_every_executor_and_on_those_that_come() -> None:
    world = world_of(2, {"a": "x"})
    assert names_of(world) == ["a"]
    assert call(world, "load_adapter", "b", "y").error == ""
    assert names_of(world) == ["a", "b"]
    assert in_executors(world) == [{"a", "b"}, {"a", "b"}]
    before = tokens_of(world, "b")
    world.kill_executor(1)
    wait_for_executors(world, 1)
    world.start_executor(1)
    wait_for_executors(world, 2)
    world.run_until(lambda: in_executors(world) == [{"a", "b"}, {"a", "b"}], 5)
    assert tokens_of(world, *["b"] * 6) == before * 6
    assert call(world, "unload_adapter", "b").error == ""
    assert in_executors(world) == [{"a"}, {"a"}]


def test_a_scheduler_that_starts_anew_learns_from_its_executor() -> None:
    world = world_of(1, {"a": "x"})
    assert call(world, "load_adapter", "b", "y").error == ""
    before = tokens_of(world, "b")
    world.start_scheduler()
    wait_for_executors(world, 1)
    world.run_until(lambda: world.gateways[0].link.model is not None, 5)
    assert names_of(world) == ["a", "b"]
    assert tokens_of(world, "b") == before


def test_what_only_an_executor_has_that_comes_late_to_a_new_scheduler_can_be_named_again() -> None:
    """The first one restarts together with the scheduler, and has nothing but what it was started with."""
    world = world_of(2, {"a": "x"})
    assert call(world, "load_adapter", "b", "y").error == ""
    before = tokens_of(world, "b")
    late = world.executors[1]
    world.kill_executor(1)  # for the while
    world.start_executor(0)
    world.start_scheduler()
    wait_for_executors(world, 1)
    world.run_until(lambda: world.gateways[0].link.model is not None, 5)
    assert names_of(world) == ["a"]
    world.executors[1] = late
    wait_for_executors(world, 2)
    world.run_until(lambda: in_executors(world) == [{"a", "b"}, {"a", "b"}], 5)
    assert names_of(world) == ["a", "b"]
    assert tokens_of(world, *["b"] * 6) == before * 6


def test_what_is_unloaded_while_an_executor_is_away_is_not_brought_back_by_it() -> None:
    world = world_of(3, {"a": "x", "b": "y"})
    away = world.executors[1:]
    for number in (1, 2):
        world.kill_executor(number)
    wait_for_executors(world, 1)
    assert call(world, "unload_adapter", "b").error == ""
    world.start_executor(2)  # in the place that one of them had
    wait_for_executors(world, 2)
    for number, executor in enumerate(away, 1):
        world.executors[number] = executor
    wait_for_executors(world, 3)
    assert in_executors(world)[1] == {"a", "b"}
    assert names_of(world) == ["a"]


def test_an_executor_of_its_own_that_joins_others_adds_none() -> None:
    world = world_of(2, {"a": "x"})
    world.kill_executor(1)
    wait_for_executors(world, 1)
    world.config = msgspec.structs.replace(world.config, adapters={"mine": "z"})
    world.start_executor(1)
    wait_for_executors(world, 2)
    world.run_until(lambda: in_executors(world)[1] == {"a", "mine"}, 5)
    assert names_of(world) == ["a"]


def test_what_cannot_be_loaded_is_nowhere() -> None:
    world = world_of(2)
    assert call(world, "load_adapter", "a", BROKEN).error == "executor 0: broken: no adapter_model.safetensors"
    assert names_of(world) == []
    rejected = submit(world, "a")
    world.run_until(world.all_ended, 5)
    assert isinstance(rejected.end, Rejected)
    assert (rejected.end.reason, rejected.end.field) == (REJECT_NOT_FOUND, "adapter")
    assert rejected.end.message == "'a' is not loaded; loaded: none"


def test_an_adapter_that_an_executor_cannot_load_when_it_joins_is_dropped() -> None:
    world = world_of(1)
    assert call(world, "load_adapter", "a", "x").error == ""
    running = submit(world, "a", max_tokens=80)
    world.run_until(lambda: len(running.tokens) > 2, 5)
    known = world.engine.fleet.adapters._known
    known["a"] = LoadedAdapter("a", BROKEN, known["a"].fingerprint)  # its files have gone since
    world.kill_executor(0)
    wait_for_executors(world, 0)
    world.start_executor(0)
    world.run_until(world.all_ended, 30)
    assert isinstance(running.end, Finished)
    assert "is not loaded" in running.end.error
    assert names_of(world) == []
    assert "adapter dropped" in [notice.event for notice in world.engine.notices.take()]


def test_an_executor_that_begins_anew_keeps_an_adapter_whose_files_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(1)
    assert call(world, "load_adapter", "a", "x").error == ""
    (before,) = tokens_of(world, "a")

    def refuse(self: SimulatedBackend, name: str, directory: str) -> ReadAdapter:
        raise ModelFilesError(f"{directory}: no adapter_model.safetensors")

    monkeypatch.setattr(SimulatedBackend, "read_adapter", refuse)
    running = submit(world, "a", max_tokens=80)
    world.run_until(lambda: len(running.tokens) > 2, 5)
    cell = world.engine.fleet.cells[0]
    cell.on_events(cell.link.reopen("a frame was lost", world.now), world.now)
    world.run_until(world.all_ended, 30)
    assert isinstance(running.end, Finished)
    assert (running.end.error, running.tokens[: len(before)]) == ("", before)
    assert names_of(world) == ["a"]
    assert tokens_of(world, "a") == [before]


def test_an_adapter_in_use_stays_and_names_are_taken_once() -> None:
    world = world_of(1, {"a": "x"})
    running = submit(world, "a", max_tokens=80)
    world.run_until(lambda: len(running.tokens) > 2, 5)
    assert (
        call(world, "unload_adapter", "a").error
        == "name: 1 requests with 'a' have not ended; allowed: when none is left"
    )
    assert call(world, "load_adapter", "a", "y").error == "name: 'a' is loaded from 'x'; unload it first"
    assert call(world, "load_adapter", "a b", "y").error.startswith("name: 'a b' is not allowed; allowed: 1 to 64 ")
    assert call(world, "unload_adapter", "b").error == "not found"
    world.run_until(world.all_ended, 30)
    first = running.tokens[:8]
    assert call(world, "unload_adapter", "a").error == ""
    assert call(world, "load_adapter", "a", "y").error == ""
    assert tokens_of(world, "a")[0] != first, "other files under the same name"


def test_without_an_executor_nothing_is_loaded() -> None:
    world = world_of(1)
    world.kill_executor(0)
    wait_for_executors(world, 0)
    assert call(world, "load_adapter", "a", "x").error == "no executor is connected"


@pytest.mark.parametrize("most", [1, 2])
def test_no_step_runs_more_adapters_than_allowed_and_nobody_starves(most: int) -> None:
    """Requests of the first adapters keep coming; one of another still gets its turn."""
    world = world_of(1, {name: name for name in "abc"}, max_adapters=most, max_num_seqs=4)
    core = world.engine.fleet.cells[0].core
    assert core is not None
    other: LiveSequence | None = None
    for number in range(2000):
        if len([sequence for sequence in world.gateways[0].sequences if sequence.end is None]) < 8:
            submit(world, "ab"[number % most], max_tokens=10)
        if number == 10:
            other = submit(world, "c", max_tokens=5)
        world.beat()
        running = {request.new.adapter for request in core.requests() if request.row >= 0}
        assert len(running) <= most
        if other is not None and other.end is not None:
            break
    assert other is not None
    assert isinstance(other.end, Finished), "others overtook it for ever"
