"""The simulated gateway process, a real link over its connection, and the clients behind it.

Owns: what a client does when it is refused or its gateway dies, and the invariants of what a client sees.
Must not know: the scheduler beyond whether it still has a sequence, executors, or steps.
"""

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway_gateway.link.ingress_link import IngressLink, LinkPhase
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import encode_column
from headway_proto.ingress import (
    REJECT_ALREADY_EXISTS,
    REJECT_INVALID,
    REJECT_NOT_FOUND,
    REJECT_OUT_OF_RANGE,
    REJECT_OVERLOADED,
    REJECT_UNAVAILABLE,
    Finished,
    Rejected,
    Submit,
    SubmitPooled,
)
from headway_proto.sampling import NO_LOGPROBS
from headway_scheduler.core.state.arrival import Origin
from simulation import fault_invariants as invariants
from simulation.fault_invariants import Violation
from simulation.fault_model import LACKS_ADAPTER, Answer, sampling_of
from simulation.fault_process import Process
from simulation.fault_schedule import ADAPTERS, MAX_MODEL_LEN, UP, RequestPlan

GATEWAY_TICK_S = 0.1
CLIENT_RETRY_S = 0.2
_RETRIED = frozenset({REJECT_OVERLOADED, REJECT_UNAVAILABLE, REJECT_ALREADY_EXISTS})

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld


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
        link.take_admin_replies()
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
        settings = world.schedule.settings
        self._answers = [Answer(plan, settings, context) for context in settings.contexts or (MAX_MODEL_LEN,)]
        self.answer = self._answers[0]
        """The longest."""
        self.delivered: list[int] = []
        self.is_done = False
        self.gateway: GatewayProcess | None = None
        self.sequence: LiveSequence | None = None
        self._num_ends = 0
        self._num_lost_gateways = 0
        self._has_been_taken = False

    def ask(self) -> None:
        if self.is_done or self.sequence is not None:
            return
        gateway = self.world.gateways[self.plan.gateway]
        if gateway.is_dead or gateway.is_stalled:
            self.world.at(self.world.now + CLIENT_RETRY_S, self.ask)
            return
        plan, sampling = self.plan, sampling_of(self.plan)
        if self.delivered:  # before which the prompt was told
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=NO_LOGPROBS)
        kind = partial(SubmitPooled, pooling=plan.pooling) if plan.pooling else Submit
        submission = kind(
            handle=gateway.link.next_handle(),
            request_id=plan.request_id,
            index=plan.index,
            token_ids=encode_column(plan.prompt),
            num_prompt_tokens=len(plan.prompt),
            max_tokens=plan.max_tokens,
            sampling=sampling,
            ignore_eos=plan.ignore_eos,
            priority=plan.priority,
            tenant=plan.tenant,
            ttft_slo_ms=plan.ttft_slo_ms,
            itl_slo_ms=plan.itl_slo_ms,
            traceparent=f"00-{plan.number:032x}-{1:016x}-01",
            adapter=plan.adapter,
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
            self._has_been_taken |= not isinstance(sequence.end, Rejected)
            if sequence.submission.sampling.prompt_logprobs != NO_LOGPROBS:
                self._look_at_prompt(sequence, who)
            if self.plan.is_bad and tokens:
                raise Violation("ISOLATION", f"{who} is invalid and ran")
            invariants.prefix_stable(self.delivered, tokens)
            invariants.oracle_equal(tokens[start:], start, self.answer.tokens)
            self.delivered += tokens[start:]
            if sequence.end is not None:
                self._on_end(sequence, sequence.end, who)

    def _look_at_prompt(self, sequence: LiveSequence, who: str) -> None:
        told = [value for part in sequence.prompt_logprobs for value in part.values()[0].tolist()]
        invariants.oracle_equal(told, 0, self.answer.prompt_logprobs)
        if sequence.tokens:
            invariants.exactly_once(len(told), len(self.plan.prompt) - 1, f"the prompt of {who}")

    def _on_end(self, sequence: LiveSequence, end: Finished | Rejected, who: str) -> None:
        if isinstance(end, Rejected):
            self._on_rejection(end, who)
            return
        self._num_ends += 1
        invariants.terminal_once(self._num_ends, who)
        if invariants.is_found_guilty(sequence.submission.request_id in self.world.found_guilty, end):
            self.close()
            return
        if LACKS_ADAPTER in end.error:
            invariants.may_lack_its_adapter(self._may_lack_adapter, end.error, who)
            self.close()
            return
        if "cannot hold this request" in end.error and self.world.schedule.settings.contexts:
            self.close()
            return
        ends = {(one.reason, len(one.tokens)): one for one in self._answers}
        answer = ends.get((end.reason, len(sequence.tokens)), self.answer)
        invariants.ends_as_it_should(end.reason, len(sequence.tokens), answer.reason, len(answer.tokens), who)
        if answer.reason != "error":
            invariants.vector_equal(sequence.vector, answer.vector, who)
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
        if end.reason == REJECT_NOT_FOUND:
            invariants.may_lack_its_adapter(self._may_lack_adapter, end.message, who)
            self.close()
            return
        if self.world.schedule.settings.contexts and end.field == "prompt":
            self.close()
            return
        has_all = end.reason == REJECT_OUT_OF_RANGE and self.delivered == self.answer.tokens
        if not has_all and not (end.reason == REJECT_INVALID and self.plan.is_bad):
            raise Violation("ISOLATION", f"{who} was refused: {end.reason}, {end.message}")
        self.close()

    @property
    def _may_lack_adapter(self) -> bool:
        """Whether its adapter may be gone: an operator has unloaded it, or nobody who had it can tell of it or load it."""
        world, name = self.world, self.plan.adapter
        if name in world.unloaded:
            return True
        if name in ADAPTERS[:-1] or not self._has_been_taken:
            return name not in ADAPTERS[:-1]
        assert world.lives_at_load is not None
        num_joined, scheduler = world.lives_at_load
        return len(world.joined) > num_joined and (name in world.spoiled or world.scheduler.life != scheduler)

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
            is_live = origin in scheduler.engine.early or scheduler.engine.find(origin) is not None
            invariants.cancel_bound(is_live, f"request {self.plan.number}")

        world.at(max(world.now, link.last[UP]) + 2 * world.schedule.settings.wire_s + 1e-4, look)

    def close(self) -> None:
        if not self.is_done:
            self.is_done = True
            self.world.num_open -= 1
