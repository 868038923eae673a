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

    metrics_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65000,
            description="loopback port for Prometheus to read the scheduler's metrics, the next for the executor's, those "
            "after it for the gateway's, one a worker; 0: none",
        ),
    ] = 0
    probe_cert_file: Annotated[
        str,
        Meta(
            description="PEM certificate with which serve itself asks whether the gateway is ready, where "
            "tls_client_ca_file is set (with probe_key_file)"
        ),
    ] = ""
    probe_key_file: Annotated[str, Meta(description="PEM private key of probe_cert_file")] = ""

    def validate(self) -> None:
        """Check what types alone cannot; the services check what they are given.

        Raises:
            ValueError: one of certificate and key is missing.
        """
        if bool(self.probe_cert_file) != bool(self.probe_key_file):
            missing = "probe_key_file" if self.probe_cert_file else "probe_cert_file"
            raise ValueError(
                f"{missing}: '' is not allowed; allowed: a PEM file, because the other of the two is given"
            )
