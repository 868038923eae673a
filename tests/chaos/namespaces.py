"""Hosts that are network namespaces, joined by a wire that delays and breaks.

Owns: making namespaces and interfaces, and removing them whatever happens.
Must not know: what runs in them.

The wire is ``wire.py``; this process is a host too, named "client", without a namespace of its own.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

CLIENT = "client"
# Of this process: the client's end is in the namespace that other runs on this machine share.
_SUBNET = f"10.213.{os.getpid() % 254 + 1}"
_WIRE = Path(__file__).with_name("wire.py")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    name = f"hwtry{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except (OSError, FileNotFoundError) as error:
        return f"no network namespaces here (root and /dev/net/tun are needed): {error}"
    return ""


class Hosts:
    """Namespaces by host name. Addresses are those of one small network."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [*names, CLIENT]
        self._namespace_of = {name: f"hw{os.getpid()}{name}" for name in names}
        self._interface_of = {name: f"hw{os.getpid() % 100000}n{place}" for place, name in enumerate(self._names)}
        self.address_of = {name: f"{_SUBNET}.{place + 1}" for place, name in enumerate(self._names)}
        self._wire: subprocess.Popen[str] | None = None

    def prefix(self, name: str) -> list[str]:
        """What to put before a command so that it runs on this host."""
        return ["ip", "netns", "exec", self._namespace_of[name]]

    def delay(self, one: str, other: str, milliseconds: float) -> None:
        """Let every packet between the two take so long."""
        self._order(f"delay {one} {other} {milliseconds}")

    def cut(self, one: str, other: str) -> None:
        """Lose every packet between the two from now on; nobody is told."""
        self._order(f"cut {one} {other}")

    def heal(self, one: str, other: str) -> None:
        """Undo ``cut``."""
        self._order(f"heal {one} {other}")

    def open(self) -> None:
        """Make them."""
        words = [f"{name}={self._interface_of[name]},{self.address_of[name]}" for name in self._names]
        self._wire = subprocess.Popen(
            [sys.executable, str(_WIRE), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer("ready")
        for name in self._names:
            self._plug_in(name)

    def close(self) -> None:
        """Remove them; the interfaces go with the wire."""
        if self._wire is not None:
            assert self._wire.stdin is not None
            assert self._wire.stdout is not None
            self._wire.stdin.close()
            self._wire.wait(10)
            self._wire.stdout.close()
        for namespace in self._namespace_of.values():
            with contextlib.suppress(OSError):
                _ip("netns", "delete", namespace)

    def _plug_in(self, name: str) -> None:
        interface, inside = self._interface_of[name], []
        if name in self._namespace_of:
            namespace = self._namespace_of[name]
            _ip("netns", "add", namespace)
            _ip("link", "set", interface, "netns", namespace)
            inside = ["-n", namespace]
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{self.address_of[name]}/24", "dev", interface)
        _ip(*inside, "link", "set", interface, "up")

    def _order(self, line: str) -> None:
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(line + "\n")
        self._wire.stdin.flush()
        self._answer("done")

    def _answer(self, expected: str) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        answer = self._wire.stdout.readline().strip()
        if answer != expected:
            raise OSError(f"the wire said {answer!r} where {expected!r} was expected")


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts that are gone afterwards."""
    made = Hosts(names)
    try:
        made.open()
        yield made
    finally:
        made.close()
