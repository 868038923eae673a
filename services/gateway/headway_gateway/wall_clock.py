"""The date in answers of VllmEngine and over HTTP."""

from datetime import UTC, datetime


def now() -> datetime:
    """Return the UTC time."""
    return datetime.now(UTC)
