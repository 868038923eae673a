"""A whole Headway in one process under a schedule of faults: real engine, real protocols, real executor cycle.

Owns: virtual time, links, the lives of processes, clients, and where the invariants are looked at.
Must not know: which schedules there are, or the inside of any protocol beyond what an invariant looks at.

Nothing is drawn here and no clock is read: the same schedule runs the same way. Time jumps from event to event, so that
a silence of ten seconds costs a few heartbeats. What is simulated is small (a hash for a model, dictionaries for links);
what decides anything is the code that production runs.
"""

import heapq
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import headway_executor.loop
import headway_gateway.ingress_link
import headway_scheduler.core.scheduler
import headway_scheduler.ingress_link
from headway_executor.backend import StepBatch, StepOutOfMemoryError, StepResult
from headway_executor.batch_state import AppliedStep, BatchState, ImpossibleDiff
from headway_executor.loop import StepCycle
from headway_executor.step_link import StepLink
from headway_gateway.ingress_link import IngressLink, LinkPhase, LiveSequence
from headway_proto.columns import decode_columns, encode_column
from headway_proto.ingress import (
    REJECT_ALREADY_EXISTS,
    REJECT_INVALID,
    REJECT_OUT_OF_RANGE,
    REJECT_OVERLOADED,
    REJECT_UNAVAILABLE,
    Finished,
    PrefixToPin,
    Rejected,
    Submit,
    Tokens,
    gateway_frame_reader,
)
from headway_proto.step import BackendInfo, SchedulerOutput
from headway_scheduler.core.limits import SchedulerLimits
from headway_scheduler.core.request import Origin, Request, RequestStatus
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.step_link import TAKEOVER_SILENCE_S, StepAnswered
from simulation import fault_invariants as invariants
from simulation.fault_invariants import Violation
from simulation.fault_model import Answer, ModelOfBlocks, backend_info, sampling_of
from simulation.fault_schedule import BOTH, DOWN, EXECUTOR, FIRST_GATEWAY, SCHEDULER, UP, Fault, RequestPlan, Schedule

START_S = 100.0
GATEWAY_TICK_S = 0.1
CLIENT_RETRY_S = 0.2
HEALED_WITHIN_S = 60.0
QUIET_WITHIN_S = 20.0
MOST_EVENTS = 60_000
TOKENS_KIND = 50
_RETRIED = frozenset({REJECT_OVERLOADED, REJECT_UNAVAILABLE, REJECT_ALREADY_EXISTS})


class Link:
    """Between the scheduler and one place of a peer; frames queue in either direction unless something is wrong."""

    def __init__(self) -> None:
        self.armed: tuple[deque[Fault], deque[Fault]] = (deque(), deque())
        self.last: list[float] = [0.0, 0.0]
        self.cut_until: list[float] = [0.0, 0.0]
        self.held_until: list[float] = [0.0, 0.0]
        self.down_until = 0.0
        self.connection = 0
        """Grows whenever the connection is made anew; frames of an earlier one are lost."""
        self.num_faults = 0
        """Everything that has gone wrong on it so far."""


class Process:
    """One life of a process. Frames wait in ``inbox`` while it is stalled."""

    def __init__(self, world: "FaultWorld", life: int) -> None:
        self.world = world
        self.life = life
        self.is_dead = False
        self.stalled_until = 0.0
        self.inbox: list[tuple[bytes, bytes]] = []
        self._armed_at = float("inf")

    @property
    def is_stalled(self) -> bool:
        return self.world.now < self.stalled_until

    def deliver(self, peer: bytes, data: bytes) -> None:
        if self.is_dead:
            return
        if self.is_stalled:
            self.inbox.append((peer, data))
        else:
            self.work([(peer, data)])

    def wake(self) -> None:
        """Let it do what is due, and what waits."""
        if not self.is_dead and not self.is_stalled:
            frames, self.inbox = self.inbox, []
            self.work(frames)

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        raise NotImplementedError

    def wake_at(self, at: float) -> None:
        """Wake by then at the latest."""
        at = max(at, self.world.now + 1e-6)
        if at < self._armed_at:
            self._armed_at = at
            self.world.at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        if self.world.now >= self._armed_at:
            self._armed_at = float("inf")
            self.wake()


class _Silent:
    """A log that nobody reads."""

    def info(self, *arguments: object, **named: object) -> None: ...

    warning = error = info


