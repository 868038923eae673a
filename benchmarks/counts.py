"""How many of something a benchmark takes: a whole number, at least one, or a line that says so instead of a crash later."""

import argparse


def count(text: str) -> int:
    """Read a count; for ``argparse``."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.64} is not allowed; allowed: a whole number, 1 or more")
    return int(text)


def count_or_none(text: str) -> int:
    """Read a count that may be 0; for ``argparse``."""
    return 0 if text == "0" else count(text)


def counts(text: str) -> list[int]:
    """Read counts with commas between them; for ``argparse``."""
    return [count(part) for part in text.split(",")]
