"""How many processors this process may keep busy. Must not know: what on."""

import contextlib
import math
import os
from pathlib import Path

from headway_process.control_groups import groups_around


def num_usable_cores(num_processes: int = 1) -> int:
    """Return how many cores one of so many equal processes of a container may keep busy; at least one.

    They are those that it may run on, and its part of the processor time that a container is allowed. With more threads
    than that, the system would stop all of them for a while in every tenth of a second.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min((_quota(version, group) for version, group in groups_around("cpu")), default=math.inf)
    return max(1, math.ceil(min(cores, quota / num_processes)))


def _quota(version: int, group: Path) -> float:
    """Return the processors that a group may keep busy in the mean."""
    with contextlib.suppress(OSError, ValueError):
        if version == 2:
            time, period = (group / "cpu.max").read_text().split()
        else:
            time, period = ((group / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if float(time) > 0 and float(period) > 0:  # no limit is -1 in version 1
            return float(time) / float(period)
    return math.inf
