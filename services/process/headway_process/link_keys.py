"""Files of CURVE keys, as ``zmq.auth.create_certificates`` writes them.

Owns: reading them. Must not know: whose keys they are.
"""

import struct
from pathlib import Path

from headway_process.token_files import refuse_if_anybody_writes
from headway_proto.wording import shown

_KEY_BYTES = 32


def load_public_key(directory: Path, name: str) -> bytes:
    """Return a Z85 key.

    Raises:
        ValueError: the file cannot be used.
    """
    return _load(directory, name)[0]


def load_own_keys(directory: Path, name: str) -> tuple[bytes, bytes]:
    """Return public and secret key in Z85.

    Raises:
        ValueError: the file is unusable or has no secret key.
    """
    public, secret = _load(directory, name)
    if secret is None:
        raise ValueError(f"curve_keys: {name} in {shown(directory)} holds no secret key")
    return public, secret


def _load(directory: Path, name: str) -> tuple[bytes, bytes | None]:
    try:
        return load_key_pair(directory / name)
    except ValueError as error:
        raise ValueError(
            f"curve_keys: {shown(directory)} is not allowed; allowed: a directory with a usable {name} ({error})"
        ) from error


def load_key_pair(path: Path) -> tuple[bytes, bytes | None]:
    """Return public key and, if present, secret key in Z85.

    Raises:
        ValueError: no readable file with a whole key, or everybody may write it.
    """
    import zmq.auth  # the launcher reads keys only if there are some
    from zmq.utils import z85

    try:
        refuse_if_anybody_writes(path.stat().st_mode)
    except OSError as error:
        raise ValueError(error.strerror or "no such file") from None
    try:
        public, secret = zmq.auth.load_certificate(path)
        are_whole = all(len(z85.decode(key)) == _KEY_BYTES for key in (public, secret) if key is not None)
    except OSError as error:
        raise ValueError(error.strerror or "no such file") from None
    except (ValueError, LookupError, struct.error):  # zmq raises the last two for half a line or bad Z85
        are_whole = False
    if not are_whole:
        raise ValueError("no whole CURVE key in it")
    return public, secret
