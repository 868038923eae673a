"""VllmEngine's requests as ``headway.v1``, and refusals back. No field is ignored silently."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from headway_gateway.access.authentication import TENANT_METADATA_KEY
from headway_gateway.requests.structural_tags import grammar_of_tags
from headway_gateway.statuses import CallRefusedError, invalid_arguments, renamed
from headway_proto import generation_pb2 as api
from headway_proto.wording import one_line, shown

PRIORITY_METADATA_KEY = "headway-priority"
TTFT_SLO_METADATA_KEY = "headway-ttft-slo-ms"
ITL_SLO_METADATA_KEY = "headway-itl-slo-ms"

TRANSLATED_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"})
TRANSLATED_EMBED_FIELDS = frozenset({"request_id", "tokenized"})
TRANSLATED_SAMPLING_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "ignore_eos",
        "n",
        "logprobs",
        "seed",
        "logit_bias",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "json_schema",
        "json_object",
        "regex",
        "grammar",
        "choice",
        "structural_tag",
    }
)
TEXT_SAMPLING_FIELDS = frozenset(
    {
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        # A constraint always begins with the first token here.
        "grammar_from_first_token",
    }
)
"""Accepted without effect: the answer has tokens only."""

_NO_MEDIA = "media are not supported; allowed: text and token ids"
_NO_TRANSFER = "KV caches are not transferred between engines; allowed: unset"
_REASONS = {
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
}
_UNKNOWN = "unknown to this version of Headway; allowed: unset"
_MOST_INT32 = (1 << 31) - 1
_SEED_MASK = (1 << 64) - 1
_PRIORITIES = {
    "realtime": api.PRIORITY_REALTIME,
    "high": api.PRIORITY_HIGH,
    "normal": api.PRIORITY_NORMAL,
    "low": api.PRIORITY_LOW,
}
_CALLERS_NAMES = (
    ("sampling.", "sampling_params."),
    ("token_ids.ids", "tokenized.input_ids"),
    ("inputs[0].token_ids.ids", "tokenized.input_ids"),
    ("inputs[0]", "tokenized"),
    ("prompt", "input"),
    ("tenant", f"metadata {TENANT_METADATA_KEY}"),
)
"""Prefixes of our field names and of the caller's."""


def translate(request: vllm.GenerateRequest, metadata: Mapping[str, str]) -> api.GenerateRequest:
    """Return the request in ``headway.v1``.

    Raises:
        CallRefusedError: INVALID_ARGUMENT with every field that has no equivalent.
    """
    wrong = dict(_refusals(request))
    wrong.update(_metadata_refusals(metadata))
    if wrong:
        raise invalid_arguments(wrong)
    native = api.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(request.sampling_params),
        priority=_PRIORITIES.get(metadata.get(PRIORITY_METADATA_KEY, ""), api.PRIORITY_UNSPECIFIED),
        tenant=metadata.get(TENANT_METADATA_KEY, ""),
        ttft_slo_ms=int(metadata.get(TTFT_SLO_METADATA_KEY, "0")),
        itl_slo_ms=int(metadata.get(ITL_SLO_METADATA_KEY, "0")),
        keep_special_tokens=not request.sampling_params.skip_special_tokens,
    )
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        native.token_ids.SetInParent()
        # Truncation keeps a prompt's end.
        native.token_ids.ids.extend(request.tokenized.input_ids[-request.sampling_params.truncate_prompt_tokens :])
    elif kind == "text":
        native.text = request.text
    return native


def translate_embed(request: vllm.EmbedRequest, metadata: Mapping[str, str]) -> api.EmbedRequest:
    """Return the request in ``headway.v1``; the checkpoint chooses the pooling. Raises as ``translate``."""
    wrong = dict(_untranslatable(request, "", TRANSLATED_EMBED_FIELDS))
    wrong.update(_metadata_refusals(metadata))
    token_ids = request.tokenized.input_ids
    wrong.update(_token_id_refusals("tokenized.input_ids", token_ids))
    if wrong:
        raise invalid_arguments(wrong)
    return api.EmbedRequest(
        request_id=request.request_id,
        inputs=[api.Input(token_ids=api.TokenIds(ids=token_ids))],
        priority=_PRIORITIES.get(metadata.get(PRIORITY_METADATA_KEY, ""), api.PRIORITY_UNSPECIFIED),
        tenant=metadata.get(TENANT_METADATA_KEY, ""),
        ttft_slo_ms=int(metadata.get(TTFT_SLO_METADATA_KEY, "0")),
    )


