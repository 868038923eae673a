"""Frames and the state machines that take them: any bytes, damaged frames, and intact frames of anything, in any order."""

import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzz.limits import bounded, examples
from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_executor.links.step_link import StepLink
from headway_gateway.link.ingress_link import IngressLink
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import ingress, operations, step
from headway_proto.columns import encode_column
from headway_proto.framing import FrameReader, FrameWriter, FramingError
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine

READERS = {
    "step at scheduler": step.scheduler_frame_reader,
    "step at executor": step.executor_frame_reader,
    "ingress at scheduler": ingress.scheduler_frame_reader,
    "ingress at gateway": ingress.gateway_frame_reader,
}
HEADER = struct.Struct("<2sBBIQI")
KINDS = {1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 36, 48, 49, 50, 51, 52}

INFO = step.BackendInfo(
    backend="b", device="d", dtype="t", model_name="m", model_fingerprint="f", num_blocks=16, block_size=4,
    max_model_len=32, vocab_size=50, eos_token_ids=(0,), max_num_rows=4, num_host_blocks=4,
)  # fmt: skip
MODEL = ingress.ModelInfo(
    name="m", fingerprint="f", backend="b", device="d", dtype="t", max_model_len=32, vocab_size=50, eos_token_ids=(0,),
    max_request_tokens=32,
)  # fmt: skip


def framed(kind: int, epoch: int, sequence: int, payload: bytes) -> bytes:
    """An intact frame around any payload."""
    fields = HEADER.pack(b"HW", 1, kind, epoch, sequence, len(payload))
    return fields + struct.pack("<I", zlib.crc32(payload, zlib.crc32(fields))) + payload


small = st.integers(-2, 40)
integers = st.one_of(
    small, st.integers(-(1 << 63), (1 << 64) - 1), st.sampled_from([1 << 31, (1 << 31) - 1, -(1 << 31)])
)
floats = st.one_of(st.floats(), st.sampled_from([0.0, math.nan, math.inf, -1.0]))
columns = st.one_of(
    st.binary(max_size=64),
    st.lists(st.integers(-2, 40), max_size=12).map(encode_column),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=8).map(encode_column),
)
texts = st.one_of(
    st.sampled_from(["", "r", "s", "status", "cancel", "pin", "unpin", "list", "explain"]), st.text(max_size=20)
)


SCALARS: dict[type, st.SearchStrategy[Any]] = {
    msgspec.inspect.IntType: integers,
    msgspec.inspect.FloatType: floats,
    msgspec.inspect.BytesType: columns,
    msgspec.inspect.StrType: texts,
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.NoneType: st.none(),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Well-typed values of a message field, from a msgspec type."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    if type(info) in SCALARS:
        return SCALARS[type(info)]
    match info:
        case msgspec.inspect.UnionType(types=members):
            return st.one_of([values_of(member) for member in members])
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(values_of(item), max_size=4).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(values_of, items))
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            special = INFO_FIELDS if cls is step.BackendInfo else {}
            values = {
                field.name: special[field.name] if field.name in special else values_of(field.type) for field in fields
            }
            return st.fixed_dictionaries(values).map(lambda drawn, cls=cls: cls(**drawn))
    raise AssertionError(info)


# What an executor may truly have takes memory in proportion; here it has little, or what cannot be.
SIZE = st.one_of(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, -1, (1 << 24) + 1, 1 << 62]))
INFO_FIELDS = dict.fromkeys(
    ("num_blocks", "block_size", "max_model_len", "vocab_size", "max_num_rows", "num_host_blocks"), SIZE
)


@pytest.mark.parametrize("name", READERS)
@examples()
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=b"HW")
def test_any_bytes_are_a_frame_or_a_framing_error(name: str, data: bytes) -> None:
    decode_or_refuse(READERS[name](), data)


