"""The CURVE keys of the link to the scheduler."""

from pathlib import Path

import msgspec

from headway_process.link_keys import load_own_keys, load_public_key

SCHEDULER_PUBLIC_KEY = "scheduler.key"
GATEWAY_SECRET_KEY = "gateway.key_secret"  # noqa: S105  # a file's name


class LinkKeys(msgspec.Struct, frozen=True):
    """The scheduler's public key and the gateway's pair, in Z85."""

    scheduler_public: bytes
    public: bytes
    secret: bytes


def load_link_keys(directory: Path) -> LinkKeys:
    """Read both key files.

    Raises:
        ValueError: a file is missing or wrong.
    """
    scheduler_public = load_public_key(directory, SCHEDULER_PUBLIC_KEY)
    public, secret = load_own_keys(directory, GATEWAY_SECRET_KEY)
    return LinkKeys(scheduler_public=scheduler_public, public=public, secret=secret)
