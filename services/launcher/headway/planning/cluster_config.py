"""The settings of ``headway cluster``."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from headway_proto.wording import shown


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a deployment runs on several machines. Durations in seconds."""

    engine: Annotated[Literal["ray"], Meta(description="what places, heals and scales the processes")] = "ray"
    address: Annotated[
        str,
        Meta(description="HOST:PORT of the engine's head; auto: the one that this user has started on this machine"),
    ] = "auto"
    name: Annotated[str, Meta(description="name of the deployment; one engine can carry several")] = "headway"
    nodes_here: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="first start an engine of its own on this machine's loopback, with a head and so many nodes; cluster down ends it",
        ),
    ] = 0
    cpus: Annotated[
        float, Meta(ge=0, le=1024, description="CPUs that one rank of an executor reserves; 0: its num_threads, or 1")
    ] = 0.0
    ready_s: Annotated[float, Meta(gt=0, le=86400, description="seconds that cluster up waits until all serves")] = (
        600.0
    )
    token_file: Annotated[
        str,
        Meta(description="file with a bearer token of the role admin, for scaling; needed if the gateway wants tokens"),
    ] = ""
    scale_up_wait_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="an executor is added when what waits would take longer than this to start"),
    ] = 2.0
    scale_up_after_s: Annotated[
        float, Meta(ge=0, le=86400, description="for as long must that be so, without a break")
    ] = 3.0
    scale_down_after_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="an executor is drained when one fewer had been enough for so long"),
    ] = 60.0
    scale_down_use: Annotated[
        float,
        Meta(ge=0, le=1, description="enough: the others would then use at most this share of their rows and blocks"),
    ] = 0.6

    NAME: ClassVar[str] = "letters, digits and hyphens, at most 32"

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line with the field, its value and what is allowed.
        """
        plain = self.name.replace("-", "")
        if not (plain.isascii() and plain.isalnum() and len(self.name) <= 32):
            raise ValueError(f"name: {shown(self.name)} is not allowed; allowed: {self.NAME}")
        if self.nodes_here and self.address != "auto":
            raise ValueError(
                f"address: {shown(self.address)} is not allowed; allowed: without it, because nodes_here is given"
            )
