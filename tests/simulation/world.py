"""A whole Headway in one process, from one seed: real engine, real executor state, real gateway links, unreliable wires.

Owns: virtual time, the wires and what goes wrong on them, restarts of every process.
Must not know: the inside of any protocol; it only carries frames between the objects that production runs.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_executor.links.step_link import AdapterAsked, EpochBegan, LinkOutcome, StepLink, StepReady
from headway_executor.step.adapter_changes import AdapterChanges
from headway_gateway.link.ingress_link import IngressLink
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import decode_column, encode_column
from headway_proto.ingress import PRIORITY_NORMAL, Submit
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS
from headway_scheduler.cells.fleet import DEFAULT_PLACEMENT
from headway_scheduler.core.choosing.policies import PlacementSettings
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.flight.recorder import NullRecorder

BEAT_S = 0.002
WIRE_DELAY_S = 0.001


class Trouble(msgspec.Struct, frozen=True):
    """Probabilities per frame."""

    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0


@dataclass(order=True)
class _Delivery:
    at: float
    number: int
    deliver: Callable[[], None] = field(compare=False)


class SimulatedExecutor:
    """One life of an executor process."""

    def __init__(self, incarnation: int, config: BackendConfig) -> None:
        self.name = b"executor-%d" % incarnation
        self.backend = SimulatedBackend()
        self.info = self.backend.open(config)
        self.link = StepLink(incarnation=incarnation, info=self.info)
        self.state = BatchState(self.info)
        self.outbox: list[bytes] = []
        self.poison: int | None = None
        """A prompt that begins with this token kills the process."""
        self.is_dead = False
        self.adapters = AdapterChanges(self.backend, wake=lambda: None)

    def receive(self, data: bytes, now: float) -> None:
        if not self.is_dead:
            self.act(self.link.receive(data, now), now)

    def tick(self, now: float) -> None:
        self.act(self.link.tick(now), now)

    def act(self, outcome: LinkOutcome, now: float) -> None:
        self.outbox += outcome.frames
        for event in outcome.events:
            if isinstance(event, EpochBegan):
                self.state.begin_epoch()
            elif isinstance(event, StepReady):
                self.execute(event, now)
            elif isinstance(event, AdapterAsked):
                self.adapters.begin(event.change)
                for change, answer in self.adapters.take_answers():
                    self.outbox += self.link.answer_adapter(change, answer)

    def execute(self, event: StepReady, now: float) -> None:
        output = event.output
        if any(decode_column(new.token_ids)[0] == self.poison for new in output.scheduled_new_reqs):
            self.is_dead = True
            return
        try:
            applied = self.state.apply(output)
        except ImpossibleDiff as error:
            raise AssertionError(f"the scheduler sent an impossible diff: {error}") from error
        digest = self.state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None
        if applied.moves is not None:
            moves = applied.moves
            self.backend.move_blocks(copies=moves.copies, swap_out=moves.swap_out, swap_in=moves.swap_in)
        result = self.backend.execute(applied.batch)
        if result.accepted_tokens is not None:
            self.state.accept(result.accepted_tokens)
        self.outbox += self.link.result(epoch=output.epoch, step=output.step, result=result, state_digest=digest)


class SimulatedGateway:
    """One life of a gateway process."""

    def __init__(self, number: int, now: float) -> None:
        self.name = b"gateway-%d" % number
        self.link = IngressLink(incarnation=1000 + number, now=now)
        self.sequences: list[LiveSequence] = []
        self.aborted: list[LiveSequence] = []
        self.ended: list[LiveSequence] = []
        """Each time that the end of a sequence was told."""

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        sampling: SamplingParams,
        *,
        priority: int = PRIORITY_NORMAL,
        tenant: str = "",
        ttft_slo_ms: int = 0,
        itl_slo_ms: int = 0,
        adapter: str = "",
    ) -> LiveSequence:
        submission = Submit(
            handle=self.link.next_handle(),
            request_id=request_id,
            index=0,
            token_ids=encode_column(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            priority=priority,
            tenant=tenant,
            ttft_slo_ms=ttft_slo_ms,
            itl_slo_ms=itl_slo_ms,
            adapter=adapter,
        )
        sequence = LiveSequence(submission, (), lambda: None)
        self.sequences.append(sequence)
        self.link.submit(sequence)
        return sequence


class World:
    """One scheduler, one executor or several, some gateways, and the wires between them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        config: BackendConfig,
        num_gateways: int,
        seed: int,
        num_executors: int = 1,
        placement: PlacementSettings = DEFAULT_PLACEMENT,
        make_executor: Callable[[int, int, BackendConfig], SimulatedExecutor] | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.now = 1000.0
        self.trouble = Trouble()
        self.limits = limits
        self.config = config
        self._lives = 0
        self._num_frames = 0
        self._wire: list[_Delivery] = []
        self._last_delivery: dict[tuple[bytes, str], float] = {}
        self.num_troubled = 0
        self.poison: int | None = None
        """A prompt that begins with this token kills the executor that runs it; it is started again at once."""
        self._num_executors = num_executors
        self._placement = placement
        self._make_executor = make_executor
        """From its number, its life and its settings."""
        self.recorder: NullRecorder | None = None
        """What the next life of the scheduler records into."""
        self.executors: list[SimulatedExecutor | None] = [None] * num_executors
        self.start_scheduler()
        for number in range(num_executors):
            self.start_executor(number)
        self.gateways = [SimulatedGateway(number, self.now) for number in range(num_gateways)]

    def start_scheduler(self) -> None:
        """A new life of the scheduler; the old one and all it knew is gone."""
        self._lives += 1
        incarnation = int(self.rng.integers(1, 1 << 62))
        self.engine = SchedulerEngine(
            self.limits, incarnation, self.recorder, max_executors=self._num_executors, placement=self._placement
        )

    @property
    def executor(self) -> SimulatedExecutor:
        """The first executor that lives; the newest, if none does."""
        return next(iter(self._live_executors()), self._newest)

    def start_executor(self, number: int = 0) -> None:
        """A new life of an executor."""
        self._lives += 1
        life, config, make = self._lives, self.config, self._make_executor
        executor = SimulatedExecutor(life, config) if make is None else make(number, life, config)
        self._newest = self.executors[number] = executor
        self._newest.poison = self.poison

    def kill_executor(self, number: int) -> None:
        """The end of an executor; nobody starts it again."""
        self.executors[number] = None

    def restart_gateway(self, number: int) -> SimulatedGateway:
        """A new life of one gateway; its streams are gone."""
        self._lives += 1
        old = self.gateways[number]
        self.gateways[number] = SimulatedGateway(100 + self._lives, self.now)
        return old

    def beat(self) -> None:
        """Let a little time pass: deliver what is due, let every process act once."""
        self.now += BEAT_S
        while self._wire and self._wire[0].at <= self.now:
            heapq.heappop(self._wire).deliver()
        self.engine.run(self.now)
        for number, executor in enumerate(self.executors):
            if executor is not None and executor.is_dead:
                self.start_executor(number)
        for executor in self._live_executors():
            executor.tick(self.now)
        for gateway in self.gateways:
            gateway.link.tick(self.now)
        self._collect()

    def _collect(self) -> None:
        engine = self.engine
        for peer, frame in engine.fleet.links.outgoing:
            self._send(peer, "down", frame, self._to_executor)
        engine.fleet.links.outgoing.clear()
        for peer, frame in engine.gateways.outgoing:
            self._send(peer, "down", frame, self._to_gateway)
        engine.gateways.outgoing.clear()
        for executor in self._live_executors():
            for frame in executor.outbox:
                self._send(
                    executor.name, "up", frame, lambda peer, data: self.engine.executor_frame(peer, data, self.now)
                )
            executor.outbox.clear()
        for gateway in self.gateways:
            for frame in gateway.link.take_frames():
                self._send(
                    gateway.name, "up", frame, lambda peer, data: self.engine.gateway_frame(peer, data, self.now)
                )
            gateway.ended += [sequence for sequence in gateway.link.take_news() if sequence.end is not None]

    def _send(self, peer: bytes, direction: str, frame: bytes, deliver: Callable[[bytes, bytes], None]) -> None:
        trouble, copies = self.trouble, 1
        if self.rng.random() < trouble.drop:
            copies = 0
        elif self.rng.random() < trouble.duplicate:
            copies = 2
        if copies and self.rng.random() < trouble.corrupt:
            damaged = bytearray(frame)
            damaged[int(self.rng.integers(0, len(damaged)))] ^= 1 << int(self.rng.integers(0, 8))
            frame = bytes(damaged)
            self.num_troubled += 1
        self.num_troubled += copies != 1
        for _ in range(copies):
            at = self.now + WIRE_DELAY_S
            if self.rng.random() < trouble.delay:
                at += float(self.rng.random()) * 0.05  # overtaken by what is sent later: frames are reordered
                self.num_troubled += 1
            else:
                at = max(at, self._last_delivery.get((peer, direction), 0.0))
                self._last_delivery[peer, direction] = at
            self._num_frames += 1
            heapq.heappush(self._wire, _Delivery(at, self._num_frames, lambda frame=frame: deliver(peer, frame)))  # type: ignore[misc]

    def _to_executor(self, peer: bytes, data: bytes) -> None:
        for executor in self._live_executors():
            if executor.name == peer:
                executor.receive(data, self.now)
                return
        self.engine.executor_unreachable(peer, self.now)

    def _live_executors(self) -> list[SimulatedExecutor]:
        return [executor for executor in self.executors if executor is not None]

    def _to_gateway(self, peer: bytes, data: bytes) -> None:
        for gateway in self.gateways:
            if gateway.name == peer:
                gateway.link.receive(data, self.now)
                return
        self.engine.gateway_unreachable(peer, self.now)

    def run_until(self, done: Callable[[], bool], most_seconds: float) -> None:
        """Beat until ``done``; fails if it takes longer than ``most_seconds`` of virtual time."""
        limit = self.now + most_seconds
        while not done():
            assert self.now < limit, "no end in sight"
            self.beat()

    def all_ended(self) -> bool:
        return all(
            sequence.end is not None or sequence in gateway.aborted
            for gateway in self.gateways
            for sequence in gateway.sequences
        )