def incarnation_of(executor: bytes) -> int:
    return 7000 + int(executor.split(b"-")[1])


class WatchedState(BatchState):
    """The executor's mirror, compared with the scheduler's columns after every step."""

    def __init__(self, info: BackendInfo, executor: "ExecutorProcess") -> None:
        super().__init__(info)
        self._executor = executor
        self._next_step = 0

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._next_step = 0
        self._executor.is_flipped = False

    def apply(self, output: SchedulerOutput) -> AppliedStep:
        executor, world = self._executor, self._executor.world
        with world.watching():
            current = (executor.link.epoch, self._next_step)
            invariants.epoch_fence("a step", (output.epoch, output.step), current)
            self._next_step += 1
            try:
                applied = super().apply(output)
            except ImpossibleDiff as error:
                if not executor.is_flipped:
                    raise Violation("MIRROR", f"impossible diff in step {output.step}: {error}") from error
                raise
            key = (executor.link._scheduler_incarnation, output.epoch, output.step)
            ours, theirs = world.digests.get(key), self.digest()
            if not executor.is_flipped:
                invariants.mirror(f"digest of step {output.step}", ours, theirs)
            elif ours != theirs and output.step % world.schedule.settings.digest_every == 0:
                world.must_reopen.add(key)
            return applied


