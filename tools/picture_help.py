"""Draws what `headway --help` prints as a picture of a terminal, with rich (https://rich.readthedocs.io).

Owns: the size of the terminal. Must not know: the commands.

    python tools/picture_help.py [--output docs/pictures/help.svg]      # needs the extra top (rich)
"""

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headway.__main__ import overview

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 132


def picture(text: str) -> str:
    """Return a terminal with this text, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ headway --help", style="bold"))
    console.print(Text(text))
    return console.export_svg(title="headway", unique_id="help")


def main(words: Sequence[str] | None = None) -> int:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw what headway --help prints.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures" / "help.svg")
    arguments = parser.parse_args(words)
    arguments.output.write_text(picture(overview()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
