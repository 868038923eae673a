"""Quick checks of a gateway's packages, files and addresses before it starts."""

import errno
import socket
from pathlib import Path

from headway_gateway.certificates import CertificateFiles
from headway_gateway.config import GatewayConfig

_PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "jinja2", "llguidance", "tokenizers")
_TOKENIZER_FILE = "tokenizer.json"


class MissingFileError(ValueError):
    """The model directory lacks a file."""


def packages_of(config: GatewayConfig) -> tuple[str, ...]:
    """Return the packages that only a gateway imports."""
    more = (("opentelemetry",) if config.otel_endpoint else (), ("uvicorn", "httptools") if config.http_address else ())
    return (*_PACKAGES, *more[0], *more[1])


def check(config: GatewayConfig) -> None:
    """Check that the gateway could start.

    Raises:
        MissingFileError: the model has no tokenizer.
        ValueError: certificate and key are unusable.
    """
    if not Path(config.model, _TOKENIZER_FILE).exists():
        raise MissingFileError(
            f"{config.model}: no {_TOKENIZER_FILE}; allowed: a directory with a Hugging Face tokenizer file"
        )
    if config.tls_cert_file:
        CertificateFiles(config)


def problem_of_listening(address: str) -> str:
    """Return why a server cannot listen on HOST:PORT; empty if it can."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    problems = []
    for family, kind, protocol, _, bound in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As in servers: connections of an ended server are no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(bound)
        except OSError as error:
            problems.append(error)
    # A name's missing address is harmless; a taken one would lead clients to another server.
    taken = [error for error in problems if error.errno == errno.EADDRINUSE]
    if not taken and len(problems) < len(found):
        return ""
    return (taken or problems)[0].strerror or "the reason is unknown"
