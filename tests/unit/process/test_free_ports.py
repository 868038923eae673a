"""Ports for servers that have not started yet."""

import socket
from pathlib import Path

import pytest

from headway_process import free_ports as module
from headway_process.free_ports import free_ports


def test_they_differ_and_are_not_those_of_connections() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    first = module._first_of_system()
    assert all(port < first for port in ports) or first < 2 * module._LEAST, "this system leaves few, or none"


def test_one_that_is_taken_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports("127.0.0.1", 1)
    monkeypatch.setattr(module, "_LEAST", first)
    monkeypatch.setattr(module, "_first_of_system", lambda: first + 1)
    assert free_ports("127.0.0.1", 1) == [first]
    with socket.create_server(("127.0.0.1", first)):
        ports = free_ports("127.0.0.1", 3)
    assert first not in ports, "there is no other, so the system was asked"
    assert len(set(ports)) == 3


def test_a_host_of_another_machine_has_none() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        free_ports("192.0.2.1", 1)


@pytest.mark.parametrize("said", ["", "many few"])
def test_a_system_that_does_not_say_its_range_has_the_usual_one(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RANGE_OF_SYSTEM", tmp_path / "range")
    assert module._first_of_system() == 32768
    (tmp_path / "range").write_text(said)
    assert module._first_of_system() == 32768
