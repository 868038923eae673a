"""Checks of the requests with several inputs: Embed and Score. Must not know: sockets, tasks, tokenising."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import grpc

from headway_gateway.requests.validation import name_violations, served_adapter
from headway_gateway.statuses import CallRefusedError, invalid_arguments
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo
from headway_proto.pooling import POOL_SCORE

MAX_INPUTS = 64


class CheckedInputs(NamedTuple):
    """``adapter``: its name, or ""."""

    request_id: str
    adapter: str


def check_embed(request: api.EmbedRequest, model: ModelInfo) -> CheckedInputs:
    """Check what needs no tokenised input.

    Raises:
        CallRefusedError: FAILED_PRECONDITION if the executor makes no vectors, else as ``check_request``.
    """
    adapter = served_adapter(request, model)
    if is_reranker(model):
        raise _not_here(f"Embed: the model {model.name} scores pairs and makes no vectors; allowed: Score")
    if not model.embedding_size:
        raise _not_here(f"Embed: the backend {model.backend} makes no vectors here")
    wrong = dict(name_violations(request))
    wrong.update(_list_violations("inputs", request.inputs))
    if request.pooling not in api.Pooling.values():
        wrong["pooling"] = f"{request.pooling} is not allowed; allowed: 0 to {max(api.Pooling.values())}"
    elif not (request.pooling or model.default_pooling):
        wrong["pooling"] = "unset, and the checkpoint names none that is known; allowed: LAST, MEAN, CLS"
    if request.dimensions > model.embedding_size:
        wrong["dimensions"] = (
            f"{request.dimensions} is not allowed; allowed: 0 (all) to {model.embedding_size}, the model's"
        )
    return _checked(request.request_id, adapter, wrong)


def check_score(request: api.ScoreRequest, model: ModelInfo) -> CheckedInputs:
    """Check what needs no tokenised input.

    Raises:
        CallRefusedError: FAILED_PRECONDITION if the executor reports no log probabilities, else as ``check_request``.
    """
    adapter = served_adapter(request, model)
    if not is_reranker(model):
        require_generates(model, "Score")
        if not model.supports_prompt_logprobs:
            raise _not_here(f"Score: the backend {model.backend} reports no log probabilities of prompts")
    wrong = dict(name_violations(request))
    wrong.update(_input_violations("prompt", request.prompt))
    wrong.update(_list_violations("continuations", request.continuations))
    if is_reranker(model):
        named = [("prompt", request.prompt)]
        named += ((f"continuations[{place}]", one) for place, one in enumerate(request.continuations[:MAX_INPUTS]))
        for field, one in named:
            if one.HasField("token_ids"):
                wrong[field] = (
                    "token_ids are not allowed for a reranker, whose texts are tokenized in pairs; allowed: text"
                )
    return _checked(request.request_id, adapter, wrong)


def is_reranker(model: ModelInfo) -> bool:
    """Whether it gives relevances of pairs of texts, and nothing else."""
    return model.default_pooling == POOL_SCORE


def require_generates(model: ModelInfo, call: str) -> None:
    """Refuse ``call`` for an encoder, or a decoder without a head.

    Raises:
        CallRefusedError: FAILED_PRECONDITION.
    """
    if not model.generates:
        if is_reranker(model):
            raise _not_here(f"{call}: the model {model.name} scores pairs and makes no text; allowed: Score")
        raise _not_here(f"{call}: the model {model.name} makes vectors and no text; allowed: Embed")


def _not_here(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, message, reason="not_supported_by_model")


def _checked(request_id: str, adapter: str, wrong: Mapping[str, str]) -> CheckedInputs:
    if wrong:
        raise invalid_arguments(wrong)
    return CheckedInputs(request_id or secrets.token_hex(16), adapter)


def _list_violations(field: str, inputs: "Sequence[api.Input]") -> Iterable[tuple[str, str]]:
    # They are counted before one is looked at: millions of objects take seconds.
    if not 1 <= len(inputs) <= MAX_INPUTS:
        yield field, f"{len(inputs)} are not allowed; allowed: 1 to {MAX_INPUTS}"
        return
    for place, one in enumerate(inputs):
        yield from _input_violations(f"{field}[{place}]", one)


def _input_violations(field: str, one: api.Input) -> Iterable[tuple[str, str]]:
    kind = one.WhichOneof("input")
    if kind is None:
        yield field, "there is none; allowed: one of text, token_ids"
    elif kind == "text" and not one.text:
        yield f"{field}.text", "it is empty; allowed: at least one character"
    elif kind == "token_ids" and not one.token_ids.ids:
        yield f"{field}.token_ids.ids", "it is empty; allowed: at least one token"
