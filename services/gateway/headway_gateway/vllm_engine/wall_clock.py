"""The date in some of VllmEngine's answers.

Owns: the wall clock. Must not know: its readers.
"""

from datetime import UTC, datetime


def now() -> datetime:
    """The date and time, in UTC."""
    return datetime.now(UTC)
