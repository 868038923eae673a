"""The gateway's side of ingress as a plain object, against a scripted scheduler over a network that misbehaves."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_gateway.link.ingress_link import IngressLink, LinkPhase
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import decode_column, encode_column, encode_columns, encode_floats
from headway_proto.framing import Frame
from headway_proto.ingress import (
    ACKNOWLEDGE_EVERY_FRAMES,
    FINISH_LENGTH,
    HEARTBEAT_INTERVAL_S,
    REJECT_INVALID,
    REJECT_OVERLOADED,
    STATE_DRAINING,
    STATE_SERVING,
    Abort,
    Admitted,
    Finished,
    GatewayHeartbeat,
    GatewayHello,
    ModelInfo,
    PromptLogprobs,
    Rejected,
    SchedulerHello,
    SchedulerStatus,
    Submit,
    TokenLogprobs,
    Tokens,
    scheduler_frame_reader,
    scheduler_frame_writer,
)
from headway_proto.operations import AdminCall, AdminReply
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

MODEL = ModelInfo(
    name="m", fingerprint="f", backend="b", device="cpu", dtype="float32", max_model_len=64, vocab_size=100,
    eos_token_ids=(0,), max_request_tokens=64,
)  # fmt: skip
PROMPT = [7, 8, 9]


def token_at(seed: int, index: int) -> int:
    return 1 + (seed * 31 + index * 7) % 90


def new_sequence(link: IngressLink, *, max_tokens: int = 8, held: tuple[int, ...] = (), seed: int = 3) -> LiveSequence:
    submission = Submit(
        handle=link.next_handle(),
        request_id=f"r{seed}",
        index=0,
        token_ids=encode_column(PROMPT),
        num_prompt_tokens=len(PROMPT),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
    )
    return LiveSequence(submission, held, lambda: None)


class ScriptedScheduler:
    """One scheduler life: knows the rules of the other side, in the plainest form."""

    def __init__(self, first_epoch: int) -> None:
        self.epoch = first_epoch
        self.reader = scheduler_frame_reader()
        self.writer = scheduler_frame_writer()
        self.open = False
        self.expected = 0
        self.bodies: list[msgspec.Struct] = []
        self.running: dict[int, tuple[Submit, int]] = {}
        self.outgoing: list[bytes] = []

    def say(self, body: msgspec.Struct) -> None:
        self.outgoing.append(self.writer.encode(body))

    def receive(self, data: bytes) -> None:
        frame: Frame = self.reader.decode(data)
        body = frame.body
        if isinstance(body, GatewayHello):
            self.epoch += 1
            self.writer.begin_epoch(self.epoch)
            self.running.clear()
            self.open, self.expected = True, 0
            self.bodies.append(body)
            self.say(SchedulerHello(1, body.incarnation, body.link, 100, MODEL, STATE_SERVING))
        elif self.open and frame.epoch == self.epoch and frame.sequence >= self.expected:
            if frame.sequence > self.expected:
                self.open = False
                return
            self.expected += 1
            self.bodies.append(body)
            if isinstance(body, Submit):
                held = len(decode_column(body.token_ids)) - body.num_prompt_tokens
                assert decode_column(body.token_ids).tolist() == PROMPT + [
                    token_at(body.sampling.seed, index) for index in range(held)
                ]
                self.running[body.handle] = (body, held)
            elif isinstance(body, Abort):
                for handle in decode_column(body.handles).tolist():
                    self.running.pop(handle, None)

    def step(self) -> None:
        if not self.open:
            return
        columns, finished, admitted = [], [], []
        for handle, (submit, index) in list(self.running.items()):
            admitted.append(Admitted(handle, 1))
            columns.append((handle, index, token_at(submit.sampling.seed, index)))
            self.running[handle] = (submit, index + 1)
            if index + 1 >= submit.max_tokens:
                del self.running[handle]
                finished.append(Finished(handle=handle, reason=FINISH_LENGTH, num_output_tokens=index + 1))
        if columns:
            column_group = encode_columns([*map(_int32, zip(*columns, strict=True))])
            self.say(Tokens(admitted=tuple(admitted), columns=column_group, finished=tuple(finished)))
        else:
            self.say(SchedulerStatus(MODEL, STATE_SERVING, 1, 0))


def _int32(values):
    return decode_column(encode_column(values))


def deliver(link: IngressLink, scheduler: ScriptedScheduler, now: float) -> None:
    """A good network: everything said on both sides arrives."""
    for _ in range(8):
        for frame in link.take_frames():
            scheduler.receive(frame)
        outgoing, scheduler.outgoing = scheduler.outgoing, []
        for frame in outgoing:
            link.receive(frame, now)
        if not outgoing:
            break


def opened(now: float = 0.0) -> tuple[IngressLink, ScriptedScheduler]:
    link, scheduler = IngressLink(incarnation=42, now=now), ScriptedScheduler(100)
    link.tick(now)
    deliver(link, scheduler, now)
    assert link.phase is LinkPhase.OPEN
    return link, scheduler


def test_the_answer_to_hello_opens_the_link_and_brings_the_model():
    link, scheduler = opened()
    assert link.model == MODEL
    assert link.scheduler_state == STATE_SERVING
    assert link.submit_credits == 100
    assert scheduler.bodies[0] == GatewayHello(incarnation=42, link=0)
    assert scheduler.bodies[1] == GatewayHeartbeat(received=1)


def test_hello_is_repeated_until_answered():
    link, scheduler = IngressLink(incarnation=42, now=0.0), ScriptedScheduler(100)
    for tick in range(10):
        link.tick(tick * HEARTBEAT_INTERVAL_S / 2)
    frames = link.take_frames()
    assert len(frames) == 1, "only the latest hello matters"
    link.tick(10 * HEARTBEAT_INTERVAL_S)
    assert len(link.take_frames()) == 1
    scheduler.receive(frames[0])
    link.receive(scheduler.outgoing.pop(), 3.0)
    assert link.phase is LinkPhase.OPEN


def test_hellos_that_answer_somebody_else_are_ignored():
    link = IngressLink(incarnation=42, now=0.0)
    link.tick(0.0)
    for gateway, number, epoch in ((41, 0, 5), (42, 1, 5), (42, 0, 0)):
        writer = scheduler_frame_writer()
        writer.begin_epoch(epoch)
        link.receive(writer.encode(SchedulerHello(1, gateway, number, 1, MODEL, STATE_SERVING)), 0.0)
        assert link.phase is LinkPhase.HAILING


def test_tokens_admission_logprobs_and_end_reach_the_sequence():
    link, scheduler = opened()
    sequence = new_sequence(link, max_tokens=2)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    handle = sequence.handle
    scheduler.say(
        Tokens(
            admitted=(Admitted(handle, 2),),
            columns=encode_columns([_int32([handle, handle]), _int32([0, 1]), _int32([5, 6])]),
            logprobs=(TokenLogprobs(handle, 0, -1.0, (), ()), TokenLogprobs(handle, 1, -2.0, (), ())),
            finished=(Finished(handle=handle, reason=FINISH_LENGTH, num_output_tokens=2),),
        )
    )
    deliver(link, scheduler, 0.0)
    assert link.take_news() == [sequence]
    assert link.take_news() == []
    assert sequence.tokens == [5, 6]
    assert sequence.num_cached_tokens == 2
    assert [entry.logprob for entry in sequence.logprobs] == [-1.0, -2.0]
    assert sequence.end.reason == FINISH_LENGTH
    assert not list(link.live_sequences)


def test_frames_are_acknowledged_after_a_number_of_them_and_with_every_heartbeat():
    link, scheduler = opened()
    scheduler.bodies.clear()
    for _ in range(ACKNOWLEDGE_EVERY_FRAMES):
        scheduler.say(SchedulerStatus(MODEL, STATE_SERVING, 1, 0))
    deliver(link, scheduler, 0.0)
    assert scheduler.bodies == [GatewayHeartbeat(received=1 + ACKNOWLEDGE_EVERY_FRAMES)]
    link.tick(HEARTBEAT_INTERVAL_S)
    deliver(link, scheduler, HEARTBEAT_INTERVAL_S)
    assert scheduler.bodies[-1] == GatewayHeartbeat(received=1 + ACKNOWLEDGE_EVERY_FRAMES)


def test_silence_opens_a_new_link_and_resubmits_with_what_was_received():
    link, scheduler = opened()
    sequence = new_sequence(link)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    scheduler.step()
    deliver(link, scheduler, 0.0)
    link.tick(1.5)
    assert link.phase is LinkPhase.HAILING
    assert link.counters.silences == 1
    replacement = ScriptedScheduler(900)
    deliver(link, replacement, 1.5)
    hello, submit = replacement.bodies[:2]
    assert hello == GatewayHello(incarnation=42, link=1)
    assert decode_column(submit.token_ids).tolist() == [*PROMPT, token_at(3, 0)]
    assert submit.num_prompt_tokens == len(PROMPT)
    assert submit.handle == sequence.handle
    assert submit.has_run


def of_prompt(handle: int, first: int, *values: float) -> Tokens:
    """One alternative beside each value."""
    columns = PromptLogprobColumns(
        first, encode_floats(values), encode_column(range(len(values))), encode_floats(values)
    )
    return Tokens(admitted=(Admitted(handle, 0),), prompt_logprobs=(PromptLogprobs(handle, columns),))


def test_what_is_held_of_a_prompt_is_told_on_a_new_link_and_what_comes_twice_is_dropped():
    link, scheduler = opened()
    sequence = new_sequence(link)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    scheduler.say(of_prompt(sequence.handle, 1, -1.0))
    deliver(link, scheduler, 0.0)
    assert link.take_news() == [sequence]
    link.tick(1.5)
    replacement = ScriptedScheduler(900)
    deliver(link, replacement, 1.5)
    submit = replacement.bodies[1]
    assert (submit.num_prompt_logprobs, submit.has_run) == (1, True)
    assert decode_column(submit.token_ids).tolist() == PROMPT
    replacement.say(of_prompt(sequence.handle, 1, -9.0, -2.0))
    deliver(link, replacement, 1.5)
    parts = [[column.tolist() for column in part.values()] for part in sequence.prompt_logprobs]
    assert parts == [[[-1.0], [[0]], [[-1.0]]], [[-2.0], [[1]], [[-2.0]]]]
    assert sequence.num_prompt_logprobs == 2
    assert link.phase is LinkPhase.OPEN


@pytest.mark.parametrize(("first", "values"), [(2, (-1.0,)), (1, (-1.0, -1.0, -1.0)), (0, (-1.0,))])
def test_a_gap_in_a_prompt_or_what_is_none_of_it_opens_a_new_link(first, values):
    link, scheduler = opened()
    sequence = new_sequence(link)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    scheduler.say(of_prompt(sequence.handle, first, *values))
    for frame in scheduler.outgoing:
        link.receive(frame, 0.0)
    assert link.phase is LinkPhase.HAILING
    assert link.counters.token_gaps == 1
    assert not sequence.prompt_logprobs


def test_what_has_not_run_is_submitted_again_as_it_was():
    link, scheduler = opened()
    link.submit(new_sequence(link))
    deliver(link, scheduler, 0.0)
    first = scheduler.bodies[-1]
    link.tick(1.5)
    replacement = ScriptedScheduler(900)
    deliver(link, replacement, 1.5)
    assert replacement.bodies[1] == first
    assert not first.has_run


@pytest.mark.parametrize("fault", ["damage", "frame gap", "token gap", "missing tokens at the end"])
def test_faults_open_a_new_link(fault):
    link, scheduler = opened()
    sequence = new_sequence(link)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    handle = sequence.handle
    if fault == "damage":
        frame = bytearray(scheduler.writer.encode(SchedulerStatus(MODEL, STATE_SERVING, 1, 0)))
        frame[-1] ^= 1
        link.receive(bytes(frame), 0.0)
        assert link.counters.damaged_frames == 1
    elif fault == "frame gap":
        scheduler.writer.encode(SchedulerStatus(MODEL, STATE_SERVING, 1, 0))
        link.receive(scheduler.writer.encode(SchedulerStatus(MODEL, STATE_SERVING, 1, 0)), 0.0)
        assert link.counters.sequence_gaps == 1
    elif fault == "token gap":
        columns = encode_columns([_int32([handle]), _int32([1]), _int32([5])])
        link.receive(scheduler.writer.encode(Tokens(columns=columns)), 0.0)
        assert link.counters.token_gaps == 1
    else:
        ended = Finished(handle=handle, reason=FINISH_LENGTH, num_output_tokens=1)
        link.receive(scheduler.writer.encode(Tokens(finished=(ended,))), 0.0)
        assert link.counters.token_gaps == 1
    assert link.phase is LinkPhase.HAILING
    assert sequence.tokens == []
    assert sequence.end is None


def test_duplicates_are_dropped():
    link, scheduler = opened()
    sequence = new_sequence(link)
    link.submit(sequence)
    deliver(link, scheduler, 0.0)
    columns = encode_columns([_int32([sequence.handle]), _int32([0]), _int32([5])])
    frame = scheduler.writer.encode(Tokens(columns=columns))
    link.receive(frame, 0.0)
    link.receive(frame, 0.0)
    assert link.counters.duplicate_frames == 1
    link.receive(scheduler.writer.encode(Tokens(columns=columns)), 0.0)
    assert link.counters.duplicate_tokens == 1
    assert sequence.tokens == [5]
    assert link.phase is LinkPhase.OPEN


def test_an_abort_goes_out_with_the_next_frames_and_silences_the_sequence():
    link, scheduler = opened()
    kept, dropped = new_sequence(link, seed=1), new_sequence(link, seed=2)
    link.submit(kept)
    link.submit(dropped)
    link.abort([dropped])
    deliver(link, scheduler, 0.0)
    assert list(scheduler.running) == [kept.handle]
    assert scheduler.bodies[-1] == Abort(handles=encode_column([dropped.handle]))
    link.abort([dropped])
    assert link.take_frames() == []


def test_a_refused_newcomer_ends_and_a_refused_old_hand_is_tried_again():
    link, scheduler = opened()
    newcomer, old_hand, unlucky = (new_sequence(link, seed=seed) for seed in (1, 2, 3))
    for sequence in (newcomer, old_hand, unlucky):
        link.submit(sequence)
    deliver(link, scheduler, 0.0)
    columns = encode_columns([_int32([old_hand.handle, unlucky.handle]), _int32([0, 0]), _int32([5, 6])])
    scheduler.say(Tokens(columns=columns))
    scheduler.say(Rejected(handle=newcomer.handle, reason=REJECT_OVERLOADED, retry_after_ms=10))
    scheduler.say(Rejected(handle=old_hand.handle, reason=REJECT_OVERLOADED, retry_after_ms=200))
    scheduler.say(Rejected(handle=unlucky.handle, reason=REJECT_INVALID, field="x", message="no"))
    deliver(link, scheduler, 0.0)
    assert newcomer.end.reason == REJECT_OVERLOADED
    assert unlucky.end.reason == REJECT_INVALID
    assert old_hand.end is None
    link.tick(0.1)
    assert not link.take_frames()
    link.tick(0.21)
    (frame,) = link.take_frames()
    assert scheduler.reader.decode(frame).body.handle == old_hand.handle


def test_status_versions_grow_with_news_only():
    link, scheduler = opened()
    before = link.status_version
    scheduler.say(SchedulerStatus(MODEL, STATE_SERVING, 1, 0))
    scheduler.say(SchedulerStatus(MODEL, STATE_SERVING, 2, 0))
    deliver(link, scheduler, 0.0)
    assert link.status_version == before
    assert link.num_steps == 2
    scheduler.say(SchedulerStatus(MODEL, STATE_DRAINING, 3, 0))
    deliver(link, scheduler, 0.0)
    assert link.status_version > before


def test_admin_calls_survive_a_relink_and_forgotten_ones_do_not_come_back():
    link, scheduler = opened()
    kept, forgotten = (link.call_admin(AdminCall(method=method, request_id="r1")) for method in ("status", "explain"))
    link.forget_admin_call(forgotten)
    link.tick(1.5)
    replacement = ScriptedScheduler(900)
    deliver(link, replacement, 1.5)
    assert AdminCall(call_id=kept, method="status", request_id="r1") in replacement.bodies
    assert all(getattr(body, "method", "") != "explain" for body in replacement.bodies)
    replacement.say(AdminReply(call_id=forgotten))
    replacement.say(AdminReply(call_id=kept))
    deliver(link, replacement, 1.5)
    assert [reply.call_id for reply in link.take_admin_replies()] == [kept]
    assert scheduler.bodies


class FaultyNetwork:
    """A gateway's link, a scheduler that may be replaced, and frames on their way between them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.link = IngressLink(incarnation=42, now=self.now)
        self.scheduler = ScriptedScheduler(100)
        self.sequences: list[LiveSequence] = []
        self.aborted: set[int] = set()
        self.to_scheduler: list[bytes] = []
        self.to_gateway: list[bytes] = []

    def act(self, what: str) -> None:
        self.to_scheduler += self.link.take_frames()
        self.to_gateway += self.scheduler.outgoing
        self.scheduler.outgoing = []
        getattr(self, what)()

    def step(self) -> None:
        self.scheduler.step()

    def deliver_all(self) -> None:
        to_scheduler, self.to_scheduler = self.to_scheduler, []
        to_gateway, self.to_gateway = self.to_gateway, []
        for frame in to_scheduler:
            self.scheduler.receive(frame)
        for frame in to_gateway:
            self.link.receive(frame, self.now)

    def deliver_to_gateway(self) -> None:
        for frame in self.to_gateway[:1]:
            self.link.receive(frame, self.now)
        del self.to_gateway[:1]

    def deliver_to_scheduler(self) -> None:
        for frame in self.to_scheduler[:1]:
            self.scheduler.receive(frame)
        del self.to_scheduler[:1]

    def drop_to_gateway(self) -> None:
        del self.to_gateway[:1]

    def drop_to_scheduler(self) -> None:
        del self.to_scheduler[:1]

    def duplicate(self) -> None:
        self.to_gateway += self.to_gateway[:1]

    def swap(self) -> None:
        self.to_gateway[:2] = self.to_gateway[1::-1]

    def damage(self) -> None:
        for frame in self.to_gateway[:1]:
            damaged = bytearray(frame)
            damaged[len(damaged) // 2] ^= 0x40
            self.to_gateway[0] = bytes(damaged)

    def restart(self) -> None:
        self.scheduler = ScriptedScheduler(self.scheduler.epoch + 1000)
        self.to_scheduler, self.to_gateway = [], []

    def wait(self) -> None:
        self.now += 0.3
        self.link.tick(self.now)

    def submit(self) -> None:
        self.sequences.append(new_sequence(self.link, seed=len(self.sequences)))
        self.link.submit(self.sequences[-1])

    def abort(self) -> None:
        self.aborted |= {sequence.handle for sequence in self.sequences[-1:]}
        self.link.abort(self.sequences[-1:])

    def heal(self) -> None:
        self.to_scheduler, self.to_gateway = [], []
        for _ in range(60):
            self.wait()
            deliver(self.link, self.scheduler, self.now)
            self.scheduler.step()
            deliver(self.link, self.scheduler, self.now)


FAULTS = (
    "step", "deliver_all", "deliver_to_gateway", "deliver_to_scheduler", "drop_to_gateway", "drop_to_scheduler",
    "duplicate", "swap", "damage", "restart", "wait", "submit", "abort",
)  # fmt: skip


@settings(max_examples=200)
@given(faults=st.lists(st.sampled_from(FAULTS), max_size=100))
def test_every_stream_is_exact_whatever_the_network_and_the_scheduler_do(faults):
    network = FaultyNetwork()
    for fault in faults:
        network.act(fault)
    network.heal()
    for seed, sequence in enumerate(network.sequences):
        assert sequence.tokens == [token_at(seed, index) for index in range(len(sequence.tokens))]
        if sequence.handle not in network.aborted:
            assert len(sequence.tokens) == 8
            assert sequence.end.reason == FINISH_LENGTH
    assert not network.scheduler.running
    assert not list(network.link.live_sequences)
