"""One service by itself: ``headway scheduler``, ``executor`` and ``gateway``."""

import argparse
import os

from headway.planning.services import SERVICES, add_service_flags, announce, load
from headway_process.collector import pause_collector
from headway_process.lean_imports import import_structlog, one_blas_thread
from headway_process.parent import launcher_is_gone


def add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--config`` and the service's flags."""
    add_service_flags(parser, SERVICES[name])


def run(arguments: argparse.Namespace, name: str) -> int:
    """See ``Command``."""
    pause_collector()  # each service relaxes it when it is ready
    config = load(SERVICES[name], arguments, os.environ)
    import_structlog()
    with one_blas_thread():
        run_service = SERVICES[name].run
    if launcher_is_gone(os.environ):
        return 0
    announce(name, config)
    return run_service(config)
