"""The simulated scheduler process: the real engine behind its two sockets, watched.

Owns: where the invariants of the scheduler are looked at, and what has to be remembered for them.
Must not know: what goes wrong, or why.
"""

from typing import TYPE_CHECKING, Any

from headway_proto.columns import decode_column, decode_columns
from headway_proto.ingress import (
    Submit,
    Tokens,
    gateway_frame_reader,
)
from headway_proto.step import SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.step.sending import digest_of
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.executor_link import TAKEOVER_SILENCE_S, StepAnswered
from headway_scheduler.ingress_link import GatewayGone
from headway_scheduler.live_sequences import Name
from simulation import fault_invariants as invariants
from simulation.fault_executor import incarnation_of
from simulation.fault_invariants import Violation
from simulation.fault_process import START_S, Process
from simulation.fault_schedule import TENANTS

TOKENS_KIND = 50

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld


class WatchedEngine(SchedulerEngine):
    """The real engine; notes what was submitted, and sees that an answer may be taken in before it is."""

    def __init__(self, process: "SchedulerProcess", limits: SchedulerLimits, incarnation: int) -> None:
        super().__init__(limits, incarnation, process.world.new_recorder(limits))
        self._process = process
        self._send_step = self.executor_link.send_step
        self.executor_link.send_step = self._watched_send  # type: ignore[method-assign]

    def _watched_send(self, output: SchedulerOutput) -> None:
        self._process.on_step(output)
        self._send_step(output)

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        origin, name = Origin(owner, submit.handle), Name(submit.request_id, submit.index)
        invariants.taken_once(self.live.get(origin) is not None or origin in self.early, f"handle {submit.handle}")
        num_held = len(submit.token_ids) // 4 - submit.num_prompt_tokens
        self._process.next_index.setdefault((owner, submit.handle), num_held)
        sequence = self._process.world.client_of(submit.request_id).sequence
        if sequence is not None and sequence.handle == submit.handle:
            invariants.as_asked(submit, sequence.submission)
        super()._on_submit(owner, submit, now)
        if self.live.get(origin) is not None:
            self._process.without_a_gateway.discard(name)
            request = None if self.core is None else self.core.find(origin)
            if request is not None and request.latest_start is not None:
                invariants.owed_an_end(self._has_been_told(name, submit.handle), submit.request_id)

    def _has_been_told(self, name: Name, handle: int) -> bool:
        """Whether the client knows that its request runs, or has run, by what it holds of it."""
        sequence = self._process.world.client_of(name.request_id).sequence
        if sequence is None or sequence.handle != handle:
            return False
        return sequence.num_cached_tokens is not None or len(sequence.tokens) > sequence.num_held

    def _on_shed(self, core: Scheduler, end: FinishedEvent) -> None:
        live = self.live.get(end.origin)
        assert live is not None
        name = live.name
        invariants.owed_an_end(self._has_been_told(name, end.origin.handle), name.request_id)
        super()._on_shed(core, end)

    def _on_gateway_gone(self, event: GatewayGone, now: float) -> None:
        self._process.without_a_gateway |= {live.name for live in self.live.of_owner(event.owner)}
        super()._on_gateway_gone(event, now)

    def _on_answer(self, event: StepAnswered, now: float) -> None:
        process, core, output = self._process, self.core, event.output
        assert core is not None
        oldest = core._epoch.in_flight[0].step if core._epoch.in_flight else -1
        given = (output.epoch, process.frame_epoch, output.step, incarnation_of(process.peer))
        invariants.epoch_fence("an answer", given, (core.epoch, core.epoch, oldest, self.executor_link._executor))
        failed = [(blocks, core.cache.holds(blocks).tolist()) for blocks in process.blocks_of_failed(core, output)]
        super()._on_answer(event, now)
        if core.epoch == output.epoch:
            for blocks, held in failed:
                before = [block for block, is_held in zip(blocks.tolist(), held, strict=True) if is_held]
                after = blocks[core.cache.holds(blocks)].tolist()
                invariants.failed_not_cached(before, after, blocks.tolist())
            key = (self.incarnation, output.epoch, output.step)
            if key in process.world.must_reopen:
                raise Violation("MIRROR", f"the state digest of step {output.step} differs, and the epoch goes on")


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
        self._holds: dict[int, str] = {}
        """By block: the tenant of whom its content is."""
        self._holds_on_host: dict[int, str] = {}
        self.written: dict[int, dict[int, Request]] = {}
        """By step in flight: the blocks that it writes, and for whom."""
        self.peer = b""
        self.frame_epoch = 0
        self._epoch = -1
        self._served: dict[int, int] = {}
        self._had_rows: set[int] = set()
        self._overtaken: dict[int, int] = {}
        self._num_older: dict[int, int] = {}
        self._promotes = limits.order != "fair"
        self._heard: dict[bytes, float] = {}
        """When frames of an executor that was in use came; damaged ones count, as life is all that matters here."""
        self._checked: tuple[int, ...] | None = None
        self._blocks_checked: tuple[int, ...] | None = None
        self._reader = gateway_frame_reader()
        self._watches_tenants = limits.enable_prefix_caching and limits.prefix_cache_scope == "tenant"
        self._watches_fcfs = limits.order in {"fcfs", "priority"} and not limits.prefix_aware

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        world, engine = self.world, self.engine
        now = world.now
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
            self.check()
        self.wake_at(engine.next_deadline)

    def _take_in(self, peer: bytes, data: bytes) -> None:
        engine, now = self.engine, self.world.now
        self.peer, self.frame_epoch = peer, int.from_bytes(data[4:8], "little")
        before = engine.fleet.links[0]._peer
        engine.executor_frame(peer, data, now)
        after = engine.fleet.links[0]._peer
        if before is not None and before != after is not None:
            silent_s = now - self._heard.get(before, START_S)
            invariants.one_executor(silent_s, TAKEOVER_SILENCE_S, before.decode())
        if peer in {before, after}:
            self._heard[peer] = now
        self._send_step_frames()

    def _send_step_frames(self) -> None:
        engine, world = self.engine, self.world
        unreachable: list[bytes] = []
        outgoing, engine.fleet.links.outgoing = engine.fleet.links.outgoing, []
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
            if frame[3] == TOKENS_KIND:
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

    # ----------------------------------------------------------------------------------------------- steps, as they go

    def on_step(self, output: SchedulerOutput) -> None:
        core = self.engine.fleet.cells[0].core
        assert core is not None
        if core.epoch != self._epoch:
            self._epoch = core.epoch
            self.written.clear()
            self._holds.clear()
            self._holds_on_host.clear()
            self._served.clear()
            self._had_rows = set()
            self._overtaken.clear()
            self._num_older.clear()
        self.world.digests[self.engine.incarnation, core.epoch, output.step] = digest_of(core.rows)
        running = self._running(core, output)
        invariants.budget(core, self.engine.limits, running, output)
        if self._watches_tenants:
            self._follow_tenants(core, output)
        written = self._writes(core, running)
        unreturned = {step.step for step in core._epoch.in_flight}
        self.written = {step: blocks for step, blocks in self.written.items() if step in unreturned}
        in_flight = {block: request for blocks in self.written.values() for block, request in blocks.items()}
        invariants.write_exclusivity(in_flight, written)
        self.written[output.step] = written
        # Who may have brought an executor down runs alone, out of turn, and the others wait for that.
        is_trial = core.alone is not None
        if self._watches_fcfs and output.scheduled_new_reqs and not is_trial:
            invariants.first_come_first_served(core, output, self._had_rows)
        self._had_rows = {request.arrival for request in core.rows.requests[: core.rows.end] if request is not None}
        served = {core.rows.request_in(row).arrival for row in running}
        self._served = {
            request.arrival: 0 if request.arrival in served or is_trial else self._served.get(request.arrival, 0) + 1
            for request in core._requests.values()
        }
        invariants.no_starvation(self._served)
        if output.scheduled_new_reqs and self._promotes and not is_trial:
            self._count_overtaking(core, output)
        self.check_blocks(core)
        self._blocks_checked = _state_of(core)
        self.world.num_steps += 1

    def _follow_tenants(self, core: Scheduler, output: SchedulerOutput) -> None:
        """Note whose content blocks get, wherever it is copied, and see whose content a request starts with."""
        holds = self._holds
        for block, host in decode_columns(output.swap_out, 2).T.tolist():
            self._holds_on_host[host] = holds[block]
        for host, block in decode_columns(output.swap_in, 2).T.tolist():
            holds[block] = self._holds_on_host[host]
        for row, block in decode_columns(output.new_blocks, 2).T.tolist():
            holds[block] = self.world.client_of(core.rows.request_in(row).new.request_id).plan.tenant
        for new in output.scheduled_new_reqs:
            tenant = self.world.client_of(core.rows.request_in(new.row).new.request_id).plan.tenant
            blocks = decode_column(new.block_ids).tolist()
            num_computed = -(-new.num_computed_tokens // core.rows.block_size)
            invariants.tenant_isolation(tenant, [holds[block] for block in blocks[:num_computed]])
            holds |= dict.fromkeys(blocks[num_computed:], tenant)

    def _count_overtaking(self, core: Scheduler, output: SchedulerOutput) -> None:
        now, aging_s = self.world.now, self.engine.limits.aging_s
        started = [core.rows.request_in(new.row).arrival for new in output.scheduled_new_reqs]
        waiting = sorted(request.arrival for request in core._requests.values() if request.row < 0)
        old = [
            request.arrival
            for request in core._requests.values()
            if request.row < 0 and request.start < 0 and now - request.arrival_time > aging_s
        ]
        self._overtaken = {
            arrival: self._overtaken.get(arrival, 0) + sum(other > arrival for other in started) for arrival in old
        }
        self._num_older = {arrival: max(waiting.index(arrival), self._num_older.get(arrival, 0)) for arrival in old}
        invariants.no_endless_overtaking(self._overtaken, self._num_older)

    @staticmethod
    def _running(core: Scheduler, output: SchedulerOutput) -> dict[int, int]:
        """Tokens per row by the rules of the wire: one each, but for the exceptions."""
        rows, counts = (
            decode_columns(output.num_scheduled_tokens, 2).tolist() if output.num_scheduled_tokens else ((), ())
        )
        exceptions = dict(zip(rows, counts, strict=True))
        running = {}
        for row, request in enumerate(core.rows.requests[: core.rows.end]):
            count = exceptions.get(row, 1) if request is not None else 0
            if count:
                running[row] = count
        return running

    @staticmethod
    def _writes(core: Scheduler, running: dict[int, int]) -> dict[int, Request]:
        size, written = core.rows.block_size, {}
        for row, count in running.items():
            end = int(core.rows.num_computed_tokens[row])
            request = core.rows.request_in(row)
            for block in core.rows.block_table[row, (end - count) // size : -(-end // size)].tolist():
                other = written.setdefault(block, request)
                invariants.write_exclusivity({block: other}, {block: request})
        return written

    @staticmethod
    def blocks_of_failed(core: Scheduler, output: Any) -> list[Any]:
        rows = [error.row for error in output.errors if core.rows.requests[error.row] is not None]
        leavers = core._epoch.in_flight[0].leavers if core._epoch.in_flight else {}
        return [core.rows.blocks_of(row) for row in rows if row not in leavers]

    def check_blocks(self, core: Scheduler) -> None:
        invariants.block_conservation(core)
        invariants.block_exclusivity(core)
        invariants.no_orphan(core)

    def _cancel_preempted(self, core: Scheduler) -> None:
        for request in core._requests.values():
            if self.world.num_to_cancel and request.status is RequestStatus.PREEMPTED:
                self.world.num_to_cancel -= 1
                self.world.at(self.world.now, self.world.client_of(request.new.request_id).cancel)

    def check(self) -> None:
        """After each beat, if anything may have changed."""
        core = self.engine.fleet.cells[0].core
        seen = None if core is None else _state_of(core)
        if core is not None:
            if seen != self._blocks_checked:
                self.check_blocks(core)
                self._blocks_checked = seen
            if self.world.num_to_cancel:
                self._cancel_preempted(core)
        if core is None or seen != self._checked:
            invariants.bounded(self.engine)
            invariants.nobody_gone_is_suspected(self.engine, self.without_a_gateway)
            self._checked = seen


def _state_of(core: Scheduler) -> tuple[int, ...]:
    """What changes whenever blocks or requests may have changed hands."""
    return (
        core.epoch,
        core.next_step,
        core.num_in_flight,
        len(core._requests),
        core.num_waiting,
        core.counters.num_finished,
    )