class ExecutorProcess(Process):
    """The real cycle over a model of a device that takes ``step_s`` a step, one after another."""

    executes_inline = False

    def __init__(self, world: "FaultWorld", life: int, slot: int, shrunk: int = 0) -> None:
        super().__init__(world, life)
        self.slot = slot
        self.name = b"executor-%d" % life
        info = backend_info(world.schedule.settings, shrunk)
        self.link = StepLink(incarnation=incarnation_of(self.name), info=info)
        self.model = ModelOfBlocks(info, self._on_wrong_block)
        self.state = WatchedState(info, self)
        self.cycle = StepCycle(link=self.link, state=self.state, backend=self, log=_Silent(), wake=lambda: None)
        self.is_flipped = False
        self.num_failing = 0
        self.memory_tokens = 0
        self._num_memory_errors = 0
        self._busy_until = 0.0

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        now, cycle = self.world.now, self.cycle
        outgoing = cycle.tick(now)
        outgoing += cycle.collect(now)
        for _, data in frames:
            outgoing += cycle.receive(data, now)
        for frame in outgoing:
            self.world.send_up(self.slot, self.name, frame)
        self.wake_at(cycle.next_deadline)

    def flip(self) -> None:
        """Memory corruption: a block table says something else from now on."""
        rows = self.state.live_rows
        if len(rows) and self.link.running:
            row = int(rows[0])
            last = int(self.state._num_blocks[row]) - 1
            if last >= 0:
                self.state._block_table[row, last] ^= 1
                self.is_flipped = True

    # The four calls of a backend that the cycle uses.

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        total = int(batch.num_scheduled_tokens.sum())
        error: Exception | None = None
        if self.num_failing:
            self.num_failing -= 1
            error = RuntimeError("the step failed")
        elif self.memory_tokens and total > self.memory_tokens:
            error = StepOutOfMemoryError(total, "simulated")
            self._num_memory_errors += 1
            with self.world.watching():
                invariants.memory_respected(self._num_memory_errors)
        if error is not None and total % 2:
            raise error
        with self.world.watching():
            result = self.model.run(batch)
        step_s = self.world.schedule.settings.step_s
        if not step_s and error is None:
            return result
        self._busy_until = max(self._busy_until, self.world.now) + step_s
        future: Future[StepResult] = Future()
        self.world.at(self._busy_until, lambda: self._complete(future, result, error))
        return future

    def _complete(self, future: Future[StepResult], result: StepResult, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
        self.wake()

    def move_blocks(self, *, copies: Any, swap_out: Any, swap_in: Any) -> None:
        self.model.move(copies.tolist(), swap_out.tolist(), swap_in.tolist())

    def _on_wrong_block(self, what: str) -> None:
        if not self.is_flipped:
            raise Violation("BLOCK-EXCLUSIVITY", what)


class WatchedEngine(SchedulerEngine):
    """The real engine; notes what was submitted, and sees that an answer may be taken in before it is."""

    def __init__(self, process: "SchedulerProcess", limits: SchedulerLimits, incarnation: int) -> None:
        super().__init__(limits, incarnation)
        self._process = process
        self._send_step = self.step_link.send_step
        self.step_link.send_step = self._watched_send  # type: ignore[method-assign]

    def _watched_send(self, output: SchedulerOutput) -> None:
        self._process.on_step(output)
        self._send_step(output)

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        origin = Origin(owner, submit.handle)
        invariants.taken_once(origin in self._names or origin in self._unjudged, f"handle {submit.handle}")
        num_held = len(submit.token_ids) // 4 - submit.num_prompt_tokens
        self._process.next_index.setdefault((owner, submit.handle), num_held)
        super()._on_submit(owner, submit, now)

    def _on_answer(self, event: StepAnswered, now: float) -> None:
        process, core, output = self._process, self.core, event.output
        assert core is not None
        oldest = core._in_flight[0].step if core._in_flight else -1
        given = (output.epoch, process.frame_epoch, output.step, incarnation_of(process.peer))
        invariants.epoch_fence("an answer", given, (core.epoch, core.epoch, oldest, self.step_link._executor))
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
            tenant_weights={"a": 3.0},
        )
        self.engine = WatchedEngine(
            self, limits, incarnation=(world.schedule.seed * 0x9E3779B1 + life * 7919) % (1 << 61)
        )
        self.next_index: dict[tuple[int, int], int] = {}
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
            self._send_steps()
            self._send_news()
            engine.notices.clear()
            self.check()
        self.wake_at(engine.next_deadline)

    def _take_in(self, peer: bytes, data: bytes) -> None:
        engine, now = self.engine, self.world.now
        self.peer, self.frame_epoch = peer, int.from_bytes(data[4:8], "little")
        before = engine.step_link._peer
        engine.executor_frame(peer, data, now)
        after = engine.step_link._peer
        if before is not None and before != after is not None:
            silent_s = now - self._heard.get(before, START_S)
            invariants.one_executor(silent_s, TAKEOVER_SILENCE_S, before.decode())
        if peer in {before, after}:
            self._heard[peer] = now
        self._send_steps()

    def _send_steps(self) -> None:
        engine, world = self.engine, self.world
        unreachable: list[bytes] = []
        outgoing, engine.step_link.outgoing = engine.step_link.outgoing, []
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
        core = self.engine.core
        assert core is not None
        if core.epoch != self._epoch:
            self._epoch = core.epoch
            self.written.clear()
            self._served.clear()
            self._had_rows = set()
            self._overtaken.clear()
            self._num_older.clear()
        self.world.digests[self.engine.incarnation, core.epoch, output.step] = core._digest()
        running = self._running(core, output)
        invariants.budget(core, self.engine.limits, running, output)
        written = self._writes(core, running)
        unreturned = {step.step for step in core._in_flight}
        self.written = {step: blocks for step, blocks in self.written.items() if step in unreturned}
        in_flight = {block: request for blocks in self.written.values() for block, request in blocks.items()}
        invariants.write_exclusivity(in_flight, written)
        self.written[output.step] = written
        if self._watches_fcfs and output.scheduled_new_reqs:
            invariants.first_come_first_served(core, output, self._had_rows)
        self._had_rows = {request.arrival for request in core.rows.requests[: core.rows.end] if request is not None}
        served = {core.rows.request_in(row).arrival for row in running}
        self._served = {
            request.arrival: 0 if request.arrival in served else self._served.get(request.arrival, 0) + 1
            for request in core._requests.values()
        }
        invariants.no_starvation(self._served)
        if output.scheduled_new_reqs and self._promotes:
            self._count_overtaking(core, output)
        self.check_blocks(core)
        self._blocks_checked = _state_of(core)
        self.world.num_steps += 1

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
        leavers = core._in_flight[0].leavers if core._in_flight else {}
        return [core.rows.blocks_of(row) for row in rows if row not in leavers]

    def check_blocks(self, core: Scheduler) -> None:
        invariants.block_conservation(core)
        invariants.block_exclusivity(core)
        invariants.no_orphan(core)

    def _cancel_preempted(self, core: Scheduler) -> None:
        for request in core._requests.values():
            if self.world.num_to_cancel and request.status is RequestStatus.PREEMPTED:
                self.world.num_to_cancel -= 1
                client = self.world.clients[int(request.new.request_id.rpartition("-")[2])]
                self.world.at(self.world.now, client.cancel)

    def check(self) -> None:
        """After each beat, if anything may have changed."""
        core = self.engine.core
        seen = None if core is None else _state_of(core)
        if core is not None:
            if seen != self._blocks_checked:
                self.check_blocks(core)
                self._blocks_checked = seen
            if self.world.num_to_cancel:
                self._cancel_preempted(core)
        if core is None or seen != self._checked:
            invariants.bounded(self.engine)
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


