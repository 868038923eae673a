"""A copy of a running server's flight log."""

import argparse
import shutil
import sys
from pathlib import Path

import grpc

from headway.client import Client, HeadwayError
from headway.flags.named_files import token_of_file
from headway.flags.settings import ConfigurationError
from headway.running.health import root_certificates
from headway.terminal.progress import ProgressLine
from headway_lab.flight.source import NoFlightLogError
from headway_proto.admin_pb2 import ReadFlightLogResponse
from headway_scheduler.flight.log import paths_of

_KIB = 1 << 10
_NO_LOG = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)


def client_for(arguments: argparse.Namespace) -> Client:
    """Connect to the server in ``arguments.log``.

    Raises:
        ConfigurationError: a file is unreadable.
    """
    return Client(
        arguments.log,
        token=token_of_file(arguments.token_file, "--token-file") or None,
        root_certificates=root_certificates(arguments.root_certificates, "--root-certificates"),
    )


def fetch(arguments: argparse.Namespace, directory: Path) -> Path:
    """Copy the server's log into a new directory; return it.

    Raises:
        NoFlightLogError: the server records nothing.
        ConfigurationError: the server does not answer, or writing failed.
    """
    with client_for(arguments) as client:
        try:
            try:
                return _copy(client, arguments.log, directory / "log")
            except HeadwayError as error:
                if error.code is not grpc.StatusCode.ABORTED:
                    raise
                shutil.rmtree(directory / "log")
                return _copy(client, arguments.log, directory / "log")
        except HeadwayError as error:
            kind = NoFlightLogError if error.code in _NO_LOG else ConfigurationError
            raise kind(f"{arguments.log}: {error}") from None
        except OSError as error:
            raise ConfigurationError(f"the flight log cannot be copied to this host: {error.strerror}") from None


def _copy(client: Client, address: str, directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    progress = ProgressLine(sys.stderr)
    try:
        num_bytes = 0
        for piece in client.read_flight_log():
            _write(directory, piece)
            num_bytes += len(piece.data)
            progress.show(num_bytes // _KIB, piece.num_log_bytes // _KIB, f"KiB fetched  flight log of {address}")
    finally:
        progress.erase()
    return directory


def _write(directory: Path, piece: ReadFlightLogResponse) -> None:
    paths = paths_of(directory, piece.life, piece.segment)
    with (paths.checkpoint if piece.is_checkpoint else paths.segment).open("ab") as file:
        file.write(piece.data)