def in_callers_words(refusal: CallRefusedError) -> CallRefusedError:
    """Use the caller's field names."""
    return renamed(refusal, _CALLERS_NAMES)


def _sampling(given: vllm.SamplingParams) -> api.SamplingParams:
    """Values that proto3 cannot distinguish from unset become defaults."""
    native = api.SamplingParams(
        min_tokens=given.min_tokens,
        min_p=given.min_p,
        top_k=min(given.top_k, _MOST_INT32),
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=[api.LogitBias(token_id=token_id, bias=bias) for token_id, bias in given.logit_bias.items()],
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )
    for name in ("temperature", "max_tokens", "logprobs", "prompt_logprobs"):
        if given.HasField(name):
            setattr(native, name, getattr(given, name))
    for name in ("top_p", "repetition_penalty", "n"):
        if getattr(given, name):
            setattr(native, name, getattr(given, name))
    if given.HasField("seed"):
        native.seed = given.seed & _SEED_MASK
    constraint = given.WhichOneof("constraint")
    if constraint == "choice":
        native.choice.choices.extend(given.choice.choices)
        native.choice.SetInParent()
    elif constraint == "structural_tag":
        native.grammar = grammar_of_tags(given.structural_tag)
    elif constraint in {"json_schema", "json_object", "regex", "grammar"}:
        setattr(native, constraint, getattr(given, constraint))
    return native


def _refusals(request: vllm.GenerateRequest) -> Iterable[tuple[str, str]]:
    yield from _untranslatable(request, "", TRANSLATED_FIELDS)
    sampling = request.sampling_params
    yield from _untranslatable(sampling, "sampling_params.", TRANSLATED_SAMPLING_FIELDS | TEXT_SAMPLING_FIELDS)
    if sampling.HasField("structural_tag"):
        try:
            grammar_of_tags(sampling.structural_tag)
        except ValueError as error:
            yield "sampling_params.structural_tag", one_line(error)
    if request.data_parallel_rank:
        yield "data_parallel_rank", f"{request.data_parallel_rank} is not allowed; allowed: 0, the only rank"
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) < 0:
            yield f"sampling_params.{name}", f"{getattr(sampling, name)} is not allowed; allowed: 0 to 20"
    if sampling.HasField("truncate_prompt_tokens"):
        if sampling.truncate_prompt_tokens < 1:
            field = "sampling_params.truncate_prompt_tokens"
            yield field, f"{sampling.truncate_prompt_tokens} is not allowed; allowed: 1 or more"
        elif request.HasField("text"):
            yield "sampling_params.truncate_prompt_tokens", "not allowed together with text; allowed: with token ids"
    yield from _token_id_refusals("tokenized.input_ids", request.tokenized.input_ids)
    yield from _token_id_refusals("sampling_params.stop_token_ids", sampling.stop_token_ids)


def _token_id_refusals(field: str, token_ids: Sequence[int]) -> Iterable[tuple[str, str]]:
    """Token ids travel as int32 from here on."""
    if token_ids and max(token_ids) > _MOST_INT32:
        yield field, f"{max(token_ids)} is not a token id of this model"


def _untranslatable(message: Any, prefix: str, accepted: frozenset[str]) -> Iterable[tuple[str, str]]:
    for descriptor, _ in message.ListFields():
        if descriptor.name not in accepted:
            field = prefix + descriptor.name
            yield field, _REASONS.get(field, _UNKNOWN)


def _metadata_refusals(metadata: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    priority = metadata.get(PRIORITY_METADATA_KEY)
    if priority is not None and priority not in _PRIORITIES:
        yield (
            f"metadata {PRIORITY_METADATA_KEY}",
            f"{shown(priority)} is not allowed; allowed: {', '.join(_PRIORITIES)}",
        )
    for key in (TTFT_SLO_METADATA_KEY, ITL_SLO_METADATA_KEY):
        value = metadata.get(key, "0")
        if not (value.isascii() and value.isdigit() and len(value) <= 9):
            yield f"metadata {key}", f"{shown(value)} is not allowed; allowed: milliseconds as a whole number"
