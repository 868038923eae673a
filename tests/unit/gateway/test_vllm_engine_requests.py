"""Every field of VllmEngine's request: translated, without meaning for tokens, or refused by its name."""

import grpc
import pytest

pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine: the extra smg")

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from fake_scheduler import MODEL
from headway_gateway.requests.structural_tags import grammar_of_tags
from headway_gateway.requests.validation import check_request
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_gateway.vllm_engine.requests import (
    TEXT_SAMPLING_FIELDS,
    TRANSLATED_FIELDS,
    TRANSLATED_SAMPLING_FIELDS,
    in_callers_words,
    translate,
)
from headway_proto import generation_pb2 as api


def request(**sampling) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(original_text="a b", input_ids=[5, 6]),
        sampling_params=vllm.SamplingParams(**sampling),
    )


def refusal(wrong: vllm.GenerateRequest, metadata=None) -> CallRefusedError:
    with pytest.raises(CallRefusedError) as caught:
        translate(wrong, metadata or {})
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value


TAG = '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}'
TRANSLATIONS = [
    ("temperature", 0.0, "temperature", 0.0),
    ("temperature", 0.5, "temperature", 0.5),
    ("top_p", 0.25, "top_p", 0.25),
    ("top_k", 7, "top_k", 7),
    ("top_k", 4_294_967_295, "top_k", 2_147_483_647),
    ("min_p", 0.5, "min_p", 0.5),
    ("frequency_penalty", -1.0, "frequency_penalty", -1.0),
    ("presence_penalty", 1.5, "presence_penalty", 1.5),
    ("repetition_penalty", 1.25, "repetition_penalty", 1.25),
    ("max_tokens", 3, "max_tokens", 3),
    ("max_tokens", 0, "max_tokens", 0),
    ("min_tokens", 2, "min_tokens", 2),
    ("stop", ["x", "yz"], "stop", ["x", "yz"]),
    ("stop_token_ids", [9, 8], "stop_token_ids", [9, 8]),
    ("ignore_eos", True, "ignore_eos", True),
    ("n", 3, "n", 3),
    ("logprobs", 0, "logprobs", 0),
    ("logprobs", 5, "logprobs", 5),
    ("seed", 11, "seed", 11),
    ("seed", -1, "seed", (1 << 64) - 1),
    ("prompt_logprobs", 0, "prompt_logprobs", 0),
    ("prompt_logprobs", 20, "prompt_logprobs", 20),
    # Of the prompt, not of the sampling: see below.
    ("truncate_prompt_tokens", 2, "stop", []),
    ("truncate_prompt_tokens", 9, "stop", []),
    ("logit_bias", {7: -2.5}, "logit_bias", [api.LogitBias(token_id=7, bias=-2.5)]),
    ("json_schema", "{}", "json_schema", "{}"),
    ("json_object", True, "json_object", True),
    ("regex", "a+", "regex", "a+"),
    ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
    ("choice", vllm.ChoiceConstraint(choices=["a", "b"]), "choice", api.Choice(choices=["a", "b"])),
    ("structural_tag", TAG, "grammar", grammar_of_tags(TAG)),
    # Of the text in which stop strings are looked for: an argument of the generation, not a field of ours.
    ("skip_special_tokens", True, "stop", []),
]


@pytest.mark.parametrize(("field", "given", "ours", "value"), TRANSLATIONS)
def test_a_sampling_field_is_translated(field, given, ours, value) -> None:
    native = translate(request(**{field: given}), {})
    assert getattr(native.sampling, ours) == value
    assert list(native.token_ids.ids) == [5, 6]
    assert native.request_id == "r"


def test_what_proto3_cannot_tell_from_unset_is_the_default() -> None:
    given = translate(request(), {})
    assert not any(
        given.sampling.HasField(name) for name in ("temperature", "top_p", "repetition_penalty", "n", "seed")
    )
    spec = check_request(given, MODEL)
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (spec.num_continuations, spec.max_tokens, sampling.logprobs) == (1, None, -1)


@pytest.mark.parametrize("field", sorted(TEXT_SAMPLING_FIELDS))
def test_a_field_about_text_changes_nothing(field) -> None:
    assert translate(request(**{field: True}), {}) == translate(request(), {})


def test_tags_that_are_none_are_refused() -> None:
    error = refusal(request(structural_tag="{}"))
    assert [name for name, _ in error.violations] == ["sampling_params.structural_tag"]
    assert "; allowed: a format, or structures with triggers" in error.message


