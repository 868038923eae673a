"""Every bad field of a request: which code, which field, which words. What is good passes unharmed."""

import math
import time

import grpc
import msgspec
import pytest

from headway_gateway.requests.input_checks import MAX_INPUTS, check_score
from headway_gateway.requests.validation import (
    MOST_TOLD,
    CheckedRequest,
    check_prompt,
    check_request,
    resolve_max_tokens,
)
from headway_gateway.statuses import CallRefusedError
from headway_proto.columns import encode_column
from headway_proto.generation_pb2 import (
    Chat,
    ChatMessage,
    GenerateRequest,
    Input,
    LogitBias,
    Resume,
    SamplingParams,
    ScoreRequest,
    TokenIds,
)
from headway_proto.ingress import PRIORITY_LOW, PRIORITY_NORMAL, ModelInfo, Submit
from headway_proto.pooling import POOL_SCORE
from headway_proto.sampling import NO_LOGPROBS
from headway_proto.sampling import SamplingParams as WireSampling

MODEL = ModelInfo(
    name="demo", fingerprint="f", backend="b", device="cpu", dtype="float32", max_model_len=100, vocab_size=50,
    eos_token_ids=(0,), max_request_tokens=80, supports_prompt_logprobs=True,
)  # fmt: skip

RERANKER = msgspec.structs.replace(MODEL, embedding_size=1, default_pooling=POOL_SCORE)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request(**changes: object) -> GenerateRequest:
    return GenerateRequest(**({"text": "x"} | changes))


def sampled(**changes: object) -> GenerateRequest:
    return request(sampling=SamplingParams(**changes))


def submitted(checked: CheckedRequest) -> Submit:
    return checked.submission(0, handle=7, prompt=encode_column([1, 2]), max_tokens=3, traceparent="00-trace")


