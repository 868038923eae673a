"""An output's pieces, for comparisons that do not depend on how its text was cut."""

from collections.abc import Iterable

from headway_gateway.openai.pieces import Piece
from headway_gateway.openai.thinking import Thought


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces, with neighbours of one kind as one; calls stay by themselves."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        else:
            found.append(piece)
    return found
