"""Addresses of links and metrics.

Owns: their forms, and two rules: links beyond this machine need keys; Unix sockets need a private directory. Must not
know: sockets, services.
"""

import ipaddress
import os
import stat
from pathlib import Path
from urllib.parse import urlsplit

from headway_proto.wording import shown

MAX_IPC_PATH_BYTES = 107
"""``sockaddr_un.sun_path`` has 108 bytes with the zero."""

_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


def check_link_address(field: str, address: str, *, has_keys: bool, least_port: int = 1) -> None:
    """Refuse an unusable address, or one that strangers could reach without a key.

    ``least_port`` 0 lets the system choose.

    Raises:
        ValueError: one line with ``field``, the value (cut at 64 characters) and what is allowed.
    """
    scheme, _, rest = address.partition("://")
    allowed = "ipc://PATH or tcp://HOST:PORT"
    if scheme == "ipc" and rest and not rest.startswith(("@", "*")):  # no directory guards those
        num_bytes = len(rest.encode("utf-8", "surrogatepass"))
        if num_bytes <= MAX_IPC_PATH_BYTES:
            return
        allowed = f"an ipc path of at most {MAX_IPC_PATH_BYTES} bytes, not {num_bytes}"
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and len(port) <= 5 and least_port <= int(port) <= 65535:
            if has_keys or is_loopback(host):
                return
            allowed = "ipc://PATH, a loopback tcp:// address, or any tcp:// address together with curve_keys"
    raise ValueError(f"{field}: {shown(address)} is not allowed; allowed: {allowed}")


def check_offered_address(field: str, address: str, *, has_keys: bool) -> None:
    """Refuse an address that this process cannot listen on and give to others as it is.

    Port 0 or ``*`` lets the system choose.

    Raises:
        ValueError: see ``check_link_address``.
    """
    numbered = f"{address[:-1]}0" if address.endswith(":*") else address
    check_link_address(field, numbered, has_keys=has_keys, least_port=0)
    host = address.removeprefix("tcp://").rpartition(":")[0]
    try:
        is_wildcard = host == "*" or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_unspecified
    except ValueError:
        is_wildcard = False  # a name
    if is_wildcard or not address.startswith("tcp://"):
        raise ValueError(
            f"{field}: {shown(address)} is not allowed; allowed: tcp://HOST:PORT with an address of this host that the "
            "others can reach"
        )


def check_ipc_directory(field: str, address: str) -> None:
    """Refuse a Unix socket that others could use or replace.

    Raises:
        ValueError: its directory is missing, another user's, or open to others.
    """
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return
    directory = Path(path).parent
    allowed = "a socket in a directory of this user that nobody else can enter (mode 0700)"
    try:
        status = directory.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no path"
        raise ValueError(f"{field}: {shown(address)} is not allowed ({reason}); allowed: {allowed}") from None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {os.geteuid(), 0}:
        raise ValueError(f"{field}: {shown(address)} is not allowed (another user's directory); allowed: {allowed}")
    if mode & 0o077:
        raise ValueError(f"{field}: {shown(address)} is not allowed (mode {mode:04o}); allowed: {allowed}")


def is_loopback(host: str) -> bool:
    """Whether ``host`` (name or address, IPv6 with or without brackets) is this machine."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


HTTP_URL_FORM = "http://HOST:PORT or https://HOST:PORT"


def is_http_url(url: str) -> bool:
    """Tell whether a URL names a server that HTTP can reach: a host, and a port or none."""
    try:
        parts = urlsplit(url)
        is_server = bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that are not closed, or a port that is none
        return False
    return is_server and parts.scheme in {"http", "https"} and not any(map(str.isspace, url))


def channel_options(address: str) -> tuple[tuple[str, int], ...]:
    """Return options of gRPC's for a channel to HOST:PORT: no proxy leads to this machine, whatever the environment says."""
    return (("grpc.enable_http_proxy", 0),) if is_loopback(address.rpartition(":")[0]) else ()


def check_metrics_address(address: str, token_file: str, num_ports: int = 1) -> None:
    """Refuse an unusable address, or one that strangers could read without a token.

    Raises:
        ValueError: see ``check_link_address``.
    """
    if token_file and not Path(token_file).is_file():
        raise ValueError(f"metrics_token_file: {shown(token_file)} is not allowed; allowed: a file that exists")
    if not address:
        return
    host, _, port = address.rpartition(":")
    most = 65536 - num_ports
    allowed = f"HOST:PORT with a port from 0 to {most}"
    if host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= most:
        if token_file or is_loopback(host):
            return
        allowed = "a loopback address, or any address together with metrics_token_file"
    raise ValueError(f"metrics_address: {shown(address)} is not allowed; allowed: {allowed}")
