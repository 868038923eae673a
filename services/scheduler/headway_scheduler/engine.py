"""The scheduler without sockets and clock: frames and the time in, frames out.

Owns: how core and links work together. Must not know: ZeroMQ, signals, wall clocks.
Production, simulation and fault tests run it. The next step is sent before gateways are, so the executor never waits.
"""

from headway_proto import ingress
from headway_proto.columns import INT32, decode_column
from headway_proto.ingress import Abort, Rejected, Submit
from headway_proto.operations import AdminCall
from headway_proto.step import BackendInfo
from headway_scheduler.administration import Administration
from headway_scheduler.blame import Blame
from headway_scheduler.brake import Brake
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.delivery import deliver, deliver_end, load_of, model_of
from headway_scheduler.executor_link import (
    EpochOpened,
    ExecutorLink,
    ExecutorLost,
    ExecutorRefused,
    StepAnswered,
    StepEvent,
    StepFailed,
)
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.ingress_link import Announcement, GatewayGone, IngressEvent, IngressLinks
from headway_scheduler.live_sequences import LiveSequence, LiveSequences, name_of
from headway_scheduler.notices import Notices
from headway_scheduler.queue_pace import UNKNOWN_S, QueuePace
from headway_scheduler.serving_statistics import ServingStatistics
from headway_scheduler.submissions import EarlySubmissions, Problem, new_request, problem_of

LEAST_STEP_TOKENS = 8
"""Smaller steps are tried down to this size before a request is blamed for a lack of memory."""


