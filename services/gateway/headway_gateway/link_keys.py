"""The CURVE keys of the link to the scheduler, as ``zmq.auth.create_certificates`` writes them.

Owns: the names of the key files and reading them. Must not know: the protocol that the keys protect.
"""

from pathlib import Path

import msgspec

from headway_process.link_keys import load_key_pair

SCHEDULER_PUBLIC_KEY = "scheduler.key"
GATEWAY_SECRET_KEY = "gateway.key_secret"  # noqa: S105  # a file's name


class LinkKeys(msgspec.Struct, frozen=True):
    """The scheduler's public key and the gateway's own pair, Z85-encoded."""

    scheduler_public: bytes
    public: bytes
    secret: bytes


def load_link_keys(directory: Path) -> LinkKeys:
    """Read ``scheduler.key`` and ``gateway.key_secret`` of ``directory``.

    Raises:
        ValueError: a file is missing or holds no such key; the message is one line.
    """
    scheduler_public, _ = _load(directory / SCHEDULER_PUBLIC_KEY)
    public, secret = _load(directory / GATEWAY_SECRET_KEY)
    if secret is None:
        raise ValueError(f"curve_keys: {GATEWAY_SECRET_KEY} in {str(directory)!r:.64} holds no secret key")
    return LinkKeys(scheduler_public=scheduler_public, public=public, secret=secret)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_key_pair(path)
    except ValueError as error:
        raise ValueError(
            f"curve_keys: {str(path.parent)!r:.64} is not allowed; allowed: a directory with a usable {path.name} ({error})"
        ) from error
