"""Tables of text."""

from collections.abc import Collection, Sequence

_REPLACEMENT = "?"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return one line per row, of ``printable`` cells."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    """Replace control, format and line characters, with which a name could steer a terminal."""
    return "".join(character if character.isprintable() else _REPLACEMENT for character in text)