class SchedulerEngine:
    """Feed it frames, call ``run`` after each batch and by ``next_deadline``, then send both links' ``outgoing``.

    Times are in seconds, monotonic.
    """

    def __init__(self, limits: SchedulerLimits, incarnation: int, recorder: NullRecorder | None = None) -> None:
        self.limits = limits
        self.recorder = recorder or NullRecorder()
        live, notices, brake = LiveSequences(), Notices(), Brake(num_trial_tokens=limits.max_steps_in_flight)
        self._blame = Blame(brake, live, notices)
        self.live, self.notices, self.brake = live, notices, brake
        self.incarnation = incarnation
        self.executor_link = ExecutorLink(incarnation)
        self.gateways = IngressLinks(incarnation, submit_credits=limits.max_num_waiting + limits.max_num_seqs)
        self.statistics = ServingStatistics()
        self.administration = Administration(self)
        self.early = EarlySubmissions(limits)
        self.num_answers = 0
        self.draining = False
        self.core: Scheduler | None = None
        self.info: BackendInfo | None = None
        self._queue_pace = QueuePace()
        self._paused_until = float("-inf")
        """No steps before this time, because steps failed."""

    @property
    def view(self) -> SchedulerView | None:
        """None before an executor joins."""
        return None if self.core is None else SchedulerView(self.core)

    @property
    def next_deadline(self) -> float:
        """When to call ``run``."""
        links = min(self.executor_link.next_deadline, self.gateways.next_deadline)
        return min(links, self._paused_until) if self._paused_until > float("-inf") else links

    @property
    def num_unfinished(self) -> int:
        """Waiting and running sequences."""
        return len(self.early) if self.core is None else self.core.num_unfinished

    @property
    def state(self) -> str:
        """One of ``ingress.STATE_*``."""
        if self.draining:
            return ingress.STATE_DRAINING
        if not self.executor_link.is_open:
            return ingress.STATE_WAITING_FOR_EXECUTOR
        return ingress.STATE_PAUSED if self.core is not None and self.core.paused else ingress.STATE_SERVING

    def executor_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Handle one frame."""
        self._on_step_events(self.executor_link.receive(peer, data, now), now)

    def gateway_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Handle one frame."""
        for event in self.gateways.receive(peer, data, now, self._announcement):
            self._on_gateway_event(event, now)

    def executor_unreachable(self, peer: bytes, now: float) -> None:
        """Handle a failed send."""
        self._on_step_events(self.executor_link.unreachable(peer), now)

    def gateway_unreachable(self, peer: bytes, now: float) -> None:
        """Handle a failed send."""
        for event in self.gateways.unreachable(peer):
            self._on_gateway_event(event, now)

    def run(self, now: float) -> None:
        """Do what is due."""
        if now >= self._paused_until:
            # Even without an executor: a deadline in the past would make the loop spin.
            self._paused_until = float("-inf")
        if now >= self.statistics.next_mark_at:
            self.statistics.keep_time(now, self.view)
        self._on_step_events(self.executor_link.tick(now), now)
        for event in self.gateways.tick(now, self._announcement):
            self._on_gateway_event(event, now)
        self.schedule_steps(now)
        self.gateways.flush()

    def schedule_steps(self, now: float) -> None:
        """Send all steps that may be in flight."""
        core, link = self.core, self.executor_link
        if core is None or not link.is_open or now < self._paused_until:
            return
        if self.brake.has_suspects:
            trial = self._blame.next_trial(core)
            core.run_alone(trial.origin, trial.num_tokens)
            self.recorder.ran_alone(trial.origin, trial.num_tokens)
        num_before = len(link.outgoing)
        while (output := core.schedule(now)) is not None:
            link.send_step(output)
            self.statistics.step_tokens.observe(output.total_num_scheduled_tokens)
        shed = core.take_shed()
        frames = link.outgoing[num_before:]
        if frames:
            self.recorder.sent(now, frames, len(shed))
        elif core.num_in_flight < self.limits.max_steps_in_flight and not core.awaits_answer:
            # Only if the core looked for a step.
            self.recorder.sent_nothing(now, len(shed), is_idle=not core.num_unfinished)
        for end in shed:
            self.statistics.count_end(end, now)
            self._on_shed(core, end)

    # ------------------------------------------------------------------------------------------------------- executor

    def _on_step_events(self, events: list[StepEvent], now: float) -> None:
        for event in events:
            if isinstance(event, StepAnswered):
                self._on_answer(event, now)
            elif isinstance(event, EpochOpened):
                self._on_epoch(event, now)
            elif isinstance(event, ExecutorRefused):
                self.notices.add("executor refused", reason=event.reason)
            elif isinstance(event, ExecutorLost):
                self._on_executor_lost(event, now)

    def _on_executor_lost(self, event: ExecutorLost, now: float) -> None:
        self.notices.add("executor lost", reason=event.reason)
        self.statistics.count_executor_loss()
        self.recorder.executor_gone(now, event.reason)
        if self.core is not None:
            self._end_guilty(self.core, event.reason, None, now)
        self.announce()

    def _on_answer(self, event: StepAnswered, now: float) -> None:
        assert self.core is not None
        try:
            events = self.core.update(event.output, now)
        except (StateMismatch, ValueError) as error:
            self.recorder.mismatched(now, event.output, str(error))
            self._on_step_events(self.executor_link.reopen(str(error), now), now)
            return
        self.recorder.answered(now, event.output, events.finished)
        self.num_answers += 1
        self.brake.count_answer()
        self.schedule_steps(now)
        self.statistics.count_answer(events, event.output.device_time_us, now)
        self._deliver(events, now)

    def _on_epoch(self, event: EpochOpened, now: float) -> None:
        info = event.info
        capacity = ExecutorCapacity.of(info)
        same_model = self.info is None or self.info.model_fingerprint == info.model_fingerprint
        if self.core is None:
            self.core = Scheduler(self.limits, capacity, event.epoch)
        else:
            if event.failure is not None and self._on_failure(self.core, event.failure, event.reason, now):
                self._on_step_events(self.executor_link.lift_limit(now), now)
                return
            self._deliver(self.core.begin_epoch(capacity, event.epoch, same_model=same_model), now)
        self.recorder.epoch_began(now, event.epoch, capacity, info, event.reason, same_model=same_model)
        changed = self.info != info
        self.info = info
        for owner, submit in self.early.take():
            self._on_submit(owner, submit, now)
        self.notices.add(
            "epoch opened", epoch=event.epoch, reason=event.reason, model=info.model_name, backend=info.backend
        )
        if self.core.max_num_batched_tokens < self.limits.max_num_batched_tokens:
            self.notices.add(
                "the executor takes smaller steps", max_num_batched_tokens=self.core.max_num_batched_tokens
            )
        if changed:
            self.notices.add("model", blocks=info.num_blocks, block_size=info.block_size, context=info.max_model_len)
        self.statistics.count_epoch(now)
        self.announce()

    def _on_failure(self, core: Scheduler, failure: StepFailed, reason: str, now: float) -> bool:
        """Try smaller steps, or blame a request. Return whether one alone was too large."""
        if failure.max_num_batched_tokens >= LEAST_STEP_TOKENS:
            return False  # the size of the step explains it
        is_found = self._end_guilty(core, reason, failure.step, now)
        self._paused_until = now + self.brake.pause_s()
        return is_found and failure.max_num_batched_tokens > 0

    def _end_guilty(self, core: Scheduler, reason: str, step: int | None, now: float) -> bool:
        """After lost steps, end the guilty request. Return whether one was found."""
        verdict = self._blame.judge(core, reason, step)
        if verdict is None:
            return False
        core.start_slowly(verdict.in_flight)
        self.recorder.started_slowly(verdict.in_flight)
        if verdict.guilty is None:
            return False
        self.recorder.aborted(now, verdict.guilty, "it is to blame", verdict.error)
        end = core.fail(verdict.guilty, verdict.error)
        if end is None:
            return False
        self._deliver(StepEvents(finished=(end,)), now)
        return True

    # ------------------------------------------------------------------------------------------------------- gateways

    def _on_gateway_event(self, event: IngressEvent, now: float) -> None:
        if isinstance(event, GatewayGone):
            self._on_gateway_gone(event, now)
            return
        body = event.body
        if isinstance(body, Submit):
            self._on_submit(event.owner, body, now)
        elif isinstance(body, Abort):
            self._on_abort(event.owner, body, now)
        else:
            assert isinstance(body, AdminCall)
            self.gateways.send(event.owner, self.administration.answer(body, now))

    def _on_gateway_gone(self, event: GatewayGone, now: float) -> None:
        self.early.remove_owner(event.owner)
        lost = self.live.of_owner(event.owner)
        self.notices.add("gateway link closed", reason=event.reason, sequences=len(lost))
        for live in lost:
            self._forget(live.origin)
            self._abort_silently(live.origin, f"its gateway is gone: {event.reason}", now)

    def _on_abort(self, owner: int, abort: Abort, now: float) -> None:
        for handle in _handles(abort.handles):
            origin = Origin(owner, handle)
            self.early.remove(origin)
            live = self.live.get(origin)
            if live is not None and self.core is not None:
                self.brake.forget(live.name)
                self._forget(origin)
                self._abort_silently(origin, "its client no longer wants it", now)

    def _abort_silently(self, origin: Origin, why: str, now: float) -> None:
        end = None if self.core is None else self._abort(self.core, origin, why, now)
        if end is not None:
            self.statistics.count_end(end, now)

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        rejected = self._refusal(submit)
        if rejected is None and self.info is None:
            self.early.add(owner, submit)
        elif rejected is None:
            rejected = self._accept(owner, submit, now)
        if rejected is not None:
            self.notices.refused(submit, rejected)
            self.recorder.refused(now, submit, rejected)
            self.gateways.send(owner, rejected)

    def _refusal(self, submit: Submit) -> Rejected | None:
        if self.draining:
            problem = Problem(ingress.REJECT_UNAVAILABLE, "", "the scheduler is draining; it takes no new requests")
            return problem.rejection(submit.handle)
        if self.early.is_full_for(submit):
            problem = Problem(ingress.REJECT_OVERLOADED, "", "no executor has joined yet and the queue is full")
            return problem.rejection(submit.handle, UNKNOWN_S)
        if self.live.named(name_of(submit)) is not None:
            message = f"{submit.request_id!r:.64} is the id of a live request"
            return Problem(ingress.REJECT_ALREADY_EXISTS, "request_id", message).rejection(submit.handle)
        found = problem_of(submit, None if self.info is None else self.info.vocab_size)
        return None if found is None else found.rejection(submit.handle)

    def _accept(self, owner: int, submit: Submit, now: float) -> Rejected | None:
        assert self.core is not None
        assert self.info is not None
        new = new_request(owner, submit, self.info.eos_token_ids)
        try:
            self.core.add_request(new, now)
        except RequestRejected as rejection:
            is_passing = rejection.reason == ingress.REJECT_OVERLOADED
            retry_s = self._queue_pace.retry_after_s(self.core.num_waiting, now) if is_passing else 0.0
            problem = Problem(rejection.reason, rejection.field, rejection.message)
            return problem.rejection(submit.handle, retry_s)
        self.recorder.arrived(now, new)
        live = LiveSequence(new.origin, name_of(submit), submit.traceparent)
        self.live.add(live)
        self.statistics.count_arrival(new.tenant)
        self.notices.accepted(live, len(new.token_ids), new.tenant)
        return None

    def _on_shed(self, core: Scheduler, end: FinishedEvent) -> None:
        self._forget(end.origin)
        message = "the first token can no longer come within its objective (ttft_slo_ms)"
        retry_s = max(UNKNOWN_S, core.expected_prefill_s)
        rejected = Problem(ingress.REJECT_OVERLOADED, "", message).rejection(end.origin.handle, retry_s)
        self.gateways.send(end.origin.owner, rejected)

    def _deliver(self, events: StepEvents, now: float) -> None:
        if events.admitted:
            self._queue_pace.count_starts(len(events.admitted), now)
        deliver(self.gateways, events)
        for end in events.finished:
            self._deliver_end(end, now)

    def _deliver_end(self, end: FinishedEvent, now: float) -> None:
        self.statistics.count_end(end, now)
        live = self._forget(end.origin)
        if live is not None:
            self.notices.ended(live, end)
            self.brake.forget(live.name)
        deliver_end(self.gateways, end, now)

    def _forget(self, origin: Origin) -> LiveSequence | None:
        live = self.live.remove(origin)
        if live is not None:
            self.administration.remember_ended(live.name.request_id)
        return live

    def _announcement(self) -> Announcement:
        view, model = self.view, None
        if self.info is not None and view is not None:
            model = model_of(self.info, view)
        load = load_of(view, len(self.early))
        return Announcement(model, self.state, self.num_answers, self.num_unfinished, load)

    # ------------------------------------------------------------------------------------------ an operator's commands

    def announce(self) -> None:
        """Send the state to every gateway."""
        self.gateways.announce(self._announcement())

    def drain(self) -> None:
        """Refuse new sequences."""
        self.draining = True
        self.announce()

    def end(self, origin: Origin, now: float) -> None:
        """Abort a sequence and report it."""
        assert self.core is not None
        finished = self._abort(self.core, origin, "an operator cancelled it", now)
        if finished is not None:
            self._deliver(StepEvents(finished=(finished,)), now)

    def _abort(self, core: Scheduler, origin: Origin, why: str, now: float) -> FinishedEvent | None:
        self.recorder.aborted(now, origin, why)
        return core.abort(origin)


def _handles(column: bytes) -> list[int]:
    usable = len(column) - len(column) % INT32.itemsize
    handles: list[int] = decode_column(column[:usable]).tolist()
    return handles
