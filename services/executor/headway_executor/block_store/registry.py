"""Transports by name, from the entry point group ``headway.block_transports``.

Owns: the look-up, the built-in ones. Must not know: how a transport works.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.transport import BlockTransport
from headway_process.entry_points import ByName
from headway_proto.wording import shown

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "nixl": "headway_executor.block_store.nixl_transport:NixlTransport",
        "shm": "headway_executor.block_store.shm_transport:ShmTransport",
        "tcp": "headway_executor.block_store.tcp_transport:TcpTransport",
    }
)
"""Known without the metadata of an installation, which may be older than the source."""

TRANSPORTS = ByName("headway.block_transports", BUILT_IN)


def transport_names() -> tuple[str, ...]:
    """Return the sorted names; import nothing."""
    return TRANSPORTS.names


def enabled_transports(block_transports: str) -> tuple[str, ...]:
    """Split the setting ``block_transports``, a comma list; "" enables none.

    Raises:
        BackendConfigError: a name is unknown or listed twice; one line.
    """
    names = tuple([name.strip() for name in block_transports.split(",")]) if block_transports.strip() else ()
    for name in names:
        if name not in TRANSPORTS or names.count(name) > 1:
            raise BackendConfigError(
                f"block_transports: {shown(name)} is not allowed; allowed: each at most once, of {', '.join(TRANSPORTS.names)}"
            )
    return names


def make_transport(name: str, settings: Mapping[str, object] | None = None) -> BlockTransport:
    """Import and construct a transport, with those ``settings`` that its constructor names.

    Raises:
        BackendConfigError: the name is unknown, a package is missing, or a setting cannot be honoured.
    """
    if name not in TRANSPORTS:
        raise BackendConfigError(
            f"block_transports: {shown(name)} is not allowed; allowed: {', '.join(TRANSPORTS.names)}"
        )
    try:
        found = cast(type, TRANSPORTS.load(name))
    except ModuleNotFoundError as error:
        raise BackendConfigError(f"block_transports: {name!r} needs {error.name!r}, which is not installed") from error
    wanted = inspect.signature(found).parameters
    given = {field: value for field, value in (settings or {}).items() if field in wanted}
    return cast(BlockTransport, found(**given))
