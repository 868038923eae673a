"""A generation's events as VllmEngine's answers; the tokenizer's files; the figures of load."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine: the extra smg")

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import headway
from headway_gateway.statuses import CallRefusedError
from headway_gateway.vllm_engine.answers import AnswerWriter
from headway_gateway.vllm_engine.loads import OutputRate, scheduler_load
from headway_gateway.vllm_engine.tokenizer_files import tokenizer_archive
from headway_proto import generation_pb2 as api
from headway_proto.operations import Status

DEMO = Path(headway.__file__).parent / "demo_model"
ACCEPTED = api.GenerateResponse(accepted=api.Accepted(prompt_tokens=7, cached_tokens=4))


def delta(index: int, token_ids: list[int], *, top: int | None = None) -> api.GenerateResponse:
    made = api.Delta(index=index, text="x", token_ids=token_ids)
    if top is not None:
        for token_id in token_ids:
            alternatives = [api.TopLogprob(token_id=place, logprob=-place) for place in range(top)]
            made.logprobs.add(token_id=token_id, logprob=-0.5, top=alternatives)
    return api.GenerateResponse(delta=made)


def finished(index: int, num_tokens: int, **end) -> api.GenerateResponse:
    usage = api.Usage(prompt_tokens=7, output_tokens=num_tokens, cached_tokens=4)
    return api.GenerateResponse(finished=api.Finished(index=index, usage=usage, **end))


async def answers_to(request: vllm.GenerateRequest, *events: api.GenerateResponse) -> list[vllm.GenerateResponse]:
    sent: list[vllm.GenerateResponse] = []

    async def send(message: vllm.GenerateResponse) -> None:
        sent.append(vllm.GenerateResponse.FromString(message.SerializeToString()))

    writer = AnswerWriter(request, send)
    for event in events:
        await writer.write(event)
    return sent


async def test_a_stream_is_chunks_of_new_tokens_and_an_end_per_output() -> None:
    chunk, other, end = await answers_to(
        vllm.GenerateRequest(stream=True),
        ACCEPTED,
        delta(0, [1, 2]),
        delta(1, [3]),
        api.GenerateResponse(delta=api.Delta(index=0, text="text that was held back")),
        finished(1, 1, reason=api.FINISH_REASON_LENGTH),
    )
    assert list(chunk.chunk.token_ids) == [1, 2]
    assert (chunk.chunk.completion_tokens, chunk.chunk.prompt_tokens, chunk.chunk.cached_tokens) == (2, 7, 4)
    assert (other.chunk.index, list(other.chunk.token_ids)) == (1, [3])
    assert not chunk.chunk.HasField("output_logprobs")
    complete = end.complete
    assert (complete.index, complete.finish_reason, complete.completion_tokens) == (1, "length", 1)
    assert not complete.output_ids


async def test_without_a_stream_outputs_come_whole_and_in_order() -> None:
    request = vllm.GenerateRequest(sampling_params=vllm.SamplingParams(logprobs=2, n=2))
    first, second = await answers_to(
        request,
        ACCEPTED,
        delta(0, [1], top=2),
        delta(1, [5], top=2),
        finished(1, 1, reason=api.FINISH_REASON_LENGTH),
        delta(0, [2], top=2),
        finished(0, 2, reason=api.FINISH_REASON_STOP, stop="x"),
    )
    assert (second.complete.index, list(second.complete.output_ids)) == (1, [5])
    complete = first.complete
    assert (complete.index, list(complete.output_ids), complete.matched_stop_str) == (0, [1, 2], "x")
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (7, 2, 4)
    columns = complete.output_logprobs
    assert list(columns.token_logprobs) == [-0.5, -0.5]
    assert list(columns.token_ids) == [1, 2]
    assert [list(top.token_ids) for top in columns.top_logprobs] == [[0, 1], [0, 1]]
    assert [list(top.values) for top in columns.top_logprobs] == [[0.0, -1.0], [0.0, -1.0]]


async def test_without_alternatives_none_are_told() -> None:
    request = vllm.GenerateRequest(stream=True, sampling_params=vllm.SamplingParams(logprobs=0))
    (chunk,) = await answers_to(request, ACCEPTED, delta(0, [1], top=0))
    assert list(chunk.chunk.output_logprobs.token_ids) == [1]
    assert not chunk.chunk.output_logprobs.top_logprobs


@pytest.mark.parametrize(
    ("stop_token_ids", "told"), [((), None), ((9,), "matched_token_id"), ((8,), None)], ids=["eos", "asked", "other"]
)
async def test_only_a_stop_token_that_was_asked_for_is_a_match(stop_token_ids, told) -> None:
    request = vllm.GenerateRequest(sampling_params=vllm.SamplingParams(stop_token_ids=stop_token_ids))
    (end,) = await answers_to(request, ACCEPTED, finished(0, 1, reason=api.FINISH_REASON_STOP, stop_token_id=9))
    assert end.complete.finish_reason == "stop"
    assert end.complete.WhichOneof("matched_stop") == told


async def test_an_abort_is_told_and_an_error_ends_the_call() -> None:
    (end,) = await answers_to(vllm.GenerateRequest(), ACCEPTED, finished(0, 0, reason=api.FINISH_REASON_ABORT))
    assert end.complete.finish_reason == "abort"
    with pytest.raises(CallRefusedError, match="output 1 could not be run: NaN logits"):
        await answers_to(
            vllm.GenerateRequest(), ACCEPTED, finished(1, 0, reason=api.FINISH_REASON_ERROR, error="NaN logits")
        )


def test_the_tokenizers_archive_is_whole_and_always_the_same() -> None:
    archive = tokenizer_archive(DEMO)
    chunks = list(archive.chunks())
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert tokenizer_archive(DEMO) == archive
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert files.namelist() == ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"]
        assert files.read("tokenizer.json") == (DEMO / "tokenizer.json").read_bytes()


def test_load_is_told_from_the_schedulers_figures() -> None:
    figures = dict.fromkeys(Status.__struct_fields__, 0) | {"scheduler_state": "serving", "executor_state": "ready"}
    figures |= {"num_running": 3, "num_waiting": 2, "num_total_blocks": 40, "num_free_blocks": 30, "max_num_seqs": 6}
    figures |= {"recent_prefix_hit_rate": 0.75}
    load = scheduler_load(Status(**figures), 120.0)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.token_usage, load.utilization, load.cache_hit_rate) == (0.25, 0.5, 0.75)
    assert (load.gen_throughput, load.max_running_requests) == (120.0, 6)
    empty = scheduler_load(Status(**figures | {"num_total_blocks": 0, "num_free_blocks": 0, "max_num_seqs": 0}), 0.0)
    assert (empty.token_usage, empty.utilization) == (0.0, 0.0)


def test_the_rate_of_output_is_that_between_readings() -> None:
    rate = OutputRate()
    assert rate.read(1000, 10.0) == 0.0
    assert rate.read(1100, 12.0) == 50.0
    assert rate.read(1101, 12.1) == 50.0  # Too soon for a new one.
    assert rate.read(5, 20.0) == 0.0  # Another scheduler counts from 0.
    assert rate.read(15, 21.0) == 10.0


def prompt_pieces() -> list[api.GenerateResponse]:
    """A prompt of three tokens in two pieces, with one alternative each."""
    entries = [
        api.TokenLogprob(token_id=token_id, logprob=-0.25, top=[api.TopLogprob(token_id=9, logprob=-0.125)])
        for token_id in (6, 7)
    ]
    first = api.Prompt(first_token_index=0, token_ids=[5, 6], logprobs=entries[:1])
    second = api.Prompt(first_token_index=2, token_ids=[7], logprobs=entries[1:])
    return [api.GenerateResponse(prompt=first), api.GenerateResponse(prompt=second)]


def input_logprobs(*, alternatives: bool) -> vllm.InputLogProbs:
    made = vllm.InputLogProbs(token_ids=[5, 6, 7])
    made.token_logprobs.add()
    for _ in range(2):
        made.token_logprobs.add(value=-0.25)
    if alternatives:
        made.top_logprobs.add()
        for _ in range(2):
            made.top_logprobs.add(values=[-0.125], token_ids=[9])
    return made


async def test_the_prompt_is_told_once_in_a_stream_and_with_every_whole_output() -> None:
    reason = api.FINISH_REASON_LENGTH
    ends = [finished(index, 2, reason=reason) for index in (0, 1)]
    events = [ACCEPTED, *prompt_pieces(), delta(0, [1]), delta(0, [2]), ends[0], delta(1, [3]), ends[1]]
    for count in (0, 1):
        expected = input_logprobs(alternatives=count > 0)
        sampling = vllm.SamplingParams(n=2, prompt_logprobs=count)
        told = await answers_to(vllm.GenerateRequest(stream=True, sampling_params=sampling), *events)
        chunks = [answer.chunk for answer in told if answer.HasField("chunk")]
        assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True, False, False]
        assert chunks[0].input_logprobs == expected
        assert not any(answer.complete.HasField("input_logprobs") for answer in told if answer.HasField("complete"))
        whole = await answers_to(vllm.GenerateRequest(sampling_params=sampling), *events)
        assert [answer.complete.input_logprobs for answer in whole] == [expected, expected]
