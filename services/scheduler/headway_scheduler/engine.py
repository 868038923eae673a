"""The scheduler process without its sockets and clock: frames and the time in, frames out.

Owns: how the core, the step link and the gateways' links work together: receive, schedule, send, update.
Must not know: ZeroMQ, signals, wall clocks. Production, simulation and fault tests run this same object.

Order within a beat: an answer is taken in, the next step is decided and sent, and only then are the gateways told, so
that the executor never waits for them.
"""

import msgspec

from headway_proto import ingress
from headway_proto.columns import INT32, decode_column
from headway_proto.ingress import (
    Abort,
    Admitted,
    Finished,
    ModelInfo,
    PromptLogprobs,
    Rejected,
    SchedulerLoad,
    Submit,
    TokenLogprobs,
)
from headway_proto.operations import AdminCall
from headway_proto.sampling import violations
from headway_proto.step import BackendInfo
from headway_scheduler.administration import Administration
from headway_scheduler.brake import MAX_LOSSES, Brake, Name
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.flight.recorder import FlightRecorder
from headway_scheduler.ingress_link import (
    Announcement,
    GatewayGone,
    GatewayLink,
    GatewayMessage,
    IngressEvent,
    IngressLinks,
)
from headway_scheduler.queue_pace import UNKNOWN_S, QueuePace
from headway_scheduler.serving_statistics import ServingStatistics
from headway_scheduler.step_link import (
    EpochOpened,
    ExecutorLost,
    ExecutorRefused,
    StepAnswered,
    StepEvent,
    StepFailed,
    StepLink,
)

MAX_REQUEST_ID_BYTES = 128
MAX_TENANT_BYTES = 128
MAX_TRACEPARENT_CHARACTERS = 128
LEAST_STEP_TOKENS = 8
"""Steps are made smaller down to this before a request is blamed for what the executor's memory does not hold."""


class Notice(msgspec.Struct, frozen=True):
    """Something an operator wants to read in the log."""

    event: str
    details: dict[str, str | int | float]
    level: str = "info"


