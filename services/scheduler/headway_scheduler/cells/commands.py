"""Operators' commands that change the core, recorded since later decisions depend on them.

Owns: the core's call for each command. Must not know: who gives it.
"""

import contextlib

from headway_proto.columns import decode_column, encode_column
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix, PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.flight.recorder import NullRecorder


def pause(core: Scheduler, recorder: NullRecorder, *, is_paused: bool) -> None:
    """Stop or resume starting requests."""
    core.paused = is_paused
    recorder.paused(is_paused=is_paused)


def drop_cached(core: Scheduler, recorder: NullRecorder) -> None:
    """Drop cached blocks that no request holds."""
    core.drop_cached()
    recorder.cache_dropped()


def pin(core: Scheduler, recorder: NullRecorder, name: str, tenant: str, token_ids: bytes) -> PinnedPrefix:
    """Keep a prefix in the cache. ``token_ids`` is an int32 column.

    Raises:
        PinRefused: it cannot be pinned.
    """
    pinned = core.pinned_prefixes.pin(name, tenant, decode_column(token_ids))
    recorder.pinned(name, tenant, token_ids)
    return pinned


def pin_as(other: Scheduler, core: Scheduler, recorder: NullRecorder) -> None:
    """Pin what another core has pinned; what does not fit here is left out."""
    known = pins(core)
    for name, (tenant, token_ids) in pins(other).items():
        if name not in known:
            with contextlib.suppress(PinRefused):
                pin(core, recorder, name, tenant, token_ids)


def unpin(core: Scheduler, recorder: NullRecorder, name: str) -> bool:
    """Return whether the pin existed."""
    recorder.unpinned(name)
    return core.pinned_prefixes.unpin(name)


def pins(core: Scheduler) -> dict[str, tuple[str, bytes]]:
    """Tenant and int32 column of each pin, oldest first."""
    contents = core.pinned_prefixes.contents()
    return {name: (tenant, encode_column(token_ids)) for name, (tenant, token_ids) in contents.items()}
