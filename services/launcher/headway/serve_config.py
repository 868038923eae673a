"""What ``headway serve`` can be told beyond the settings of the services that it starts.

Owns: those settings. Must not know: the services' own, or how anything is started.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

DEMO_MODEL = "demo"


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's own settings."""

    model: Annotated[str, Meta(description="checkpoint directory, or demo for the model that ships with Headway")] = (
        DEMO_MODEL
    )
    max_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="restarts of one process within restart_window_s before giving up")
    ] = 10
    restart_window_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds over which the restarts of a process are counted")
    ] = 60.0
    hang_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="seconds without a sign of life after which a process is replaced; 0: never"),
    ] = 15.0

    def validate(self) -> None:
        """Accept whatever the types admit: the services check what they are given."""
