"""The life of a request that a running server has: what ``Admin.Explain`` says of it.

Owns: the call, and what is told where there is no more than that. Must not know: flight logs.
"""

import argparse
import sys

from headway.client import Client, HeadwayError
from headway.settings import ConfigurationError, bytes_of_file, token_of_file

HINT = (
    "For its whole life, serve with --flight-log DIRECTORY, and ask with headway explain DIRECTORY REQUEST on the "
    "scheduler's host.\n"
)
NOT_FOUND_EXIT_CODE = 1


def explain_live(arguments: argparse.Namespace) -> int:
    """Print what the server says; return the exit code.

    Raises:
        ConfigurationError: the server cannot be asked.
    """
    if not arguments.request:
        raise ConfigurationError("REQUEST is required where a server is asked; allowed: the id of a live request")
    client = Client(
        arguments.log,
        token=token_of_file(arguments.token_file, "--token-file") or None,
        root_certificates=bytes_of_file(arguments.root_certificates, "--root-certificates"),
    )
    with client:
        try:
            answer = client.explain(arguments.request)
        except HeadwayError as error:
            sys.stderr.write(f"headway explain: {error}\n")
            return NOT_FOUND_EXIT_CODE
    state = answer.request
    sys.stdout.write(f"Request {state.request_id} is {state.state}. {answer.explanation}\n{HINT}")
    return 0
