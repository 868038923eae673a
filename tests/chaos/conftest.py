"""The table of promises: each test fills a row with what it measured; shown as it goes, and written at the end.

Owns: the table, its seed, and the file named by ``CHAOS_RESULTS``.
Must not know: how anything is measured.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from program import provenance

SEED = int(os.environ.get("CHAOS_SEED", "20261121"))
_OUTCOME = pytest.StashKey[str]()


@dataclass
class Row:
    """One line of the table."""

    inject: str = ""
    promise: str = ""
    measured: list[str] = field(default_factory=list)
    outcome: str = "did not run"
    took_s: float = 0.0

    def about(self, inject: str, promise: str) -> None:
        """What is done, and what must come of it."""
        self.inject, self.promise = inject, promise

    def note(self, text: str) -> None:
        """Something measured."""
        self.measured.append(text)

    def cells(self) -> str:
        return f"| {self.inject} | {self.promise} | {'; '.join(self.measured) or '-'} | {self.outcome} |"


TABLE: list[Row] = []
SESSION: list[pytest.Config] = []
ORIGIN: dict[str, Any] = {}


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Iterator[Row]:
    """The row of this test."""
    line = Row()
    started = time.monotonic()
    yield line
    line.took_s = time.monotonic() - started
    line.outcome = request.node.stash.get(_OUTCOME, "did not run")
    if line.inject:
        TABLE.append(line)
        say(f"\n{line.cells()} ({line.took_s:.0f} s)\n")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Chance from the seed and the test's name, so that a test alone draws what it draws among others."""
    return random.Random(f"{SEED} {request.node.name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        expected = hasattr(report, "wasxfail")
        names = {"passed": "holds", "failed": "BROKEN", "skipped": "not yet" if expected else "skipped"}
        item.stash[_OUTCOME] = names[report.outcome]
    return report


def pytest_configure(config: pytest.Config) -> None:
    SESSION.append(config)
    ORIGIN.update(provenance(SEED))  # now: a run takes minutes, in which the tree may go on


def pytest_sessionfinish() -> None:
    destination = os.environ.get("CHAOS_RESULTS")
    if not TABLE or not destination:
        return
    text = as_markdown()
    Path(destination).write_text(text)
    say(f"\n{text}\n")


def as_markdown() -> str:
    """The table with where and of what it was measured."""
    origin, hardware = ORIGIN, ORIGIN["hardware"]
    facts = (
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB; "
        f"Python {origin['python']}; commit {origin['commit']}; seed {SEED}; "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}; {sum(line.took_s for line in TABLE) / 60:.0f} minutes in all"
    )
    lines = [
        "# What was injected, promised and measured",
        "",
        "Written by `make chaos`: real processes, every token compared with an undisturbed run. Other work may have run on",
        "the machine meanwhile. *not yet*: the test is there and the promise does not hold.",
        "",
        facts,
        "",
        "| inject | promise | measured | |",
        "|---|---|---|---|",
        *(line.cells() for line in TABLE),
        "",
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    """Past pytest's capture, so that a run of minutes shows where it is."""
    if os.environ.get("CHAOS_RESULTS"):
        with SESSION[0].pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            sys.stderr.write(text)
            sys.stderr.flush()
