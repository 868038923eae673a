"""The simulated scheduler process: the real engine behind its two sockets, watched.

Owns: where the invariants of the scheduler are looked at, and what has to be remembered for them.
Must not know: what goes wrong, or why.
"""

from collections import Counter
from typing import TYPE_CHECKING

from headway_proto.columns import decode_columns
from headway_proto.ingress import (
    Submit,
    Tokens,
    gateway_frame_reader,
)
from headway_scheduler.cells.cell import Cell
from headway_scheduler.cells.live_sequences import Name
from headway_scheduler.core.choosing.policies import PlacementSettings
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.links.ingress_link import GatewayGone
from simulation import fault_invariants as invariants
from simulation.fault_cell import CellWatch
from simulation.fault_executor import ExecutorProcess
from simulation.fault_placement import PlacementWatch
from simulation.fault_process import Process
from simulation.fault_schedule import ADAPTERS, TENANTS, Settings

TOKENS_KINDS = frozenset({50, 53})

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld


class WatchedEngine(SchedulerEngine):
    """The real engine; notes what was submitted, and sees that an answer may be taken in before it is."""

    def __init__(self, process: "SchedulerProcess", limits: SchedulerLimits, incarnation: int) -> None:
        super().__init__(
            limits,
            incarnation,
            process.world.new_recorder(limits),
            process.world.schedule.settings.max_executors,
            placement_of(process.world.schedule.settings),
        )
        self._process = process
        self._add_cell = self.fleet._add_cell
        self.fleet._add_cell = self._watched_add_cell  # type: ignore[method-assign]

    def _watched_add_cell(self) -> None:
        self._add_cell()
        self._process.watch(self.fleet.cells[-1])

    def find(self, origin: Origin) -> Request | None:
        """The request of this origin, wherever it is."""
        cell = self.fleet.cell_of(origin)
        core = None if cell is None else cell.core
        return self.fleet.placement.find(origin) if core is None else core.find(origin)

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        origin, name = Origin(owner, submit.handle), Name(submit.request_id, submit.index)
        invariants.taken_once(self.live.get(origin) is not None or origin in self.early, f"handle {submit.handle}")
        num_held = len(submit.token_ids) // 4 - submit.num_prompt_tokens
        self._process.next_index.setdefault((owner, submit.handle), num_held)
        sequence = self._process.world.client_of(submit.request_id, submit.index).sequence
        if sequence is not None and sequence.handle == submit.handle:
            invariants.as_asked(submit, sequence.submission)
        super()._on_submit(owner, submit, now)
        if self.live.get(origin) is not None:
            self._process.without_a_gateway.discard(name)
            request = self.find(origin)
            if request is not None and request.latest_start is not None:
                invariants.owed_an_end(self._has_been_told(name, submit.handle), submit.request_id)

    def _has_been_told(self, name: Name, handle: int) -> bool:
        """Whether the client knows that its request runs, or has run, by what it holds of it."""
        sequence = self._process.world.client_of(*name).sequence
        if sequence is None or sequence.handle != handle:
            return False
        return sequence.num_cached_tokens is not None or len(sequence.tokens) > sequence.num_held

    def refuse_late(self, end: FinishedEvent, expected_prefill_s: float, now: float) -> None:
        live = self.live.get(end.origin)
        assert live is not None
        name = live.name
        invariants.owed_an_end(self._has_been_told(name, end.origin.handle), name.request_id)
        super().refuse_late(end, expected_prefill_s, now)

    def _on_gateway_gone(self, event: GatewayGone, now: float) -> None:
        self._process.without_a_gateway |= {live.name for live in self.live.of_owner(event.owner)}
        super()._on_gateway_gone(event, now)


def placement_of(settings: Settings) -> PlacementSettings:
    """The policy and the first roles."""
    return PlacementSettings(settings.placement, tuple(Role(role) for role in settings.roles))


