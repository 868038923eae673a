"""Quick checks of a gateway's packages and files before it starts."""

from pathlib import Path

from headway_gateway.certificates import CertificateFiles
from headway_gateway.config import GatewayConfig

_PACKAGES = (
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "hpack",
    "jinja2",
    "llguidance",
    "tokenizers",
    "uvloop",
)
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
