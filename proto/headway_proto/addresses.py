"""Where the ZeroMQ links may run.

Owns: the forms of a link's address, and the rule that a link beyond this machine needs keys.
Must not know: sockets, or which service asks.
"""

import ipaddress

MAX_IPC_PATH_BYTES = 107
"""``sockaddr_un.sun_path`` holds 108 bytes, the terminating zero included."""

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


def check_link_address(field: str, address: str, *, has_keys: bool, least_port: int = 1) -> None:
    """Refuse an address that cannot be used, or that strangers could reach without a key.

    ``least_port`` 0 allows a binding side to let the system choose.

    Raises:
        ValueError: one line naming ``field``, the value (cut at 64 characters) and what is allowed.
    """
    scheme, _, rest = address.partition("://")
    allowed = "ipc://PATH or tcp://HOST:PORT"
    if scheme == "ipc" and rest:
        num_bytes = len(rest.encode())
        if num_bytes <= MAX_IPC_PATH_BYTES:
            return
        allowed = f"an ipc path of at most {MAX_IPC_PATH_BYTES} bytes, not {num_bytes}"
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and least_port <= int(port) <= 65535:
            if has_keys or is_loopback(host):
                return
            allowed = "ipc://PATH, a loopback tcp:// address, or any tcp:// address together with curve_keys"
    raise ValueError(f"{field}: {address!r:.64} is not allowed; allowed: {allowed}")


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name, or an address, IPv6 with or without brackets) is this machine and nobody else's."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
