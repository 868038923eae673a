"""The systemd unit starts what is there, and gives it the time to stop that it may take."""

import shutil
import socket
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from headway.__main__ import parser_of
from headway.flags.settings import ConfigurationError
from headway.planning.plan import make_plan
from headway.running.service_manager import tell_ready, tell_stopping

UNIT = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "headway.service"


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    parser = RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_it_starts_serve_with_a_file_of_settings(service: dict[str, str], tmp_path: Path) -> None:
    program, *words = service["ExecStart"].split()
    assert Path(program).name == "headway"
    command, flag, file = words
    settings = tmp_path / Path(file).name
    settings.write_text('[serve]\nmodel = "demo"\n')
    plan = make_plan(parser_of(command).parse([flag, str(settings)]), {}, tmp_path)
    assert plan.commands


def test_systemd_waits_longer_than_serve_takes_to_stop(service: dict[str, str], tmp_path: Path) -> None:
    plan = make_plan(parser_of("serve").parse([]), {}, tmp_path)
    longest_s = sum(max(stage.values()) for stage in plan.stop_stages)
    assert longest_s < float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"  # the signal is for serve alone, which stops the others in order


def test_systemd_waits_for_the_word_that_serve_says(
    service: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")
    tell_ready("nobody listens")
    for address, bound in ((str(tmp_path / "notify"), str(tmp_path / "notify")), (f"@{tmp_path}", f"\0{tmp_path}")):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        tell_stopping()  # the manager may be gone
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(bound)
            tell_ready("headway is ready")
            tell_stopping()
            assert manager.recv(1000) == b"READY=1\nSTATUS=headway is ready"
            assert manager.recv(1000).startswith(b"STOPPING=1")


def test_a_wrong_setting_is_not_tried_again(service: dict[str, str]) -> None:
    assert str(ConfigurationError.exit_code) in service["RestartPreventExitStatus"].split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd's own check")
def test_systemd_knows_every_line(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/headway/bin/headway", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
