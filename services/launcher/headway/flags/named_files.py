"""Files that a user names, read within bounds: a device, such as /dev/zero, may have no end.

Must not know: what is in them.
"""

import codecs
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headway.flags.settings import ConfigurationError
from headway_proto.wording import shown

MOST_BYTES = 1 << 26
"""Of a file that is read whole, or of a line."""


def bytes_of_file(path: str | None, origin: str, most_bytes: int = MOST_BYTES) -> bytes | None:
    """Return a file's content, if one is named.

    Raises:
        ConfigurationError: the file is unreadable, or larger than ``most_bytes``.
    """
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise _unreadable(path, origin, error) from None
    if len(content) > most_bytes:
        raise ConfigurationError(f"{origin}: {shown(path)} is too large; allowed: {most_bytes} bytes")
    return content


def lines_of_file(path: str, origin: str) -> Iterator[tuple[int, bytes]]:
    """Yield a file's lines as ``lines_of`` does.

    Raises:
        ConfigurationError: the file is unreadable, or a line too long.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (what is done with a line may raise the same errors)
    except (OSError, ValueError) as error:
        raise _unreadable(path, origin, error) from None
    with file:
        yield from lines_of(file, path, origin)


def lines_of(file: BinaryIO, name: str, origin: str) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers from 1, without their ends and without a byte order mark.

    Raises:
        ConfigurationError: the file is unreadable, or a line has more than ``MOST_BYTES``.
    """
    for number in itertools.count(1):
        try:
            line = file.readline(MOST_BYTES + 1)
        except OSError as error:
            raise _unreadable(name, origin, error) from None
        if not line:
            return
        if len(line) > MOST_BYTES:
            raise ConfigurationError(
                f"{origin}: line {number} of {shown(name)} is too long; allowed: {MOST_BYTES} bytes"
            )
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def decoded(content: bytes, where: str) -> str:
    """Return what was read as text.

    Raises:
        ConfigurationError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: byte {error.start + 1} is not UTF-8; allowed: text in UTF-8") from None


def token_of_file(path: str | None, origin: str) -> str:
    """Return the bearer token in a file, if one is named.

    Raises:
        ConfigurationError: the file is unreadable, or not one word of printable ASCII.
    """
    words = (bytes_of_file(path, origin) or b"").decode("ascii", "replace").split()
    if len(words) > 1 or not all(word.isascii() and word.isprintable() for word in words):
        raise ConfigurationError(f"{origin}: {shown(path)} holds no token; allowed: one word of printable ASCII")
    return words[0] if words else ""


def _unreadable(path: str, origin: str, error: OSError | ValueError) -> ConfigurationError:
    """A path with a zero byte is a ValueError."""
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigurationError(f"{origin}: cannot read {shown(path)}: {reason}")
