"""Which Ray a cluster uses: one on loopback alone, or one that wants a token."""

import importlib.util
from typing import Any

import pytest

from headway.flags.settings import ConfigurationError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra ray)")


def nodes(*addresses: str) -> list[dict[str, Any]]:
    return [{"NodeManagerAddress": address} for address in addresses]


def test_loopback_is_enough() -> None:
    from headway.cluster.ray_engine import _require_guarded

    _require_guarded(nodes("127.0.0.1", "127.0.0.1"), {})


def test_beyond_loopback_there_must_be_a_token() -> None:
    from headway.cluster.ray_engine import _require_guarded

    _require_guarded(nodes("127.0.0.1", "10.0.0.2"), {"RAY_AUTH_MODE": "token"})
    for mode in ({}, {"RAY_AUTH_MODE": "disabled"}):
        with pytest.raises(
            ConfigurationError, match=r"address: Ray listens on 10\.0\.0\.2 without authentication; allowed: "
        ):
            _require_guarded(nodes("127.0.0.1", "10.0.0.2"), mode)
