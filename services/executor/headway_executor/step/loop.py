"""The executor's cycle, from frames to steps and back, and the loop that drives it.

Owns: the order of steps and results. Must not know: backends, sockets, signals.

A failed step asks for a new epoch; a lost device ends the process.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import msgspec
from structlog.typing import FilteringBoundLogger

from headway_executor.backend import (
    NO_SPECULATION,
    DeviceLostError,
    ExecutorBackend,
    RankLostError,
    StepBatch,
    StepResult,
    StepTooLargeError,
)
from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.block_moves import BlockMoves
from headway_executor.batch.diff_checks import ImpossibleDiff
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.store import NoStore, Store
from headway_executor.block_store.suspects import SuspectBlocks
from headway_executor.block_store.transfers import BlockTransfers, StepNumber
from headway_executor.host.statistics import ExecutorStatistics
from headway_executor.links.step_link import (
    AdapterAsked,
    EpochBegan,
    EpochLost,
    LinkOutcome,
    MustEnd,
    OtherVersion,
    ProposalsAccepted,
    StepReady,
    most_bytes_of,
)
from headway_executor.step.adapter_changes import AdapterChanges, Beside, at_once
from headway_executor.step.seams import Link, NoRanks, Ranks
from headway_process.pulse import Pulse
from headway_proto.adapters import name_of
from headway_proto.columns import Int32Array
from headway_proto.framing import MAX_BYTES_TO_SCHEDULER
from headway_proto.step import DIGEST_INTERVAL_STEPS, SchedulerOutput, adapters_in


class Channel(Protocol):
    """The connection to the scheduler."""

    def wait(self, timeout: float) -> None:
        """Return when a frame may be there, after ``wake``, or after ``timeout`` seconds."""
        ...

    def receive(self) -> bytes | None:
        """Return the next frame, or None."""
        ...

    def send(self, frame: bytes) -> None:
        """Send, or drop without a peer: the protocol notices lost frames."""
        ...


class _Pending(msgspec.Struct, frozen=True):
    epoch: int
    step: int
    num_tokens: int
    num_samples: int
    speculates: bool
    state_digest: int | None
    stale_rows: Int32Array
    future: Future[StepResult]


class _AppliedStep(NamedTuple):
    number: StepNumber
    num_tokens: int
    batch: StepBatch
    moves: BlockMoves | None
    state_digest: int | None


class _Arriving(NamedTuple):
    """A step whose pulls are under way; it keeps later steps waiting."""

    step: _AppliedStep
    fetched: Future[FetchedBlocks]


class StepCycle:
    """The cycle of one executor, or of one of its ranks. Any thread may call ``wake``.

    After ``step_timeout_s`` without a result, the device counts as lost. Without a ``store``, no block can be pulled.
    ``beside`` lets adapters be read while steps run.
    """

    def __init__(
        self,
        *,
        link: Link,
        state: BatchState,
        backend: ExecutorBackend,
        log: FilteringBoundLogger,
        wake: Callable[[], None],
        step_timeout_s: float = float("inf"),
        store: Store | None = None,
        ranks: Ranks | None = None,
        beside: Beside = at_once,
    ) -> None:
        self._link = link
        self._state = state
        self._backend = backend
        self._log = log
        self._wake = wake
        self._step_timeout_s = step_timeout_s
        self._store: Store = NoStore() if store is None else store
        self._ranks: Ranks = NoRanks() if ranks is None else ranks
        self._adapters = AdapterChanges(backend, wake, beside)
        self._suspects = SuspectBlocks(state.block_size)
        self._arriving: _Arriving | None = None
        self._held: deque[SchedulerOutput] = deque()
        """Steps that wait: for the one that is arriving, for an adapter, or for those before them."""
        self._oldest_since = float("inf")
        self._pending: deque[_Pending] = deque()
        self.statistics = ExecutorStatistics()
        self._transfers = BlockTransfers(backend, self._store, self.statistics, log)
        self.device_lost: DeviceLostError | None = None
        """The error after which this process must end, or None."""

    @property
    def next_deadline(self) -> float:
        """The time when ``tick`` is due."""
        return float("-inf") if self._export_is_due or self._has_held else self._link.next_deadline

    @property
    def _export_is_due(self) -> bool:
        """Whether a step has been answered and its exports have not begun: a client waits for the answer only."""
        return self._transfers.are_due and not self._pending

    @property
    def _has_held(self) -> bool:
        """Whether a held step waits for nothing any more."""
        return self._arriving is None and bool(self._held) and not self._lacks_adapter(self._held[0])

    def receive(self, data: bytes, now: float) -> list[bytes]:
        """Handle a frame; return the frames to send."""
        frames = self._act(self._link.receive(data, now), now)
        # A frame may be what a step waits for, and the next frame may end its epoch.
        return frames + self.collect(now) if self._arriving is not None else frames

    def tick(self, now: float) -> list[bytes]:
        """Do what is due; return the frames to send."""
        if self._export_is_due:
            self._transfers.export()
        frames = self.collect(now)
        if self.device_lost is not None:
            return frames
        if self._has_held and not frames:  # the frames first: a backend may run the next step here, and they would wait
            frames = self._begin(self._held.popleft(), now)
        if self._pending and now - self._oldest_since > self._step_timeout_s:
            step = self._pending[0]
            error = DeviceLostError(f"no result after {self._step_timeout_s:g} s")
            return frames + self._fail(step.epoch, step.step, error, now)
        return frames + self._act(self._link.tick(now), now)

    def collect(self, now: float) -> list[bytes]:
        """Report finished steps in order."""
        frames: list[bytes] = []
        while self._pending and self._pending[0].future.done() and self.device_lost is None:
            step = self._pending.popleft()
            self._oldest_since = now
            error = step.future.exception()
            if error is not None:
                frames += self._fail(step.epoch, step.step, error, now)
            else:
                frames += self._report(step, step.future.result(), now)
        frames += self._answer_adapters()
        if self._arriving is not None and self._arriving.fetched.done() and self.device_lost is None:
            frames += self._arrive(self._arriving.step, self._arriving.fetched.result(), now)
        return frames

    def _act(self, outcome: LinkOutcome, now: float) -> list[bytes]:
        frames = outcome.frames
        for event in outcome.events:
            if isinstance(event, StepReady):
                frames += self._take(event.output, now)
            elif isinstance(event, EpochBegan):
                self._state.begin_epoch()
                self._forget_arriving()
                self._suspects.forget()
                # The backend still finishes these steps before any step of the new epoch; their results are dropped.
                self._pending.clear()
                self.statistics.record_epoch()
                self._log.info("epoch began", epoch=event.epoch)
            elif isinstance(event, MustEnd):
                if event.is_in_another_state:
                    self._store.forget()
                frames += self._end_of_group(event.reason, is_in_another_state=event.is_in_another_state)
            elif isinstance(event, OtherVersion):
                self._log.error("the scheduler is of another version of Headway", reason=event.reason)
            elif isinstance(event, AdapterAsked):
                self._adapters.begin(event.change)
                frames += self._answer_adapters()
            elif isinstance(event, ProposalsAccepted):
                frames += self._accept(event.accepted_tokens)
            else:
                self._log_loss(event)
        return frames

    def _answer_adapters(self) -> list[bytes]:
        frames: list[bytes] = []
        for change, answer in self._adapters.take_answers():
            what = "adapter loaded" if change.directory else "adapter unloaded"
            self._log.info("adapter not changed" if answer.error else what, adapter=change.name, error=answer.error)
            frames += self._link.answer_adapter(change, answer)
        return frames

    def _end_of_group(self, reason: str, *, is_in_another_state: bool = False) -> list[bytes]:
        self.device_lost = RankLostError(reason)
        return self._link.leave(reason, is_in_another_state=is_in_another_state)

    def _accept(self, accepted_tokens: Int32Array) -> list[bytes]:
        try:
            self._state.accept(accepted_tokens)
        except ValueError as error:
            return self._end_of_group(f"what rank 0 accepted: {error}")
        return []

    def _take(self, output: SchedulerOutput, now: float) -> list[bytes]:
        if self._arriving is not None or self._held or self._lacks_adapter(output):
            self._held.append(output)
            return []
        return self._begin(output, now)

    def _lacks_adapter(self, output: SchedulerOutput) -> bool:
        """Whether a new row's adapter is still being loaded, here or on another rank: a new executor is asked for what it
        lacks, and gets steps at once. Rows that run already have theirs.
        """
        entries = adapters_in(output)
        if not entries:
            return False
        changing = {*self._adapters.names, *self._ranks.changing_adapters}
        return any(name_of(row.adapter) in changing for row in entries)

    def _begin(self, output: SchedulerOutput, now: float) -> list[bytes]:
        try:
            batch, moves = self._state.apply(output)
        except ImpossibleDiff as error:
            self._store.forget()
            return self._act(self._link.lose_epoch(output.epoch, f"step {output.step}: {error}", now), now)
        digest = self._state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None
        number = StepNumber(output.epoch, output.step)
        self._ranks.begin(number)
        step = _AppliedStep(number, output.total_num_scheduled_tokens, batch, moves, digest)
        if moves is None or not moves.pulls:
            return self._execute(step, None, now)
        self._arriving = _Arriving(step, self._store.fetch(moves.pulls))
        self._arriving.fetched.add_done_callback(lambda _: self._wake())
        return self.collect(now)

    def _arrive(self, step: _AppliedStep, fetched: FetchedBlocks, now: float) -> list[bytes]:
        """Run the step whose blocks are there; those behind it come with the next ticks."""
        self._arriving = None
        self.statistics.record_pulls(
            len(fetched.blocks), len(fetched.missing), fetched.contents.nbytes, fetched.seconds
        )
        if len(fetched.missing):
            self._log.warning("blocks could not be pulled", count=len(fetched.missing), problems=fetched.problems)
        self._ranks.go_on(fetched)
        return self._execute(step, fetched, now)

    def _execute(self, step: _AppliedStep, fetched: FetchedBlocks | None, now: float) -> list[bytes]:
        number, num_tokens, batch, moves, digest = step
        self._transfers.export()
        stale_rows = self._suspects.stale_rows(batch, moves, fetched)
        if len(stale_rows):
            batch = msgspec.structs.replace(batch, stale_rows=stale_rows)
        self.statistics.record_step(num_tokens, len(batch.rows), now)
        try:
            if moves is not None:
                self._transfers.before_step(number, moves, fetched)
            result = self._backend.execute(batch)
        except Exception as error:  # noqa: BLE001 (one step must not end the process)
            return self._fail(*number, error, now)
        if moves is not None:
            self._transfers.after_step(number, moves)
        future = _future_of(result)
        num_samples = int(batch.samples.sum())
        if not self._pending:
            self._oldest_since = now
        speculates = batch.num_speculative_tokens is not None
        self._pending.append(_Pending(*number, num_tokens, num_samples, speculates, digest, stale_rows, future))
        if not future.done():
            future.add_done_callback(lambda _: self._wake())
        return self.collect(now)

    def _report(self, step: _Pending, result: StepResult, now: float) -> list[bytes]:
        if not self._ranks.decides:
            return self._answer(step, result, now)
        num_wanted = step.num_samples
        if step.speculates:
            accepted = NO_SPECULATION if result.accepted_tokens is None else result.accepted_tokens
            try:
                self._state.accept(accepted)
            except ValueError as error:
                return self._fail(step.epoch, step.step, RuntimeError(f"the backend's answer: {error}"), now)
            num_wanted += int(accepted[2].sum())
            self.statistics.record_speculation(int(accepted[1].sum()), int(accepted[2].sum()))
        if len(result.sampled_token_ids) != num_wanted:
            text = f"the backend answered {len(result.sampled_token_ids)} tokens, not {num_wanted}"
            return self._fail(step.epoch, step.step, RuntimeError(text), now)
        num_bytes = most_bytes_of(result)
        if num_bytes > MAX_BYTES_TO_SCHEDULER:
            text = f"the answer to {step.num_tokens} tokens takes {num_bytes} bytes; allowed: {MAX_BYTES_TO_SCHEDULER}"
            return self._fail(step.epoch, step.step, StepTooLargeError(step.num_tokens, text), now)
        return self._answer(step, result, now)

    def _answer(self, step: _Pending, result: StepResult, now: float) -> list[bytes]:
        self.statistics.record_result(result.device_time_us, len(result.errors), now)
        return self._link.result(
            epoch=step.epoch, step=step.step, result=result, state_digest=step.state_digest, stale_rows=step.stale_rows
        )

    def _fail(self, epoch: int, step: int, error: BaseException, now: float) -> list[bytes]:
        self.statistics.record_failure(type(error).__name__)
        self._log.error("step failed", epoch=epoch, step=step, exc_info=error)
        reason = f"step {step} failed: {type(error).__name__}: {error}"
        if isinstance(error, DeviceLostError):
            self.device_lost = error
            return self._link.leave(reason)
        # Nothing tells how much room a step takes beside the fixed part: allow half of the tokens.
        limit = max(error.num_tokens // 2, 1) if isinstance(error, StepTooLargeError) else 0
        return self._act(self._link.lose_epoch(epoch, reason, now, failed_step=step, max_num_batched_tokens=limit), now)

    def _forget_arriving(self) -> None:
        self._arriving = None
        self._held.clear()

    def _log_loss(self, event: EpochLost) -> None:
        self._forget_arriving()
        self._log.warning("epoch lost", epoch=event.epoch, reason=event.reason)


def _future_of(result: StepResult | Future[StepResult]) -> Future[StepResult]:
    if isinstance(result, Future):
        return result
    future: Future[StepResult] = Future()
    future.set_result(result)
    return future


def serve(
    cycle: StepCycle,
    channel: Channel,
    should_stop: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    pulse: Pulse | None = None,
    on_turn: Callable[[], None] = lambda: None,
) -> None:
    """Run until ``should_stop`` or until the device is lost."""
    while not should_stop() and cycle.device_lost is None:
        now = clock()
        if pulse is not None:
            pulse.beat(now)
        on_turn()
        # Results come first: the scheduler may wait for one to decide the next step.
        _send_all(channel, cycle.tick(now))
        while (frame := channel.receive()) is not None:
            now = clock()
            if pulse is not None:
                pulse.beat(now)  # without a thread, a backend may run one step after another here
            _send_all(channel, cycle.receive(frame, now))
            if should_stop() or cycle.device_lost is not None:
                return
        if cycle.device_lost is not None:
            return
        channel.wait(max(0.0, cycle.next_deadline - clock()))


def _send_all(channel: Channel, frames: list[bytes]) -> None:
    for frame in frames:
        channel.send(frame)
