"""How a message names a value and tells another's error. Must not know: whose value or error it is."""

from pathlib import PurePath

_SHOWN_CHARACTERS = 64
_GAP = "..."


def shown(value: object, most: int = _SHOWN_CHARACTERS) -> str:
    """Return a value as Python writes it: text and paths quoted, control characters escaped.

    Of more than ``most`` characters, the beginning and the end are left: what tells two long paths apart is mostly at
    their ends, and the quotes stay closed.
    """
    text = repr(str(value) if isinstance(value, PurePath) else value)
    most += len("''")
    if len(text) <= most:
        return text
    end = (most - len(_GAP)) // 2
    return text[: most - len(_GAP) - end] + _GAP + text[-end:]


def one_line(text: object, most: int | None = None) -> str:
    """Return a text, or an error's, in one line of at most ``most`` characters: each run of white space is one space.

    An error without a text is told by its class.
    """
    line = " ".join(str(text).split())[:most]
    return type(text).__name__ if isinstance(text, BaseException) and not line else line
