"""A failing schedule made small: what is left is needed for the failure.

Owns: the search. Must not know: what a fault or a violation means.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002) over the
list of faults and requests: parts are left out, halves first, as long as the same invariant fails.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from simulation.fault_schedule import Schedule

_Item = TypeVar("_Item")
Fails = Callable[[Schedule], bool]


def shrink(schedule: Schedule, fails: Fails, within_s: float = 20.0) -> Schedule:
    """The smallest schedule found that still ``fails``."""
    deadline = time.monotonic() + within_s

    def still(candidate: Schedule) -> bool:
        return time.monotonic() < deadline and fails(candidate)

    size = None
    while size != (size := (len(schedule.faults), len(schedule.requests))):
        for field in ("faults", "requests"):
            schedule = _with_fewest(schedule, field, still)
    return schedule


def _with_fewest(schedule: Schedule, field: str, still: Fails) -> Schedule:
    def with_(kept: list[object]) -> Schedule:
        return msgspec.structs.replace(schedule, **{field: tuple(kept)})

    return with_(_without_needless(getattr(schedule, field), lambda kept: still(with_(kept))))


def _without_needless(items: Sequence[_Item], still: Callable[[list[_Item]], bool]) -> list[_Item]:
    kept = list(items)
    chunk = max(len(kept) // 2, 1)
    while kept:
        place, removed = 0, False
        while place < len(kept):
            rest = kept[:place] + kept[place + chunk :]
            if still(rest):
                kept, removed = rest, True
            else:
                place += chunk
        if chunk == 1 and not removed:
            return kept
        chunk = max(chunk // 2, 1)
    return kept


def told(schedule: Schedule) -> str:
    """For people: one line per event, in order."""
    settings = schedule.settings
    lines = [f"seed {schedule.seed}, healed after {schedule.heal_at} s"]
    lines.append("  " + ", ".join(f"{name}={getattr(settings, name)}" for name in settings.__struct_fields__))
    lines += [f"  {event!r}" for event in sorted((*schedule.requests, *schedule.faults), key=lambda event: event.at)]
    return "\n".join(lines)
