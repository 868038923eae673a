"""Ports for servers that have not started yet.

Owns: which ports these are. Must not know: who will listen there.

The system gives ports of one range to connections that go out, and to whoever asks for any. One of those may be taken
before its server has it, or while that starts again. So these are below that range, where only servers are.
"""

import contextlib
import errno
import random
import socket
from pathlib import Path

_RANGE_OF_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST = 32768
_LEAST = 10_000
"""Below are those of well-known services."""
_TRIES = 200
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


def free_ports(host: str, count: int) -> list[int]:
    """Return different ports of ``host`` on which nobody listens now.

    Raises:
        OSError: ``host`` is not this machine's.
    """
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    below = range(_LEAST, max(_LEAST, _first_of_system()))
    candidates = random.SystemRandom().sample(below, min(len(below), _TRIES + count))
    with contextlib.ExitStack() as stack:
        probes: list[socket.socket] = []
        for port in (*candidates, *[0] * count):
            if len(probes) == count:
                break
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                probe.bind((host.strip("[]"), port))
            except OSError as error:
                if error.errno not in _TAKEN or not port:
                    raise
            else:
                probes.append(probe)
        return [probe.getsockname()[1] for probe in probes]


def _first_of_system() -> int:
    """The first port that the system gives to connections."""
    try:
        return int(_RANGE_OF_SYSTEM.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST
