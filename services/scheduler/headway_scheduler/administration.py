"""Answers to operators.

Owns: the answers to ``AdminCall``. Must not know: gRPC, frames, who asked.
"""

from collections import OrderedDict
from functools import partial
from typing import Protocol

import msgspec

from headway_proto.columns import INT32
from headway_proto.operations import (
    AdminCall,
    AdminReply,
    CacheChange,
    CacheChanges,
    CachePosition,
    FlightLogPlace,
    PinnedPrefix,
    PrefixToPin,
    SequenceState,
    TenantPrefixUse,
)
from headway_scheduler.cell import Cell
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix as CorePinnedPrefix
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.fleet import Fleet
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.live_sequences import LiveSequences
from headway_scheduler.placement.placement import Placed
from headway_scheduler.status_report import Reported, status_of
from headway_scheduler.wait_sentences import sentence_for

MAX_PIN_NAME_BYTES = 128
MOST_TOKENS_IN_A_REPLY = 1 << 18
"""In cache changes; if there are more, the reply says so."""

NO_EXECUTOR = "no executor has joined yet"
NO_FLIGHT_LOG = "flight_log: the scheduler records nothing; allowed: a directory (--flight-log DIRECTORY)"

MAX_REMEMBERED_ENDS = 16384
"""Cancelling an ended request is no error while its id is kept."""


_NEED_EXECUTOR = {"pause", "resume", "flush", "cache", "pins", "pin", "unpin"}
_reply = partial(AdminReply, call_id=0)


class Administered(Reported, Protocol):
    """The scheduler as operators see it."""

    live: LiveSequences
    recorder: NullRecorder

    def drain(self) -> None:
        """Refuse new sequences."""

    def end(self, origin: Origin, now: float) -> None:
        """Abort a sequence."""

    def announce(self) -> None:
        """Send the state to every gateway."""


class Administration:
    """Answers operators about one scheduler."""

    def __init__(self, scheduler: Administered) -> None:
        self._scheduler = scheduler
        self._ended: OrderedDict[str, None] = OrderedDict()

    def remember_ended(self, request_id: str) -> None:
        """Keep an ended request's id."""
        self._ended[request_id] = None
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def answer(self, call: AdminCall, now: float) -> AdminReply:
        """Execute ``call``."""
        reply = self._reply(call, now)
        return msgspec.structs.replace(reply, call_id=call.call_id)

    def _reply(self, call: AdminCall, now: float) -> AdminReply:
        match call.method:
            case "status":
                return _reply(status=status_of(self._scheduler, now), tenants=self._tenants())
            case "list":
                return _reply(sequences=self._sequences(now))
            case "cancel":
                return self._cancel(call.request_id, now)
            case "drain":
                self._scheduler.drain()
                return _reply()
            case "explain":
                return self._explain(call.request_id, now)
            case "flight_log":
                return self._flight_log(call.place or FlightLogPlace(), now)
        if call.method not in _NEED_EXECUTOR:
            return _refusal(f"unknown method {call.method!r:.64}")
        cells = [cell for cell in self._scheduler.fleet.cells if cell.core is not None]
        return self._with_executors(call, cells, now) if cells else _refusal(NO_EXECUTOR)

    def _with_executors(self, call: AdminCall, cells: list[Cell], now: float) -> AdminReply:
        """Do what the call asks for in every cell."""
        views = [SchedulerView(core) for core in self._scheduler.fleet.cores]
        match call.method:
            case "pause" | "resume":
                self._scheduler.fleet.pause(is_paused=call.method == "pause")
                self._scheduler.announce()
                return _reply()
            case "flush":
                for cell in cells:
                    cell.drop_cached()
                return _reply(status=status_of(self._scheduler, now))
            case "cache":
                return _cache_changes(views[0], call.position)
            case "pins":
                return _reply(pinned_prefixes=tuple(map(_pinned, views[0].pinned_prefixes())))
        if call.prefix is None:
            return _refusal("prefix: there is none; allowed: one with a name")
        if call.method == "pin":
            return _pin(self._scheduler.fleet, call.prefix)
        return _reply() if self._scheduler.fleet.unpin(call.prefix.name) else _refusal("not found")

    def _tenants(self) -> tuple[TenantPrefixUse, ...]:
        view = self._scheduler.view
        uses = {} if view is None else view.prefix_use()
        return tuple(
            TenantPrefixUse(tenant=tenant, num_query_tokens=use.num_query_tokens, num_hit_tokens=use.num_hit_tokens)
            for tenant, use in uses.items()
        )

    def _sequences(self, now: float) -> tuple[SequenceState, ...]:
        view = self._scheduler.view
        if view is None:
            return ()
        return tuple(_state_of(view.view_of(request), request, now) for request in view.requests())

    def _explain(self, request_id: str, now: float) -> AdminReply:
        fleet, view = self._scheduler.fleet, self._scheduler.view
        found = self._scheduler.live.of_request(request_id)
        cell = fleet.cell_of(found[0].origin) if found else None
        if cell is not None and cell.core is not None:
            request = cell.core.find(found[0].origin)
        else:
            request = fleet.placement.find(found[0].origin) if found else None
        if view is None or request is None:
            return _refusal("not found")
        explanation = f"It arrived {now - request.arrival_time:.1f} s ago"
        if not fleet.open_cells:
            explanation += ". No executor is connected, so nothing runs; it keeps its place."
        elif cell is None or cell.core is None:
            explanation += f" and waits for an executor behind {fleet.placement.num_ahead_of(request)} others: " + (
                "admission is paused." if fleet.is_paused else "none of them could start it soon."
            )
        elif request.row >= 0:
            explanation += _why_running(SchedulerView(cell.core), request)
        else:
            explanation += _why_waiting(cell.core, SchedulerView(cell.core), request)
        explanation += _why_there(fleet.placement.placed(request.new.origin))
        return _reply(sequences=(_state_of(view.view_of(request), request, now),), explanation=explanation)

    def _cancel(self, request_id: str, now: float) -> AdminReply:
        found = self._scheduler.live.of_request(request_id)
        if not found and request_id not in self._ended:
            return _refusal("not found")
        for live in found:
            self._scheduler.end(live.origin, now)
        return _reply()

    def _flight_log(self, place: FlightLogPlace, now: float) -> AdminReply:
        recorder = self._scheduler.recorder
        pieces = recorder.pieces
        if pieces is None:
            return _refusal(NO_FLIGHT_LOG)
        if not place.life:
            recorder.flush(now, None, is_final=True)  # without the core, so no segment begins now
            return _reply(flight_log=pieces.contents())
        if place.mark and place.life == pieces.life:
            return _reply(flight_log=pieces.contents(place.mark))
        return _reply(flight_log=pieces.piece(place))