class GatewayProcess(Process):
    """The real link of a gateway, and the connection under it."""

    def __init__(self, world: "FaultWorld", life: int, slot: int) -> None:
        super().__init__(world, life)
        self.slot = slot
        self.link = IngressLink(incarnation=9000 + life, now=world.now)
        self.clients: dict[int, Client] = {}
        self._waiting: list[bytes] = []
        self._frames_version = 0
        self._silence_version = 0

    @property
    def name(self) -> bytes:
        return b"g%d-%d-%d" % (self.slot, self.life, self.world.links[self.slot].connection)

    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        now, link = self.world.now, self.link
        for _, data in frames:
            link.receive(data, now)
        link.tick(now)
        if link.silence_version != self._silence_version:
            self._silence_version = link.silence_version
            self.world.reconnect(self.slot, 0.0)
            self._waiting.clear()
        for sequence in link.take_news():
            client = self.clients.get(sequence.handle)
            if client is not None:
                client.on_news(sequence)
        self.flush()
        self.wake_at(now + GATEWAY_TICK_S)

    def flush(self) -> None:
        frames = self.link.take_frames()
        if self.link.frames_version != self._frames_version:
            self._frames_version = self.link.frames_version
            self._waiting.clear()
        self._waiting += frames
        if self.world.now >= self.world.links[self.slot].down_until and not self.world.scheduler.is_dead:
            for frame in self._waiting:
                self.world.send_up(self.slot, self.name, frame)
            self._waiting.clear()


