"""The scheduler without sockets and clock: frames and the time in, frames out.

Owns: how cells, placement and the gateways' links work together. Must not know: ZeroMQ, signals, wall clocks.
Production, simulation and fault tests run this same object.

An answer is taken in, the next step decided and sent, and only then gateways are written to: the executor never waits.
With one cell, its core queues every request. With more, ``Placement`` does, and each core gets what it can start soon.
"""

from headway_proto import ingress
from headway_proto.columns import INT32, decode_column
from headway_proto.ingress import Abort, Rejected, Submit
from headway_proto.operations import AdminCall
from headway_proto.wording import shown
from headway_scheduler.cells.fleet import DEFAULT_PLACEMENT, Fleet
from headway_scheduler.cells.live_sequences import LiveSequence, LiveSequences, Name, name_of
from headway_scheduler.cells.notices import Notices
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.choosing.policies import PlacementSettings
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.figures.fleet_view import FleetView
from headway_scheduler.figures.serving_statistics import ServingStatistics
from headway_scheduler.flight.recorder import NullRecorder
from headway_scheduler.gateways.delivery import deliver, deliver_end, deliver_verdict, load_of, model_of
from headway_scheduler.gateways.queue_pace import UNKNOWN_S, QueuePace
from headway_scheduler.gateways.submissions import EarlySubmissions, Problem, new_request, problem_of
from headway_scheduler.links.ingress_link import Announcement, GatewayGone, IngressEvent, IngressLinks
from headway_scheduler.operators.administration import Administration

LINK_OPENS_WITHIN_S = 3.0
"""A gateway that goes on has noticed by then that its link is lost, and has opened another."""


