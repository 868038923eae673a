"""The settings that every service has.

Owns: their types and help. Must not know: other settings.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

MetricsAddress: TypeAlias = Annotated[
    str, Meta(description="HOST:PORT for Prometheus metrics, with port 0 for a free port; empty: none")
]
MetricsTokenFile: TypeAlias = Annotated[
    str,
    Meta(description="file with the bearer tokens of metrics readers, one a line; required beyond loopback"),
]
LogLevel: TypeAlias = Annotated[Literal["debug", "info", "warning", "error"], Meta(description="lowest level to log")]
LogFormat: TypeAlias = Annotated[
    Literal["console", "json"], Meta(description="console: readable lines; json: one object per line")
]
ExitWithParent: TypeAlias = Annotated[bool, Meta(description="end when the parent process ends")]
