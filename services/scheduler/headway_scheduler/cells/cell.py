"""A cell: one executor as the scheduler sees it, with its core and its brake.

Owns: how steps, answers, losses and epochs of one executor act on one core. Must not know: other cells, gateways, or
what carries frames.
"""

from functools import partial
from typing import Protocol

from headway_proto.adapters import AdapterChanged
from headway_proto.step import BackendInfo
from headway_scheduler.cells.blame import Blame
from headway_scheduler.cells.brake import Brake, FailurePause
from headway_scheduler.cells.core_calls import CoreCalls
from headway_scheduler.cells.live_sequences import LiveSequences
from headway_scheduler.cells.notices import Notices
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.figures.serving_statistics import ServingStatistics
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.links.executor_link import (
    AdapterAnswered,
    EpochOpened,
    ExecutorLink,
    ExecutorLost,
    ExecutorRefused,
    InAnotherState,
    StepAnswered,
    StepEvent,
    StepFailed,
)
from headway_scheduler.placement.transit import Transit

LEAST_STEP_TOKENS = 8
"""Smaller steps are tried down to this size before a request is blamed for a lack of memory."""

MOST_STEPS_OF_EPOCH = (1 << 31) - (1 << 25)
"""Then another begins. Columns of int32 hold the numbers of steps, also of steps to come: as many as a request has tokens."""

USED_WRONG_BLOCKS = "it has used blocks of an executor that was in another state"
"""Why an epoch begins whose executor did nothing wrong."""


class Serving(Protocol):
    """What a cell needs of the scheduler process around it."""

    limits: SchedulerLimits
    live: LiveSequences
    notices: Notices
    statistics: ServingStatistics

    def deliver(self, events: StepEvents, now: float) -> None:
        """Send gateways what a core has brought."""

    def refuse_late(self, end: FinishedEvent, expected_prefill_s: float, now: float) -> None:
        """A request can no longer meet its objective; nothing of it has run."""


class AnswersOfAdapters(Protocol):
    """Takes what executors say of adapters."""

    def answered(self, cell: "Cell", answer: AdapterChanged) -> None:
        """A cell's executor was asked to load or unload an adapter."""


class OtherCells(Protocol):
    """What a cell needs of the others."""

    brake: Brake
    transit: Transit

    @property
    def adapters(self) -> AnswersOfAdapters: ...  # noqa: D102 - who waits for its answers on adapters

    def state_lost(self, cell: "Cell", now: float) -> None:
        """What the executor had computed is gone; its requests may go on elsewhere."""

    def cell_has_preempted(self) -> None:
        """A request that lost its row waits in this cell."""

    def cell_opened(self, cell: "Cell", now: float) -> None:
        """This cell began an epoch."""

    def cell_lost(self, cell: "Cell", now: float) -> None:
        """This cell has no executor now."""

    def distrust(self, epoch: int) -> None:
        """An executor was in another state than it should be in: nobody is to use what it wrote in this epoch."""

    def begin_anew(self, now: float) -> None:
        """Who has used what is not to be used begins anew."""


