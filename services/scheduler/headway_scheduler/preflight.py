"""Checks before a scheduler starts.

Owns: whether the flight log can be written. Must not know: who asks.
"""

import os
from pathlib import Path

from headway_proto.wording import shown
from headway_scheduler.config import SchedulerConfig


def check(config: SchedulerConfig) -> None:
    """Check a validated ``config`` without writing anything.

    Raises:
        ValueError: the directory of the flight log can be neither made nor written.
    """
    if not config.flight_log:
        return
    directory = Path(config.flight_log).absolute()
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    problem = "" if os.access(nearest, os.W_OK | os.X_OK) else "Permission denied"
    if not nearest.is_dir():
        problem = f"{nearest} is no directory"
    if problem:
        raise ValueError(f"flight_log: {shown(config.flight_log)} cannot be used: {problem}")