@pytest.mark.parametrize("name", READERS)
@examples()
@given(kind=st.integers(0, 255), payload=st.binary(max_size=100), epoch=st.integers(0, 5))
@example(kind=33, payload=b"\x91" * 2000, epoch=0)
@example(kind=1, payload=b"\xdd\xff\xff\xff\xff", epoch=0)
@example(kind=33, payload=b"\x9c\x01\xa1\xff", epoch=0)
@example(kind=17, payload=b"\xc6\xff\xff\xff\xff", epoch=0)
@example(kind=17, payload=b"\x92" + b"\x91" * 100_000, epoch=0)
def test_an_intact_envelope_around_any_payload(name: str, kind: int, payload: bytes, epoch: int) -> None:
    decode_or_refuse(READERS[name](), framed(kind, epoch, 0, payload))


def decode_or_refuse(reader: FrameReader, data: bytes) -> None:
    with bounded():
        try:
            reader.decode(data)
        except FramingError as error:
            refusal = str(error)
        else:
            return
    assert "\n" not in refusal
    assert len(refusal) < 400


def message_of(kinds: dict[type[msgspec.Struct], int]) -> st.SearchStrategy[msgspec.Struct]:
    return st.one_of([values_of(kind) for kind in kinds])


def encodable(body: msgspec.Struct) -> bytes | None:
    try:
        return msgspec.msgpack.encode(body)
    except (UnicodeEncodeError, OverflowError):
        return None


class Wire:
    """Frames of one sender, with the numbers that its peer expects, or others."""

    def __init__(self, kinds: dict[type[msgspec.Struct], int]) -> None:
        self.writer = FrameWriter(kinds)

    def frame(self, body: msgspec.Struct, damage: int, epoch: int | None) -> bytes:
        if epoch is not None and epoch != self.writer.epoch:
            self.writer.begin_epoch(epoch)
        data = self.writer.encode(body)
        if damage == 1:  # a bit is wrong
            place = len(data) // 2
            return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        if damage == 2:  # cut off
            return data[: len(data) - 1]
        if damage == 3:  # one is lost
            self.writer.next_sequence += 1
        return data


steps = st.tuples(st.integers(0, 9), st.floats(0, 3), st.integers(0, 2))
"""Kind of damage (0 and from 4 on: none), seconds passed, which peer."""

TO_SCHEDULER_STEP, TO_EXECUTOR = step._TO_SCHEDULER, step._TO_EXECUTOR
TO_SCHEDULER_INGRESS, TO_GATEWAY = ingress._TO_SCHEDULER, ingress._TO_GATEWAY


@examples(75)
@given(
    limits=st.booleans(),
    script=st.lists(
        st.tuples(st.one_of(message_of(TO_SCHEDULER_STEP), message_of(TO_SCHEDULER_INGRESS)), steps), max_size=12
    ),
)
def test_the_scheduler_takes_any_message_from_anybody(limits: bool, script: list[Any]) -> None:
    """A gateway and an executor that have been let in say anything. Neither may end the scheduler."""
    engine = SchedulerEngine(SchedulerLimits(max_num_seqs=4, max_num_waiting=8, order="fair" if limits else "fcfs"), 7)
    now = 0.0
    executor, gateway = Wire(TO_SCHEDULER_STEP), Wire(TO_SCHEDULER_INGRESS)
    executor.writer.encode(step.ExecutorHeartbeat(1, 0))
    with bounded():
        engine.executor_frame(b"e0", Wire(TO_SCHEDULER_STEP).frame(step.ExecutorHello(1, INFO), 0, 0), now)
        engine.gateway_frame(b"g0", Wire(TO_SCHEDULER_INGRESS).frame(ingress.GatewayHello(1, 0), 0, 0), now)
        for body, (damage, passed, peer) in script:
            now += passed
            if encodable(body) is None:
                continue
            if type(body) in TO_SCHEDULER_STEP:
                engine.executor_frame(b"e%d" % peer, executor.frame(body, damage, engine.fleet.links[0].epoch), now)
            else:
                links = engine.gateways.links()
                epoch = links[-1].epoch if links else 0
                engine.gateway_frame(b"g%d" % (0 if links else peer), gateway.frame(body, damage, epoch), now)
            engine.run(now)
            engine.fleet.links.outgoing.clear()
            engine.gateways.outgoing.clear()
            engine.notices.take()


sane_sampling = st.just(SamplingParams())
submits = st.builds(
    ingress.Submit,
    handle=st.one_of(st.integers(0, 5), integers), request_id=st.sampled_from(["a", "b", "c"]), index=st.integers(-1, 2),
    token_ids=st.one_of(columns, st.lists(st.integers(0, 49), min_size=1, max_size=20).map(encode_column)),
    num_prompt_tokens=st.one_of(st.integers(-1, 21), integers), max_tokens=st.one_of(st.integers(-1, 12), integers),
    sampling=st.one_of(sane_sampling, values_of(SamplingParams)), ignore_eos=st.booleans(), priority=st.integers(-1, 6),
    tenant=st.sampled_from(["", "t", "\x00", "x" * 200]), ttft_slo_ms=integers, itl_slo_ms=integers,
)  # fmt: skip
outputs = st.builds(
    step.ExecutorOutput,
    epoch=st.integers(6, 9), step=st.one_of(st.integers(0, 4), integers),
    sampled_token_ids=st.one_of(columns, st.lists(st.integers(0, 49), min_size=1, max_size=4).map(encode_column)),
    logprobs=st.lists(values_of(step.RowLogprobs), max_size=2).map(tuple),
    errors=st.lists(values_of(step.RowError), max_size=2).map(tuple), device_time_us=integers,
    state_digest=st.one_of(st.none(), integers), move_time_us=integers,
)  # fmt: skip
admin_calls = st.builds(
    operations.AdminCall, call_id=integers,
    method=st.sampled_from(["status", "list", "explain", "cancel", "pause", "resume", "pin", "unpin", "pins", "nonsense"]),
    request_id=st.sampled_from(["a", "b", ""]), prefix=st.one_of(st.none(), values_of(operations.PrefixToPin)),
)  # fmt: skip


@examples(150)
@given(script=st.lists(st.one_of(submits, outputs, admin_calls, values_of(ingress.Abort)), max_size=16))
def test_the_scheduler_takes_plausible_messages_with_any_values(script: list[Any]) -> None:
    """In order and intact, so that every one of them is judged by what it says."""
    engine = SchedulerEngine(SchedulerLimits(max_num_seqs=4, max_num_waiting=8), 6)
    engine.executor_frame(b"e", Wire(TO_SCHEDULER_STEP).frame(step.ExecutorHello(1, INFO), 0, 0), 0.0)
    engine.gateway_frame(b"g", Wire(TO_SCHEDULER_INGRESS).frame(ingress.GatewayHello(1, 0), 0, 0), 0.0)
    executor, gateway = Wire(TO_SCHEDULER_STEP), Wire(TO_SCHEDULER_INGRESS)
    now = 0.0
    with bounded():
        for body in script:
            now += 0.01
            if encodable(body) is None:
                continue
            if isinstance(body, step.ExecutorOutput):
                engine.executor_frame(b"e", executor.frame(body, 0, engine.fleet.links[0].epoch), now)
            elif engine.gateways.links():
                engine.gateway_frame(b"g", gateway.frame(body, 0, engine.gateways.links()[-1].epoch), now)
            engine.run(now)
            engine.fleet.links.outgoing.clear()
            engine.gateways.outgoing.clear()
        assert engine.fleet.cells[0].core is not None
        assert len(engine.gateways.links()) == 1


@examples(75)
@given(script=st.lists(st.tuples(message_of(TO_EXECUTOR), steps), max_size=12))
def test_the_executors_link_takes_any_message(script: list[Any]) -> None:
    link = StepLink(incarnation=1, info=INFO)
    wire = Wire(TO_EXECUTOR)
    now = 0.0
    with bounded():
        link.receive(wire.frame(step.NewEpoch(3, 1, 9), 0, 3), now)
        for body, (damage, passed, _) in script:
            now += passed
            if encodable(body) is not None:
                link.receive(wire.frame(body, damage, link.epoch), now)
            link.tick(now)


@examples(100)
@given(script=st.lists(st.tuples(message_of(TO_GATEWAY), steps), max_size=12))
def test_the_gateways_link_takes_any_message(script: list[Any]) -> None:
    link = IngressLink(incarnation=1, now=0.0)
    wire = Wire(TO_GATEWAY)
    now = 0.0
    submit = ingress.Submit(
        handle=link.next_handle(), request_id="r", index=0, token_ids=encode_column([1, 2]), num_prompt_tokens=2,
        max_tokens=8, sampling=SamplingParams(),
    )  # fmt: skip
    with bounded():
        link.submit(LiveSequence(submit, (), lambda: None))
        hello = ingress.SchedulerHello(5, 1, 0, 10, MODEL, ingress.STATE_SERVING)
        link.receive(wire.frame(hello, 0, 4), now)
        for body, (damage, passed, _) in script:
            now += passed
            if encodable(body) is not None:
                link.receive(wire.frame(body, damage, None), now)
            link.tick(now)
            list(link.take_frames())
            list(link.take_news())
            list(link.take_admin_replies())


pairs = st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 17)), max_size=6).map(
    lambda rows: encode_column([a for a, _ in rows] + [b for _, b in rows])
)
new_requests = st.builds(
    step.NewRequest,
    row=st.one_of(st.integers(-1, 5), integers),
    token_ids=st.one_of(columns, st.lists(st.integers(0, 49), min_size=1, max_size=12).map(encode_column)),
    num_prompt_tokens=st.one_of(st.integers(-1, 12), integers),
    block_ids=st.one_of(columns, st.lists(st.integers(0, 15), max_size=4).map(encode_column)),
    num_computed_tokens=st.one_of(st.integers(-1, 12), integers),
    sampling=sane_sampling,
)
diffs = st.builds(
    step.SchedulerOutput,
    epoch=st.just(1), step=integers, scheduled_new_reqs=st.lists(new_requests, max_size=3).map(tuple),
    finished_rows=st.one_of(columns, st.just(b"")), new_blocks=st.one_of(st.just(b""), pairs, columns),
    num_scheduled_tokens=st.one_of(st.just(b""), pairs, columns), block_copies=st.one_of(st.just(b""), pairs, columns),
    swap_out=st.one_of(st.just(b""), pairs, columns), swap_in=st.one_of(st.just(b""), pairs, columns),
    total_num_scheduled_tokens=st.one_of(st.integers(0, 12), integers),
)  # fmt: skip


@examples(200)
@given(script=st.lists(st.tuples(diffs, st.booleans()), min_size=1, max_size=5))
def test_any_diff_is_applied_or_impossible(script: list[Any]) -> None:
    state = BatchState(INFO)
    with bounded():
        for diff, begin in script:
            if begin:
                state.begin_epoch()
            try:
                applied = state.apply(diff)
            except ImpossibleDiff:
                continue
            check_batch(applied.batch, diff)
            state.digest()


def check_batch(batch: Any, diff: step.SchedulerOutput) -> None:
    """What a backend may rely on."""
    assert int(batch.num_scheduled_tokens.sum()) == diff.total_num_scheduled_tokens
    assert (batch.num_scheduled_tokens > 0).all()
    assert (batch.num_computed_tokens >= 0).all()
    assert (batch.num_computed_tokens + batch.num_scheduled_tokens <= INFO.max_model_len).all()
    assert ((batch.block_table >= 0) & (batch.block_table < INFO.num_blocks)).all()


@pytest.mark.parametrize("kinds", [TO_SCHEDULER_STEP, TO_EXECUTOR, TO_SCHEDULER_INGRESS, TO_GATEWAY])
@examples(100)
@given(data=st.data())
def test_a_mutated_message_decodes_to_its_type_or_is_refused(
    kinds: dict[type[msgspec.Struct], int], data: st.DataObject
) -> None:
    """The checksum is made right again, so that the decoder itself has to judge."""
    body = data.draw(message_of(kinds))
    payload = encodable(body)
    if payload is None:
        return
    mutated = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(mutated) - 1))
        mutated[place] = data.draw(st.integers(0, 255))
    reader: Callable[[], FrameReader] = {
        id(TO_SCHEDULER_STEP): step.scheduler_frame_reader,
        id(TO_EXECUTOR): step.executor_frame_reader,
        id(TO_SCHEDULER_INGRESS): ingress.scheduler_frame_reader,
        id(TO_GATEWAY): ingress.gateway_frame_reader,
    }[id(kinds)]
    decode_or_refuse(reader(), framed(kinds[type(body)], 0, 0, bytes(mutated)))


