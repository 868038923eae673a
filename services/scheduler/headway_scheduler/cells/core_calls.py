"""The calls that change a core between its steps and answers, each with its record.

Owns: that such a call is in the flight recording, since later decisions depend on it; the requests that are to leave the
core. Must not know: executors, other cells, or who calls.
"""

import contextlib
from collections.abc import Callable, Sequence

from headway_proto.columns import decode_column, encode_column
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix, PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.stored_blocks import StoredBlocks
from headway_scheduler.flight.recorder import NullRecorder


class CoreCalls:
    """The calls of one core. Times in seconds, monotonic. ``on_news``: the core may have another step now."""

    def __init__(self, core: Scheduler, recorder: NullRecorder, on_news: Callable[[], None]) -> None:
        self.core = core
        self._recorder = recorder
        self._on_news = on_news
        self._leaving: dict[Origin, None] = {}
        """Requests that are to be released as soon as no step owes them a token."""

    # ------------------------------------------------------------------------------------------- requests come and go

    def add_request(self, new: NewRequestEvent, now: float) -> None:
        """Let the core queue a request.

        Raises:
            RequestRejected: it can never run, or the queue is full.
        """
        self._on_news()
        self.core.add_request(new, now)
        self._recorder.arrived(now, new)

    def adopt(self, request: Request) -> None:
        """Let the core queue a request that another core, or placement, has given up."""
        self._on_news()
        self._recorder.adopted(request)
        self.core.moving.adopt(request)

    def abort(self, origin: Origin, why: str, now: float) -> FinishedEvent | None:
        """Abort a request; None if the core does not have it."""
        if self.core.find(origin) is None:
            return None
        self._on_news()
        self._recorder.aborted(now, origin, why)
        self._leaving.pop(origin, None)
        return self.core.abort(origin)

    def fail(self, origin: Origin, error: str, now: float) -> FinishedEvent | None:
        """End a request that is to blame for lost steps; None if the core does not have it."""
        self._recorder.aborted(now, origin, "it is to blame", error)
        return self.core.fail(origin, error)

    def let_leave(self, origin: Origin, *, must_leave: bool = False) -> bool:
        """Let a running request go on elsewhere after its next token, its blocks with it; False if it does not run here."""
        if origin in self._leaving:
            return False
        self._on_news()
        self._recorder.let_leave(origin, must_leave=must_leave)
        return self.core.moving.let_leave(origin, must_leave=must_leave)

    def release(self, origins: Sequence[Origin]) -> list[Request]:
        """Give up these requests. Those that a step in flight owes a token come with a later call."""
        self._leaving.update(dict.fromkeys(origins))
        if not self._leaving:
            return []
        self._on_news()
        found = []
        for origin in list(self._leaving):
            self._recorder.released(origin)
            request = self.core.moving.release(origin)
            if request is not None or self.core.find(origin) is None:
                del self._leaving[origin]
            if request is not None:
                found.append(request)
        return found

    def release_waiting(self) -> list[Request]:
        """Give up what waits in the core."""
        self._on_news()
        self._recorder.released_waiting()
        return self.core.moving.release_waiting()

    def release_all(self) -> list[Request]:
        """The executor is lost: give up every request of the core."""
        self._on_news()
        self._leaving.clear()
        self._recorder.released_all()
        return self.core.release_all()

    def return_lease(self, stored: StoredBlocks) -> None:
        """Another cell has fetched these blocks of this executor's pool, or nobody wants them any more."""
        self._on_news()
        self._recorder.lease_returned(stored)
        self.core.moving.return_lease(stored)

    # ------------------------------------------------------------------------------------------------ after lost steps

    def run_alone(self, origin: Origin | None, num_tokens: int) -> None:
        """Run only this request until it has so many tokens; None: all may run."""
        self.core.run_alone(origin, num_tokens)
        self._recorder.ran_alone(origin, num_tokens)

    def start_slowly(self, origins: tuple[Origin, ...]) -> None:
        """Let few of these requests start at a time."""
        self.core.start_slowly(origins)
        self._recorder.started_slowly(origins)

    def distrust(self, epoch: int) -> None:
        """What an executor, this or another, wrote in this epoch may be anything."""
        self._recorder.distrusted(epoch)
        self.core.moving.distrust(epoch)

    # --------------------------------------------------------------------------------------------- operators' commands

    def pause(self, *, is_paused: bool) -> None:
        """Stop or resume starting requests."""
        if self.core.paused != is_paused:
            self.core.paused = is_paused
            self._recorder.paused(is_paused=is_paused)

    def drop_cached(self) -> None:
        """Drop cached blocks that no request holds."""
        self.core.drop_cached()
        self._recorder.cache_dropped()

    def pin(self, name: str, tenant: str, token_ids: bytes) -> PinnedPrefix:
        """Keep a prefix in the cache. ``token_ids`` is an int32 column.

        Raises:
            PinRefused: it cannot be pinned.
        """
        pinned = self.core.pinned_prefixes.pin(name, tenant, decode_column(token_ids))
        self._recorder.pinned(name, tenant, token_ids)
        return pinned

    def unpin(self, name: str) -> bool:
        """Return whether the pin existed."""
        self._recorder.unpinned(name)
        return self.core.pinned_prefixes.unpin(name)

    def restore_pin(self, name: str, before: tuple[str, bytes] | None) -> None:
        """Make a pin what it was; None: there was none."""
        if before is None:
            self.unpin(name)
        else:
            self.pin(name, *before)

    @property
    def pins(self) -> dict[str, tuple[str, bytes]]:
        """Tenant and int32 column of each pin, oldest first."""
        contents = self.core.pinned_prefixes.contents()
        return {name: (tenant, encode_column(token_ids)) for name, (tenant, token_ids) in contents.items()}

    def pin_as(self, other: "CoreCalls") -> None:
        """Pin what another core has pinned; what does not fit here is left out."""
        known = self.pins
        for name, (tenant, token_ids) in other.pins.items():
            if name not in known:
                with contextlib.suppress(PinRefused):
                    self.pin(name, tenant, token_ids)