BAD = [
    (request(request_id="é" * 65), "request_id", "130 bytes; allowed: at most 128"),
    (request(request_id="a\nb"), "request_id", "control character"),
    (request(request_id="a\x85b"), "request_id", "control character"),
    (request(tenant="t" * 129), "tenant", "129 bytes; allowed: at most 128"),
    (request(tenant="\x7f"), "tenant", "control character"),
    (request(priority=9), "priority", "9 is not allowed; allowed: 0 to 4"),
    (GenerateRequest(), "prompt", "there is none; allowed: one of text, token_ids, chat"),
    (GenerateRequest(text=""), "text", "the prompt is empty"),
    (GenerateRequest(token_ids=TokenIds()), "token_ids.ids", "the prompt is empty"),
    (GenerateRequest(chat=Chat()), "chat.messages", "the prompt is empty"),
    (
        GenerateRequest(chat=Chat(messages=[ChatMessage(role="user"), ChatMessage(role="root", content="x")])),
        "chat.messages[1].role",
        "'root' is not a role; allowed: system, developer, user, assistant, tool",
    ),
    (
        GenerateRequest(chat=Chat(messages=[ChatMessage(role="user")] * 16385)),
        "chat.messages",
        "16385 are not allowed; allowed: at most 16384",
    ),
    (sampled(max_tokens=0), "sampling.max_tokens", "0 is not allowed; allowed: 1 or more"),
    (sampled(max_tokens=3, min_tokens=4), "sampling.min_tokens", "4 is not allowed; allowed: at most max_tokens, 3"),
    (sampled(temperature=-0.5), "sampling.temperature", "-0.5 is not allowed; allowed: 0 (greedy) to 100"),
    (sampled(temperature=math.nan), "sampling.temperature", "nan is not allowed"),
    (sampled(temperature=math.inf), "sampling.temperature", "inf is not allowed"),
    (sampled(top_p=0.0), "sampling.top_p", "0.0 is not allowed; allowed: above 0, up to 1"),
    (sampled(top_p=1.5), "sampling.top_p", "1.5 is not allowed"),
    (sampled(top_p=math.nan), "sampling.top_p", "nan is not allowed"),
    (sampled(top_k=-2), "sampling.top_k", "-2 is not allowed; allowed: -1 or 0 (keep all), or 1 and more"),
    (sampled(min_p=-0.5), "sampling.min_p", "allowed: 0 to 1"),
    (sampled(min_p=1.5), "sampling.min_p", "allowed: 0 to 1"),
    (sampled(min_p=math.nan), "sampling.min_p", "nan"),
    (sampled(repetition_penalty=0.0), "sampling.repetition_penalty", "allowed: above 0, up to 10"),
    (sampled(repetition_penalty=11.0), "sampling.repetition_penalty", "allowed: above 0, up to 10"),
    (sampled(repetition_penalty=math.nan), "sampling.repetition_penalty", "nan"),
    (sampled(presence_penalty=2.5), "sampling.presence_penalty", "allowed: -2 to 2"),
    (sampled(presence_penalty=math.nan), "sampling.presence_penalty", "nan"),
    (sampled(frequency_penalty=-2.5), "sampling.frequency_penalty", "allowed: -2 to 2"),
    (sampled(frequency_penalty=math.inf), "sampling.frequency_penalty", "inf"),
    (sampled(n=0), "sampling.n", "0 is not allowed; allowed: 1 to 16"),
    (sampled(n=17), "sampling.n", "17 is not allowed; allowed: 1 to 16"),
    (sampled(logprobs=21), "sampling.logprobs", "21 is not allowed; allowed: 0 to 20"),
    (sampled(logit_bias=[LogitBias(token_id=-1, bias=1)]), "sampling.logit_bias", "-1 is not allowed"),
    (sampled(logit_bias=[LogitBias(token_id=50, bias=1)]), "sampling.logit_bias", "allowed: token ids 0 to 49"),
    (sampled(logit_bias=[LogitBias(token_id=1, bias=math.nan)]), "sampling.logit_bias", "nan is not allowed"),
    (sampled(logit_bias=[LogitBias(token_id=1, bias=101)]), "sampling.logit_bias", "allowed: -100 to 100"),
    (sampled(logit_bias=[LogitBias()] * 301), "sampling.logit_bias", "301 is not allowed; allowed: at most 300"),
    (sampled(stop=["a"] * 5), "sampling.stop", "5 entries are not allowed; allowed: at most 4"),
    (sampled(stop=["a", ""]), "sampling.stop[1]", "'' is not allowed; allowed: 1 to 256 bytes"),
    (sampled(stop=["é" * 129]), "sampling.stop[0]", "allowed: 1 to 256 bytes"),
    (sampled(stop_token_ids=[50]), "sampling.stop_token_ids", "50 is not allowed; allowed: token ids 0 to 49"),
    (sampled(stop_token_ids=[-1]), "sampling.stop_token_ids", "-1 is not allowed"),
    (sampled(stop_token_ids=[1] * 65), "sampling.stop_token_ids", "65 entries are not allowed; allowed: at most 64"),
    (request(resume=Resume(others=[{}])), "resume.others", "1 entries are not allowed; allowed: at most n - 1, 0"),
    (
        request(resume=Resume(others=[{"ids": [50]}, {"ids": [1]}]), sampling=SamplingParams(n=2, best_of=3)),
        "resume.others",
        "2 entries are not allowed; allowed: at most n - 1, 1",
    ),
    (
        request(resume=Resume(token_ids=[1]), sampling=SamplingParams(best_of=2)),
        "resume.token_ids",
        "1 tokens are not allowed together with best_of = 2, whose outputs come whole; allowed: none",
    ),
    (
        request(resume=Resume(others=[{"ids": [1, 2]}]), sampling=SamplingParams(n=2, best_of=3)),
        "resume.others[0].ids",
        "2 tokens are not allowed together with best_of = 3",
    ),
    (
        request(resume=Resume(others=[{}, {"ids": [3, -1]}]), sampling=SamplingParams(n=3)),
        "resume.others[1].ids",
        "-1 is not a token id of this model; allowed: 0 to 49",
    ),
    (
        request(resume=Resume(token_ids=[1]), sampling=SamplingParams(prompt_logprobs=1)),
        "sampling.prompt_logprobs",
        "not allowed together with resume.token_ids: the prompt was reported before them; allowed: unset",
    ),
    (sampled(prompt_logprobs=21), "sampling.prompt_logprobs", "21 is not allowed; allowed: 0 to 20"),
    (sampled(best_of=0), "sampling.best_of", "0 is not allowed; allowed: n, 1, to 16"),
    (sampled(n=3, best_of=2), "sampling.best_of", "2 is not allowed; allowed: n, 3, to 16"),
    (sampled(best_of=17), "sampling.best_of", "17 is not allowed; allowed: n, 1, to 16"),
    (request(resume=Resume(seed=1), sampling=SamplingParams(seed=2)), "resume.seed", "1 differs from sampling.seed 2"),
    (request(resume=Resume(token_ids=[1, 50])), "resume.token_ids", "50 is not a token id of this model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "field", "words"), BAD, ids=[f"{field}-{place}" for place, (_, field, _) in enumerate(BAD)]
)
def test_a_bad_field_is_refused_by_name(bad, field, words):
    with pytest.raises(CallRefusedError) as refusal:
        check_request(bad, MODEL)
    assert refusal.value.code is INVALID
    violations = dict(refusal.value.violations)
    assert list(violations) == [field]
    assert words in violations[field]
    assert "allowed" in violations[field]
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 400


def test_every_bad_field_is_named_at_once():
    with pytest.raises(CallRefusedError) as refusal:
        check_request(GenerateRequest(sampling=SamplingParams(n=0, top_p=7.0)), MODEL)
    assert {field for field, _ in refusal.value.violations} == {"prompt", "sampling.n", "sampling.top_p"}


@pytest.mark.parametrize(
    "bad",
    [
        sampled(stop=[""] * 100_000),
        sampled(logit_bias=[LogitBias(token_id=-1, bias=1000)] * 500_000),
        sampled(stop_token_ids=[-1] * 1_000_000),
        request(chat=Chat(messages=[ChatMessage(role="x", content="x")] * 100_000)),
    ],
    ids=["stop strings", "biases", "stop tokens", "messages"],
)
def test_of_many_faults_some_are_told(bad):
    began_at = time.process_time()
    with pytest.raises(CallRefusedError) as refusal:
        check_request(bad, MODEL)
    assert time.process_time() - began_at < 0.5
    assert len(refusal.value.violations) <= MOST_TOLD


def test_of_many_texts_that_a_reranker_does_not_take_some_are_told():
    continuations = [Input(token_ids=TokenIds(ids=[1]))] * 100_000
    with pytest.raises(CallRefusedError) as refusal:
        check_score(ScoreRequest(prompt=Input(text="x"), continuations=continuations), RERANKER)
    assert len(refusal.value.violations) == 1 + MAX_INPUTS


def test_another_model_is_not_found():
    with pytest.raises(CallRefusedError) as refusal:
        check_request(request(model="gpt-7" * 40), MODEL)
    assert refusal.value.code is grpc.StatusCode.NOT_FOUND
    assert len(refusal.value.message) < 150
    check_request(request(model="demo"), MODEL)


def test_defaults_are_filled_in():
    spec = check_request(request(sampling=SamplingParams(seed=5)), MODEL)
    assert spec.sampling == WireSampling(seed=5)
    assert spec.sampling.logprobs == NO_LOGPROBS
    assert spec.max_tokens is None
    assert spec.num_continuations == 1
    assert submitted(spec).priority == PRIORITY_NORMAL
    assert list(spec.held_by(0)) == []
    assert len(spec.request_id) == 32


def test_what_is_given_is_kept():
    spec = check_request(
        request(
            request_id="r",
            priority=PRIORITY_LOW,
            tenant="t",
            ttft_slo_ms=1,
            itl_slo_ms=2,
            sampling=SamplingParams(
                max_tokens=3, temperature=0.0, top_p=0.5, top_k=-1, min_p=0.25, n=2, logprobs=0, stop=["a"],
                stop_token_ids=[4], ignore_eos=True, seed=2**64 - 1, logit_bias=[LogitBias(token_id=1, bias=-2)],
            ),
        ),
        MODEL,
    )  # fmt: skip
    assert spec.request_id == "r"
    asked = submitted(spec)
    assert (asked.request_id, asked.sampling) == (spec.request_id, spec.sampling)
    assert (asked.tenant, asked.ttft_slo_ms, asked.itl_slo_ms, asked.priority) == ("t", 1, 2, PRIORITY_LOW)
    assert (asked.handle, asked.index, asked.num_prompt_tokens, asked.max_tokens) == (7, 0, 2, 3)
    assert (asked.ignore_eos, asked.traceparent) == (True, "00-trace")
    assert spec.sampling == WireSampling(
        temperature=0.0, top_p=0.5, min_p=0.25, top_k=0, logprobs=0, stop_token_ids=(4,), seed=2**64 - 1,
        logit_bias=((1, -2.0),),
    )  # fmt: skip
    assert (spec.num_continuations, spec.max_tokens) == (2, 3)


def test_seeds_of_continuations_count_up_and_wrap():
    spec = check_request(sampled(n=3, seed=2**64 - 2), MODEL)
    assert [spec.sampling_of(index).seed for index in range(3)] == [2**64 - 2, 2**64 - 1, 0]


def test_unset_seeds_differ():
    assert check_request(request(), MODEL).sampling.seed != check_request(request(), MODEL).sampling.seed


def test_resume_brings_its_seed():
    spec = check_request(request(resume=Resume(token_ids=[1, 2], seed=9)), MODEL)
    assert (spec.sampling.seed, list(spec.held_by(0))) == (9, [1, 2])


def test_each_continuation_has_its_held_tokens():
    resume = Resume(token_ids=[1, 2], seed=9, others=[{"ids": [3]}])
    spec = check_request(request(resume=resume, sampling=SamplingParams(n=3)), MODEL)
    assert [list(spec.held_by(index)) for index in range(3)] == [[1, 2], [3], []]
    assert [spec.sampling_of(index).seed for index in range(3)] == [9, 10, 11]


@pytest.mark.parametrize(
    ("ids", "field", "words"),
    [
        ([], "text", "the prompt is empty"),
        ([1] * 80, "text", "the prompt has 80 tokens; allowed: at most 79"),
        ([1, -1], "text[1]", "-1 is not a token id of this model; allowed: 0 to 49"),
        ([50], "text[0]", "50 is not a token id"),
    ],
)
def test_bad_prompts(ids, field, words):
    with pytest.raises(CallRefusedError) as refusal:
        check_prompt(ids, "text", MODEL)
    assert refusal.value.code is INVALID
    assert dict(refusal.value.violations)[field].startswith(words)


@pytest.mark.parametrize(
    ("sampling", "held", "code", "words"),
    [
        ({"max_tokens": 71}, None, INVALID, "sampling.max_tokens: 71 is not allowed; allowed: at most 70 behind 10"),
        ({"min_tokens": 71}, None, INVALID, "sampling.min_tokens: 71 is not allowed; allowed: at most 70"),
        ({"max_tokens": 3}, [1] * 4, grpc.StatusCode.OUT_OF_RANGE, "resume.token_ids: 4 tokens are held; the output"),
        ({}, [1] * 71, grpc.StatusCode.OUT_OF_RANGE, "resume.token_ids: 71 tokens are held; the output ends after 70"),
    ],
)
def test_room_behind_the_prompt(sampling, held, code, words):
    resume = {} if held is None else {"resume": Resume(token_ids=held)}
    spec = check_request(request(sampling=SamplingParams(**sampling), **resume), MODEL)
    with pytest.raises(CallRefusedError) as refusal:
        resolve_max_tokens(spec, 10, MODEL)
    assert refusal.value.code is code
    assert refusal.value.message.startswith(words)


def test_the_tokens_that_are_held_of_each_continuation_are_counted():
    resume = Resume(token_ids=[2], others=[{"ids": [1] * 71}])
    spec = check_request(request(sampling=SamplingParams(n=2), resume=resume), MODEL)
    with pytest.raises(
        CallRefusedError, match=r"^resume.others\[0\].ids: 71 tokens are held; the output ends after 70$"
    ):
        resolve_max_tokens(spec, 10, MODEL)


def test_unset_max_tokens_takes_the_room():
    assert resolve_max_tokens(check_request(request(), MODEL), 10, MODEL) == 70
    assert resolve_max_tokens(check_request(sampled(max_tokens=70), MODEL), 10, MODEL) == 70


def test_only_the_first_continuation_reports_the_prompt_and_all_report_themselves_where_some_are_chosen():
    spec = check_request(sampled(n=2, best_of=3, prompt_logprobs=4, seed=8), MODEL)
    assert (spec.num_continuations, spec.num_returned, spec.is_choice) == (3, 2, True)
    asked = [(one.seed, one.prompt_logprobs, one.logprobs) for one in map(spec.sampling_of, range(3))]
    assert asked == [(8, 4, 0), (9, NO_LOGPROBS, 0), (10, NO_LOGPROBS, 0)]
    assert not check_request(sampled(n=2, best_of=2), MODEL).is_choice


def test_a_backend_without_reports_of_prompts_is_not_asked():
    without = msgspec.structs.replace(MODEL, supports_prompt_logprobs=False)
    with pytest.raises(CallRefusedError, match=r"sampling.prompt_logprobs: the backend b does not support it"):
        check_request(sampled(prompt_logprobs=0), without)
