"""A checkpoint's files are read before they are needed, unless that does harm."""

import os
import sys
from pathlib import Path

import pytest

from headway_executor.checkpoint import reading_ahead
from headway_executor.checkpoint.reading_ahead import read_ahead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs sendfile to a file, and proc")


def checkpoint(directory: Path, *sizes: int) -> Path:
    for number, size in enumerate(sizes):
        (directory / f"{number}.safetensors").write_bytes(bytes(size))
    (directory / "config.json").write_text("{}")
    return directory


def test_all_of_every_weight_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: dict[str, int] = {}
    sendfile = os.sendfile

    def counting(to: int, source: int, place: int, count: int) -> int:
        name = Path(f"/proc/self/fd/{source}").readlink().name
        sent = sendfile(to, source, place, min(count, 1 << 20))  # the system too may send less than it is asked for
        assert place == read.get(name, 0)
        read[name] = place + sent
        return sent

    monkeypatch.setattr(os, "sendfile", counting)
    thread = read_ahead(checkpoint(tmp_path, 3_000_000, 0, 10))
    assert thread is not None
    thread.join(10)
    assert read == {"0.safetensors": 3_000_000, "1.safetensors": 0, "2.safetensors": 10}


def test_what_does_not_fit_into_memory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_ahead, "_memory_bytes", lambda: 1000)
    assert read_ahead(checkpoint(tmp_path, 300, 300)) is None


def test_what_cannot_be_read_is_left_to_loading(tmp_path: Path) -> None:
    assert read_ahead(tmp_path / "nothing") is None
    assert read_ahead(tmp_path) is None
    (tmp_path / "model.safetensors").mkdir()
    thread = read_ahead(tmp_path)
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert read_ahead(tmp_path) is None