class SchedulerEngine:
    """Feed it frames, call ``run`` after each batch and by ``next_deadline``, then send both links' ``outgoing``.

    Feed ``executor_frame`` and ``gateway_frame``, call ``run`` after each batch of frames and by ``next_deadline`` at the
    latest, then take ``executors.outgoing`` and ``gateways.outgoing``. Times in seconds, monotonic.
    ``max_executors``: the most cells.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        incarnation: int,
        recorder: NullRecorder | None = None,
        max_executors: int = 1,
        placement: PlacementSettings = DEFAULT_PLACEMENT,
    ) -> None:
        self.limits = limits
        self.recorder = recorder or NullRecorder()
        self.live, self.notices = LiveSequences(), Notices()
        self.incarnation = incarnation
        self.gateways = IngressLinks(incarnation, submit_credits=limits.max_num_waiting + limits.max_num_seqs)
        self.statistics = ServingStatistics()
        self.administration = Administration(self)
        self.early = EarlySubmissions(limits)
        self.fleet = Fleet(self, incarnation, self.recorder, max_executors, placement)
        self.draining = False
        self._accepted: set[Name] = set()
        """Sequences that may come again although this scheduler drains: it had accepted them before their link was lost."""
        self._forgets_accepted_at = float("inf")
        self._queue_pace = QueuePace()

    @property
    def view(self) -> FleetView | None:
        """What may be read from the cores; None before an executor joins."""
        fleet = self.fleet
        views = {cell.number: SchedulerView(cell.core) for cell in fleet.cells if cell.core is not None}
        connected = [cell.number for cell in fleet.open_cells]
        return FleetView(views, connected, fleet.placement) if views else None

    @property
    def next_deadline(self) -> float:
        """The time of the next call of ``run``, even if nothing arrives."""
        return min(self.fleet.next_deadline, self.gateways.next_deadline)

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting or running, or without a link for a moment."""
        return len(self.early) + self.fleet.num_unfinished + len(self._accepted)

    @property
    def state(self) -> str:
        """One of ``ingress.STATE_*``."""
        if self.draining:
            return ingress.STATE_DRAINING
        if not self.fleet.open_cells:
            return ingress.STATE_WAITING_FOR_EXECUTOR
        return ingress.STATE_PAUSED if self.fleet.is_paused else ingress.STATE_SERVING

    def executor_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Take in one frame of the step protocol."""
        self.fleet.receive(peer, data, now)

    def gateway_frame(self, peer: bytes, data: bytes, now: float) -> None:
        """Handle one frame."""
        for event in self.gateways.receive(peer, data, now, self._announcement):
            self._on_gateway_event(event, now)

    def executor_unreachable(self, peer: bytes, now: float) -> None:
        """The transport could not reach this executor."""
        self.fleet.unreachable(peer, now)

    def gateway_unreachable(self, peer: bytes, now: float) -> None:
        """Handle a failed send."""
        for event in self.gateways.unreachable(peer):
            self._on_gateway_event(event, now)

    def run(self, now: float) -> None:
        """Do what is due: heartbeats, time-outs, steps, messages to gateways."""
        if now >= self._forgets_accepted_at:
            self._accepted.clear()
            self._forgets_accepted_at = float("inf")
        if now >= self.statistics.next_mark_at:
            self.statistics.keep_time(now, self.view)
        self.fleet.tick(now)
        for event in self.gateways.tick(now, self._announcement):
            self._on_gateway_event(event, now)
        self.fleet.schedule(now)
        self.gateways.flush()

    def fleet_changed(self, now: float) -> None:
        """An executor joined, began anew, or is gone: submissions that came early may find one now."""
        if self.fleet.info is not None:
            for owner, submit in self.early.take():
                self._accepted.add(name_of(submit))
                self._on_submit(owner, submit, now)
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
            assert isinstance(body, AdminCall)
            self._on_admin_call(event.owner, body, now)

    def _on_admin_call(self, owner: int, call: AdminCall, now: float) -> None:
        reply = self.administration.answer(call, now, lambda late: self.gateways.send(owner, late))
        if reply is not None:
            self.gateways.send(owner, reply)

    def _on_gateway_gone(self, event: GatewayGone, now: float) -> None:
        early = self.early.take_of_owner(event.owner)
        lost = self.live.of_owner(event.owner)
        if self.draining:
            self._accepted.update(map(name_of, early), [live.name for live in lost])
            self._forgets_accepted_at = now + LINK_OPENS_WITHIN_S
        self.notices.add("gateway link closed", reason=event.reason, sequences=len(lost))
        for live in lost:
            self._forget(live.origin)
            self._abort_silently(live.origin, f"its gateway is gone: {event.reason}", now)

    def _on_abort(self, owner: int, abort: Abort, now: float) -> None:
        for handle in _handles(abort.handles):
            origin = Origin(owner, handle)
            self.early.remove(origin)
            live = self.live.get(origin)
            if live is not None:
                self.fleet.brake.forget(live.name)
                self._forget(origin)
                self._abort_silently(origin, "its client no longer wants it", now)

    def _abort_silently(self, origin: Origin, why: str, now: float) -> None:
        """Abort a sequence without a message to a gateway."""
        end = self.fleet.abort(origin, why, now)
        if end is not None:
            self._count_end(end, now)

    def _on_submit(self, owner: int, submit: Submit, now: float) -> None:
        rejected = self._refusal(submit)
        if rejected is None and self.fleet.info is None:
            self.early.add(owner, submit)
        elif rejected is None and (verdict := self.fleet.brake.submitted(name_of(submit), has_run=submit.has_run)):
            deliver_verdict(self.gateways, owner, submit, verdict)
        elif rejected is None:
            rejected = self._accept(owner, submit, now)
        if rejected is not None:
            self.notices.refused(submit, rejected)
            self.recorder.refused(now, submit, rejected)
            self.gateways.send(owner, rejected)

    def _refusal(self, submit: Submit) -> Rejected | None:
        is_known = name_of(submit) in self._accepted
        self._accepted.discard(name_of(submit))
        if self.draining and not is_known:
            problem = Problem(ingress.REJECT_UNAVAILABLE, "", "the scheduler is draining; it takes no new requests")
            return problem.rejection(submit.handle)
        if self.early.is_full_for(submit):
            problem = Problem(ingress.REJECT_OVERLOADED, "", "no executor has joined yet and the queue is full")
            return problem.rejection(submit.handle, UNKNOWN_S)
        if self.live.named(name_of(submit)) is not None:
            message = f"{shown(submit.request_id)} is the id of a live request; allowed: another, or none"
            return Problem(ingress.REJECT_ALREADY_EXISTS, "request_id", message).rejection(submit.handle)
        found = problem_of(submit, None if self.fleet.info is None else self.fleet.info.vocab_size)
        return None if found is None else found.rejection(submit.handle)

    def _accept(self, owner: int, submit: Submit, now: float) -> Rejected | None:
        assert self.fleet.info is not None
        adapter = self.fleet.adapters.identity_of(submit.adapter) if submit.adapter else ""
        if adapter is None:
            message = self.fleet.adapters.why_unknown(submit.adapter)
            return Problem(ingress.REJECT_NOT_FOUND, "adapter", message).rejection(submit.handle)
        new = new_request(owner, submit, self.fleet.info.eos_token_ids, adapter)
        try:
            self.fleet.add(new, now)
        except RequestRejected as rejection:
            is_passing = rejection.reason == ingress.REJECT_OVERLOADED
            retry_s = self._queue_pace.retry_after_s(self.fleet.num_waiting, now) if is_passing else 0.0
            problem = Problem(rejection.reason, rejection.field, rejection.message)
            return problem.rejection(submit.handle, retry_s)
        live = LiveSequence(new.origin, name_of(submit), submit.traceparent)
        self.live.add(live)
        self.statistics.count_arrival(new.tenant)
        self.notices.accepted(live, len(new.token_ids), new.tenant)
        return None

    def refuse_late(self, end: FinishedEvent, expected_prefill_s: float, now: float) -> None:
        """Refuse a request that can no longer meet its objective; nothing of it has run."""
        self._count_end(end, now)
        live = self._forget(end.origin)
        if live is not None:
            self.fleet.brake.forget(live.name)
        message = "the first token can no longer come within its objective (ttft_slo_ms)"
        retry_s = max(UNKNOWN_S, expected_prefill_s)
        rejected = Problem(ingress.REJECT_OVERLOADED, "", message).rejection(end.origin.handle, retry_s)
        self.gateways.send(end.origin.owner, rejected)

    def deliver(self, events: StepEvents, now: float) -> None:
        """Send gateways what a core has brought."""
        if events.admitted:
            self._queue_pace.count_starts(len(events.admitted), now)
        deliver(self.gateways, events)
        for end in events.finished:
            self._deliver_end(end, now)

    def _deliver_end(self, end: FinishedEvent, now: float) -> None:
        self._count_end(end, now)
        live = self._forget(end.origin)
        if live is not None:
            self.notices.ended(live, end)
            self.fleet.brake.forget(live.name)
        deliver_end(self.gateways, end, now)

    def _count_end(self, end: FinishedEvent, now: float) -> None:
        self.statistics.count_end(end, now)
        self.fleet.placement.count_end(end)

    def _forget(self, origin: Origin) -> LiveSequence | None:
        live = self.live.remove(origin)
        if live is not None:
            self.administration.remember_ended(live.name.request_id)
        return live

    def _announcement(self) -> Announcement:
        view, info, model = self.view, self.fleet.info, None
        if info is not None and view is not None:
            model = model_of(info, view, self.fleet.adapters.all())
        load = load_of(view, len(self.early))
        return Announcement(model, self.state, self.fleet.num_answers, self.num_unfinished, load)

    # ------------------------------------------------------------------------------------------ an operator's commands

    def announce(self) -> None:
        """Send the state to every gateway."""
        self.gateways.announce(self._announcement())

    def drain(self) -> None:
        """Refuse new sequences."""
        self.draining = True
        self.announce()

    def end(self, origin: Origin, now: float) -> None:
        """Abort a sequence and tell its gateway."""
        finished = self.fleet.abort(origin, "an operator cancelled it", now)
        if finished is not None:
            self.deliver(StepEvents(finished=(finished,)), now)


def _handles(column: bytes) -> list[int]:
    usable = len(column) - len(column) % INT32.itemsize
    handles: list[int] = decode_column(column[:usable]).tolist()
    return handles
