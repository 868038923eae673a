"""How many cores an executor takes: within its affinity, and within every quota around it."""

import os
from pathlib import Path

import pytest

from headway_process import control_groups
from headway_process.processors import num_usable_cores


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_ALL", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    return tmp_path


def test_without_groups_all_cores_of_the_affinity(groups: Path):
    assert num_usable_cores() == 16
    assert num_usable_cores(num_processes=4) == 16, "each has an affinity of its own"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 16),
        ("50000 100000", 1),
        ("150000 100000", 2),
        ("400000 100000", 4),
        ("6400000 100000", 16),
        ("nothing", 16),
        ("0 0", 16),
    ],
)
def test_the_quota_of_a_container(groups: Path, quota: str, expected: int):
    (groups / "own").write_text("0::/\n")
    (groups / "cpu.max").write_text(f"{quota}\n")
    assert num_usable_cores() == expected


def test_the_smallest_quota_around_it_which_ranks_share(groups: Path):
    (groups / "own").write_text("0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "a" / "cpu.max").write_text("600000 100000\n")
    (groups / "a" / "b" / "cpu.max").write_text("800000 100000\n")
    assert num_usable_cores() == 6
    assert num_usable_cores(num_processes=4) == 2


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 16)])
def test_version_1(groups: Path, quota: str, expected: int):
    (groups / "own").write_text("4:cpu,cpuacct:/x\n2:memory:/headway\n0::/x\n")
    (groups / "cpu" / "x").mkdir(parents=True)
    (groups / "cpu" / "x" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (groups / "cpu" / "x" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_usable_cores() == expected
