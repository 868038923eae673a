"""Answers to operators.

Owns: the answers to ``AdminCall``. Must not know: gRPC, frames, who asked.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from headway_proto.columns import INT32
from headway_proto.operations import (
    AdapterToLoad,
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
from headway_proto.wording import shown
from headway_scheduler.cells.cell import Cell
from headway_scheduler.cells.fleet import Fleet
from headway_scheduler.cells.live_sequences import LiveSequences
from headway_scheduler.core.choosing.roles import Role, what_nobody_does
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix as CorePinnedPrefix
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import RequestFigures, SchedulerView
from headway_scheduler.figures.fleet_view import NO_EXECUTOR
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.operators.status_report import Reported, status_of
from headway_scheduler.operators.wait_sentences import (
    sentence_for,
    sentence_for_move,
    sentence_for_placed,
    sentence_for_unplaced,
)

MAX_PIN_NAME_BYTES = 128
MOST_TOKENS_IN_A_REPLY = 1 << 18
"""In cache changes; if there are more, the reply says so."""

NOT_YET = "no executor has joined yet"
NO_FLIGHT_LOG = "flight_log: the scheduler records nothing; allowed: a directory (--flight-log DIRECTORY)"

MAX_REMEMBERED_ENDS = 16384
"""Cancelling an ended request is no error while its id is kept."""


_ABOUT_ONE_EXECUTOR = {"drain_executor", "undrain_executor", "set_executor_role", "cache", "pins"}
_CHANGES_ADAPTERS = {"load_adapter", "unload_adapter"}
_ABOUT_ALL_EXECUTORS = {"pause", "resume", "flush", "pin", "unpin"}
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

    def answer(self, call: AdminCall, now: float, later: Callable[[AdminReply], None]) -> AdminReply | None:
        """Execute ``call``. The answer is None if it comes through ``later``, once executors have answered."""
        if call.method in _CHANGES_ADAPTERS:
            self._change_adapters(call, lambda error: later(AdminReply(call_id=call.call_id, error=error)))
            return None
        if call.method == "adapters":
            return AdminReply(call_id=call.call_id, adapters=self._scheduler.fleet.adapters.all())
        reply = self._reply(call, now)
        return msgspec.structs.replace(reply, call_id=call.call_id)

    def _change_adapters(self, call: AdminCall, answer: Callable[[str], None]) -> None:
        fleet, wanted = self._scheduler.fleet, call.adapter or AdapterToLoad("")
        if call.method == "load_adapter":
            fleet.adapters.load(wanted.name, wanted.directory, answer)
        else:
            identity = fleet.adapters.identity_of(wanted.name)
            num_requests = 0 if identity is None else fleet.num_requests_with(identity)
            fleet.adapters.unload(wanted.name, num_requests, answer)

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
        if call.method not in _ABOUT_ONE_EXECUTOR | _ABOUT_ALL_EXECUTORS:
            return _refusal(f"unknown method {shown(call.method)}")
        cells = [cell for cell in self._scheduler.fleet.cells if cell.core is not None]
        if not cells:
            return _refusal(NOT_YET)
        if call.method in _ABOUT_ONE_EXECUTOR:
            return self._with_one_executor(call, cells)
        return self._with_all_executors(call, now)

    def _with_all_executors(self, call: AdminCall, now: float) -> AdminReply:
        """Do what the call asks for in every cell."""
        match call.method:
            case "pause" | "resume":
                self._scheduler.fleet.pause(is_paused=call.method == "pause")
                self._scheduler.announce()
                return _reply()
            case "flush":
                for calls in self._scheduler.fleet.calls:
                    calls.drop_cached()
                return _reply(status=status_of(self._scheduler, now))
        if call.prefix is None:
            return _refusal("prefix: there is none; allowed: one with a name")
        if call.method == "pin":
            return _pin(self._scheduler.fleet, call.prefix)
        return _reply() if self._scheduler.fleet.unpin(call.prefix.name) else _refusal("not found")

    def _with_one_executor(self, call: AdminCall, cells: list[Cell]) -> AdminReply:
        """Do what the call asks for in the cell that it names."""
        cell = next((cell for cell in cells if cell.number == call.executor), None)
        if cell is None or cell.core is None:
            numbers = ", ".join(str(cell.number) for cell in cells)
            return _refusal(f"executor: {call.executor} is not known; allowed: {numbers}")
        view = SchedulerView(cell.core)
        match call.method:
            case "cache":
                return _cache_changes(view, call.position)
            case "pins":
                return _reply(pinned_prefixes=tuple(map(_pinned, view.pinned_prefixes())))
            case "set_executor_role":
                return _set_role(self._scheduler.fleet, cell, call.role)
        is_draining = call.method == "drain_executor"
        others = [other for other in self._scheduler.fleet.open_cells if other is not cell and not other.is_draining]
        if is_draining and not others:
            return _refusal(f"executor: {call.executor} cannot drain, because no other executor takes requests")
        self._scheduler.fleet.drain_cell(call.executor, is_draining=is_draining)
        return _reply()

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
        return tuple(
            _state_of(request, view.figures_of(request, executor), executor, now)
            for request, executor in view.requests()
        )

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
        executor = NO_EXECUTOR if cell is None else cell.number
        if not fleet.open_cells:
            explanation += ". No executor is connected, so nothing runs; it keeps its place."
        elif cell is None or cell.core is None:
            explanation += _why_unplaced(fleet, request)
        else:
            where = f" on executor {executor}" if len(fleet.cells) > 1 else ""
            why = _why_waiting if request.row < 0 else _why_running
            explanation += why(cell.core, request, where)
        placed = fleet.placement.placed(request.new.origin)
        if placed is not None:
            explanation += f" {sentence_for_placed(placed)}"
        explanation += sentence_for_move(request, placed, _keeper_of(fleet, request))
        state = _state_of(request, view.figures_of(request, executor), executor, now)
        return _reply(sequences=(state,), explanation=explanation)

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


def _why_running(core: Scheduler, request: Request, where: str) -> str:
    figures, record = SchedulerView(core).figures_of(request), request.speculation
    preempted = f" It was preempted {request.num_preemptions} times." if request.num_preemptions else ""
    proposed = f" Of {record.num_proposed_tokens} tokens proposed for it {record.num_accepted_tokens} were right."
    return (
        f" and runs{where}: {_num_computed(figures)} of {figures.num_tokens} known tokens are computed, "
        f"in {figures.num_blocks} blocks.{preempted}{proposed if record.num_proposed_tokens else ''}"
    )


def _num_computed(figures: RequestFigures) -> int:
    """Of the known tokens: a step ahead has begun one that is not known yet."""
    return min(figures.num_computed_tokens, figures.num_tokens)


def _why_waiting(core: Scheduler, request: Request, where: str) -> str:
    num_ahead = len(SchedulerView(core).ahead_of(request))
    return f"{_preempted(request)} and waits{where} behind {num_ahead} others: {sentence_for(core, request)}."


def _why_unplaced(fleet: Fleet, request: Request) -> str:
    num_ahead = fleet.placement.num_ahead_of(request)
    why = sentence_for_unplaced(request, fleet.transit.loads(), fleet.placement.policy, is_paused=fleet.is_paused)
    return f"{_preempted(request)} and waits for an executor behind {num_ahead} others: {why}."


def _keeper_of(fleet: Fleet, request: Request) -> int:
    """The executor in whose host pool the request's blocks are, of several; else ``NO_EXECUTOR``."""
    if request.stored is None or len(fleet.cells) < 2:
        return NO_EXECUTOR
    pools = {cell.core.capacity.host_pool: cell.number for cell in fleet.cells if cell.core is not None}
    return pools.get(request.stored.pool, NO_EXECUTOR)


