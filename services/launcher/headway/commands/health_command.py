"""The command ``headway health``."""

import argparse
import sys

from headway.flags.named_files import token_of_file
from headway.flags.settings import ConfigurationError
from headway.running.health import SERVING, Target, client_certificate, health_of, root_certificates
from headway_proto.wording import shown

MAX_PORT = 65535


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("address", metavar="HOST:PORT", help="the gRPC address of the gateway")
    parser.add_argument(
        "--root-certificates",
        metavar="FILE",
        help="use TLS and trust these certificates (PEM), such as the server's own",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    parser.add_argument("--client-certificate", metavar="FILE", help="certificate to show to the server (PEM)")
    parser.add_argument("--client-key", metavar="FILE", help="private key of --client-certificate (PEM)")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait (default: 2)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the server serves."""
    host, _, port = arguments.address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= MAX_PORT):
        raise ConfigurationError(f"{shown(arguments.address)} is not allowed; allowed: HOST:PORT")
    if not arguments.timeout > 0:
        raise ConfigurationError(f"--timeout: {arguments.timeout:g} is not allowed; allowed: above 0 seconds")
    target = Target(
        address=arguments.address,
        certificates=root_certificates(arguments.root_certificates, "--root-certificates"),
        token=token_of_file(arguments.token_file, "--token-file"),
        client=client_certificate(arguments.client_certificate, arguments.client_key, "--client-certificate"),
    )
    health = health_of(target, timeout_s=arguments.timeout)
    sys.stdout.write(f"{health.status}\n")
    if health.reason:
        sys.stderr.write(f"headway health: {health.reason}\n")
    return 0 if health.status == SERVING else 1
