"""The date in some of VllmEngine's answers."""

from datetime import UTC, datetime


def now() -> datetime:
    """Return the UTC time."""
    return datetime.now(UTC)
