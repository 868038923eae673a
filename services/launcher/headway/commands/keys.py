"""``headway keys``: the keys for links between hosts.

Executor and gateway have the scheduler's public key, so no other process can pose as the scheduler. The scheduler has
theirs, per link, so a gateway cannot pose as an executor.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import zmq.auth

from headway.flags.settings import ConfigurationError
from headway_proto.wording import shown

SCHEDULER = "scheduler"
CLIENTS = {"executor": "executors", "gateway": "gateways"}
"""The peers that the scheduler admits, and their directory beside its own."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="the command makes scheduler/, executor/ and gateway/ in it; copy each to its host, and name it with --curve-keys",
    )


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    directory = Path(arguments.directory)
    try:
        make_keys(directory)
    except FileExistsError:
        raise ConfigurationError(
            f"DIRECTORY: {shown(directory)} is not allowed; allowed: one that has no keys in it yet"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"DIRECTORY: {shown(directory)} cannot be written: {error.strerror}") from None
    sys.stdout.write("".join(f"{directory / name}\n" for name in (SCHEDULER, *CLIENTS)))
    return 0


def make_keys(directory: Path) -> None:
    """Make a CURVE pair for each process, and exchange public keys. A failure leaves none of them.

    Raises:
        FileExistsError: a directory exists already.
        OSError: writing failed.
    """
    inherited_umask = os.umask(0o077)
    made: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (SCHEDULER, *CLIENTS):
            (directory / name).mkdir()
            made.append(directory / name)
            # This comes first, so that no key is added to a repository meanwhile.
            (directory / name / ".gitignore").write_text("*\n")
            zmq.auth.create_certificates(directory / name, name)
        for name, directory_name in CLIENTS.items():
            admitted = directory / SCHEDULER / directory_name
            admitted.mkdir()
            shutil.copy(directory / name / f"{name}.key", admitted)
            shutil.copy(directory / SCHEDULER / f"{SCHEDULER}.key", directory / name)
    except BaseException:
        for one in made:
            shutil.rmtree(one, ignore_errors=True)
        raise
    finally:
        os.umask(inherited_umask)
