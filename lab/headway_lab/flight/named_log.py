"""The log that a command line names: a path, or a server's address."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def add_log_flags(parser: argparse.ArgumentParser) -> None:
    """Add the log's argument and its server's flags."""
    parser.add_argument(
        "log",
        metavar="LOG|HOST:PORT",
        help="directory of a flight log (its newest life), a segment of a life, or the gRPC address of a gateway",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token of an operator")
    parser.add_argument("--root-certificates", metavar="FILE", help="use TLS and trust these certificates (PEM)")


@contextmanager
def log_on_disk(arguments: argparse.Namespace) -> Iterator[str]:
    """Return the log's path; a server's log is copied for the context.

    Raises:
        NoFlightLogError: the server records nothing.
        ConfigurationError: the server does not answer.
    """
    if not is_address(arguments.log):
        yield arguments.log
        return
    from headway_lab.flight.fetched import fetch  # gRPC takes a while to load, and a log on disk needs none

    with tempfile.TemporaryDirectory(prefix="headway-flight-") as directory:
        yield str(fetch(arguments, Path(directory)))


def is_address(text: str) -> bool:
    """Return whether this is an address."""
    _, colon, port = text.rpartition(":")
    return bool(colon) and port.isdigit() and not Path(text).exists()
