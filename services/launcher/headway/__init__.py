"""The ``headway`` command and the Python client, which imports gRPC at its first use only."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import headway.client

        return getattr(headway.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
