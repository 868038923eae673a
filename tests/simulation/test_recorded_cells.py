"""What several executors did replays to the byte, from the beginning and from every checkpoint."""

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from headway.__main__ import main
from headway_lab.flight.cells import StepCollector, StepRange
from headway_lab.flight.explanation import explanation
from headway_lab.flight.life import Follower
from headway_lab.flight.perfetto import chrome_trace
from headway_lab.flight.picture import figure_of
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.choosing.policies import PlacementSettings
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.flight.records import Adopted, Arrived, InCell, Released
from headway_scheduler.flight.replay import Replay
from simulation.recorded_cells import RecordedCells
from simulation.sharing_executors import HostPools
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


@pytest.mark.parametrize("num_executors", [1, pytest.param(2, marks=pytest.mark.deep), 3])
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
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (2, 3))])
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


@pytest.fixture(scope="module")
def killed() -> RecordedCells:
    """Executor 1 of 2 was killed while it worked, and did not return."""
    world = RecordedCells(2, seed=3, beats=1 << 30)
    submit_some(world, 40)
    undisturbed_until(world, 250)
    world.kill_executor(1)
    world.run_until(world.all_ended, 120)
    world.recorder.flush(world.now, None, is_final=True)
    return world


def moved_requests(world: RecordedCells) -> list[str]:
    """The ids of those that both executors had."""
    names: dict[Origin, str] = {}
    cells: dict[Origin, set[int]] = {}
    cell = 0
    for record in world.log.records:
        if isinstance(record, InCell):
            cell = record.number
        elif isinstance(record, Arrived):
            names[record.origin] = record.request_id
        elif isinstance(record, Adopted):
            cells.setdefault(record.origin, set()).add(cell)
    return [names[origin] for origin, found in cells.items() if len(found) > 1]


def test_explain_follows_a_request_to_another_executor(killed: RecordedCells) -> None:
    followers = {name: Follower(name) for name in moved_requests(killed)}
    assert len(followers) > 2
    replay = Replay(killed.limits)
    for event in replay.run(killed.log.records):
        for follower in followers.values():
            follower.record(event, replay)
    num_running = 0
    for name, follower in followers.items():
        (life,) = follower.lives
        text = explanation(life, 1000.0)
        (sequence,) = [one for one in killed.gateways[0].sequences + killed.gateways[1].sequences
                       if one.submission.request_id == name]  # fmt: skip
        assert life.num_output_tokens == len(life.token_times_s) == len(sequence.tokens)
        assert life.choices[-1].executor == 0
        assert "It was given to executor 1." in text
        assert "It was given to executor 0 after executor 1." in text
        assert life.end.startswith("length")
        if any("the executor was lost" in setback.why for setback in life.setbacks):
            num_running += 1
            executors = [admission.executor for admission in life.admissions]
            assert executors == sorted(executors, reverse=True)
            assert {*executors} == {0, 1}
            assert "of executor 1" in text
            assert sum(step.num_own_tokens for step in life.own_steps) >= life.num_prompt_tokens
    assert num_running > 2


def explained(pools: HostPools, *, are_readable: bool) -> list[str]:
    """Some requests that are handed off, in words, the longest answer first."""
    placement = PlacementSettings("disaggregated", (Role.PREFILL, Role.DECODE))
    world = RecordedCells(2, seed=6, beats=1 << 30, placement=placement, make_executor=pools.executor)
    pools.are_readable = are_readable
    submit_some(world, 12)
    world.run_until(world.all_ended, 30)
    world.recorder.flush(world.now, None, is_final=True)
    sequences = [sequence for gateway in world.gateways for sequence in gateway.sequences]
    sequences.sort(key=lambda one: -one.submission.max_tokens)
    followers = [Follower(one.submission.request_id) for one in sequences]
    replay = Replay(world.limits)
    for event in replay.run(world.log.records):
        for follower in followers:
            follower.record(event, replay)
    return [explanation(follower.lives[0], 1000.0) for follower in followers]


def test_explain_tells_of_a_hand_off() -> None:
    text, *others = explained(HostPools(), are_readable=True)
    assert re.search(r"It was handed off with (\d+) computed tokens, for another executor to go on with it", text)
    assert re.search(r"It got a row in step \d+ of executor 1: (\d+) of its \d+ tokens came with it\.", text)
    assert "and 0 tokens were computed again" in text
    assert "preempted" not in text
    assert any("before token 2: it was handed off" in other for other in others)


def test_explain_tells_of_blocks_that_were_not_right() -> None:
    text = explained(HostPools(), are_readable=False)[0]
    assert "It was handed off" in text
    assert "It was preempted: the blocks that it brought from a host pool were not right." in text


def test_a_timeline_has_a_lane_for_each_executor(killed: RecordedCells) -> None:
    collector, part = StepCollector(StepRange(0, 1 << 30)), StepCollector(StepRange(20, 60))
    replay = Replay(killed.limits)
    for event in replay.run(killed.log.records):
        collector.record(event, replay)
        part.record(event, replay)
    steps = collector.steps
    assert {step.executor for step in steps} == {0, 1}
    assert part.steps == steps[20:60]
    for step in steps:
        assert step.num_tokens == sum(cell.num_tokens for cell in step.cells)
    events = msgspec.json.decode(chrome_trace(steps, 1000.0, 2))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        1: "executor 0: rows", 2: "executor 0: steps", 3: "executor 1: rows", 4: "executor 1: steps",
    }  # fmt: skip
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] in {1, 3}:
            by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in by_track.values():
        assert all(first[1] <= second[0] + 1e-3 for first, second in pairwise(sorted(slices)))
    figure = figure_of("cells", part.steps)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["executor 0", "executor 1"]


def test_the_commands_read_a_log_of_several_executors(
    killed: RecordedCells, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(killed.log.write_to(tmp_path / "log"))
    assert main(["replay", log]) == 0
    assert "byte-identical" in capsys.readouterr().out
    assert main(["explain", log]) == 0
    assert "40 requests got a first token and ended\n" in capsys.readouterr().out
    assert main(["explain", log, moved_requests(killed)[0]]) == 0
    assert "after executor 1" in capsys.readouterr().out
    assert main(["timeline", log, "--perfetto", str(tmp_path / "trace.json")]) == 0