class SchedulerEngine:
    """The whole scheduler as one object.

    Feed ``executor_frame`` and ``gateway_frame``, call ``run`` after each batch of frames and by ``next_deadline`` at the
    latest, then take ``step_link.outgoing`` and ``gateways.outgoing``. Times in seconds, monotonic. A ``recorder`` is told
    of every call of the core.
    """

    def __init__(self, limits: SchedulerLimits, incarnation: int, recorder: FlightRecorder | None = None) -> None:
        self.limits = limits
        self.recorder = recorder
        self.incarnation = incarnation
        self.notices: list[Notice] = []
        self.tells_requests = False
        """Whether there is a notice, of level debug, of each request that comes and goes."""
        self.step_link = StepLink(incarnation)
        self.gateways = IngressLinks(incarnation, submit_credits=limits.max_num_waiting + limits.max_num_seqs)
        self.statistics = ServingStatistics()
        self.administration = Administration(self)
        self.brake = Brake(num_trial_tokens=limits.max_steps_in_flight)
        self.num_answers = 0
        """Steps that were answered: the measure of progress."""
        self._queue_pace = QueuePace()
        self._paused_until = float("-inf")
        """When the executor has been left in peace for long enough, after steps that failed."""
        self._judged_epoch = -1
        self.draining = False
        self.core: Scheduler | None = None
        self.info: BackendInfo | None = None
        # Submissions that cannot be judged yet: no executor has said what fits. A restarted scheduler gets its old
        # requests back from the gateways before its executor is back.
        self._unjudged: dict[Origin, Submit] = {}
        self._num_unjudged_bytes = 0
        self._origin_of: dict[Name, Origin] = {}
        self._names: dict[Origin, Name] = {}
        self._traceparents: dict[Origin, str] = {}

    @property
    def next_deadline(self) -> float:
        """When ``run`` wants to be called next, even if nothing arrives."""
        links = min(self.step_link.next_deadline, self.gateways.next_deadline)
        return min(links, self._paused_until) if self._paused_until > float("-inf") else links

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting or running."""
        return len(self._unjudged) if self.core is None else self.core.num_unfinished

    @property
    def state(self) -> str:
        """One of ``ingress.STATE_*``."""
        if self.draining:
            return ingress.STATE_DRAINING
        if not self.step_link.is_open:
            return ingress.STATE_WAITING_FOR_EXECUTOR
        return ingress.STATE_PAUSED if self.core is not None and self.core.paused else ingress.STATE_SERVING

    def executor_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Take in one frame of the step protocol."""
        self._on_step_events(self.step_link.receive(peer, data, now), now)

    def gateway_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Take in one frame of the ingress protocol."""
        for event in self.gateways.receive(peer, data, now, self._announcement):
            self._on_gateway_event(event, now)

    def executor_unreachable(self, peer: bytes, now: float) -> None:
        """The transport could not deliver to this executor."""
        self._on_step_events(self.step_link.unreachable(peer), now)

    def gateway_unreachable(self, peer: bytes, now: float) -> None:
        """The transport could not deliver to this gateway."""
        for event in self.gateways.unreachable(peer):
            self._on_gateway_event(event, now)

    def send_steps(self, now: float) -> None:
        """Schedule and send as many steps as may be in flight."""
        if self.core is None or not self.step_link.is_open or now < self._paused_until:
            return
        if self.brake.has_suspects:
            self._try_suspects(self.core)
        link, num_before = self.step_link, len(self.step_link.outgoing)
        while (output := self.core.schedule(now)) is not None:
            link.send_step(output)
            self.statistics.step_tokens.observe(output.total_num_scheduled_tokens)
        shed = self.core.take_shed()
        if self.recorder is not None:
            frames = link.outgoing[num_before:]
            if frames:
                self.recorder.sent(now, frames, len(shed))
            elif self.core.num_in_flight < self.limits.max_steps_in_flight and not self.core.awaits_answer:
                # or it was not even asked
                self.recorder.sent_nothing(now, len(shed), is_idle=not self.core.num_unfinished)
        for end in shed:
            self.statistics.note_end(end, now)
            self._shed(end)

    def _try_suspects(self, core: Scheduler) -> None:
        """Let the first suspect that is here and not acquitted run alone; everybody, if there is none."""
        for name in self.brake.suspects:
            origin = self._origin_of.get(name)
            request = None if origin is None else core.find(origin)
            if request is None:
                continue  # its gateway has not submitted it again yet
            if not self.brake.is_acquitted(name, core.num_tokens_of(request)):
                self._run_alone(core, origin, self.brake.num_tokens_wanted(name))
                return
            self._notice("acquitted", request_id=name.request_id, continuation=name.continuation)
        for name in self.brake.suspects:
            self.brake.forget(name)
        self._run_alone(core, None)

    def _run_alone(self, core: Scheduler, origin: Origin | None, num_tokens: int = 0) -> None:
        core.run_alone(origin, num_tokens)
        if self.recorder is not None:
            self.recorder.ran_alone(origin, num_tokens)

    def _judge(self, core: Scheduler, reason: str, failure: StepFailed | None, now: float) -> FinishedEvent | None:
        """Note who was in the steps that were lost, once per epoch; end who is guilty of it."""
        if self._judged_epoch == core.epoch:
            return None
        self._judged_epoch = core.epoch
        in_flight = core.requests_in_flight(None if failure is None else failure.step)
        guilty = self.brake.note_loss(
            [(self._names[origin], num) for origin, num in in_flight if origin in self._names]
        )
        origins = tuple(origin for origin, _ in in_flight)
        core.start_slowly(origins)
        if self.recorder is not None:
            self.recorder.started_slowly(origins)
        if guilty is None:
            return None
        self._notice("guilty", request_id=guilty.request_id, continuation=guilty.continuation, reason=reason)
        how = f"the executor was lost {MAX_LOSSES} times while it ran, the last time with nothing beside it: {reason}"
        origin = self._origin_of[guilty]
        if self.recorder is not None:
            self.recorder.aborted(now, origin, "it is to blame", how)
        return core.fail(origin, how)

    def _shed(self, end: FinishedEvent) -> None:
        """Refuse a request after all: it can no longer meet its objective, and nothing of it has run."""
        assert self.core is not None
        self._forget(end.origin)
        message = "the first token can no longer come within its objective (ttft_slo_ms)"
        rejected = Rejected(
            handle=end.origin.handle,
            reason=ingress.REJECT_OVERLOADED,
            message=message,
            retry_after_ms=round(max(UNKNOWN_S, self.core.expected_prefill_s) * 1e3),
        )
        self.gateways.send(end.origin.owner, rejected)

    def run(self, now: float) -> None:
        """Do what is due: heartbeats, time-outs, steps, and the news for the gateways, in this order."""
        if now >= self._paused_until:
            # Whether or not an executor is there to go on with: a time that is past would call for ``run`` without end.
            self._paused_until = float("-inf")
        if now >= self.statistics.next_mark_at:
            self.statistics.keep_time(now, self.core)
        self._on_step_events(self.step_link.tick(now), now)
        for event in self.gateways.tick(now, self._announcement):
            self._on_gateway_event(event, now)
        self.send_steps(now)
        self.gateways.flush()

    def drain(self) -> None:
        """Refuse new sequences from now on."""
        self.draining = True
        self.announce()

    def announce(self) -> None:
        """Tell every gateway the state now rather than with the next heartbeat."""
        self.gateways.announce(self._announcement())

    def end(self, origin: Origin, now: float) -> None:
        """Abort a sequence and tell its gateway."""
        assert self.core is not None
        finished = self._abort(self.core, origin, "an operator cancelled it", now)
        if finished is not None:
            self._deliver(StepEvents(finished=(finished,)), now)

    def pause(self, *, is_paused: bool) -> None:
        """Let no request start, or let them start again, and tell the gateways."""
        assert self.core is not None
        self.core.paused = is_paused
        if self.recorder is not None:
            self.recorder.paused(is_paused=is_paused)
        self.announce()

    def drop_cached(self) -> None:
        """Let go of the cached blocks that nobody holds."""
        assert self.core is not None
        self.core.pool.drop_cached()
        if self.recorder is not None:
            self.recorder.cache_dropped()

    def _abort(self, core: Scheduler, origin: Origin, why: str, now: float) -> FinishedEvent | None:
        if self.recorder is not None:
            self.recorder.aborted(now, origin, why)
        return core.abort(origin)

    def origins_named(self, request_id: str) -> list[Origin]:
        """The live sequences of a request, by index."""
        found = sorted((index, origin) for (name, index), origin in self._origin_of.items() if name == request_id)
        return [origin for _, origin in found]

    # ------------------------------------------------------------------------------------------------------- executor

    def _on_step_events(self, events: list[StepEvent], now: float) -> None:
        for event in events:
            if isinstance(event, StepAnswered):
                self._on_answer(event, now)
            elif isinstance(event, EpochOpened):
                self._on_epoch(event, now)
            elif isinstance(event, ExecutorRefused):
                self._notice("executor refused", reason=event.reason)
            elif isinstance(event, ExecutorLost):
                self._notice("executor lost", reason=event.reason)
                self.statistics.note_executor_lost()
                if self.recorder is not None:
                    self.recorder.executor_gone(now, event.reason)
                if self.core is not None:
                    self._deliver_guilty(self._judge(self.core, event.reason, None, now), now)
                self.announce()

    def _on_answer(self, event: StepAnswered, now: float) -> None:
        assert self.core is not None
        try:
            events = self.core.update(event.output, now)
        except (StateMismatch, ValueError) as error:
            if self.recorder is not None:
                self.recorder.mismatched(now, event.output, str(error))
            self._on_step_events(self.step_link.reopen(str(error), now), now)
            return
        if self.recorder is not None:
            self.recorder.answered(now, event.output, events.finished)
        self.num_answers += 1
        self.brake.note_answer()
        self.send_steps(now)
        self.statistics.note_answer(events, event.output.device_time_us, now)
        self._deliver(events, now)

    def _on_failure(self, core: Scheduler, failure: StepFailed, reason: str, now: float) -> bool:
        """A step failed: try smaller ones, or look for who is to blame. Whether it was somebody who was too large."""
        if failure.max_num_batched_tokens >= LEAST_STEP_TOKENS:
            return False  # it is the size of the step, as far as one can tell
        guilty = self._judge(core, reason, failure, now)
        self._deliver_guilty(guilty, now)
        self._paused_until = now + self.brake.pause_s()
        return guilty is not None and failure.max_num_batched_tokens > 0

    def _deliver_guilty(self, end: FinishedEvent | None, now: float) -> None:
        if end is not None:
            self._deliver(StepEvents(finished=(end,)), now)

    def _on_epoch(self, event: EpochOpened, now: float) -> None:
        info = event.info
        capacity = ExecutorCapacity.of(info)
        same_model = self.info is None or self.info.model_fingerprint == info.model_fingerprint
        if self.core is None:
            self.core = Scheduler(self.limits, capacity, event.epoch)
        else:
            if event.failure is not None and self._on_failure(self.core, event.failure, event.reason, now):
                self._on_step_events(self.step_link.lift_limit(now), now)
                return
            self._deliver(self.core.begin_epoch(capacity, event.epoch, same_model=same_model), now)
        if self.recorder is not None:
            self.recorder.epoch_began(now, event.epoch, capacity, info, event.reason, same_model=same_model)
        changed = self.info != info
        self.info = info
        unjudged, self._unjudged = self._unjudged, {}
        self._num_unjudged_bytes = 0
        for origin, submit in unjudged.items():
            self._on_submit(origin.owner, submit, now)
        self._notice(
            "epoch opened", epoch=event.epoch, reason=event.reason, model=info.model_name, backend=info.backend
        )
        if self.core.max_num_batched_tokens < self.limits.max_num_batched_tokens:
            self._notice("the executor takes smaller steps", max_num_batched_tokens=self.core.max_num_batched_tokens)
        if changed:
            self._notice("model", blocks=info.num_blocks, block_size=info.block_size, context=info.max_model_len)
        self.statistics.note_epoch(now)
        self.announce()

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
            self._on_admin_call(event, body, now)

    def _on_gateway_gone(self, event: GatewayGone, now: float) -> None:
        for origin in [origin for origin in self._unjudged if origin.owner == event.owner]:
            self._forget_unjudged(origin)
        origins = [origin for origin in self._names if origin.owner == event.owner]
        self._notice("gateway link closed", reason=event.reason, sequences=len(origins))
        for origin in origins:
            self._forget(origin)
            self._abort_silently(origin, f"its gateway is gone: {event.reason}", now)

    def _on_abort(self, owner: int, abort: Abort, now: float) -> None:
        for handle in _handles(abort.handles):
            origin = Origin(owner, handle)
            self._forget_unjudged(origin)
            if origin in self._names and self.core is not None:
                self.brake.forget(self._names[origin])
                self._forget(origin)
                self._abort_silently(origin, "its client no longer wants it", now)

    def _abort_silently(self, origin: Origin, why: str, now: float) -> None:
        """Abort a sequence of which nobody wants to hear."""
        end = None if self.core is None else self._abort(self.core, origin, why, now)
        if end is not None:
            self.statistics.note_end(end, now)

    def _forget_unjudged(self, origin: Origin) -> None:
        submit = self._unjudged.pop(origin, None)
        if submit is not None:
            self._num_unjudged_bytes -= len(submit.token_ids)

    def _on_admin_call(self, event: GatewayMessage, call: AdminCall, now: float) -> None:
        self.gateways.send(event.owner, self.administration.answer(call, now))

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        rejected = self._refusal(submit)
        if rejected is None and self.info is None:
            self._forget_unjudged(Origin(owner, submit.handle))
            self._unjudged[Origin(owner, submit.handle)] = submit
            self._num_unjudged_bytes += len(submit.token_ids)
        elif rejected is None:
            rejected = self._accept(owner, submit, now)
        if rejected is not None:
            self._tell_refusal(submit, rejected)
            if self.recorder is not None:
                self.recorder.refused(now, submit, rejected)
            self.gateways.send(owner, rejected)

    def _accept(self, owner: int, submit: Submit, now: float) -> Rejected | None:
        assert self.core is not None
        new = self._new_request(owner, submit)
        try:
            self.core.add_request(new, now)
        except RequestRejected as rejection:
            is_passing = rejection.reason == ingress.REJECT_OVERLOADED
            retry_s = self._queue_pace.retry_after_s(self.core.num_waiting, now) if is_passing else 0.0
            return Rejected(
                handle=submit.handle,
                reason=rejection.reason,
                field=rejection.field,
                message=rejection.message,
                retry_after_ms=round(retry_s * 1e3),
            )
        if self.recorder is not None:
            self.recorder.arrived(now, new)
        name = Name(submit.request_id, submit.index)
        self._origin_of[name] = new.origin
        self._names[new.origin] = name
        self.statistics.note_arrival(new.tenant)
        if self.tells_requests:
            num_tokens = len(new.token_ids)
            self._notice_request(name, submit.traceparent, "request accepted", tokens=num_tokens, tenant=new.tenant)
        if submit.traceparent:
            self._traceparents[new.origin] = submit.traceparent
        return None

    def _new_request(self, owner: int, submit: Submit) -> NewRequestEvent:
        assert self.info is not None
        sampling = submit.sampling
        stops = set(sampling.stop_token_ids)
        if not submit.ignore_eos:
            stops.update(self.info.eos_token_ids)
        # The executor needs the stop ids only to forbid them until min_tokens is reached.
        forbidden = tuple(sorted(stops)) if sampling.min_tokens else ()
        if forbidden != sampling.stop_token_ids:
            sampling = msgspec.structs.replace(sampling, stop_token_ids=forbidden)
        return NewRequestEvent(
            origin=Origin(owner, submit.handle),
            request_id=submit.request_id,
            index=submit.index,
            token_ids=decode_column(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            max_tokens=submit.max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(stops),
            priority=submit.priority,
            tenant=submit.tenant,
            ttft_slo_ms=submit.ttft_slo_ms,
            itl_slo_ms=submit.itl_slo_ms,
            has_run=submit.has_run,
            num_prompt_logprobs=submit.num_prompt_logprobs,
        )

    def _refusal(self, submit: Submit) -> Rejected | None:
        """Everything about a submission that can be judged without the core; None if all is well."""

        def refuse(reason: str, field: str, message: str, retry_after_ms: int = 0) -> Rejected:
            return Rejected(
                handle=submit.handle, reason=reason, field=field, message=message, retry_after_ms=retry_after_ms
            )

        if self.draining:
            return refuse(ingress.REJECT_UNAVAILABLE, "", "the scheduler is draining; it takes no new requests")
        if self._unjudged and self._are_too_many_unjudged(len(submit.token_ids)):
            message = "no executor has joined yet and the queue is full"
            return refuse(ingress.REJECT_OVERLOADED, "", message, round(UNKNOWN_S * 1e3))
        if Name(submit.request_id, submit.index) in self._origin_of:
            return refuse(
                ingress.REJECT_ALREADY_EXISTS, "request_id", f"{submit.request_id!r:.64} is the id of a live request"
            )
        if len(submit.token_ids) % INT32.itemsize or not submit.token_ids:
            return refuse(ingress.REJECT_INVALID, "token_ids", f"{len(submit.token_ids)} bytes are no int32 column")
        num_tokens = len(submit.token_ids) // INT32.itemsize
        checks = (
            (0 <= submit.handle < 1 << 31, "handle", submit.handle, "0 to 2^31 - 1"),
            (len(submit.request_id.encode()) <= MAX_REQUEST_ID_BYTES, "request_id", submit.request_id, "128 bytes"),
            (len(submit.traceparent) <= MAX_TRACEPARENT_CHARACTERS, "traceparent", submit.traceparent, "128 characters"),
            (len(submit.tenant.encode()) <= MAX_TENANT_BYTES, "tenant", submit.tenant, "128 bytes"),
            (submit.max_tokens >= 1, "max_tokens", submit.max_tokens, "1 or more"),
            (submit.sampling.min_tokens <= submit.max_tokens, "min_tokens", submit.sampling.min_tokens,
             f"at most max_tokens, {submit.max_tokens}"),
            (ingress.PRIORITY_REALTIME <= submit.priority <= ingress.PRIORITY_LOW, "priority", submit.priority, "1 to 4"),
        )  # fmt: skip
        for ok, field, value, allowed in checks:
            if not ok:
                return refuse(ingress.REJECT_INVALID, field, f"{value!r:.64} is not allowed; allowed: {allowed}")
        num_held = num_tokens - submit.num_prompt_tokens
        if num_held >= submit.max_tokens:
            return refuse(
                ingress.REJECT_OUT_OF_RANGE, "resume", f"{num_held} tokens held of max_tokens {submit.max_tokens}"
            )
        vocab_size = 1 << 31 if self.info is None else self.info.vocab_size
        for field, problem in violations(submit.sampling, vocab_size):
            return refuse(ingress.REJECT_INVALID, field, problem)
        return None

    def _are_too_many_unjudged(self, num_more_bytes: int) -> bool:
        """Whether what waits for an executor is as much as may wait, with these tokens."""
        if len(self._unjudged) >= self.limits.max_num_waiting:
            return True
        num_bytes = self._num_unjudged_bytes + num_more_bytes
        return 0 < self.limits.max_waiting_tokens < num_bytes // INT32.itemsize

    def _deliver(self, events: StepEvents, now: float) -> None:
        """Sort what a step brought by gateway."""
        if events.admitted:
            self._queue_pace.note_starts(len(events.admitted), now)
        for admitted in events.admitted:
            link = self.gateways.get(admitted.origin.owner)
            if link is not None:
                link.hold(admitted=(Admitted(admitted.origin.handle, admitted.num_cached_tokens),))
        for prompt in events.prompt_logprobs:
            link = self.gateways.get(prompt.origin.owner)
            if link is not None:
                link.hold(prompt_logprobs=(PromptLogprobs(prompt.origin.handle, prompt.values),))
        if len(events.owners):
            self._deliver_tokens(events)
        for logprobs in events.logprobs:
            link = self.gateways.get(logprobs.origin.owner)
            if link is not None:
                values = logprobs.values
                link.hold(
                    logprobs=(
                        TokenLogprobs(
                            logprobs.origin.handle,
                            logprobs.index,
                            values.logprob,
                            values.top_token_ids,
                            values.top_logprobs,
                        ),
                    )
                )
        for finished in events.finished:
            self._deliver_end(finished, now)

    def _deliver_tokens(self, events: StepEvents) -> None:
        links: list[GatewayLink] = self.gateways.links()
        for link in links:
            if len(links) == 1:
                link.hold(columns=(events.handles, events.indices, events.token_ids))
            else:
                mine = events.owners == link.owner
                link.hold(columns=(events.handles[mine], events.indices[mine], events.token_ids[mine]))

    def _deliver_end(self, end: FinishedEvent, now: float) -> None:
        self.statistics.note_end(end, now)
        self._tell_end(end)
        if end.origin in self._names:
            self.brake.forget(self._names[end.origin])
        self._forget(end.origin)
        link = self.gateways.get(end.origin.owner)
        if link is None:
            return
        scheduled = now if end.scheduled_time is None else end.scheduled_time
        first = end.arrival_time if end.first_token_time is None else end.first_token_time
        prefill_device_us, decode_device_us = end.device_us
        link.hold(
            finished=(
                Finished(
                    handle=end.origin.handle,
                    reason=end.reason.value,
                    num_output_tokens=end.num_output_tokens,
                    stop_token_id=end.stop_token_id,
                    queue_ms=(scheduled - end.arrival_time) * 1e3,
                    ttft_ms=(first - end.arrival_time) * 1e3,
                    num_preemptions=end.num_preemptions,
                    error=end.error,
                    total_ms=(now - end.arrival_time) * 1e3,
                    prefill_device_ms=prefill_device_us / 1e3,
                    decode_device_ms=decode_device_us / 1e3,
                ),
            )
        )

    def _forget(self, origin: Origin) -> None:
        name = self._names.pop(origin, None)
        self._traceparents.pop(origin, None)
        if name is not None:
            del self._origin_of[name]
            self.administration.remember_ended(name[0])

    def _announcement(self) -> Announcement:
        return Announcement(self._model_info(), self.state, self.num_answers, self.num_unfinished, self._load())

    def _load(self) -> SchedulerLoad:
        core = self.core
        if core is None:
            return SchedulerLoad(num_waiting=len(self._unjudged))
        usage = 1.0 - core.pool.num_free / core.pool.num_blocks
        return SchedulerLoad(core.num_running, core.num_waiting, core.max_running, usage)

    def _model_info(self) -> ModelInfo | None:
        if self.info is None or self.core is None:
            return None
        return ModelInfo(
            name=self.info.model_name,
            fingerprint=self.info.model_fingerprint,
            backend=self.info.backend,
            device=self.info.device,
            dtype=self.info.dtype,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            eos_token_ids=self.info.eos_token_ids,
            max_request_tokens=min(self.core.capacity.max_request_tokens, ingress.MAX_REQUEST_TOKENS),
            supports_prompt_logprobs=self.info.supports_prompt_logprobs,
            supports_constraints=self.info.supports_constraints,
        )

    def _tell_refusal(self, submit: Submit, rejected: Rejected) -> None:
        if self.tells_requests:
            name = Name(submit.request_id, submit.index)
            self._notice_request(
                name, submit.traceparent, "request refused", reason=rejected.reason, message=rejected.message
            )

    def _tell_end(self, end: FinishedEvent) -> None:
        name = self._names.get(end.origin)
        if name is None:
            return
        traceparent = self._traceparents.get(end.origin, "")
        if end.reason is FinishReason.ERROR:
            self._notice_request(name, traceparent, "request failed", "warning", error=end.error)
        elif self.tells_requests:
            self._notice_request(
                name,
                traceparent,
                "request finished",
                reason=end.reason.value,
                output_tokens=end.num_output_tokens,
                preemptions=end.num_preemptions,
            )

    def _notice_request(
        self, name: Name, traceparent: str, event: str, level: str = "debug", **details: str | float
    ) -> None:
        ids: dict[str, str | int | float] = {"request_id": name.request_id, "continuation": name.continuation}
        if traceparent:
            ids["trace_id"] = trace_id_of(traceparent)
        self.notices.append(Notice(event, {**ids, **details}, level))

    def _notice(self, event: str, **details: str | float) -> None:
        self.notices.append(Notice(event, dict(details)))


def trace_id_of(traceparent: str) -> str:
    """The id of the trace in a W3C ``traceparent``; empty if it is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""


def _handles(column: bytes) -> list[int]:
    usable = len(column) - len(column) % INT32.itemsize
    handles: list[int] = decode_column(column[:usable]).tolist()
    return handles
