"""Header blocks: read by hpack, which takes longer than everything else about a short request, and written without it.

Owns: the blocks that were read before. Must not know: what a header means.

A block's meaning depends on the connection's table of headers. A client soon sends the same block again and again, and such
a block changes nothing in the table: so its headers are known until another block changes it.
"""

from collections.abc import Iterable
from typing import TypeAlias

from hpack import Decoder

Headers: TypeAlias = list[tuple[bytes, bytes]]

_MOST_KNOWN = 8
_MOST_KNOWN_BYTES = 1024


class HeaderBlocks:
    """Reads blocks in the order in which they come."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` bounds the headers of a block."""
        self._decoder = Decoder(max_header_list_size=most_bytes)
        self._known: dict[bytes, Headers] = {}

    def read(self, block: bytes) -> Headers:
        """Return the headers, which nobody may change: the same list for a block that is known.

        Raises:
            hpack.exceptions.HPACKError: it cannot be read; nothing more can.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._table()
        headers: Headers = self._decoder.decode(block, raw=True)  # type: ignore[assignment]  # raw: pairs of bytes
        newest, *sizes = self._table()
        if newest is not before[0] or sizes != before[1:]:
            self._known.clear()
        elif len(block) <= _MOST_KNOWN_BYTES:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[bytes(block)] = headers
        return headers

    def _table(self) -> list[object]:
        """The newest entry, and what else tells whether the table has changed."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return [entries[0] if entries else None, len(entries), table.maxsize]


def pack_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of headers. It uses no table, so that it is the same bytes on every connection."""
    return b"".join(b"\0" + _packed(name) + _packed(value) for name, value in headers)


def _packed(text: bytes) -> bytes:
    """A string literal of HPACK (RFC 7541, 5.2), not compressed."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    digits = [0x7F]
    length -= 0x7F
    while length >= 0x80:
        digits.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes((*digits, length)) + text
