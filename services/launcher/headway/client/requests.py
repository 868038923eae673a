"""Messages from plain Python values; the server checks ranges."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import grpc

from headway.client.errors import InvalidRequestError
from headway_proto import admin_pb2, generation_pb2
from headway_proto.wording import shown


class ChatMessage(TypedDict):
    """One message of a chat prompt: a text, or parts of a text, each ``{"type": "text", "text": ...}``.

    Further keys, such as ``tool_calls``, reach the template as they are.
    """

    role: str
    content: str | Sequence[Mapping[str, Any]]


RequestT = TypeVar("RequestT")

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]


Input: TypeAlias = str | Sequence[int]

_MOST_TIMEOUT_S = 1e9
"""Some thirty years. gRPC takes a time beyond its own numbers for one that has passed."""


class BatchOptions(TypedDict, total=False):
    """Keyword arguments of ``score``, with the ranges and defaults of generation.proto."""

    request_id: str
    priority: Literal["realtime", "high", "normal", "low"]
    ttft_slo_ms: int
    tenant: str
    model: str
    adapter: str
    timeout_s: float


class EmbedOptions(BatchOptions, total=False):
    """Keyword arguments of ``embed``, with the ranges and defaults of generation.proto."""

    pooling: Literal["last", "mean", "cls"]
    normalize: bool
    dimensions: int


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``, with the ranges and defaults of generation.proto.

    A request has at most one constraint: ``json_schema`` (a text, or Python values), ``json_object``, ``regex``,
    ``grammar`` or ``choice``. ``tools`` and those behind it are of chats alone; ``chat_template_kwargs`` are variables of the
    template.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    n: int
    best_of: int
    echo: bool
    keep_special_tokens: bool
    request_id: str
    priority: Literal["realtime", "high", "normal", "low"]
    ttft_slo_ms: int
    itl_slo_ms: int
    tenant: str
    model: str
    adapter: str
    timeout_s: float
    json_schema: str | Mapping[str, Any] | bool
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


_PRIORITIES = {
    "realtime": generation_pb2.PRIORITY_REALTIME,
    "high": generation_pb2.PRIORITY_HIGH,
    "normal": generation_pb2.PRIORITY_NORMAL,
    "low": generation_pb2.PRIORITY_LOW,
}

_POOLINGS = {
    "last": generation_pb2.POOLING_LAST,
    "mean": generation_pb2.POOLING_MEAN,
    "cls": generation_pb2.POOLING_CLS,
}

_NAMED_NUMBERS: Mapping[str, Mapping[str, Any]] = {"priority": _PRIORITIES, "pooling": _POOLINGS}

_SCALAR_SAMPLING_OPTIONS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
)
_REQUEST_OPTIONS = (
    "request_id",
    "ttft_slo_ms",
    "itl_slo_ms",
    "tenant",
    "model",
    "adapter",
    "echo",
    "keep_special_tokens",
)
_CHAT_OPTIONS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
CONSTRAINT_OPTIONS = ("json_schema", "json_object", "regex", "grammar", "choice")
"""A request has at most one of these."""

_KNOWN_OPTIONS = GenerateOptions.__annotations__.keys()


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """Build a request.

    Raises:
        InvalidRequestError: a value does not fit the message.
        TypeError: an option is unknown.
    """
    unknown = options.keys() - _KNOWN_OPTIONS
    if unknown:
        raise TypeError(f"generate() has no option {min(unknown)!r}")
    values: Mapping[str, Any] = options
    stop = options.get("stop", ())
    with _refusals_of_protobuf():
        request = generation_pb2.GenerateRequest(
            sampling=generation_pb2.SamplingParams(
                logit_bias=[
                    generation_pb2.LogitBias(token_id=token_id, bias=bias)
                    for token_id, bias in options.get("logit_bias", {}).items()
                ],
                stop=[stop] if isinstance(stop, str) else stop,
                stop_token_ids=options.get("stop_token_ids", ()),
                **_constraint(values),
            ),
        )
        _set_fields(request, values, _REQUEST_OPTIONS)
        _set_fields(request.sampling, values, _SCALAR_SAMPLING_OPTIONS)
        _set_prompt(request, prompt)
        _set_chat_options(request, values)
    if "priority" in options:
        request.priority = _number("priority", options["priority"], _PRIORITIES)
    return request


def embed_request(inputs: Sequence[Input], options: EmbedOptions) -> generation_pb2.EmbedRequest:
    """Build a request. Raises as ``generate_request``."""
    request = generation_pb2.EmbedRequest()
    _set_options(request, options, EmbedOptions.__annotations__)
    with _refusals_of_protobuf():
        request.inputs.extend([_input(one) for one in inputs])
    return request


def score_request(prompt: Input, continuations: Sequence[Input], options: BatchOptions) -> generation_pb2.ScoreRequest:
    """Build a request. Raises as ``generate_request``."""
    request = generation_pb2.ScoreRequest()
    _set_options(request, options, BatchOptions.__annotations__)
    with _refusals_of_protobuf():
        request.prompt.CopyFrom(_input(prompt))
        request.continuations.extend([_input(one) for one in continuations])
    return request


def _set_options(request: Any, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = options.keys() - known.keys()
    if unknown:
        raise TypeError(f"this call has no option {min(unknown)!r}")
    with _refusals_of_protobuf():
        for name in _NAMED_NUMBERS.keys() & options.keys():
            setattr(request, name, _number(name, options[name], _NAMED_NUMBERS[name]))
        _set_fields(request, options, options.keys() - _NAMED_NUMBERS.keys() - {"timeout_s"})


def timeout_of(options: Mapping[str, Any]) -> float | None:
    """Return the time that a call may take, if the caller says so. Raises as ``checked_timeout``."""
    timeout_s = options.get("timeout_s")
    return None if timeout_s is None else checked_timeout(timeout_s)


def checked_timeout(timeout_s: Any) -> float:
    """Return the time that a call may take.

    Raises:
        InvalidRequestError: it is no number.
    """
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s):
        problem = f"timeout_s: {shown(timeout_s)} is not allowed; allowed: seconds"
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, problem)
    return min(float(timeout_s), _MOST_TIMEOUT_S)


def _set_fields(message: Any, values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Set those that are given, and are not None."""
    for name in names:
        if values.get(name) is not None:
            try:
                setattr(message, name, values[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {shown(values[name])} is not allowed ({error})") from error


def _number(field: str, name: object, names: Mapping[str, Any]) -> Any:
    if name not in names:
        raise InvalidRequestError(
            grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {shown(name)} is not allowed; allowed: {', '.join(names)}"
        )
    return names[str(name)]


def _input(one: Input) -> generation_pb2.Input:
    if isinstance(one, str):
        return generation_pb2.Input(text=one)
    return generation_pb2.Input(token_ids=generation_pb2.TokenIds(ids=one))


@contextmanager
def _refusals_of_protobuf() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        problem = f"{shown(error.object)} is not Unicode; allowed: text without lone surrogates"
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, problem) from error
    except ValueError as error:
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


def _constraint(values: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in CONSTRAINT_OPTIONS if name in values]
    if len(given) > 1:
        raise ValueError(f"{given[1]}: not allowed together with {given[0]}; allowed: one constraint")
    if not given:
        return {}
    name, value = given[0], values[given[0]]
    if name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    if name == "choice":
        value = generation_pb2.Choice(choices=value)
    return {name: value}


def _set_prompt(request: generation_pb2.GenerateRequest | admin_pb2.PinPrefixRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: {shown(prompt)} is not allowed; allowed: a text, a list of token ids or of messages")
    parts: list[Any] = list(prompt)
    if parts and isinstance(parts[0], Mapping):
        request.chat.CopyFrom(_chat(parts))
    else:
        request.token_ids.CopyFrom(generation_pb2.TokenIds(ids=parts))


def _set_chat_options(request: generation_pb2.GenerateRequest, values: Mapping[str, Any]) -> None:
    given = [name for name in _CHAT_OPTIONS if values.get(name) is not None]
    if given and not request.HasField("chat"):
        raise ValueError(f"{given[0]}: not allowed with a prompt that is no chat; allowed: with a list of messages")
    for name, field in (("tools", "tools"), ("chat_template_kwargs", "variables")):
        if name in given:
            setattr(request.chat, field, _json(name, values[name]))
    _set_fields(request.chat, values, [name for name in given if name in _CHAT_OPTIONS[2:]])


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {shown(value)} is not allowed ({error}); allowed: what JSON can hold") from error


def _chat(messages: Sequence[Any]) -> generation_pb2.Chat:
    return generation_pb2.Chat(messages=[_message(one, f"messages[{place}]") for place, one in enumerate(messages)])


def _message(given: Mapping[str, Any], field: str) -> generation_pb2.ChatMessage:
    """The server reads parts, and refuses those that are no text."""
    more = {key: value for key, value in given.items() if key not in {"role", "content"}}
    content = given.get("content")
    if "role" not in given or (content is None and "tool_calls" not in given):
        raise ValueError(f"{field}.{'content' if 'role' in given else 'role'}: it is missing; allowed: a text")
    if isinstance(content, list | tuple):
        more["content"], content = content, None
    return generation_pb2.ChatMessage(role=given["role"], content=content, more=_json(field, more) if more else "")


def tokenize_request(text: str | Sequence[ChatMessage]) -> generation_pb2.TokenizeRequest:
    """Build a request for a text or chat."""
    if isinstance(text, str):
        return generation_pb2.TokenizeRequest(text=text)
    return generation_pb2.TokenizeRequest(chat=_chat(text))


def plain_request(kind: type[RequestT], **fields: object) -> RequestT:
    """Build a request of a few values.

    Raises:
        InvalidRequestError: a value does not fit its field.
    """
    request = kind()
    with _refusals_of_protobuf():
        _set_fields(request, fields, fields)
    return request


def pin_request(name: str, prefix: Prompt, tenant: str) -> admin_pb2.PinPrefixRequest:
    """Build a request to pin a prefix.

    Raises:
        InvalidRequestError: a value does not fit the message.
    """
    with _refusals_of_protobuf():
        request = plain_request(admin_pb2.PinPrefixRequest, name=name, tenant=tenant)
        _set_prompt(request, prefix)
    return request
