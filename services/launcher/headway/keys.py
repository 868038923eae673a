"""``headway keys``: the keys for links between hosts.

Owns: which key file each process needs, under the names of the services' ``curve_keys`` directories. Must not know: how
a link uses them.

Each process has a CURVE pair. Executor and gateway have the scheduler's public key, so no other process can pose as the
scheduler. The scheduler has theirs, per link, so a gateway cannot pose as an executor. For more executors or gateways,
add their public keys as ``*.key`` files. Git ignores the directory.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import zmq.auth

from headway.settings import ConfigurationError, shown

SCHEDULER = "scheduler"
CLIENTS = {"executor": "executors", "gateway": "gateways"}
"""Whose keys the scheduler admits, and the directory beside its own in which it looks for theirs."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``headway keys``."""
    parser.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="makes scheduler/, executor/ and gateway/ in it: take each to its host, and name it with --curve-keys",
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the keys; see ``Command``."""
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
    """Make a pair for each process, and give each the public keys of its peers.

    Raises:
        FileExistsError: one of the directories is there already.
        OSError: something cannot be written.
    """
    inherited_umask = os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (SCHEDULER, *CLIENTS):
            (directory / name).mkdir()
            # First, so that no key is added to a repository meanwhile.
            (directory / name / ".gitignore").write_text("*\n")
            zmq.auth.create_certificates(directory / name, name)
        for name, directory_name in CLIENTS.items():
            admitted = directory / SCHEDULER / directory_name
            admitted.mkdir()
            shutil.copy(directory / name / f"{name}.key", admitted)
            shutil.copy(directory / SCHEDULER / f"{SCHEDULER}.key", directory / name)
    finally:
        os.umask(inherited_umask)
