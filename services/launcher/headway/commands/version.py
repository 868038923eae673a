"""The command ``headway version``."""

import argparse
import importlib.metadata
import sys


def add_flags(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Print the version."""
    del arguments
    sys.stdout.write(f"headway {importlib.metadata.version('headway')}\n")
    return 0