OUTPUT_FIELDS = {field.name: values_of(field.type) for field in msgspec.inspect.type_info(step.ExecutorOutput).fields}
lies = st.one_of(st.none(), st.none(), st.sampled_from(sorted(OUTPUT_FIELDS)).flatmap(
    lambda name: st.fixed_dictionaries({name: OUTPUT_FIELDS[name]})
), st.fixed_dictionaries({"errors": st.lists(st.builds(step.RowError, st.integers(-1, 4), st.just("x")), max_size=3).map(tuple)}),
    st.fixed_dictionaries({"logprobs": st.lists(st.builds(
        step.RowLogprobs, st.integers(-1, 4), floats, st.lists(integers, max_size=2).map(tuple),
        st.lists(floats, max_size=2).map(tuple)), max_size=3).map(tuple)}),
)  # fmt: skip
"""None, or fields of a right answer that say something else."""


@examples(40)
@given(script=st.lists(st.tuples(st.one_of(st.none(), submits), lies), min_size=1, max_size=5))
@example(script=[(None, {"errors": (step.RowError(4, "x"),)})])
@example(script=[(None, {"errors": (step.RowError(-1, "x"),)})])
@example(script=[(None, {"logprobs": (step.RowLogprobs(4, 0.0, (), ()),)})])
@example(script=[(None, {"logprobs": (step.RowLogprobs(-1, 0.0, (), ()),)})])
def test_an_executor_that_answers_and_sometimes_lies(script: list[Any]) -> None:
    """It keeps the state that it should, so that its lies come deep into a run; it is never the scheduler that ends."""
    engine = SchedulerEngine(SchedulerLimits(max_num_seqs=4, max_num_waiting=8), 6)
    executor, gateway = Wire(TO_SCHEDULER_STEP), Wire(TO_SCHEDULER_INGRESS)
    reader, state = step.executor_frame_reader(), BatchState(INFO)
    engine.executor_frame(b"e", executor.frame(step.ExecutorHello(1, INFO), 0, 0), 0.0)
    engine.gateway_frame(b"g", gateway.frame(ingress.GatewayHello(1, 0), 0, 0), 0.0)
    plain = ingress.Submit(
        handle=100, request_id="plain", index=0, token_ids=encode_column([1, 2, 3]), num_prompt_tokens=3, max_tokens=20,
        sampling=SamplingParams(), ignore_eos=True,
    )  # fmt: skip
    now = 0.0
    with bounded():
        for number, (submit, lie) in enumerate([(plain, None), *script, *[(None, None)] * 30]):
            now += 0.01
            if submit is not None and encodable(submit) is not None:
                engine.gateway_frame(b"g", gateway.frame(submit, 0, engine.gateways.links()[-1].epoch), now)
            engine.run(now)
            sent, engine.fleet.links.outgoing[:] = list(engine.fleet.links.outgoing), []
            for _, data in sent:
                body = reader.decode(data).body
                if isinstance(body, step.NewEpoch):
                    state.begin_epoch()
                    executor.writer.begin_epoch(body.epoch)
                if not isinstance(body, step.SchedulerOutput) or body.epoch != engine.fleet.links[0].epoch:
                    continue
                batch = state.apply(body).batch  # What a scheduler sends is never impossible.
                digest = None if body.step % step.DIGEST_INTERVAL_STEPS else state.digest()
                tokens = encode_column([1 + number % 40] * int(batch.samples.sum()))
                answer = step.ExecutorOutput(
                    epoch=body.epoch, step=body.step, sampled_token_ids=tokens, state_digest=digest
                )  # fmt: skip
                answer = msgspec.structs.replace(answer, **lie) if lie else answer
                engine.executor_frame(b"e", executor.frame(answer, 0, None), now)
            engine.gateways.outgoing.clear()
            engine.notices.take()
