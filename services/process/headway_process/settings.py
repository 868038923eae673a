"""The settings that every service has, each declared once: metrics, logs, and the parent to end with.

Owns: their types and what the help says of them. Must not know: the settings of any one service.
"""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

MetricsAddress: TypeAlias = Annotated[
    str, Meta(description="HOST:PORT to serve metrics for Prometheus on, port 0 picks a free one; empty: none")
]
MetricsTokenFile: TypeAlias = Annotated[
    str,
    Meta(
        description="file with the bearer tokens, one a line, that readers of the metrics carry; required beyond loopback"
    ),
]
LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"], Meta(description="least severe level that is logged")
]
LogFormat: TypeAlias = Annotated[
    Literal["console", "json"], Meta(description="console: readable lines; json: one object per line")
]
ExitWithParent: TypeAlias = Annotated[bool, Meta(description="end when the process that started this one ends")]
