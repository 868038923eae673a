"""The command ``headway completion``: what a shell needs to complete commands, flags and files.

Owns: which flags name files. Must not know: how a shell completes (https://docs.iterative.ai/shtab does).
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable

from headway.flags.configuration import OneLineParser
from headway_proto.wording import one_line

SHELLS = ("bash", "zsh", "fish")
_FILES = frozenset({"FILE", "MODEL", "LOG"})
_DIRECTORIES = frozenset({"DIR", "DIRECTORY"})
_FILE_FLAGS = (
    *("-file", "-keys", "-log", "--model", "-certificate", "-certificates", "--client-key"),
    *("--json", "--csv", "--png", "--trace", "--deployment"),
)
"""Ends of flags of settings, which all have the same placeholder."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    """Print the script for a shell."""
    import shtab

    from headway.__main__ import COMMANDS, parser_of

    summaries = {name: command.summary for name, command in COMMANDS.items()}
    sys.stdout.write(shtab.complete(whole_parser(summaries, parser_of), arguments.shell) + "\n")
    return 0


def whole_parser(summaries: dict[str, str], parser_of: Callable[[str], OneLineParser]) -> argparse.ArgumentParser:
    """Return one parser with all commands. A command that this host cannot load has no flags."""
    whole = argparse.ArgumentParser(prog="headway", add_help=False)
    commands = whole.add_subparsers()
    for name, summary in summaries.items():
        parser = OneLineParser(prog=f"headway {name}")
        with contextlib.suppress(ModuleNotFoundError):
            parser = parser_of(name)
        _mark_files(parser._actions)  # noqa: SLF001 (argparse has no other way to list them)
        commands.add_parser(name, parents=[parser], add_help=False, help=summary)
    return whole


def _mark_files(actions: Iterable[argparse.Action]) -> None:
    """Let shells complete the names of files where a flag takes one, and say each flag's meaning in one line."""
    import shtab

    for action in actions:
        if action.help and action.help is not argparse.SUPPRESS:
            action.help = one_line(action.help)
        if isinstance(action.metavar, str) and action.metavar.startswith("{") and action.choices is None:
            action.choices = action.metavar.strip("{}").split(",")  # a setting's; it is checked elsewhere
        takes_text = action.metavar == "TEXT" and any(flag.endswith(_FILE_FLAGS) for flag in action.option_strings)
        is_file = action.metavar in _FILES or takes_text
        if is_file and action.choices is None:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
