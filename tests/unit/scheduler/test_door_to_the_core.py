"""Operators and tools read the core through its view; nothing else reaches into its tables."""

import ast
from pathlib import Path

import pytest

from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.view import SchedulerFigures, SchedulerView

REPOSITORY = Path(__file__).parents[3]
PRODUCT = [
    path
    for top in ("services", "lab", "proto")
    for path in sorted((REPOSITORY / top).rglob("*.py"))
    if "headway_scheduler/core/" not in path.as_posix() and "_compiled" not in path.parts
]
TABLES = {"pool", "rows", "cache", "counters", "swapping", "prefix_statistics", "pinned_prefixes"}
CORE_NAMES = {"core", "_core", "scheduler", "_scheduler"}
MAY_REACH_IN = {"core_calls.py", "recorder.py", "replay.py", "checkpoint.py"}
"""The commands of operators, and their replay, change the core. The others record and restore it."""


def reaches_in(source: str) -> list[str]:
    """The expressions in ``source`` that take a table out of a core."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in TABLES:
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in CORE_NAMES:
                found.append(ast.unparse(node))
    return found


def test_only_the_view_reaches_into_the_core():
    found = {path.name: reaches_in(path.read_text()) for path in PRODUCT if path.name not in MAY_REACH_IN}
    assert len(found) > 100
    assert {name: places for name, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "source", ["core.pool.num_free", "self._core.rows", "engine.fleet.cells[0].core.cache.changes(0, 1)"]
)
def test_reaching_in_is_seen(source: str):
    assert reaches_in(source)


def test_the_figures_of_a_scheduler_without_work_are_the_defaults_but_for_its_capacity():
    capacity = ExecutorCapacity(
        num_blocks=8, block_size=4, max_model_len=16, vocab_size=97, max_num_rows=4, num_host_blocks=3
    )
    view = SchedulerView(Scheduler(SchedulerLimits(max_num_batched_tokens=32), capacity))
    figures = view.figures()
    expected = SchedulerFigures(
        num_total_blocks=8, num_free_blocks=8, num_host_blocks=3, num_free_host_blocks=3, num_budget_tokens=32
    )
    assert figures == expected
    assert view.counters == SchedulerCounters()
    assert (view.requests(), view.owners(), view.prefix_use()) == ([], {}, {})
    assert (view.kv_usage, view.alone, view.step_times, view.pinned_prefixes()) == (0.0, None, None, ())
    assert not view.cache_changes(None, 4).has_more
