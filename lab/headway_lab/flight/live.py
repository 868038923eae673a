"""A request on a running server, from ``Admin.Explain``."""

import argparse
import sys

from headway.client import HeadwayError
from headway.flags.settings import ConfigurationError
from headway.terminal.tables import printable
from headway_lab.flight.fetched import client_for

HINT = "For its whole life, also when it has ended, serve with --flight-log DIRECTORY.\n"
NOT_FOUND_EXIT_CODE = 1


def explain_live(arguments: argparse.Namespace) -> int:
    """Print the server's explanation; return the exit code.

    Raises:
        ConfigurationError: the server does not answer.
    """
    if not arguments.request:
        raise ConfigurationError(
            "REQUEST is required where a server without a flight log is asked; allowed: the id of a live request"
        )
    with client_for(arguments) as client:
        try:
            answer = client.explain(arguments.request)
        except HeadwayError as error:
            sys.stderr.write(f"headway explain: {error}\n{HINT}")
            return NOT_FOUND_EXIT_CODE
    state = answer.request
    sentence = printable(f"Request {state.request_id} is {state.state}. {answer.explanation}")
    sys.stdout.write(f"{sentence}\n{HINT}")
    return 0


def print_state(arguments: argparse.Namespace) -> None:
    """Print where the request is, if it is live."""
    with client_for(arguments) as client:
        try:
            answer = client.explain(arguments.request)
        except HeadwayError:  # it has ended
            return
    sys.stdout.write(f"\nNow it is {answer.request.state}. {printable(answer.explanation)}\n")
