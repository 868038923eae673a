"""Tells systemd, if that has started this process, when it serves and when it stops. Must not know: what is served."""

import contextlib
import os
import socket

_SOCKET_VARIABLE = "NOTIFY_SOCKET"


def tell_ready(text: str) -> None:
    """Say that it serves; ``systemctl status`` shows the line ``text``."""
    _tell(f"READY=1\nSTATUS={text}")


def tell_stopping() -> None:
    """Say that it ends in good order, which may take a while."""
    _tell("STOPPING=1\nSTATUS=stopping")


def _tell(message: str) -> None:
    address = os.environ.get(_SOCKET_VARIABLE, "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending,
    ):
        sending.setblocking(False)
        sending.sendto(message.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
