"""The keys of one end of a link between processes.

Owns: their form. Must not know: sockets, files.
"""

from typing import NamedTuple


class LinkKeys(NamedTuple):
    """In Z85; ``peer``: the other end's public key. No log shows them."""

    peer: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "LinkKeys(...)"