class Cell:
    """One executor. Times in seconds, monotonic."""

    def __init__(
        self, link: ExecutorLink, serving: Serving, others: OtherCells, recorder: NullRecorder, news: set[int]
    ) -> None:
        self.number = link.number
        self.link = link
        self.recorder = recorder
        self.calls: CoreCalls | None = None
        """None before an executor joins."""
        self.info: BackendInfo | None = None
        self.role = Role.BOTH
        self.is_draining = False
        """Whether its requests go elsewhere, and no others come."""
        self.num_answers = 0
        self._news = news
        self.has_news = True
        self.lost_steps_had: tuple[Origin, ...] = ()
        """The requests of the newest steps that were lost, until the next epoch."""
        self._serving = serving
        self._others = others
        self._limits = serving.limits
        self._brake = others.brake
        self._blame = Blame(others.brake, serving.live, serving.notices)
        self._pause = FailurePause()
        self._paused_until = float("-inf")
        """After steps that failed, the executor gets none until then."""

    @property
    def has_news(self) -> bool:
        """Whether ``schedule_steps`` may have something to do. ``news`` has the numbers of all cells where this is so."""
        return self.number in self._news

    @has_news.setter
    def has_news(self, has_news: bool) -> None:
        if has_news:
            self._news.add(self.number)
        else:
            self._news.discard(self.number)

    @property
    def core(self) -> Scheduler | None:
        """None before an executor joins."""
        return None if self.calls is None else self.calls.core

    @property
    def view(self) -> SchedulerView | None:
        """What may be read from the core; None before an executor joins."""
        return None if self.core is None else SchedulerView(self.core)

    @property
    def is_open(self) -> bool:
        """Whether its executor is there."""
        return self.link.is_open and self.calls is not None

    @property
    def next_deadline(self) -> float:
        """The time until which no step is sent; infinite if there is none."""
        return self._paused_until if self._paused_until > float("-inf") else float("inf")

    def on_events(self, events: list[StepEvent], now: float) -> None:
        """Act on what the link reports."""
        is_distrusted = False
        for event in events:
            if isinstance(event, StepAnswered):
                self._on_answer(event, now)  # and sends the next step
                continue
            self.has_news = True
            if isinstance(event, EpochOpened):
                self._on_epoch(event, now)
            elif isinstance(event, InAnotherState):
                is_distrusted = self.core is not None
                if self.core is not None:
                    self._others.distrust(self.core.epoch)
            elif isinstance(event, AdapterAnswered):
                self._others.adapters.answered(self, event.answer)
            elif isinstance(event, ExecutorRefused):
                self._serving.notices.add("executor refused", reason=event.reason)
            elif isinstance(event, ExecutorLost):
                self._on_lost(event, now)
        if is_distrusted:
            self._others.begin_anew(now)

    def schedule_steps(self, now: float) -> None:
        """Schedule and send as many steps as may be in flight."""
        calls, link = self.calls, self.link
        self.has_news = False
        if now >= self._paused_until:
            # With or without an executor: a time in the past would ask for another turn again and again.
            self._paused_until = float("-inf")
        if calls is None or not link.is_open or now < self._paused_until:
            self.has_news = now < self._paused_until
            return
        core = calls.core
        if self._brake.has_suspects:
            calls.run_alone(*self._blame.next_trial(core))
        if core.num_in_flight < core.max_in_flight:
            self._send_steps(calls, now)
        if core.num_preempted:
            self._others.cell_has_preempted()

    def _send_steps(self, calls: CoreCalls, now: float) -> None:
        core, link = calls.core, self.link
        num_before = len(link.outgoing)
        while (output := core.schedule(now)) is not None:
            link.send_step(output)
            self._serving.statistics.step_tokens.observe(output.total_num_scheduled_tokens)
        shed = core.take_shed()
        frames = link.outgoing[num_before:]
        if frames or shed:
            self.end_leases()
        if frames:
            if core.num_in_flight < core.max_in_flight:
                self.has_news = True
            self.recorder.sent(now, frames, len(shed))
        elif not core.awaits_answer:
            # Otherwise the core did not look for a step at all, and only an answer can change that.
            self.has_news = core.num_unfinished > 0
            self.recorder.sent_nothing(now, len(shed), is_idle=not self.has_news)
        for end in shed:
            self._serving.refuse_late(end, core.expected_prefill_s, now)

    def adopt(self, request: Request, *, slowly: bool) -> None:
        """Let the core queue a request. ``slowly``: it was in lost steps, and few of those start at a time."""
        assert self.calls is not None
        self.calls.adopt(request)
        if slowly:
            self.calls.start_slowly((request.new.origin,))

    def release_all(self, now: float) -> list[Request]:
        """The executor is lost: give up every request of the core."""
        calls = self.calls
        if calls is None or not (calls.core.num_unfinished or calls.core.num_in_flight):
            return []
        self._serving.deliver(StepEvents(admitted=calls.core.admission.starts.take_admitted()), now)
        requests = calls.release_all()
        self.end_leases()
        return requests

    def end_leases(self) -> None:
        """Return the leases of blocks elsewhere that the core needs no more. A replay finds them alike."""
        core = self.core
        if core is not None and core.ended_leases:
            self._others.transit.return_leases(core.moving.take_ended_leases())

    # ------------------------------------------------------------------------------------------------------- executor

    def _on_lost(self, event: ExecutorLost, now: float) -> None:
        self._serving.notices.add("executor lost", reason=event.reason, **self._which())
        self._serving.statistics.count_executor_loss(self.number)
        self.recorder.executor_gone(now, event.reason)
        if self.calls is not None:
            self._end_guilty(self.calls, event.reason, None, now)
        self._others.cell_lost(self, now)

    def _on_answer(self, event: StepAnswered, now: float) -> None:
        calls = self.calls
        assert calls is not None
        try:
            events = calls.core.update(event.output, now)
        except (StateMismatch, ValueError) as error:
            self.recorder.mismatched(now, event.output, str(error))
            self.on_events([InAnotherState(), *self.link.reopen(str(error), now)], now)
            return
        self.recorder.answered(now, event.output, events.finished)
        self.num_answers += 1
        self._pause.count_answer()
        released = calls.release(events.left)
        if self.is_draining and calls.core.num_waiting:
            released += calls.release_waiting()  # it was preempted before it could leave
        if released:
            self._others.transit.take_back(released)
        self.end_leases()
        self.schedule_steps(now)
        self._serving.statistics.count_answer(events, event.output.device_time_us, now, self.number)
        self._serving.deliver(events, now)
        if calls.core.next_step >= MOST_STEPS_OF_EPOCH:
            self.on_events(self.link.reopen("its steps are numbered anew", now), now)

    def _on_epoch(self, event: EpochOpened, now: float) -> None:
        info, notices = event.info, self._serving.notices
        capacity = ExecutorCapacity.of(info)
        same_model = self.info is None or self.info.model_fingerprint == info.model_fingerprint
        calls = self.calls
        if calls is None:
            core = Scheduler(self._limits, capacity, event.epoch)
            self.calls = CoreCalls(core, self.recorder, partial(self._news.add, self.number))
        else:
            core = calls.core
            if event.failure is not None and self._on_failure(calls, event.failure, event.reason, now):
                self.on_events(self.link.lift_limit(now), now)
                return
            self._others.state_lost(self, now)
            self._serving.deliver(core.begin_epoch(capacity, event.epoch, same_model=same_model), now)
            self.end_leases()
        self.lost_steps_had = ()
        self.recorder.epoch_began(now, event.epoch, capacity, info, event.reason, same_model=same_model)
        is_news, self.info = self.info != info, info
        notices.add(
            "epoch opened",
            epoch=event.epoch,
            reason=event.reason,
            model=info.model_name,
            backend=info.backend,
            **self._which(),
        )
        if core.max_num_batched_tokens < self._limits.max_num_batched_tokens:
            notices.add("the executor takes smaller steps", max_num_batched_tokens=core.max_num_batched_tokens)
        if is_news:
            notices.add("model", blocks=info.num_blocks, block_size=info.block_size, context=info.max_model_len)
        self._serving.statistics.count_epoch(now, self.number)
        self._others.cell_opened(self, now)

    def _on_failure(self, calls: CoreCalls, failure: StepFailed, reason: str, now: float) -> bool:
        """A step failed: try smaller ones, or blame a request. Return whether one was too large."""
        if failure.max_num_batched_tokens >= LEAST_STEP_TOKENS:
            return False  # the size of the step explains it
        is_found = self._end_guilty(calls, reason, failure.step, now)
        self._paused_until = now + self._pause.count_failure()
        return is_found and failure.max_num_batched_tokens > 0

    def _end_guilty(self, calls: CoreCalls, reason: str, step: int | None, now: float) -> bool:
        """Steps were lost: end the guilty request, if it is known, and return whether it was."""
        verdict = self._blame.judge(calls.core, reason, step)
        if verdict is None:
            return False
        self.lost_steps_had = verdict.in_flight
        calls.start_slowly(verdict.in_flight)
        if verdict.guilty is None:
            return False
        end = calls.fail(verdict.guilty, verdict.error, now)
        self.end_leases()
        if end is None:
            return False
        self._serving.deliver(StepEvents(finished=(end,)), now)
        return True

    def _which(self) -> dict[str, int]:
        return {"executor": self.number} if self.number else {}
