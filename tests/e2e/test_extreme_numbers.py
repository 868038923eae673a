"""The ends of every number's range, in every field of every request: what is asked for, or a refusal that is documented.

Owns: finding the fields (the stubs tell them, so a new one is tried without a word here) and which statuses a caller may
see. Must not know: what any field means.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from e2e.test_gateway_serving import DEMO
from headway.client import AsyncClient
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_gateway.figures import load_reports
from headway_proto import admin_pb2, orca_pb2
from headway_proto import generation_pb2 as api
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

try:
    from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
except ImportError:  # the extra smg is not installed
    vllm_engine_pb2 = None

_INT32, _UINT32, _INT64, _UINT64 = ((-(1 << 31), (1 << 31) - 1), (0, (1 << 32) - 1), (-(1 << 63), (1 << 63) - 1), (0, (1 << 64) - 1))  # fmt: skip
RANGES = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_SINT32: _INT32,
    FieldDescriptor.TYPE_SFIXED32: _INT32,
    FieldDescriptor.TYPE_ENUM: _INT32,
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_FIXED32: _UINT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_SINT64: _INT64,
    FieldDescriptor.TYPE_SFIXED64: _INT64,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_FIXED64: _UINT64,
}
EDGES = sorted(
    {edge + by for bits in (0, 31, 32, 53, 63, 64) for edge in (1 << bits, -(1 << bits)) for by in (-1, 0, 1)}
)
REALS = (math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45)
REAL_TYPES = {FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE}

DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""None of these calls meets a server that is away, full or late, so no other status has an excuse."""

SHORT = api.SamplingParams(max_tokens=2)
VALID: dict[str, Message] = {
    message.DESCRIPTOR.full_name: message
    for message in (
        api.GenerateRequest(text="x", sampling=SHORT),
        api.DetokenizeRequest(token_ids=[5]),
        admin_pb2.PinPrefixRequest(name="pin", text="a prefix"),
    )
}
"""What every other field of a request is while one is at an end; where nothing is needed, nothing is said."""

if vllm_engine_pb2 is not None:
    whole = vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[3, 4]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=2),
        stream=True,
    )
    VALID[whole.DESCRIPTOR.full_name] = whole


class Method:
    """A call by its name on the wire, with its request's class."""

    def __init__(self, path: str, request: Descriptor, *, streams: bool) -> None:
        self.path = path
        self.request = request
        self.streams = streams

    def extremes(self) -> Iterator[tuple[str, Message]]:
        """A request with one number at an end of its range, for each number and end; and which that is."""
        for fields in number_fields(self.request):
            leaf = fields[-1]
            for value in REALS if leaf.type in REAL_TYPES else [edge for edge in EDGES if _fits(leaf, edge)]:
                message = GetMessageClass(self.request)()
                message.MergeFrom(VALID.get(self.request.full_name, message))
                place(message, fields, value)
                yield f"{self.path} {'.'.join(field.name for field in fields)}={value}", message

    async def status(self, channel: grpc.aio.Channel, message: Message) -> grpc.StatusCode:
        """How the call ends; one without an end is left once it has told something and then nothing for a moment."""
        serialize = type(message).SerializeToString
        try:
            if not self.streams:
                await channel.unary_unary(self.path, serialize)(message, timeout=20)
                return grpc.StatusCode.OK
            call = channel.unary_stream(self.path, serialize)(message, timeout=20)
            response = await call.read()
            while response is not grpc.aio.EOF:
                response = await asyncio.wait_for(call.read(), 1.0)
        except TimeoutError:
            call.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def methods() -> list[Method]:
    files = [api.DESCRIPTOR, admin_pb2.DESCRIPTOR]
    files += [] if vllm_engine_pb2 is None else [vllm_engine_pb2.DESCRIPTOR]
    found = [
        Method(f"/{service.full_name}/{method.name}", method.input_type, streams=method.server_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]
    load = orca_pb2.OrcaLoadReportRequest.DESCRIPTOR
    return [*found, Method(f"/{load_reports.SERVICE}/StreamCoreMetrics", load, streams=True)]


def number_fields(message: Descriptor, within: tuple[Descriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The way to every number in a message, in messages within it too, but not in one within itself."""
    for field in message.fields:
        if field.type in RANGES or field.type in REAL_TYPES:
            yield (field,)
        elif field.message_type is not None and field.message_type not in within:
            for rest in number_fields(field.message_type, (*within, message)):
                yield (field, *rest)


def place(message: Message, fields: tuple[FieldDescriptor, ...], value: float) -> None:
    """Set the number at the end of the way; of what is repeated, one."""
    field, *rest = fields
    held = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = field.message_type.fields_by_name["key"]
        if rest[0].name == "key":
            held[value]  # a value that is a message or a number is there once it was asked for
        elif len(rest) == 1:
            held["k" if key.type == FieldDescriptor.TYPE_STRING else 1] = value
        else:
            place(held["k" if key.type == FieldDescriptor.TYPE_STRING else 1], tuple(rest[1:]), value)
    elif rest:
        place(held.add() if field.is_repeated else held, tuple(rest), value)
    elif field.is_repeated:
        held.append(value)
    else:
        setattr(message, field.name, value)


def _fits(field: FieldDescriptor, value: int) -> bool:
    least, most = RANGES[field.type]
    return least <= value <= most


async def test_no_number_in_a_request_ends_in_an_error_of_the_server(tmp_path: Path) -> None:
    backend = BackendConfig(model=str(DEMO), block_size=4, num_kv_blocks=512, options={"real_time": "false"})
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    with running(tmp_path, DEMO, SimulatedBackend(), backend, SchedulerLimits(), kv_events=True) as server:
        async with AsyncClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
            await client.wait_ready(20)
            turn = asyncio.Semaphore(32)

            async def attempt(method: Method, what: str, message: Message) -> None:
                async with turn:
                    code = await method.status(channel, message)
                tried[method.path.rpartition("/")[2]] += 1
                if code not in DOCUMENTED:
                    wrong.append(f"{code.name}: {what}")

            async with asyncio.TaskGroup() as group:
                for method in methods():
                    for what, message in method.extremes():
                        group.create_task(attempt(method, what, message))
            assert (await client.generate("x", max_tokens=2, ignore_eos=True).result()).completions[0].usage
    assert {"Generate", "Detokenize", "PinPrefix", "StreamCoreMetrics"} <= tried.keys()
    assert wrong == []


@pytest.mark.skipif(vllm_engine_pb2 is None, reason="needs the stubs of VllmEngine: the extra smg")
async def test_a_subscription_that_would_run_out_of_numbers_is_refused(tmp_path: Path) -> None:
    backend = BackendConfig(model=str(DEMO), block_size=4, num_kv_blocks=256, options={"real_time": "false"})
    (method,) = (method for method in methods() if method.path.endswith("/SubscribeKvEvents"))
    with running(tmp_path, DEMO, SimulatedBackend(), backend, SchedulerLimits(), kv_events=True) as server:
        async with AsyncClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
            await client.wait_ready(20)
            stub = channel.unary_stream(
                method.path,
                common_pb2.SubscribeKvEventsRequest.SerializeToString,
                common_pb2.KvEventBatch.FromString,
            )
            largest = (1 << 63) - 1
            first = await stub(common_pb2.SubscribeKvEventsRequest(start_sequence_number=largest)).read()
            assert first.sequence_number == largest + 1
            for start in (largest + 1, (1 << 64) - 1):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)).read()
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.value.details() == (
                    f"start_sequence_number: {start} is not allowed; allowed: at most {largest}"
                )
