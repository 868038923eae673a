"""The connection flags of commands."""

import argparse

from headway.client import DEFAULT_ADDRESS, DEFAULT_RETRY_S, AsyncClient
from headway.flags.named_files import token_of_file
from headway.flags.settings import ConfigurationError
from headway.running.health import client_certificate, root_certificates


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the address's and credentials' flags."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"the gateway (default: {DEFAULT_ADDRESS})"
    )
    server.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    server.add_argument("--root-certificates", metavar="FILE", help="use TLS and trust these certificates (PEM)")
    server.add_argument("--client-certificate", metavar="FILE", help="certificate to show to the server (PEM)")
    server.add_argument("--client-key", metavar="FILE", help="private key of --client-certificate (PEM)")


def check_patience(arguments: argparse.Namespace) -> None:
    """Check ``--concurrency`` and ``--retry-s`` of a command that sends many requests.

    Raises:
        ConfigurationError: one is out of range.
    """
    if arguments.concurrency < 1:
        raise ConfigurationError(f"--concurrency: {arguments.concurrency} is not allowed; allowed: 1 or more")
    if not arguments.retry_s >= 0:
        raise ConfigurationError(f"--retry-s: {arguments.retry_s} is not allowed; allowed: 0 or more seconds")


def client_of(arguments: argparse.Namespace, retry_s: float = DEFAULT_RETRY_S) -> AsyncClient:
    """Make the client.

    Raises:
        ConfigurationError: a file is unusable.
    """
    shown_to_server = client_certificate(arguments.client_certificate, arguments.client_key, "--client-certificate")
    return AsyncClient(
        arguments.address,
        token=token_of_file(arguments.token_file, "--token-file") or None,
        root_certificates=root_certificates(arguments.root_certificates, "--root-certificates"),
        client_certificate=(shown_to_server.certificate, shown_to_server.key) if shown_to_server else None,
        retry_s=retry_s,
    )