class Client:
    """Who asked: asks again where a gateway died or had no room, and believes nothing that it is told."""

    def __init__(self, world: "FaultWorld", plan: RequestPlan) -> None:
        self.world = world
        self.plan = plan
        self.answer = Answer(plan, world.schedule.settings)
        self.delivered: list[int] = []
        self.is_done = False
        self.gateway: GatewayProcess | None = None
        self.sequence: LiveSequence | None = None
        self._num_ends = 0
        self._num_lost_gateways = 0

    def ask(self) -> None:
        if self.is_done or self.sequence is not None:
            return
        gateway = self.world.gateways[self.plan.gateway]
        if gateway.is_dead or gateway.is_stalled:
            self.world.at(self.world.now + CLIENT_RETRY_S, self.ask)
            return
        plan, sampling = self.plan, sampling_of(self.plan)
        submission = Submit(
            handle=gateway.link.next_handle(),
            request_id=f"request-{plan.number}",
            index=0,
            token_ids=encode_column(plan.prompt),
            num_prompt_tokens=len(plan.prompt),
            max_tokens=plan.max_tokens,
            sampling=sampling,
            ignore_eos=plan.ignore_eos,
            priority=plan.priority,
            tenant=plan.tenant,
            ttft_slo_ms=plan.ttft_slo_ms,
            itl_slo_ms=plan.itl_slo_ms,
        )
        self.sequence = LiveSequence(submission, self.delivered, lambda: None)
        self.gateway = gateway
        gateway.clients[submission.handle] = self
        gateway.link.submit(self.sequence)
        gateway.wake()

    def gateway_died(self) -> None:
        """The stream is gone; what was delivered is kept."""
        self.sequence = self.gateway = None
        self._num_lost_gateways += 1
        self.world.at(self.world.now + CLIENT_RETRY_S, self.ask)

    def on_news(self, sequence: LiveSequence) -> None:
        who = f"request {self.plan.number}"
        with self.world.watching():
            if sequence is not self.sequence or self.is_done:
                raise Violation("TERMINAL-ONCE", f"{who} is told more than its end")
            start, tokens = len(self.delivered), sequence.tokens
            if self.plan.is_bad and tokens:
                raise Violation("ISOLATION", f"{who} is invalid and ran")
            invariants.prefix_stable(self.delivered, tokens)
            invariants.oracle_equal(tokens[start:], start, self.answer.tokens)
            self.delivered += tokens[start:]
            if sequence.end is not None:
                self._on_end(sequence, sequence.end, who)

    def _on_end(self, sequence: LiveSequence, end: Finished | Rejected, who: str) -> None:
        if isinstance(end, Rejected):
            self._on_rejection(end, who)
            return
        self._num_ends += 1
        invariants.terminal_once(self._num_ends, who)
        answer = self.answer
        invariants.ends_as_it_should(end.reason, len(sequence.tokens), answer.reason, len(answer.tokens), who)
        if self.plan.wants_logprobs:
            told = [values.logprob for values in sequence.logprobs]
            invariants.oracle_equal(told, 0, answer.logprobs[sequence.num_held :])
        self.close()

    def _on_rejection(self, end: Rejected, who: str) -> None:
        self.sequence = self.gateway = None
        if end.reason == REJECT_ALREADY_EXISTS:
            invariants.taken_once(self._num_lost_gateways == 0, who)
        if end.reason in _RETRIED:
            self.world.at(self.world.now + max(CLIENT_RETRY_S, end.retry_after_ms / 1e3), self.ask)
            return
        has_all = end.reason == REJECT_OUT_OF_RANGE and self.delivered == self.answer.tokens
        if not has_all and not (end.reason == REJECT_INVALID and self.plan.is_bad):
            raise Violation("ISOLATION", f"{who} was refused: {end.reason}, {end.message}")
        self.close()

    def cancel(self) -> None:
        """Nobody wants it any more. Unless its gateway is stalled, the Abort leaves at once."""
        gateway, sequence = self.gateway, self.sequence
        if self.is_done:
            return
        self.close()
        if gateway is None or sequence is None or gateway.is_dead:
            return
        gateway.clients.pop(sequence.handle, None)
        gateway.link.abort([sequence])
        if not gateway.is_stalled:
            self._watch_abort(gateway, sequence)
            gateway.flush()

    def _watch_abort(self, gateway: GatewayProcess, sequence: LiveSequence) -> None:
        world, link = self.world, self.world.links[gateway.slot]
        scheduler, epoch = world.scheduler, gateway.link._epoch
        if gateway.link.phase is not LinkPhase.OPEN or not world.is_clean(gateway.slot):
            return
        owner = epoch - scheduler.engine.gateways._first_epoch
        theirs = scheduler.engine.gateways.get(owner)
        if theirs is None or theirs.peer != gateway.name:
            return  # the connection is another one since, and the link not yet
        before = (link.num_faults, link.connection)

        def look() -> None:
            same = world.scheduler is scheduler and not scheduler.is_dead and gateway.link._epoch == epoch
            if not same or before != (link.num_faults, link.connection) or not world.is_clean(gateway.slot):
                return
            origin = Origin(owner, sequence.handle)
            core = scheduler.engine.core
            is_live = origin in scheduler.engine._unjudged or (core is not None and core.find(origin) is not None)
            invariants.cancel_bound(is_live, f"request {self.plan.number}")

        world.at(max(world.now, link.last[UP]) + 2 * world.schedule.settings.wire_s + 1e-4, look)

    def close(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.world.num_open -= 1


class FaultWorld:
    """One run of one schedule. ``violation`` is what was found, None if every invariant held."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.now = START_S
        self.violation: Violation | None = None
        self.digests: dict[tuple[int | None, int, int], int] = {}
        self.must_reopen: set[tuple[int | None, int, int]] = set()
        self.num_steps = 0
        self.num_faults = 0
        self.num_to_cancel = 0
        """Requests that are to be cancelled when they are preempted."""
        self._num_events = 0
        self._num_lives = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        settings = schedule.settings
        self._wire_s = settings.wire_s
        self.links = {slot: Link() for slot in (EXECUTOR, *range(FIRST_GATEWAY, FIRST_GATEWAY + settings.num_gateways))}
        self.scheduler = SchedulerProcess(self, self._next_life())
        self.executors = [ExecutorProcess(self, self._next_life(), EXECUTOR)]
        self.gateways = [
            GatewayProcess(self, self._next_life(), FIRST_GATEWAY + number) for number in range(settings.num_gateways)
        ]
        self.clients = {plan.number: Client(self, plan) for plan in schedule.requests}
        self.num_open = len(self.clients)

    def run(self) -> Violation | None:
        """Let everything happen, heal, and see it to its end."""
        with small_constants(self.schedule):
            try:
                self._run()
            except Violation as violation:
                self.violation = self.violation or violation
            except Exception as error:  # noqa: BLE001 - whatever the product raises is a finding
                place = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__} in {place.name}, line {place.lineno}: {error}"
                self.violation = self.violation or Violation("LIVENESS", what)
        return self.violation

    def _run(self) -> None:
        for process in (self.scheduler, *self.executors, *self.gateways):
            process.wake()
        for client in self.clients.values():
            self.at(START_S + client.plan.at, client.ask)
            if client.plan.deadline_s:
                self.at(START_S + client.plan.at + client.plan.deadline_s, client.cancel)
        for fault in self.schedule.faults:
            self.at(START_S + fault.at, lambda fault=fault: self.inflict(fault))  # type: ignore[misc]
        healed = START_S + self.schedule.heal_at
        self.at(healed, self.heal)
        self._run_until(lambda: self.now >= healed and not self.num_open, healed + HEALED_WITHIN_S)
        still_open = [number for number, client in self.clients.items() if not client.is_done]
        invariants.liveness(len(still_open), f"requests {still_open}, {self.scheduler.engine.state}")
        self._run_until(self._is_quiet, self.now + QUIET_WITHIN_S)
        invariants.quiescent_zero(self.scheduler.engine)

    def _run_until(self, is_done: Callable[[], bool], limit: float) -> None:
        queue = self._queue
        while queue and self.now < limit and not is_done():
            at, _, action = heapq.heappop(queue)
            self.now = max(self.now, at)
            action()
            if self.violation is not None:
                raise self.violation
            self._num_events += 1
            if self._num_events > MOST_EVENTS:
                raise Violation("LIVENESS", "events without end")

    def _is_quiet(self) -> bool:
        engine = self.scheduler.engine
        core = engine.core
        return not engine.num_unfinished and not engine._names and (core is None or not core.num_in_flight)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Violations must not be taken for errors of a step by the code under test."""
        try:
            yield
        except Violation as violation:
            if self.violation is None:
                self.violation = violation
            raise

    def at(self, at: float, action: Callable[[], None]) -> None:
        self._num_lives += 1
        heapq.heappush(self._queue, (at, self._num_lives, action))

    def _next_life(self) -> int:
        self._num_lives += 1
        return self._num_lives

    # -------------------------------------------------------------------------------------------------------- links

    def executor_named(self, name: bytes) -> ExecutorProcess | None:
        return next((executor for executor in self.executors if executor.name == name), None)

    def send_up(self, slot: int, name: bytes, frame: bytes) -> None:
        """From a peer to the scheduler."""
        link = self.links[slot]
        if self.now < link.down_until or self.scheduler.is_dead:
            return
        scheduler, connection = self.scheduler, link.connection

        def arrive(data: bytes) -> None:
            if link.connection == connection:
                scheduler.deliver(name, data)

        self._send(link, UP, frame, arrive)

    def send_down(self, name: bytes, frame: bytes) -> bool:
        """From the scheduler to a peer; False if the transport knows that it is not there."""
        process: Process | None
        if name.startswith(b"e"):
            process, link = self.executor_named(name), self.links[EXECUTOR]
        else:
            gateway = self.gateways[int(name[1 : name.index(b"-")]) - FIRST_GATEWAY]
            process, link = gateway if gateway.name == name else None, self.links[gateway.slot]
        if process is None or process.is_dead or self.now < link.down_until:
            return False
        connection = link.connection

        def arrive(data: bytes) -> None:
            if link.connection == connection:
                process.deliver(b"", data)

        self._send(link, DOWN, frame, arrive)
        return True

    def _send(self, link: Link, direction: int, frame: bytes, arrive: Callable[[bytes], None]) -> None:
        if self.now < link.cut_until[direction]:
            self._count(link)
            return
        at, copies, in_order = self.now + self._wire_s, 1, True
        if link.armed[direction]:
            fault = link.armed[direction].popleft()
            self._count(link)
            if fault.kind == "drop":
                return
            if fault.kind == "corrupt":
                damaged = bytearray(frame)
                damaged[int(fault.place * len(frame)) % len(frame)] ^= 1 << (fault.count % 8)
                frame = bytes(damaged)
            elif fault.kind == "delay":
                at, in_order = at + fault.seconds, False
            else:
                copies = 2
        if in_order:
            at = max(at, link.last[direction], link.held_until[direction])
            link.last[direction] = at
        for _ in range(copies):
            self.at(at, lambda: arrive(frame))

    def _count(self, link: Link) -> None:
        link.num_faults += 1
        self.num_faults += 1

    def reconnect(self, slot: int, seconds: float) -> None:
        """The connection is made anew after ``seconds``; what was on its way is lost."""
        link = self.links[slot]
        link.connection += 1
        link.down_until = max(link.down_until, self.now + seconds)
        link.last = [0.0, 0.0]

    def is_clean(self, slot: int) -> bool:
        """Whether nothing is wrong with a link, its scheduler and what is under way on it."""
        link = self.links[slot]
        is_cut = max(*link.cut_until, *link.held_until, link.down_until) > self.now
        return not (is_cut or link.armed[UP] or link.armed[DOWN] or self.scheduler.is_dead or self.scheduler.is_stalled)

    # ------------------------------------------------------------------------------------------------------- faults

    def inflict(self, fault: Fault) -> None:
        if self.now >= START_S + self.schedule.heal_at:
            return
        self.num_faults += 1
        getattr(self, f"_inflict_{fault.kind}")(fault)

    def _arm(self, fault: Fault) -> None:
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.armed[direction].extend([fault] * (fault.count if fault.kind != "corrupt" else 1))

    _inflict_drop = _inflict_duplicate = _inflict_corrupt = _inflict_delay = _arm

    def _inflict_partition(self, fault: Fault) -> None:
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.cut_until[direction] = max(link.cut_until[direction], self.now + fault.seconds)
        link.num_faults += 1

    def _inflict_hold(self, fault: Fault) -> None:
        """As a short partition looks through TCP: everything arrives, late."""
        link = self.links[fault.target]
        for direction in _directions(fault):
            link.held_until[direction] = max(link.held_until[direction], self.now + fault.seconds)
        link.num_faults += 1

    def _inflict_reset(self, fault: Fault) -> None:
        self.links[fault.target].num_faults += 1
        self.reconnect(fault.target, min(fault.seconds, 0.3))

    def _inflict_crash(self, fault: Fault) -> None:
        process = self._process(fault.target)
        process.is_dead = True
        if fault.target == SCHEDULER:
            for slot in self.links:
                self.reconnect(slot, 0.0)
        elif fault.target >= FIRST_GATEWAY:
            self._lose_streams(self.gateways[fault.target - FIRST_GATEWAY])
        self.at(self.now + fault.seconds, lambda: self._restart(fault.target, process, fault.count - 1))

    def _lose_streams(self, gateway: GatewayProcess) -> None:
        for client in self.clients.values():
            if client.gateway is gateway and not client.is_done:
                client.gateway_died()

    def _restart(self, target: int, old: Process, shrunk: int = 0) -> None:
        if self._process(target) is not old:
            return
        process: Process
        if target == SCHEDULER:
            process = self.scheduler = SchedulerProcess(self, self._next_life())
        elif target == EXECUTOR:
            process = ExecutorProcess(self, self._next_life(), EXECUTOR, shrunk)
            self.executors = [executor for executor in self.executors if not executor.is_dead] + [process]
        else:
            process = GatewayProcess(self, self._next_life(), target)
            self.gateways[target - FIRST_GATEWAY] = process
        process.wake()

    def _inflict_stall(self, fault: Fault) -> None:
        self._stall(self._process(fault.target), fault.seconds)

    def _stall(self, process: Process, seconds: float) -> None:
        if process.is_dead:
            return
        process.stalled_until = max(process.stalled_until, self.now + seconds)
        for link in self.links.values():
            link.num_faults += 1
        self.at(process.stalled_until + 1e-6, process.wake)

    def _inflict_rival(self, fault: Fault) -> None:
        """A second executor, beside the one that there is."""
        if len(self.executors) < 3:
            rival = ExecutorProcess(self, self._next_life(), EXECUTOR)
            self.executors.append(rival)
            rival.wake()

    def _inflict_supplant(self, fault: Fault) -> None:
        """An executor freezes, another takes its place, and the first comes back."""
        self._stall(self._process(EXECUTOR), 1.2 + fault.seconds)
        self._inflict_rival(fault)

    def _inflict_fail(self, fault: Fault) -> None:
        for executor in self.executors:
            executor.num_failing += fault.count

    def _inflict_memory(self, fault: Fault) -> None:
        for executor in self.executors:
            executor.memory_tokens = fault.count

    def _inflict_flip(self, fault: Fault) -> None:
        for executor in self.executors:
            executor.flip()

    def _inflict_cancel(self, fault: Fault) -> None:
        client = self.clients.get(fault.count)
        if client is not None and client.sequence is not None:
            client.cancel()

    def _inflict_pause(self, fault: Fault) -> None:
        self._operate(fault.target, "pause")
        self.at(self.now + min(fault.seconds, 1.0), lambda: self._operate(fault.target, "resume"))

    def _inflict_pin(self, fault: Fault) -> None:
        plan = self.clients[fault.count].plan if fault.count in self.clients else None
        if plan is not None and not plan.is_bad:
            prefix = PrefixToPin(name=f"pin-{plan.number}", tenant=plan.tenant, token_ids=encode_column(plan.prompt))
            self._operate(fault.target, "pin", prefix)

    def _inflict_unpin(self, fault: Fault) -> None:
        self._operate(fault.target, "unpin", PrefixToPin(name=f"pin-{fault.count}"))

    def _operate(self, target: int, method: str, prefix: PrefixToPin | None = None) -> None:
        """Call what an operator calls, through any gateway."""
        gateway = self.gateways[target % len(self.gateways)]
        if not gateway.is_dead and not gateway.is_stalled:
            gateway.link.call_admin(method, prefix=prefix)
            gateway.flush()

    def _inflict_cancel_preempted(self, fault: Fault) -> None:
        self.num_to_cancel += 1

    def _process(self, target: int) -> Process:
        """Of executors the one that the scheduler uses, or else the newest."""
        if target == SCHEDULER:
            return self.scheduler
        if target >= FIRST_GATEWAY:
            return self.gateways[target - FIRST_GATEWAY]
        used = self.executor_named(self.scheduler.engine.step_link._peer or b"")
        return used or self.executors[-1]

    def heal(self) -> None:
        """Nothing goes wrong any more: what is cut is joined, what is stalled goes on, what is dead comes back."""
        for link in self.links.values():
            link.armed[UP].clear()
            link.armed[DOWN].clear()
            link.cut_until, link.held_until, link.down_until = [0.0, 0.0], [0.0, 0.0], 0.0
        if self.scheduler.is_dead:
            self._restart(SCHEDULER, self.scheduler)
        if all(executor.is_dead for executor in self.executors):
            self._restart(EXECUTOR, self._process(EXECUTOR))
        for gateway in list(self.gateways):
            if gateway.is_dead:
                self._restart(gateway.slot, gateway)
        for executor in self.executors:
            executor.num_failing = executor.memory_tokens = 0
        for process in (self.scheduler, *self.executors, *self.gateways):
            if process.stalled_until > self.now:
                process.stalled_until = 0.0
            process.wake()
        for slot in self.links:
            self._operate(slot, "resume")


def _directions(fault: Fault) -> tuple[int, ...]:
    return (UP, DOWN) if fault.direction == BOTH else (fault.direction,)


@contextmanager
def small_constants(schedule: Schedule) -> Iterator[None]:
    """What takes thousands of frames or many steps in production comes about within a few here."""
    settings = schedule.settings
    changed: list[tuple[Any, str, object]] = [
        (headway_scheduler.core.scheduler, "DIGEST_INTERVAL_STEPS", settings.digest_every),
        (headway_executor.loop, "DIGEST_INTERVAL_STEPS", settings.digest_every),
        (headway_scheduler.ingress_link, "MAX_UNACKNOWLEDGED_FRAMES", settings.window),
        (headway_gateway.ingress_link, "ACKNOWLEDGE_EVERY_FRAMES", max(settings.window // 4, 1)),
    ]
    before = [getattr(module, name) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(changed, before, strict=True):
            setattr(module, name, value)


def run(schedule: Schedule) -> FaultWorld:
    """Run a schedule to its end."""
    world = FaultWorld(schedule)
    world.run()
    return world
