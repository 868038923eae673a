"""The bytes on the wire, pinned: a change here is a change of protocol and needs a new version."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway_proto import ingress, operations, step
from headway_proto.adapters import AdapterChange, AdapterChanged, LoadedAdapter, RowAdapter
from headway_proto.columns import encode_column, encode_columns, encode_floats
from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.pooling import POOL_LAST, POOL_MEAN
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import Constraint, SamplingParams

INFO = step.BackendInfo(
    backend="torch",
    device="cpu",
    dtype="float32",
    model_name="demo",
    model_fingerprint="f00d",
    num_blocks=64,
    block_size=16,
    max_model_len=1024,
    vocab_size=4096,
    eos_token_ids=(0, 2),
    max_num_rows=8,
    num_host_blocks=32,
    swap_us_per_block=12.5,
    supports_prompt_logprobs=True,
    supports_constraints=True,
)
MODEL = ingress.ModelInfo(
    name="demo",
    fingerprint="f00d",
    backend="torch",
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    vocab_size=4096,
    eos_token_ids=(0, 2),
    max_request_tokens=1024,
    supports_prompt_logprobs=True,
    supports_constraints=True,
)
SAMPLING = SamplingParams(
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    logit_bias=((7, -1.5),),
    stop_token_ids=(2,),
    logprobs=1,
    seed=(1 << 64) - 1,
    prompt_logprobs=1,
    constraint=Constraint("regex", "a+"),
)
PROMPT = PromptLogprobColumns(1, encode_floats([-0.5]), encode_column([6]), encode_floats([-0.25]))
ADAPTER = LoadedAdapter("style", "/adapters/style", "f00d")
NEW_REQUEST = step.NewRequest(
    row=1,
    token_ids=encode_column([5, 6, 7]),
    num_prompt_tokens=3,
    block_ids=encode_column([9]),
    num_computed_tokens=0,
    sampling=SAMPLING,
)
TO_EXECUTOR = (step.scheduler_frame_writer, step.executor_frame_reader)
TO_SCHEDULER = (step.executor_frame_writer, step.scheduler_frame_reader)
TO_GATEWAY = (ingress.scheduler_frame_writer, ingress.gateway_frame_reader)
FROM_GATEWAY = (ingress.gateway_frame_writer, ingress.scheduler_frame_reader)
FINISHED = ingress.Finished(handle=5, reason=ingress.FINISH_STOP, num_output_tokens=1, stop_token_id=11)
EXECUTOR = operations.ExecutorStatus(
    number=1,
    state="ready",
    epoch=2,
    is_draining=True,
    details=None,
    num_running=3,
    num_waiting=4,
    num_total_blocks=64,
    num_free_blocks=16,
    num_cached_blocks=5,
    kv_usage=0.75,
    num_steps=6,
    role="decode",
)
POLICIES = operations.PolicyNames(order="o", batching="b", budget="u", preemption="p", placement="hybrid")
STATUS = operations.Status(
    **dict.fromkeys(operations.Status.__struct_fields__[: -len(operations.Status.__struct_defaults__)], 0)
    | {"scheduler_state": "serving", "executor_state": "ready"},
    executors=(EXECUTOR,),
    num_unplaced=7,
    num_moved=8,
)
SEQUENCE = operations.SequenceState(
    request_id="a",
    index=0,
    state="running",
    priority=3,
    tenant="t",
    num_prompt_tokens=3,
    num_output_tokens=1,
    num_computed_tokens=3,
    num_blocks=1,
    num_preemptions=0,
    age_ms=0.5,
    executor=1,
)
PAIR = np.array([[2], [4]], dtype=np.int32)

MESSAGES: list[tuple[tuple[Callable[[], FrameWriter], Callable[[], FrameReader]], msgspec.Struct]] = [
    (TO_EXECUTOR, step.SchedulerOutput(epoch=1, step=300, total_num_scheduled_tokens=256)),
    (
        TO_EXECUTOR,
        step.SchedulerOutput(
            epoch=1,
            step=2,
            scheduled_new_reqs=(NEW_REQUEST,),
            finished_rows=encode_column([0]),
            new_blocks=encode_columns(PAIR),
            num_scheduled_tokens=encode_columns(PAIR),
            block_copies=encode_columns(PAIR),
            swap_out=encode_columns(PAIR),
            swap_in=encode_columns(PAIR),
            total_num_scheduled_tokens=4,
            num_speculative_tokens=encode_columns(PAIR),
        ),
    ),
    (
        TO_EXECUTOR,
        step.TransferringOutput(
            epoch=1,
            step=2,
            exports=encode_columns(PAIR),
            pulls=(step.BlockPull("f00d", ("shm:headway-f00d",), 7, encode_column([1, 2, 3])),),
        ),
    ),
    (TO_EXECUTOR, step.LaneOutput(epoch=1, step=2, exports=encode_columns(PAIR), lane=3)),
    (
        TO_EXECUTOR,
        step.AdapterOutput(
            epoch=1, step=2, scheduled_new_reqs=(NEW_REQUEST,), adapters=(RowAdapter(1, ADAPTER.identity),)
        ),
    ),
    (TO_EXECUTOR, AdapterChange(3, "style", "/adapters/style", "f00d")),
    (TO_SCHEDULER, AdapterChanged(3, ADAPTER)),
    (TO_SCHEDULER, AdapterChanged(4, error="no such directory")),
    (TO_EXECUTOR, step.PoolingOutput(epoch=1, step=2, scheduled_new_reqs=(NEW_REQUEST,), pooled=encode_columns(PAIR))),
    (
        TO_EXECUTOR,
        step.PoolingLaneOutput(
            epoch=1,
            step=2,
            scheduled_new_reqs=(NEW_REQUEST,),
            lane=3,
            adapters=(RowAdapter(1, ADAPTER.identity),),
            pooled=encode_columns(PAIR),
        ),
    ),
    (TO_EXECUTOR, step.NewEpoch(1, 2, 3)),
    (TO_EXECUTOR, step.SchedulerHeartbeat(3)),
    (
        TO_SCHEDULER,
        step.ExecutorOutput(
            epoch=1,
            step=2,
            sampled_token_ids=encode_column([11, -1]),
            logprobs=(step.RowLogprobs(0, -0.5, (11, 12), (-0.5, -1.5)),),
            errors=(step.RowError(1, "NaN"),),
            device_time_us=1234,
            state_digest=0xDEADBEEF,
            move_time_us=321,
            prompt_logprobs=(step.RowPromptLogprobs(0, PROMPT),),
            accepted_tokens=encode_columns(np.array([[0], [2], [1]], dtype=np.int32)),
        ),
    ),
    (
        TO_SCHEDULER,
        step.PooledOutput(
            epoch=1,
            step=2,
            sampled_token_ids=encode_column([0]),
            vectors=(step.RowVector(1, encode_floats([0.5, -0.25])),),
        ),
    ),
    (TO_SCHEDULER, step.ExecutorHello(2, INFO)),
    (TO_SCHEDULER, step.ResyncRequest(2, "gap")),
    (TO_SCHEDULER, step.ExecutorHeartbeat(2, 7)),
    (FROM_GATEWAY, ingress.GatewayHello(4, 1)),
    (
        FROM_GATEWAY,
        ingress.Submit(
            handle=5,
            request_id="a",
            index=0,
            token_ids=encode_column([5, 6, 7]),
            num_prompt_tokens=3,
            max_tokens=16,
            sampling=SAMPLING,
            tenant="t",
            num_prompt_logprobs=1,
            adapter="style",
        ),
    ),
    (
        FROM_GATEWAY,
        ingress.SubmitPooled(
            handle=6,
            request_id="a",
            index=1,
            token_ids=encode_column([5, 6, 7]),
            num_prompt_tokens=3,
            max_tokens=1,
            sampling=SAMPLING,
            pooling=POOL_MEAN,
        ),
    ),
    (
        FROM_GATEWAY,
        operations.AdminCall(
            call_id=3, method="load_adapter", adapter=operations.AdapterToLoad("style", "/adapters/style")
        ),
    ),
    (TO_GATEWAY, operations.AdminReply(call_id=3, adapters=(ADAPTER,))),
    (FROM_GATEWAY, ingress.Abort(encode_column([5]))),
    (FROM_GATEWAY, ingress.GatewayHeartbeat(256)),
    (FROM_GATEWAY, operations.AdminCall(call_id=1, method="cancel", request_id="a")),
    (
        FROM_GATEWAY,
        operations.AdminCall(
            call_id=2,
            method="cache",
            position=operations.CachePosition(1, 5),
            place=operations.FlightLogPlace(life=3, mark=4, segment=5, is_checkpoint=True, offset=6),
            executor=7,
            role="both",
        ),
    ),
    (
        TO_GATEWAY,
        ingress.SchedulerHello(3, 4, 1, 100, MODEL, ingress.STATE_SERVING),
    ),
    (TO_GATEWAY, ingress.SchedulerStatus(None, ingress.STATE_WAITING_FOR_EXECUTOR, 0, 0)),
    (
        TO_GATEWAY,
        ingress.Tokens(
            admitted=(ingress.Admitted(5, 16),),
            columns=encode_columns(np.array([[5], [0], [11]], dtype=np.int32)),
            logprobs=(ingress.TokenLogprobs(5, 0, -0.5, (11,), (-0.5,)),),
            finished=(FINISHED,),
            prompt_logprobs=(ingress.PromptLogprobs(5, PROMPT),),
        ),
    ),
    (
        TO_GATEWAY,
        ingress.TokensAndVectors(finished=(FINISHED,), vectors=(ingress.Vector(5, encode_floats([0.5, -0.25])),)),
    ),
    (TO_GATEWAY, ingress.Rejected(handle=5, reason=ingress.REJECT_INVALID, field="top_p", message="2.0")),
    (TO_GATEWAY, operations.AdminReply(call_id=1, error="not found")),
    (
        TO_GATEWAY,
        operations.AdminReply(
            call_id=2,
            cache=operations.CacheChanges(
                position=operations.CachePosition(1, 6),
                block_size=2,
                changes=(operations.CacheChange(1 << 24, 1, 0, encode_column([5, 6]), "t"),),
                more=False,
            ),
            flight_log=operations.FlightLogPart(
                life=3,
                mark=4,
                files=(operations.FlightLogFile(segment=5, is_checkpoint=True, num_bytes=6),),
                data=b"7",
                is_gone=True,
            ),
        ),
    ),
]

GOLDEN = Path(__file__).with_name("golden_frames.txt")


def frame_of(pair: tuple[Callable[[], FrameWriter], Callable[[], FrameReader]], body: msgspec.Struct) -> bytes:
    writer = pair[0]()
    writer.begin_epoch(1)
    return writer.encode(body)


def test_bytes_are_the_pinned_ones() -> None:
    """To change the protocol on purpose: raise PROTOCOL_VERSION, then replace the file by what this test prints.

    A field at the end of a message, with a default, needs no new version (the next test).
    """
    lines = [f"{type(body).__name__} {frame_of(pair, body).hex()}" for pair, body in MESSAGES]
    assert lines == GOLDEN.read_text().splitlines(), "\n".join(lines)


ADDED = {
    step.BackendInfo: {
        "num_host_blocks": 0,
        "swap_us_per_block": 0.0,
        "max_num_batched_tokens": 0,
        "supports_prompt_logprobs": False,
        "supports_constraints": False,
        "max_speculative_tokens": 0,
        "host_pool": "",
        "block_addresses": (),
        "num_lanes": 1,
        "supports_adapters": False,
        "adapters": (),
        "embedding_size": 0,
        "default_pooling": 0,
        "generates": True,
        "keeps_states": False,
    },
    SamplingParams: {"prompt_logprobs": -1, "constraint": None},
    ingress.ModelInfo: {
        "supports_prompt_logprobs": False,
        "supports_constraints": False,
        "adapters": (),
        "embedding_size": 0,
        "default_pooling": 0,
        "generates": True,
    },
    step.SchedulerOutput: {"num_speculative_tokens": b""},
    step.TransferringOutput: {"exports": b"", "pulls": ()},
    step.LaneOutput: {"lane": 0},
    step.AdapterOutput: {"adapters": ()},
    step.PoolingOutput: {"pooled": b""},
    step.PoolingLaneOutput: {"adapters": (), "pooled": b""},
    step.PooledOutput: {"vectors": ()},
    ingress.SubmitPooled: {"pooling": POOL_LAST},
    ingress.TokensAndVectors: {"vectors": ()},
    step.ExecutorOutput: {"move_time_us": 0, "prompt_logprobs": (), "accepted_tokens": b"", "stale_rows": b""},
    ingress.Submit: {"traceparent": "", "has_run": False, "num_prompt_logprobs": 0, "adapter": ""},
    ingress.Tokens: {"prompt_logprobs": ()},
    ingress.Finished: {"total_ms": 0.0, "prefill_device_ms": 0.0, "decode_device_ms": 0.0},
    ingress.SchedulerStatus: {"load": ingress.SchedulerLoad()},
    operations.AdminCall: {"place": None, "executor": 0, "role": "", "adapter": None},
    operations.ExecutorStatus: {"role": ""},
    operations.PolicyNames: {"placement": ""},
    operations.Status: {
        "executors": (),
        "num_unplaced": 0,
        "num_moved": 0,
        "num_offloaded_blocks": 0,
        "num_restored_tokens": 0,
        "num_exported_blocks": 0,
        "num_pulled_tokens": 0,
        "num_stale_pulls": 0,
    },
    operations.SequenceState: {"executor": -1},
    operations.AdminReply: {"flight_log": None, "adapters": ()},
    step.ExecutorHello: {"number": -1},
    step.ResyncRequest: {
        "max_num_batched_tokens": 0,
        "failed_step": -1,
        "is_leaving": False,
        "is_in_another_state": False,
    },
}


@pytest.mark.parametrize(
    "body",
    [
        INFO,
        FINISHED,
        SAMPLING,
        MODEL,
        EXECUTOR,
        POLICIES,
        STATUS,
        SEQUENCE,
        *(body for _, body in MESSAGES if type(body) in ADDED),
    ],
)
def test_a_message_of_an_older_side_reads_as_not_known(body: msgspec.Struct) -> None:
    added = ADDED[type(body)]
    older = msgspec.msgpack.encode(msgspec.to_builtins(body, builtin_types=(bytes,))[: -len(added)])
    assert msgspec.msgpack.decode(older, type=type(body)) == msgspec.structs.replace(body, **added)


def test_a_field_that_this_side_does_not_know_is_passed_over() -> None:
    newer = msgspec.msgpack.encode([*msgspec.to_builtins(INFO), "news"])
    assert msgspec.msgpack.decode(newer, type=step.BackendInfo) == INFO


@pytest.mark.parametrize(("pair", "body"), MESSAGES)
def test_every_message_survives_the_round_trip(
    pair: tuple[Callable[[], FrameWriter], Callable[[], FrameReader]], body: msgspec.Struct
) -> None:
    assert pair[1]().decode(frame_of(pair, body)).body == body


def test_a_steady_decode_step_is_at_most_64_bytes_whatever_the_batch_and_the_step_number() -> None:
    writer = step.scheduler_frame_writer()
    writer.begin_epoch((1 << 32) - 1)
    quiet = step.SchedulerOutput(epoch=(1 << 32) - 1, step=(1 << 32) - 1, total_num_scheduled_tokens=1 << 20)
    assert len(writer.encode(quiet)) <= 64
    rows = np.arange(4096, dtype=np.int32)
    crossing = msgspec.structs.replace(quiet, new_blocks=encode_columns((rows, rows)))
    assert len(writer.encode(crossing)) <= 64 + 8 * len(rows)
