"""``headway explain``: the life of a request, from a flight log or a running server."""

import argparse
import sys

from headway_lab.flight.explanation import explanation
from headway_lab.flight.life import Follower
from headway_lab.flight.named_log import add_log_flags, is_address, log_on_disk
from headway_lab.flight.notable import Notables
from headway_lab.flight.source import Flight, NoFlightLogError
from headway_proto.wording import shown
from headway_scheduler.flight.replay import Divergence

NOT_FOUND_EXIT_CODE = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_log_flags(parser)
    parser.add_argument(
        "request",
        metavar="REQUEST",
        nargs="?",
        default="",
        help="the request's id; without it, requests that stand out are listed",
    )


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    try:
        with log_on_disk(arguments) as path:
            flight = Flight(path)
            exit_code = _explain(flight, arguments.request) if arguments.request else _list(flight)
    except NoFlightLogError:
        from headway_lab.flight.live import explain_live

        return explain_live(arguments)
    except Divergence as found:
        sys.stderr.write(f"headway explain: the replay differs from the recording: {found}\n")
        return NOT_FOUND_EXIT_CODE
    if arguments.request and is_address(arguments.log):
        from headway_lab.flight.live import print_state

        print_state(arguments)
    return exit_code


def _explain(flight: Flight, request_id: str) -> int:
    follower = Follower(request_id)
    for event in flight.events(request_id):
        follower.record(event, flight.replay)
    flight.report_notice()
    if not follower.lives:
        older = ", or it arrived before the oldest segment that is left" if flight.log.header.segment else ""
        sys.stderr.write(f"headway explain: {shown(request_id)} is no request of this recording{older}\n")
        return NOT_FOUND_EXIT_CODE
    sys.stdout.write("\n".join(explanation(life, flight.first_s) for life in follower.lives))
    return 0


def _list(flight: Flight) -> int:
    notables = Notables()
    for event in flight.events("all requests"):
        notables.record(event)
    flight.report_notice()
    sys.stdout.write(notables.text())
    return 0
