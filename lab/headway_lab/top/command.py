"""``headway top``: from flags to a live view, or to one screen as text; exit codes. Must not know: what keys do."""

import argparse
import asyncio
import io
import math
import shutil
import sys

from headway.commands.connection import add_connection_flags, client_of
from headway.flags.settings import ConfigurationError

FAILED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130
DEFAULT_INTERVAL_S = 1.0
DEFAULT_MAX_LISTED = 2000
FEWEST_LOOKS = 2
_SHORTEST_INTERVAL_S = 0.1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--interval",
        type=float,
        default=DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"seconds between two requests to the server (default: {DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one screen as plain text of the terminal's size (COLUMNS and LINES change it), and exit",
    )
    parser.add_argument(
        "--looks",
        type=int,
        default=FEWEST_LOOKS,
        metavar="N",
        help="requests to the server before --once prints: rates need two, and more make sparklines longer (default: 2)",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours, as with the variable NO_COLOR")
    parser.add_argument(
        "--max-listed",
        type=int,
        default=DEFAULT_MAX_LISTED,
        metavar="N",
        help="list requests only while at most N are live, because the list costs the scheduler time per request "
        f"(default: {DEFAULT_MAX_LISTED})",
    )
    add_connection_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    from headway_lab.top.server import NoAnswerError

    _check(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of requests may have characters that a terminal lacks
    try:
        return asyncio.run(_once(arguments) if arguments.once else _live(arguments))
    except NoAnswerError as error:
        sys.stderr.write(f"headway top: {arguments.address}: {error}\n")
        return FAILED_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _check(arguments: argparse.Namespace) -> None:
    if not (math.isfinite(arguments.interval) and arguments.interval >= _SHORTEST_INTERVAL_S):
        raise ConfigurationError(
            f"--interval: {arguments.interval:g} is not allowed; allowed: seconds, at least {_SHORTEST_INTERVAL_S:g}"
        )
    if arguments.looks < FEWEST_LOOKS:
        raise ConfigurationError(f"--looks: {arguments.looks} is not allowed; allowed: {FEWEST_LOOKS} or more")
    if arguments.max_listed < 0:
        raise ConfigurationError(f"--max-listed: {arguments.max_listed} is not allowed; allowed: 0 or more")


async def _once(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from headway_lab.top.controls import Controls
    from headway_lab.top.figures import glyphs_for
    from headway_lab.top.frame import Frame
    from headway_lab.top.history import History
    from headway_lab.top.server import Server
    from headway_lab.top.view import picture

    async with client_of(arguments) as client:
        server = Server(client, max_listed=arguments.max_listed)
        history = History(await server.look())
        for _ in range(arguments.looks - 1):
            await asyncio.sleep(arguments.interval)
            history.add(await server.look())
    size = shutil.get_terminal_size((80, 24))
    frame = Frame(
        width=size.columns, height=size.lines, address=arguments.address, glyphs=glyphs_for(sys.stdout.encoding)
    )
    console = Console(width=frame.width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(picture(history, Controls(), frame))
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    sys.stdout.write(text)
    return 0


async def _live(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from headway_lab.top.live import LiveView
    from headway_lab.top.server import Server

    console = Console(no_color=arguments.no_color or None, highlight=False)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        raise ConfigurationError("stdout is no terminal that can be drawn on; give --once for one screen as text")
    async with client_of(arguments) as client:
        server = Server(client, max_listed=arguments.max_listed)
        first = await server.look()  # Report a missing server in one line, without a screen.
        view = LiveView(server, console, first, address=arguments.address, interval_s=arguments.interval)
        return await view.show()
