"""The date, which some of VllmEngine's answers carry. Nothing is decided by it.

Owns: the one look at the wall clock. Must not know: who tells it.
"""

from datetime import UTC, datetime


def now() -> datetime:
    """The date and time, in UTC."""
    return datetime.now(UTC)