class SchedulerProcess(Process):
    """The real engine behind its two sockets."""

    def __init__(self, world: "FaultWorld", life: int) -> None:
        super().__init__(world, life)
        settings = world.schedule.settings
        limits = SchedulerLimits(
            **{name: getattr(settings, name) for name in SchedulerLimits.__struct_fields__ if hasattr(settings, name)},
            tenant_weights={TENANTS[0]: 3.0},
        )
        self.engine = WatchedEngine(
            self, limits, incarnation=(world.schedule.seed * 0x9E3779B1 + life * 7919) % (1 << 61)
        )
        self.next_index: dict[tuple[int, int], int] = {}
        self.next_position: dict[tuple[int, int], int] = {}
        self.without_a_gateway: set[Name] = set()
        """Sequences that lost their link and may be submitted again."""
        self.peer = b""
        self.frame_epoch = 0
        self._heard: dict[bytes, float] = {}
        """When frames of an executor that was in use came; damaged ones count, as life is all that matters here."""
        self._seen: tuple[int, ...] = ()
        self._books_of_pool: dict[str, HostBooks | None] = {}
        self._reader = gateway_frame_reader()
        self.num_losses: Counter[str] = Counter()
        """By request id: how often its steps were lost."""
        self.num_losses_alone: Counter[str] = Counter()
        """How often with nothing beside it."""
        self.placement = PlacementWatch(self)
        self._cells: list[CellWatch] = []
        for cell in self.engine.fleet.cells:
            self.watch(cell)

    def watch(self, cell: Cell) -> None:
        """Watch a new cell."""
        self._cells.append(CellWatch(self, cell))

    @property
    def epochs(self) -> dict[int, int]:
        """By cell."""
        return {watch.cell.number: watch.cell.core.epoch for watch in self._cells if watch.cell.core is not None}

    def cell_number_of(self, executor: ExecutorProcess) -> int | None:
        """The cell of this executor; None if it has none."""
        names = [(watch.cell.number, watch.cell.link.peer) for watch in self._cells]
        return next((number for number, name in names if name == executor.name), None)

    def drain(self, number: int, *, is_draining: bool) -> None:
        """Do as an operator does."""
        if self.is_dead or self.is_stalled or self.engine.fleet.cells[number].is_draining == is_draining:
            return
        with self.world.watching():
            self._cells[number].drain(is_draining=is_draining)
            self.engine.fleet.drain_cell(number, is_draining=is_draining)
        self.wake()

    def set_role(self, executor: ExecutorProcess, role: Role) -> None:
        """Do as an operator does."""
        number = self.cell_number_of(executor)
        if self.is_dead or self.is_stalled or number is None:
            return
        with self.world.watching():
            self.engine.fleet.set_role(number, role)
        self.wake()

    def let_leave(self, executor: ExecutorProcess, *, must_leave: bool) -> None:
        """Let all that runs on an executor go on elsewhere."""
        number = self.cell_number_of(executor)
        if self.is_dead or self.is_stalled or number is None:
            return
        cell = self.engine.fleet.cells[number]
        with self.world.watching():
            for request in [] if cell.core is None else cell.core.requests():
                cell.calls.let_leave(request.new.origin, must_leave=must_leave)
        self.wake()

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        world, engine = self.world, self.engine
        now, num_joined = world.now, len(world.joined)
        with world.watching():
            for peer, data in frames:
                if peer.startswith(b"e"):
                    self._take_in(peer, data)
            for peer, data in frames:
                if not peer.startswith(b"e"):
                    engine.gateway_frame(peer, data, now)
            engine.run(now)
            self._send_step_frames()
            self._send_news()
            engine.recorder.flush(now, engine.fleet)
            engine.notices.take()
            self.check(num_joined)
        self.wake_at(engine.next_deadline)

    def _take_in(self, peer: bytes, data: bytes) -> None:
        engine, now = self.engine, self.world.now
        self.peer, self.frame_epoch = peer, int.from_bytes(data[4:8], "little")
        before = [(watch, watch.cell.link.peer) for watch in self._cells]
        engine.executor_frame(peer, data, now)
        for watch, peer_before in before:
            watch.follow_peer(peer_before, self._heard)
        if any(peer == peer_before for _, peer_before in before) or self._is_in_use(peer):
            self._heard[peer] = now
        self._send_step_frames()

    def _is_in_use(self, peer: bytes) -> bool:
        return any(watch.cell.link.peer == peer for watch in self._cells)

    def _send_step_frames(self) -> None:
        engine, world = self.engine, self.world
        unreachable: list[bytes] = []
        outgoing = engine.fleet.links.outgoing.copy()
        engine.fleet.links.outgoing.clear()
        for peer, frame in outgoing:
            if peer not in unreachable and not world.send_down(peer, frame):
                unreachable.append(peer)
        for peer in unreachable:
            engine.executor_unreachable(peer, world.now)

    def _send_news(self) -> None:
        engine, world = self.engine, self.world
        unreachable: list[bytes] = []
        outgoing, engine.gateways.outgoing = engine.gateways.outgoing, []
        for peer, frame in outgoing:
            if frame[3] in TOKENS_KINDS:
                self._check_tokens(peer, frame)
            if peer not in unreachable and not world.send_down(peer, frame):
                unreachable.append(peer)
        for peer in unreachable:
            engine.gateway_unreachable(peer, world.now)

    def _check_tokens(self, peer: bytes, data: bytes) -> None:
        frame = self._reader.decode(data)
        tokens = frame.body
        assert isinstance(tokens, Tokens)
        links = self.engine.gateways
        owner = frame.epoch - links._first_epoch
        link = links.get(owner)
        if link is not None:
            invariants.credits_kept(frame.sequence, link._acknowledged, self.world.schedule.settings.window)
        for prompt in tokens.prompt_logprobs:
            key = owner, prompt.handle
            first = prompt.values.first_position
            invariants.exactly_once(first, self.next_position.get(key, first), f"the prompt of handle {prompt.handle}")
            self.next_position[key] = prompt.values.end
        handles, indices, _ = decode_columns(tokens.columns, 3).tolist() if tokens.columns else ((), (), ())
        for handle, index in zip(handles, indices, strict=True):
            expected = self.next_index[owner, handle]
            who = f"handle {handle} of {peer.decode()}"
            invariants.terminal_once(2 if expected < 0 else 1, who)
            invariants.exactly_once(index, expected, who)
            self.next_index[owner, handle] = index + 1
        for end in tokens.finished:
            expected = self.next_index[owner, end.handle]
            who = f"handle {end.handle} of {peer.decode()}"
            invariants.terminal_once(2 if expected < 0 else 1, who)
            invariants.exactly_once(end.num_output_tokens, expected, who)
            self.next_index[owner, end.handle] = -1

    def _cancel_preempted(self, requests: list[Request]) -> None:
        for request in requests:
            if self.world.num_to_cancel and request.status is RequestStatus.PREEMPTED:
                self.world.num_to_cancel -= 1
                self.world.at(self.world.now, self.world.client_of(request.new.request_id).cancel)

    def check(self, num_joined: int) -> None:
        """After each beat, if anything may have changed. ``num_joined``: the lives of executors that had joined before it."""
        fleet, world = self.engine.fleet, self.world
        if world.schedule.settings.has_adapters and world.lives_at_load is None:
            is_loaded = fleet.adapters.identity_of(ADAPTERS[-1]) is not None
            world.lives_at_load = (num_joined, self.life) if is_loaded else None
        num_changed = sum(watch.check() for watch in self._cells)
        if world.num_to_cancel:
            for place in (fleet.placement, *fleet.cores):
                self._cancel_preempted(list(place._requests.values()))
        self.placement.check()
        placement = fleet.placement
        seen = len(placement), len(placement._placed), placement.num_arrivals
        if num_changed or seen != self._seen:
            self._seen = seen
            invariants.bounded(self.engine)
            invariants.nobody_gone_is_suspected(self.engine, self.without_a_gateway)
            invariants.lost_cells_are_empty(fleet)
            invariants.leases_are_owned(fleet, self._books_of_pool)
