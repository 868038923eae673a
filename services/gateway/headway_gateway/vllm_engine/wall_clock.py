"""The date in some of VllmEngine's answers. Must not know: its readers."""

from datetime import UTC, datetime


def now() -> datetime:
    """Return the UTC time."""
    return datetime.now(UTC)
