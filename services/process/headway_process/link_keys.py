"""A file with the CURVE keys of a link, as ``zmq.auth.create_certificates`` writes it.

Owns: which of these files hold usable keys. Must not know: whose they are, or where they lie.
"""

import struct
from pathlib import Path

import zmq.auth
from zmq.utils import z85

_KEY_BYTES = 32


def load_key_pair(path: Path) -> tuple[bytes, bytes | None]:
    """The public and the secret key in ``path``, Z85-encoded; None where it holds no secret one.

    Raises:
        ValueError: it holds no whole key, or cannot be read; the message says why.
    """
    try:
        public, secret = zmq.auth.load_certificate(path)
        are_whole = all(len(z85.decode(key)) == _KEY_BYTES for key in (public, secret) if key is not None)
    except OSError as error:
        raise ValueError(error.strerror or "no such file") from None
    except (ValueError, LookupError, struct.error):  # The last two: zmq's own readers meet half a line, or no Z85.
        are_whole = False
    if not are_whole:
        raise ValueError("no whole CURVE key in it")
    return public, secret
