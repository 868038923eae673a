"""Under drawn schedules of faults every invariant holds; and where the product is wrong, one of them says so."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from simulation import fault_invariants as invariants
from simulation.fault_schedule import (
    CELL_FAULTS,
    EXECUTOR,
    FRAME_FAULTS,
    KINDS,
    LINK_FAULTS,
    PROCESS_FAULTS,
    SECOND_EXECUTOR,
    STEP_FAULTS,
    Fault,
    Schedule,
    draw,
    from_json,
)
from simulation.fault_shrink import shrink
from simulation.fault_world import FaultWorld, run
from simulation.mutants import FIRST_SEED, MUTANTS, TABLE, infected
from simulation.soak import kept_schedules, new_seeds, report_of, soak

NEW_SEEDS_FOR_S = 10.0
QUICK_MUTANTS = (
    "skip-free-on-abort",
    "reuse-a-block-in-flight",
    "failed-row-is-cached",
    "budget-off-by-one",
    "last-come-first-served",
    "stale-epoch-accepted",
    "resync-swallowed",
    "lost-executor-keeps-its-epoch",
    "row-not-reset",
    "credits-ignored",
    "last-token-dropped",
    "end-told-twice",
    "cancel-not-propagated",
    "delivered-again-after-restart",
    "tenant-tokens-kept",
    "traceparents-kept",
    "held-tokens-counted-for-ever",
    "abort-before-the-executor-ignored",
    "ended-ids-kept",
    "brake-not-told-of-an-abort",
    "lost-with-their-executor",
    "moved-without-its-output",
    "drained-cell-keeps-its-requests",
    "prompt-left-behind",
    "answer-of-another-cell",
)


def test_new_seeds(capsys):
    """Other schedules in every run. A seed that fails is told with the least that makes it fail and the line to keep."""
    seeds = new_seeds()
    first = next(seeds)
    totals, reports = soak(seeds, NEW_SEEDS_FOR_S, say=False)
    with capsys.disabled():
        print(f"\nfault schedules from seed {first + 1}: {totals.line().strip()}")  # noqa: T201 - to run them again
    assert not reports, "\n".join(reports)


@pytest.mark.parametrize(("found", "schedule"), kept_schedules())
def test_kept_schedules(found: str, schedule: Schedule):
    assert found, "each kept line tells above it what it found"
    assert report_of(schedule) is None


@pytest.mark.parametrize("names", [QUICK_MUTANTS[::2], QUICK_MUTANTS[1::2]], ids=["even", "odd"])
def test_mistakes_are_caught(names: tuple[str, ...]):
    """In a process of its own, which runs the core as it is written: what is compiled cannot be patched."""
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "simulation.mutants", *names], cwd=tests, capture_output=True, text=True, check=False
    )
    caught = dict(line.split()[:2] for line in done.stdout.splitlines())
    assert caught.keys() == set(names), done.stdout + done.stderr
    assert set(caught.values()) <= set(invariants.NAMES), done.stdout
    assert done.returncode == 0


def test_the_published_table_has_every_mutant_caught():
    table = TABLE.read_text()
    assert all(f"| `{name}` |" in table for name in MUTANTS)
    assert f"{len(MUTANTS)} of {len(MUTANTS)} caught" in table


def test_without_a_mistake_the_seeds_that_mutants_meet_hold():
    assert [report_of(draw(seed)) for seed in range(FIRST_SEED, FIRST_SEED + 20)] == [None] * 20


def story(schedule: Schedule) -> tuple[object, ...]:
    world: FaultWorld = run(schedule)
    delivered = [client.delivered for client in world.clients.values()]
    return world.now, world.num_steps, world.num_faults, world.digests, delivered


def test_the_same_seed_runs_the_same_way():
    schedules = [draw(seed, num_executors) for seed in range(10) for num_executors in (1, 2, 3)]
    assert [story(schedule) for schedule in schedules] == [story(schedule) for schedule in schedules]


def test_a_schedule_is_the_same_after_it_was_written_down():
    assert all(from_json(draw(seed).to_json()) == draw(seed) for seed in range(50))


def test_every_kind_of_fault_is_drawn_and_every_policy():
    schedules = [draw(seed) for seed in range(300)]
    assert {fault.kind for schedule in schedules for fault in schedule.faults} == set(KINDS)
    for field, count in {
        "order": 6,
        "batching": 5,
        "reserve": 5,
        "preemption": 3,
        "max_steps_in_flight": 5,
        "num_lanes": 4,
    }.items():
        assert len({getattr(schedule.settings, field) for schedule in schedules}) == count


def test_mostly_one_executor_is_drawn_and_its_schedule_does_not_depend_on_the_others():
    schedules = [draw(seed) for seed in range(300)]
    counts = Counter(1 + len(schedule.settings.more_executors_after_s) for schedule in schedules)
    assert set(counts) == {1, 2, 3}
    assert counts[1] > 150
    for schedule in schedules:
        alone, several = draw(schedule.seed, 1), draw(schedule.seed, 3)
        assert schedule == alone or schedule.settings.more_executors_after_s
        assert not any(fault.kind in CELL_FAULTS or fault.target >= SECOND_EXECUTOR for fault in alone.faults)
        assert alone.requests == several.requests
        assert len(alone.faults) <= len(several.faults)


def test_every_kind_of_fault_hits_every_executor():
    schedules = [draw(seed, 2) for seed in range(600)]
    hit = {(fault.kind, fault.target) for schedule in schedules for fault in schedule.faults}
    for kind in {*FRAME_FAULTS, *LINK_FAULTS, *PROCESS_FAULTS, *STEP_FAULTS, *CELL_FAULTS, "sleep"}:
        assert {(kind, EXECUTOR), (kind, SECOND_EXECUTOR)} <= hit


def test_a_failing_schedule_is_made_small():
    with infected("lost-executor-keeps-its-epoch"):
        schedule = next(draw(seed) for seed in range(1000) if len(draw(seed).faults) > 3 and run(draw(seed)).violation)
        smallest = shrink(schedule, lambda candidate: run(candidate).violation is not None)
        report = report_of(schedule)
    assert len(smallest.faults) == 1
    assert len(smallest.requests) == 1
    assert "LIVENESS" in report
    assert f"seed {schedule.seed} fails" in report


def test_events_can_be_taken_away_one_by_one():
    schedule = next(draw(seed) for seed in range(100) if len(draw(seed).faults) > 7)
    for place in range(len(schedule.faults)):
        rest: tuple[Fault, ...] = schedule.faults[:place] + schedule.faults[place + 1 :]
        assert run(msgspec.structs.replace(schedule, faults=rest)).violation is None