def _why_running(view: SchedulerView, request: Request) -> str:
    figures, record = view.figures_of(request), request.speculation
    preempted = f" It was preempted {request.num_preemptions} times." if request.num_preemptions else ""
    proposed = f" Of {record.num_proposed_tokens} tokens proposed for it {record.num_accepted_tokens} were right."
    return (
        f" and runs: {figures.num_computed_tokens} of {figures.num_tokens} known tokens are computed, "
        f"in {figures.num_blocks} blocks.{preempted}{proposed if record.num_proposed_tokens else ''}"
    )


def _why_waiting(core: Scheduler, view: SchedulerView, request: Request) -> str:
    preempted = f", was preempted {request.num_preemptions} times" if request.num_preemptions else ""
    num_ahead = len(view.ahead_of(request))
    return f"{preempted} and waits behind {num_ahead} others: {sentence_for(core, request)}."


def _why_there(placed: Placed | None) -> str:
    """Why placement chose its executor; empty where there was no choice."""
    if placed is None or placed.num_choices < 2:
        return ""
    return (
        f" Of {placed.num_choices} executors that could start it soon, number {placed.cell} was expected to be first: it "
        f"had {placed.num_cached_tokens} of its tokens in the prefix cache and {placed.num_tokens_ahead} tokens to compute "
        "before it."
    )


def _pin(fleet: Fleet, prefix: PrefixToPin) -> AdminReply:
    if not 1 <= len(prefix.name.encode()) <= MAX_PIN_NAME_BYTES:
        return _refusal(f"name: {prefix.name!r:.64} is not allowed; allowed: 1 to {MAX_PIN_NAME_BYTES} bytes")
    if len(prefix.token_ids) % INT32.itemsize:
        return _refusal(f"token_ids: {len(prefix.token_ids)} bytes are no int32 column")
    try:
        pinned = fleet.pin(prefix.name, prefix.tenant, prefix.token_ids)
    except PinRefused as refusal:
        return _refusal(str(refusal))
    return _reply(pinned_prefixes=(_pinned(pinned),))


def _cache_changes(view: SchedulerView, position: CachePosition | None) -> AdminReply:
    block_size = view.capacity.block_size
    index = position.index if position is not None and position.life == view.epoch else None
    part = view.cache_changes(index, max(1, MOST_TOKENS_IN_A_REPLY // block_size))
    changes = tuple(
        CacheChange(entry.first_node, entry.num_blocks, entry.parent_node, entry.token_bytes, entry.scope)
        for entry in part.entries
    )
    return _reply(
        cache=CacheChanges(
            position=CachePosition(view.epoch, part.next_index),
            block_size=block_size,
            changes=changes,
            more=part.has_more,
        )
    )


def _refusal(error: str) -> AdminReply:
    return _reply(error=error)


def _pinned(pinned: CorePinnedPrefix) -> PinnedPrefix:
    return PinnedPrefix(**msgspec.structs.asdict(pinned))


def _state_of(view: SchedulerView, request: Request, now: float) -> SequenceState:
    figures, new = view.figures_of(request), request.new
    return SequenceState(
        request_id=new.request_id,
        index=new.index,
        state=request.status.value,
        priority=new.priority,
        tenant=new.tenant,
        num_prompt_tokens=new.num_prompt_tokens,
        num_output_tokens=figures.num_tokens - new.num_prompt_tokens,
        num_computed_tokens=figures.num_computed_tokens,
        num_blocks=figures.num_blocks,
        num_preemptions=request.num_preemptions,
        age_ms=(now - request.arrival_time) * 1e3,
    )
