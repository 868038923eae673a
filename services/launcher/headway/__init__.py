"""The ``headway`` command and the Python client.

Owns: the short names ``headway.Client`` and ``headway.AsyncClient``. Importing the package itself stays cheap: gRPC is
loaded with the first use of a client.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import headway.client

        return getattr(headway.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