REFUSED = {
    "kv_transfer_params": vllm.KvTransferParams(remote_host="h"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": vllm.MultimodalInputs(),
    "extra_mm_inputs": [vllm.MultimodalInputs()],
    "media_refs": vllm.MediaRefs(),
    "data_parallel_rank": 1,
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_a_field_without_an_equal_is_refused(field, value) -> None:
    wrong = request()
    wrong.MergeFrom(vllm.GenerateRequest(**{field: value}))
    assert [name for name, _ in refusal(wrong).violations] == [field]


def test_no_field_of_the_stubs_is_left_without_a_decision() -> None:
    """A field of newer stubs is refused until somebody decides, and this test asks for the decision."""
    decided = TRANSLATED_FIELDS | set(REFUSED)
    assert set(vllm.GenerateRequest.DESCRIPTOR.fields_by_name) == decided
    decided = TRANSLATED_SAMPLING_FIELDS | TEXT_SAMPLING_FIELDS
    assert set(vllm.SamplingParams.DESCRIPTOR.fields_by_name) == decided
    assert {field for field, *_ in TRANSLATIONS} == TRANSLATED_SAMPLING_FIELDS


def test_the_one_rank_there_is_may_be_named() -> None:
    given = request()
    given.data_parallel_rank = 0
    assert translate(given, {}) == translate(request(), {})


def test_a_constraint_without_anything_in_it_is_not_passed_over() -> None:
    """An empty text or list is still what the output must be."""
    for field, empty in (("regex", ""), ("json_schema", ""), ("choice", vllm.ChoiceConstraint())):
        assert translate(request(**{field: empty}), {}).sampling.WhichOneof("constraint") == field
    with pytest.raises(CallRefusedError, match=r"sampling\.choice: 0 choices are not allowed"):
        check_request(translate(request(choice=vllm.ChoiceConstraint()), {}), MODEL)


def test_every_wrong_field_is_told_at_once() -> None:
    error = refusal(request(logprobs=-1, structural_tag="{}", stop_token_ids=[1 << 31]))
    assert [field for field, _ in error.violations] == [
        "sampling_params.structural_tag",
        "sampling_params.logprobs",
        "sampling_params.stop_token_ids",
    ]


def test_a_token_id_beyond_int32_is_refused() -> None:
    wrong = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 4_000_000_000]))
    assert refusal(wrong).message == "tokenized.input_ids: 4000000000 is not a token id of this model"


def test_the_end_of_a_prompt_is_kept() -> None:
    assert list(translate(request(truncate_prompt_tokens=1), {}).token_ids.ids) == [6]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(prompt_logprobs=-1), "sampling_params.prompt_logprobs: -1 is not allowed; allowed: 0 to 20"),
        (
            request(truncate_prompt_tokens=0),
            "sampling_params.truncate_prompt_tokens: 0 is not allowed; allowed: 1 or more",
        ),
        (
            vllm.GenerateRequest(text="abc", sampling_params=vllm.SamplingParams(truncate_prompt_tokens=2)),
            "sampling_params.truncate_prompt_tokens: not allowed together with text; allowed: with token ids",
        ),
    ],
)
def test_what_cannot_be_said_of_a_prompt_is_refused(wrong, message) -> None:
    assert refusal(wrong).message == message


def test_text_is_a_prompt_too() -> None:
    assert translate(vllm.GenerateRequest(text="abc"), {}).text == "abc"


def test_metadata_tells_class_tenant_and_objectives() -> None:
    metadata = {
        "headway-priority": "high",
        "headway-tenant": "acme",
        "headway-ttft-slo-ms": "300",
        "headway-itl-slo-ms": "40",
        "user-agent": "x",
    }
    native = translate(request(), metadata)
    assert (native.priority, native.tenant) == (api.PRIORITY_HIGH, "acme")
    assert (native.ttft_slo_ms, native.itl_slo_ms) == (300, 40)
    assert translate(request(), {}).priority == api.PRIORITY_UNSPECIFIED


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("headway-priority", "urgent", "realtime, high, normal, low"),
        ("headway-ttft-slo-ms", "-1", "milliseconds as a whole number"),
        ("headway-itl-slo-ms", "1e9", "milliseconds as a whole number"),
    ],
)
def test_wrong_metadata_is_refused(key, value, allowed) -> None:
    assert refusal(request(), {key: value}).message == (f"metadata {key}: {value!r} is not allowed; allowed: {allowed}")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (request(temperature=-1.0), "sampling_params.temperature"),
        (request(n=17), "sampling_params.n"),
        (request(max_tokens=0), "sampling_params.max_tokens"),
        (request(stop=[""]), "sampling_params.stop[0]"),
        (request(logit_bias={5000: 1.0}), "sampling_params.logit_bias"),
        (vllm.GenerateRequest(), "input"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput()), "tokenized.input_ids"),
    ],
)
def test_complaints_name_the_callers_fields(wrong, field) -> None:
    with pytest.raises(CallRefusedError) as caught:
        check_request(translate(wrong, {}), MODEL)
    told = in_callers_words(caught.value)
    assert [name for name, _ in told.violations] == [field]
    assert told.message.startswith(f"{field}: ")


def test_complaints_keep_places_and_those_without_fields_stay() -> None:
    told = in_callers_words(invalid_argument("token_ids.ids[3]", "9 is not a token id of this model"))
    assert told.message == "tokenized.input_ids[3]: 9 is not a token id of this model"
    other = CallRefusedError(grpc.StatusCode.UNAVAILABLE, "draining", retry_after_s=1.0)
    assert in_callers_words(other) is other
