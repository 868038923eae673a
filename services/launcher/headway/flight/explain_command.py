"""``headway explain``: the life of a request, from a flight log or from a running server.

Owns: the command's flags, what it does without a request, and its exit codes (1: there is no such request, or a decision
differs; 2: the log or the server cannot be used).
Must not know: how a life is gathered or told.
"""

import argparse
import sys
from pathlib import Path

from headway.flight.explanation import explanation
from headway.flight.life import Follower
from headway.flight.notable import Notables
from headway.flight.source import Flight
from headway_scheduler.flight.replay import Divergence

NOT_FOUND_EXIT_CODE = 1


def add_explain_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``headway explain``."""
    parser.add_argument("log", metavar="LOG|HOST:PORT", help="a flight log, or where a gateway serves gRPC")
    parser.add_argument(
        "request",
        metavar="REQUEST",
        nargs="?",
        default="",
        help="the request's id; without it, some that are worth a look",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token of an operator")
    parser.add_argument("--root-certificates", metavar="FILE", help="use TLS and trust these certificates (PEM)")


def run(arguments: argparse.Namespace) -> int:
    """Explain; return the exit code.

    Raises:
        ConfigurationError: the log or the server cannot be used.
    """
    if _is_address(arguments.log):
        from headway.flight.live import explain_live

        return explain_live(arguments)
    flight = Flight(arguments.log)
    try:
        return _explain(flight, arguments.request) if arguments.request else _list(flight)
    except Divergence as found:
        sys.stderr.write(f"headway explain: the replay differs from the recording: {found}\n")
        return NOT_FOUND_EXIT_CODE


def _is_address(text: str) -> bool:
    _, colon, port = text.rpartition(":")
    return bool(colon) and port.isdigit() and not Path(text).exists()


def _explain(flight: Flight, request_id: str) -> int:
    follower = Follower(request_id)
    for event in flight.events(request_id):
        follower.note(event, flight.replay.core)
    flight.tell_notice()
    if not follower.lives:
        older = ", or it arrived before the oldest segment that is left" if flight.log.header.segment else ""
        sys.stderr.write(f"headway explain: {request_id!r:.66} is no request of this recording{older}\n")
        return NOT_FOUND_EXIT_CODE
    sys.stdout.write("\n".join(explanation(life, flight.first_s) for life in follower.lives))
    return 0


def _list(flight: Flight) -> int:
    notables = Notables()
    for event in flight.events("all requests"):
        notables.note(event)
    flight.tell_notice()
    sys.stdout.write(notables.text())
    return 0
