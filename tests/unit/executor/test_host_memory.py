"""How much memory is free: within every control group around the process."""

from pathlib import Path

import pytest

from headway_executor.memory import host_memory
from headway_executor.memory.host_memory import free_host_bytes
from headway_process import control_groups

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {64 * GIB // 1024} kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "_ALL", tmp_path)
    return tmp_path


def group(at: Path, limit: str, used: int, inactive: int = 0, *, version: int = 2) -> None:
    at.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    (at / names[0]).write_text(f"{limit}\n")
    (at / names[1]).write_text(f"{used}\n")
    (at / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {inactive}\n")


def test_without_groups_the_whole_machine(groups: Path):
    assert free_host_bytes() == 64 * GIB


def test_a_container_that_is_the_root_of_what_it_sees(groups: Path):
    (groups / "own").write_text("0::/\n")
    group(groups, str(8 * GIB), 3 * GIB, inactive=GIB)
    assert free_host_bytes() == 6 * GIB


def test_a_systemd_unit_and_the_slice_around_it(groups: Path):
    (groups / "own").write_text("0::/system.slice/headway.service\n")
    group(groups / "system.slice" / "headway.service", "max", GIB)
    assert free_host_bytes() == 64 * GIB
    group(groups / "system.slice" / "headway.service", str(4 * GIB), GIB)
    assert free_host_bytes() == 3 * GIB
    group(groups / "system.slice", str(5 * GIB), 4 * GIB)
    assert free_host_bytes() == GIB
    group(groups / "system.slice", str(5 * GIB), 6 * GIB)
    assert free_host_bytes() == 0


@pytest.mark.parametrize("place", ["headway", ""])
def test_version_1_also_where_the_path_is_the_hosts(groups: Path, place: str):
    (groups / "own").write_text("3:cpu,cpuacct:/x\n2:memory:/headway\n0::/x\n")
    group(groups / "memory" / place, str(2 * GIB), GIB, version=1)
    assert free_host_bytes() == GIB
