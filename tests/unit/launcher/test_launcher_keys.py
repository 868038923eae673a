"""``headway keys``: every process gets what it needs and nothing that is another's."""

import errno
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from headway.__main__ import main
from headway.commands.keys import make_keys, run
from headway.flags.settings import ConfigurationError


def test_each_directory_holds_its_own_secret_and_the_public_keys_of_its_peers(tmp_path):
    make_keys(tmp_path / "keys")
    files = {str(path.relative_to(tmp_path / "keys")) for path in (tmp_path / "keys").rglob("*") if path.is_file()}
    assert files == {
        *(f"{name}/.gitignore" for name in ("scheduler", "executor", "gateway")),
        "scheduler/scheduler.key",
        "scheduler/scheduler.key_secret",
        "scheduler/executors/executor.key",
        "scheduler/gateways/gateway.key",
        "executor/executor.key",
        "executor/executor.key_secret",
        "executor/scheduler.key",
        "gateway/gateway.key",
        "gateway/gateway.key_secret",
        "gateway/scheduler.key",
    }


def test_nobody_else_can_read_them(tmp_path):
    make_keys(tmp_path / "keys")
    paths = [tmp_path / "keys", *(tmp_path / "keys").rglob("*")]
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_keys_that_are_there_stay(tmp_path):
    make_keys(tmp_path)
    before = (tmp_path / "scheduler" / "scheduler.key_secret").read_text()
    with pytest.raises(ConfigurationError, match="one that has no keys in it yet"):
        run(Namespace(directory=str(tmp_path)))
    assert (tmp_path / "scheduler" / "scheduler.key_secret").read_text() == before


def test_keygen_is_the_same_command(tmp_path, capsys):
    assert main(["keygen", str(tmp_path)]) == 0
    assert (tmp_path / "scheduler" / "scheduler.key_secret").is_file()
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_git_takes_none_of_them_wherever_they_are_made(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "mine.txt").touch()
    assert main(["keys", str(tmp_path)]) == 0
    assert main(["keys", str(tmp_path / "deploy" / "link-keys")]) == 0
    status = subprocess.run(
        ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert status.stdout == "?? mine.txt\n"


def test_this_repository_and_its_images_leave_secret_keys_out_even_copies():
    for name, line in ((".gitignore", "*.key_secret"), (".dockerignore", "**/*.key_secret")):
        assert line in (Path(__file__).resolve().parents[3] / name).read_text().splitlines()


def test_a_full_disk_leaves_no_half_of_them(tmp_path, monkeypatch):
    def full(directory, name):
        if name == "gateway":
            raise OSError(errno.ENOSPC, "No space left on device")
        (directory / f"{name}.key").touch()

    with monkeypatch.context() as patched:
        patched.setattr("zmq.auth.create_certificates", full)
        with pytest.raises(ConfigurationError, match="cannot be written: No space left on device"):
            run(Namespace(directory=str(tmp_path)))
    assert not list(tmp_path.iterdir())
    run(Namespace(directory=str(tmp_path)))
