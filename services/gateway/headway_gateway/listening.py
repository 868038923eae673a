"""Sockets that listen on HOST:PORT. Must not know: what is served on them."""

import errno
import socket

from headway_gateway.accepting import BACKLOG
from headway_proto.wording import shown


class AddressInUseError(Exception):
    """A server cannot listen; one line that names the setting."""


def listening_sockets(field: str, address: str, *, reuse_port: bool) -> list[socket.socket]:
    """Listen on every address that the host of ``address`` has here; with port 0 on one free port.

    Raises:
        AddressInUseError: the address of the setting ``field`` is taken, or not this machine's.
    """
    try:
        bound = _bound_sockets(address, reuse_port=reuse_port)
        for listening in bound:
            listening.listen(BACKLOG)
            listening.setblocking(False)
    except OSError as error:
        raise AddressInUseError(
            f"{field}: cannot listen on {shown(address)} ({error.strerror or error}); allowed: a free address"
        ) from error
    return bound


def problem_of_listening(address: str) -> str:
    """Return why a server cannot listen on HOST:PORT; empty if it can."""
    try:
        bound = _bound_sockets(address, reuse_port=False)
    except OSError as error:
        return error.strerror or str(error)
    for one in bound:
        one.close()
    return ""


def _bound_sockets(address: str, *, reuse_port: bool) -> list[socket.socket]:
    """Raise ``OSError`` if no address can be bound, or if one is taken: it would lead clients to another server."""
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    bound: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        one = socket.socket(family, kind, protocol)
        try:
            # Connections of an ended server are no obstacle.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6 and place[0] == "::":
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # every address, of both kinds
            one.bind((place[0], port, *place[2:]))
        except OSError as error:
            one.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
            continue
        bound.append(one)
        port = one.getsockname()[1]
    if problem is not None and (not bound or problem.errno == errno.EADDRINUSE):
        for one in bound:
            one.close()
        raise problem
    return bound