def _preempted(request: Request) -> str:
    return f", was preempted {request.num_preemptions} times" if request.num_preemptions else ""


def _set_role(fleet: Fleet, cell: Cell, name: str) -> AdminReply:
    if name not in set(Role):
        return _refusal(f"role: {shown(name)} is not allowed; allowed: {', '.join(Role)}")
    if not fleet.placement.policy.has_roles:
        return _refusal(f"role: it means nothing with --placement {fleet.policy_name}; allowed: disaggregated, hybrid")
    role = Role(name)
    if role is cell.role:
        return _reply()
    others = [other.role for other in fleet.open_cells if other is not cell and not other.is_draining]
    missing = what_nobody_does([*others, role])
    if missing:
        return _refusal(f"role: {name!r} would leave no executor for {missing}, of those that take requests")
    fleet.set_role(cell.number, role)
    return _reply()


def _pin(fleet: Fleet, prefix: PrefixToPin) -> AdminReply:
    if not 1 <= len(prefix.name.encode()) <= MAX_PIN_NAME_BYTES:
        return _refusal(f"name: {shown(prefix.name)} is not allowed; allowed: 1 to {MAX_PIN_NAME_BYTES} bytes")
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


def _state_of(request: Request, figures: RequestFigures, executor: int, now: float) -> SequenceState:
    new = request.new
    return SequenceState(
        request_id=new.request_id,
        index=new.index,
        state=request.status.value,
        priority=new.priority,
        tenant=new.tenant,
        num_prompt_tokens=new.num_prompt_tokens,
        num_output_tokens=figures.num_tokens - new.num_prompt_tokens,
        num_computed_tokens=_num_computed(figures),
        num_blocks=figures.num_blocks,
        num_preemptions=request.num_preemptions,
        age_ms=(now - request.arrival_time) * 1e3,
        executor=executor,
    )
