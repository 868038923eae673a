"""Warnings that many clients could repeat without end."""

import time
from typing import Any

import structlog

_INTERVAL_S = 5.0


class RareWarning:
    """One warning, at most every few seconds."""

    def __init__(self, log: structlog.stdlib.BoundLogger, event: str) -> None:
        self._log = log
        self._event = event
        self._logged_at = float("-inf")

    def warn(self, **details: Any) -> None:
        """Log it, unless it was logged recently."""
        now = time.monotonic()
        if now - self._logged_at >= _INTERVAL_S:
            self._logged_at = now
            self._log.warning(self._event, **details)
