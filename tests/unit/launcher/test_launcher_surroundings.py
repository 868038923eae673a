"""What stops every command: libraries that find no room, and a current directory that is gone."""

import resource

import headway.commands.version
from headway.__main__ import main


def test_a_library_that_cannot_be_loaded_is_told_with_the_limit_of_addresses(monkeypatch, capfd):
    def cannot(arguments: object) -> int:
        raise ImportError("libtorch_cpu.so: failed to map\nsegment")

    monkeypatch.setattr(headway.commands.version, "run", cannot)
    for limit, told in (
        (600 << 20, " (this process may have 600 MiB of addresses, see ulimit -v)"),
        (resource.RLIM_INFINITY, ""),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert main(["version"]) == 2
        said = "headway version: a package cannot be loaded: libtorch_cpu.so: failed to map segment"
        assert capfd.readouterr().err == f"{said}{told}\n"


def test_a_current_directory_that_was_deleted_is_told(monkeypatch, tmp_path, capfd):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["version"]) == 2
    assert capfd.readouterr().err == (
        "headway version: the current directory: No such file or directory; allowed: one that exists\n"
    )
