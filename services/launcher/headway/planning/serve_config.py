"""The settings of ``headway serve`` itself."""

import importlib.util
from typing import Annotated

import msgspec
from msgspec import Meta

from headway.planning.model_source import ALLOWED, DEMO_MODEL
from headway_process.addresses import is_loopback
from headway_process.installation import install_advice
from headway_proto.wording import shown

MOST_EXECUTORS = 64


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's own settings."""

    model: Annotated[str, Meta(description=f"{ALLOWED}, the model that ships with Headway; see docs/models.md")] = (
        DEMO_MODEL
    )
    offline: Annotated[bool, Meta(description="ask no hub for a model; what its cache has is served")] = False
    replicas: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="complete Headways side by side; each has a gateway on its own port, from the port of grpc_address on "
            "(or on a free port, if that is 0); docs/openai.md lists what else differs",
        ),
    ] = 1
    executors: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_EXECUTORS,
            description="executors behind the scheduler, or behind each replica's; with cuda, each has a device of its own; "
            "[[executors]] in the file describe executors that differ; see docs/executors.md",
        ),
    ] = 1
    max_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="most restarts of one process within restart_window_s")
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
            description="loopback port for the scheduler's Prometheus metrics; the next ports are for each executor and each "
            "gateway worker, then for the next replica; 0: none",
        ),
    ] = 0
    probe_cert_file: Annotated[
        str,
        Meta(
            description="PEM certificate with which serve itself checks the gateway, if tls_client_ca_file is set "
            "(with probe_key_file)"
        ),
    ] = ""
    probe_key_file: Annotated[str, Meta(description="PEM private key of probe_cert_file")] = ""
    openai_address: Annotated[
        str,
        Meta(
            description="HOST:PORT on loopback for the OpenAI and Anthropic APIs; serve starts smg in front of the gateways "
            "(extra smg); a gateway with TLS or tokens needs its own smg, see docs/openai.md"
        ),
    ] = ""
    smg_flags: Annotated[
        tuple[str, ...], Meta(description="more flags for that smg, as --smg-flags=--tool-call-parser,qwen")
    ] = ()

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one of certificate and key is missing, or smg cannot start.
        """
        _check_openai(self)
        if bool(self.probe_cert_file) != bool(self.probe_key_file):
            missing = "probe_key_file" if self.probe_cert_file else "probe_cert_file"
            raise ValueError(
                f"{missing}: '' is not allowed; allowed: a PEM file, because the other of the two is given"
            )


def _check_openai(config: ServeConfig) -> None:
    if config.smg_flags and not config.openai_address:
        raise ValueError("smg_flags: not allowed without openai_address; allowed: both, or neither")
    if not config.openai_address:
        return
    host, _, port = config.openai_address.rpartition(":")
    if not (host and is_loopback(host.strip("[]")) and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(
            f"openai_address: {shown(config.openai_address)} is not allowed; allowed: HOST:PORT of a loopback address, "
            "because this smg checks no key"
        )
    if importlib.util.find_spec("smg") is None:
        raise ValueError(
            f"openai_address: {shown(config.openai_address)} needs smg, which is not installed; allowed: nothing, or "
            f"{install_advice('smg')}"
        )
