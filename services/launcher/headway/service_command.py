"""The commands ``headway scheduler``, ``executor`` and ``gateway``: one service, run by itself.

Owns: nothing but the call. Must not know: what a setting means.
"""

import argparse
import os

from headway.services import SERVICES, add_service_flags, announce, load
from headway_process.parent import launcher_is_gone


def add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--config`` and the flags of the service."""
    add_service_flags(parser, SERVICES[name])


def run(arguments: argparse.Namespace, name: str) -> int:
    """Run the service until it is stopped; see ``Command``."""
    config = load(SERVICES[name], arguments, os.environ)
    run_service = SERVICES[name].run
    if launcher_is_gone(os.environ):
        return 0
    announce(name, config)
    return run_service(config)
