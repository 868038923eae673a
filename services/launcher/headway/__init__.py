"""The ``headway`` command, the Python client and ``LLM``, which import gRPC at their first use only."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.client import AsyncClient, Client
    from headway.llm import LLM

__all__ = ["LLM", "AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        import headway.llm

        return headway.llm.LLM
    if name in __all__:
        import headway.client

        return getattr(headway.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
