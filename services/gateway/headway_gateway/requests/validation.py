"""Checks of a generation request before and after its prompt is tokenised. Must not know: sockets, tasks,
tokenising.
"""

import json
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal

import grpc
import msgspec

from headway_gateway.statuses import CallRefusedError, beyond_context, invalid_argument, invalid_arguments
from headway_proto import admin_pb2
from headway_proto import generation_pb2 as api
from headway_proto.adapters import ADAPTER_NAME_FORM, is_adapter_name
from headway_proto.columns import INT32
from headway_proto.ingress import PRIORITY_NORMAL, ModelInfo, Submit
from headway_proto.sampling import CHOICE, MAX_LOGIT_BIAS_ENTRIES, NO_LOGPROBS, Constraint, SamplingParams, violations
from headway_proto.wording import shown

MAX_REQUEST_ID_BYTES = 128
MAX_TENANT_BYTES = 128
MAX_PIN_NAME_BYTES = 128
MAX_CONTINUATIONS = 16
MAX_STOPS = 4
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 1024
MAX_CHAT_PIECES = 1 << 14
"""Messages of a chat, their parts and their calls; and tools. Each takes some microseconds, in which nothing else is served."""
MAX_TOOLS_BYTES = 1 << 20
"""Of all together. What they say may become a grammar, in which time nothing else is served."""
MAX_VARIABLES_BYTES = 1 << 20
"""Of all variables of a chat template, in JSON."""
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")
SEED_SPACE = 1 << 64
MOST_TOLD = 32
"""Faults of a request; a message or a stop string each may have one."""

_PRIORITIES = frozenset(api.Priority.values())
_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f]")

Request = api.GenerateRequest | api.EmbedRequest | api.ScoreRequest


class CheckedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request. ``sampling.seed`` is the first continuation's."""

    request: api.GenerateRequest
    request_id: str
    sampling: SamplingParams
    num_returned: int
    num_continuations: int
    """How many are generated; the best ``num_returned`` go back."""
    adapter: str = ""

    @property
    def max_tokens(self) -> int | None:
        """The client's limit; None leaves it to the context."""
        given = self.request.sampling
        return given.max_tokens if given.HasField("max_tokens") else None

    @property
    def is_choice(self) -> bool:
        """Whether more are generated than returned."""
        return self.num_returned < self.num_continuations

    def held_by(self, index: int) -> Sequence[int]:
        """Return the output tokens that the client already has of a continuation."""
        resume = self.request.resume
        if index == 0:
            return resume.token_ids
        return resume.others[index - 1].ids if index <= len(resume.others) else ()

    def end_ids(self, model: ModelInfo) -> frozenset[int]:
        """Return an output's end tokens."""
        own = () if self.request.sampling.ignore_eos else model.eos_token_ids
        return frozenset((*own, *self.sampling.stop_token_ids))

    def sampling_of(self, index: int) -> SamplingParams:
        """Return one continuation's parameters; the seed counts up.

        To choose the best, all report log probabilities.
        """
        sampling = self.sampling
        if self.is_choice:
            sampling = msgspec.structs.replace(sampling, logprobs=max(sampling.logprobs, 0))
        if index == 0:
            return sampling
        seed = (sampling.seed + index) % SEED_SPACE
        return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=NO_LOGPROBS)

    def submission(self, index: int, *, handle: int, prompt: bytes, max_tokens: int, traceparent: str) -> Submit:
        """Return a continuation's submission. ``prompt`` is an int32 column."""
        request = self.request
        return Submit(
            handle=handle,
            request_id=self.request_id,
            index=index,
            token_ids=prompt,
            num_prompt_tokens=len(prompt) // INT32.itemsize,
            max_tokens=max_tokens,
            sampling=self.sampling_of(index),
            ignore_eos=request.sampling.ignore_eos,
            priority=request.priority or PRIORITY_NORMAL,
            tenant=request.tenant,
            ttft_slo_ms=request.ttft_slo_ms,
            itl_slo_ms=request.itl_slo_ms,
            traceparent=traceparent,
            adapter=self.adapter,
        )


def check_request(request: api.GenerateRequest, model: ModelInfo) -> CheckedRequest:
    """Check what needs no tokenised prompt.

    Raises:
        CallRefusedError: INVALID_ARGUMENT with every wrong field, or NOT_FOUND for another model.
    """
    adapter = served_adapter(request, model)
    if len(request.sampling.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise too_many_biases("sampling.logit_bias", len(request.sampling.logit_bias))
    wrong = dict(islice(_request_violations(request, model), MOST_TOLD))
    sampling = sampling_params(request)
    for field, description in violations(sampling, model.vocab_size):
        wrong.setdefault(f"sampling.{field}", description)
    if wrong:
        raise invalid_arguments(wrong)
    given = request.sampling
    return CheckedRequest(
        request=request,
        request_id=request.request_id or os.urandom(16).hex(),
        sampling=sampling,
        num_returned=_num_returned(given),
        num_continuations=_num_continuations(given),
        adapter=adapter,
    )


def too_many_biases(field: str, number: int) -> CallRefusedError:
    """Make the refusal, for who sees it before the entries are read one by one."""
    return invalid_argument(field, f"{number} is not allowed; allowed: at most {MAX_LOGIT_BIAS_ENTRIES} entries")


def served_adapter(request: Request, model: ModelInfo) -> str:
    """Return the adapter that a request asks for, by ``adapter`` or by ``model``, or ""; the scheduler knows it, or not.

    Raises:
        CallRefusedError: NOT_FOUND for another model, INVALID_ARGUMENT for an adapter beside an adapter's name.
    """
    if not request.model or request.model == model.name:
        return request.adapter
    if request.model not in model.adapters:
        served = ", ".join(map(shown, (model.name, *model.adapters)))
        raise CallRefusedError(
            grpc.StatusCode.NOT_FOUND, f"model: {shown(request.model)} is not served here; served: {served}"
        )
    if request.adapter not in {"", request.model}:
        raise invalid_argument(
            "adapter", f"{shown(request.adapter)} is not allowed with model {shown(request.model)}; allowed: unset"
        )
    return request.model


def check_pin(request: admin_pb2.PinPrefixRequest) -> None:
    """Check what needs no tokenised prefix.

    Raises:
        CallRefusedError: INVALID_ARGUMENT with every wrong field.
    """
    wrong: dict[str, str] = {}
    if not request.name:
        wrong["name"] = f"'' is not allowed; allowed: 1 to {MAX_PIN_NAME_BYTES} bytes"
    wrong.update(_name_violations("name", request.name, MAX_PIN_NAME_BYTES))
    wrong.update(_name_violations("tenant", request.tenant, MAX_TENANT_BYTES))
    wrong.update(islice(_prompt_violations(request, "prefix"), MOST_TOLD))
    if wrong:
        raise invalid_arguments(wrong)


def most_prompt_tokens(model: ModelInfo) -> int:
    """Return the length that leaves room for one token."""
    return min(model.max_model_len, model.max_request_tokens) - 1


def check_prompt(prompt_ids: Sequence[int], field: str, model: ModelInfo) -> None:
    """Check a tokenised prompt.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    if not prompt_ids:
        raise invalid_argument(field, "the prompt is empty; allowed: at least one token")
    most = most_prompt_tokens(model)
    if len(prompt_ids) > most:
        raise beyond_context(field, f"the prompt has {len(prompt_ids)} tokens; allowed: at most {most}", most + 1)
    require_token_ids(prompt_ids, field, model.vocab_size)


def require_token_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    """Check that every id has a logit.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        place, value = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise invalid_argument(
            f"{field}[{place}]", f"{value} is not a token id of this model; allowed: 0 to {vocab_size - 1}"
        )


def resolve_max_tokens(checked: CheckedRequest, num_prompt_tokens: int, model: ModelInfo) -> int:
    """Return the limit of output tokens, with those that the client already has.

    Raises:
        CallRefusedError: INVALID_ARGUMENT if it does not fit, OUT_OF_RANGE if the client already has more.
    """
    room = most_prompt_tokens(model) + 1 - num_prompt_tokens
    wanted = checked.max_tokens
    if wanted is not None and wanted > room:
        raise beyond_context(
            "sampling.max_tokens",
            f"{wanted} is not allowed; allowed: at most {room} behind {num_prompt_tokens} prompt tokens",
            num_prompt_tokens + room,
        )
    max_tokens = room if wanted is None else wanted
    min_tokens = checked.sampling.min_tokens
    if min_tokens > max_tokens:
        raise invalid_argument(
            "sampling.min_tokens",
            f"{min_tokens} is not allowed; allowed: at most {max_tokens}, the limit of max_tokens or of the context",
        )
    for index in range(checked.num_continuations):
        num_held = len(checked.held_by(index))
        if num_held > max_tokens:
            raise held_beyond_end(index, num_held, f"the output ends after {max_tokens}")
    return max_tokens


def held_beyond_end(index: int, num_held: int, why: str) -> CallRefusedError:
    """Make the refusal of a client that holds more tokens of a continuation than there are."""
    message = f"{_held_field(index)}: {num_held} tokens are held; {why}"
    return CallRefusedError(grpc.StatusCode.OUT_OF_RANGE, message)


def sampling_params(request: api.GenerateRequest) -> SamplingParams:
    """Fill in the API's defaults."""
    given = request.sampling
    return SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=0 if given.top_k == -1 else given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in given.logit_bias),
        min_tokens=given.min_tokens,
        stop_token_ids=tuple(given.stop_token_ids),
        logprobs=given.logprobs if given.HasField("logprobs") else NO_LOGPROBS,
        seed=_seed(request),
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else NO_LOGPROBS,
        constraint=_constraint(given),
    )


def _constraint(given: api.SamplingParams) -> Constraint | None:
    kind = given.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == CHOICE:
        return Constraint(kind, json.dumps(list(given.choice.choices), ensure_ascii=False))
    value = getattr(given, kind)
    return Constraint(kind, value if isinstance(value, str) else "")


def _seed(request: api.GenerateRequest) -> int:
    if request.HasField("resume"):
        return request.resume.seed
    if request.sampling.HasField("seed"):
        return request.sampling.seed
    return secrets.randbits(64)


def _request_violations(request: api.GenerateRequest, model: ModelInfo) -> Iterable[tuple[str, str]]:
    yield from name_violations(request)
    yield from _prompt_violations(request, "prompt")
    if request.HasField("resume"):
        yield from _resume_violations(request, model)
    sampling = request.sampling
    yield from _sampling_violations(sampling)
    if sampling.HasField("prompt_logprobs"):
        yield from _prompt_logprobs_violations(request, model)
    kind = sampling.WhichOneof("constraint")
    if kind is not None:
        yield from _constraint_violations(sampling, kind, model)


def name_violations(request: Request) -> Iterable[tuple[str, str]]:
    """Yield the faults in what every request has, as (field, description)."""
    if request.request_id:
        yield from _name_violations("request_id", request.request_id, MAX_REQUEST_ID_BYTES)
    if request.tenant:
        yield from _name_violations("tenant", request.tenant, MAX_TENANT_BYTES)
    if request.adapter and not is_adapter_name(request.adapter):
        yield "adapter", f"{shown(request.adapter)} is not allowed; allowed: {ADAPTER_NAME_FORM}"
    if request.priority not in _PRIORITIES:
        yield "priority", f"{request.priority} is not allowed; allowed: 0 to {max(_PRIORITIES)}"


def _name_violations(field: str, value: str, most_bytes: int) -> Iterable[tuple[str, str]]:
    if len(value.encode()) > most_bytes:
        yield field, f"{shown(value)} has {len(value.encode())} bytes; allowed: at most {most_bytes}"
    elif _CONTROL_CHARACTER.search(value):
        yield field, f"{shown(value)} contains a control character; allowed: text without control characters"


def _prompt_violations(
    request: api.GenerateRequest | admin_pb2.PinPrefixRequest, what: Literal["prompt", "prefix"]
) -> Iterable[tuple[str, str]]:
    # Both messages have the same kinds, but their stubs name the field differently.
    kind = request.WhichOneof(what)
    if kind is None:
        yield what, "there is none; allowed: one of text, token_ids, chat"
    elif kind == "text" and not request.text:
        yield "text", f"the {what} is empty; allowed: at least one character"
    elif kind == "token_ids" and not request.token_ids.ids:
        yield "token_ids.ids", f"the {what} is empty; allowed: at least one token"
    elif kind == "chat":
        yield from chat_violations(request.chat)
        if what == "prefix" and request.chat.continue_final_message:
            yield (
                "chat.continue_final_message",
                "true is not allowed, since other messages follow a prefix; allowed: false",
            )


def chat_violations(chat: api.Chat) -> Iterable[tuple[str, str]]:
    """Yield faults as (field, description)."""
    if not chat.messages:
        yield "chat.messages", "the prompt is empty; allowed: at least one message"
    if len(chat.messages) > MAX_CHAT_PIECES:
        yield "chat.messages", f"{len(chat.messages)} are not allowed; allowed: at most {MAX_CHAT_PIECES}"
        return
    for place, message in enumerate(chat.messages):
        if message.role not in CHAT_ROLES:
            yield (
                f"chat.messages[{place}].role",
                f"{shown(message.role)} is not a role; allowed: {', '.join(CHAT_ROLES)}",
            )
        if message.more:
            yield from _violations_of_more(f"chat.messages[{place}].more", message.more)
    if len(chat.tools) > MAX_TOOLS_BYTES:
        yield "chat.tools", f"{len(chat.tools)} characters are not allowed; allowed: at most {MAX_TOOLS_BYTES}"
    elif chat.tools and not isinstance(_decoded(chat.tools), list):
        yield "chat.tools", f"{shown(chat.tools)} is not allowed; allowed: a JSON array"
    if chat.continue_final_message and chat.add_generation_prompt:
        yield (
            "chat.continue_final_message",
            "true is not allowed together with add_generation_prompt true; allowed: one of them",
        )
    if chat.variables:
        yield from _variable_violations(chat.variables)


def _violations_of_more(field: str, more: str) -> Iterable[tuple[str, str]]:
    given = _decoded(more)
    if not isinstance(given, dict):
        yield field, f"{shown(more)} is not allowed; allowed: a JSON object"
        return
    content = given.get("content")
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            yield field, f"content has a part of type {shown(kind)}; allowed: parts of type text"
            return


def _variable_violations(variables: str) -> Iterable[tuple[str, str]]:
    if len(variables) > MAX_VARIABLES_BYTES:
        yield "chat.variables", f"{len(variables)} characters are not allowed; allowed: at most {MAX_VARIABLES_BYTES}"
        return
    given = _decoded(variables)
    if not isinstance(given, dict):
        yield "chat.variables", f"{shown(variables)} is not allowed; allowed: a JSON object"
        return
    for name in _OWN_VARIABLES:
        if name in given:
            yield "chat.variables", f"{shown(name)} is not allowed; allowed: names beside {', '.join(_OWN_VARIABLES)}"


def _decoded(text: str) -> object:
    """Return what a text in JSON says; None if it is none."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


def _resume_violations(request: api.GenerateRequest, model: ModelInfo) -> Iterable[tuple[str, str]]:
    if request.sampling.HasField("seed") and request.sampling.seed != request.resume.seed:
        yield (
            "resume.seed",
            f"{request.resume.seed} differs from sampling.seed {request.sampling.seed}; allowed: the seed in `accepted`",
        )
    num_returned, num_continuations = _num_returned(request.sampling), _num_continuations(request.sampling)
    others = request.resume.others
    most = min(max(num_returned, 1), MAX_CONTINUATIONS) - 1
    if len(others) > most:
        yield "resume.others", f"{len(others)} entries are not allowed; allowed: at most n - 1, {most}"
        return
    for index, held in enumerate((request.resume.token_ids, *(other.ids for other in others))):
        if held and num_returned < num_continuations:
            described = f"{len(held)} tokens are not allowed together with best_of = {num_continuations}"
            yield _held_field(index), f"{described}, whose outputs come whole; allowed: none"
        wrong = next((t for t in held if not 0 <= t < model.vocab_size), None)
        if wrong is not None:
            yield _held_field(index), f"{wrong} is not a token id of this model; allowed: 0 to {model.vocab_size - 1}"


def _held_field(index: int) -> str:
    return f"resume.others[{index - 1}].ids" if index else "resume.token_ids"


def _prompt_logprobs_violations(request: api.GenerateRequest, model: ModelInfo) -> Iterable[tuple[str, str]]:
    field = "sampling.prompt_logprobs"
    if not model.supports_prompt_logprobs:
        yield field, f"the backend {model.backend} does not support it; allowed: unset"
    elif request.resume.token_ids:
        yield field, "not allowed together with resume.token_ids: the prompt was reported before them; allowed: unset"


def _constraint_violations(sampling: api.SamplingParams, kind: str, model: ModelInfo) -> Iterable[tuple[str, str]]:
    if kind == "json_object" and not sampling.json_object:
        yield "sampling.json_object", "False is not allowed; allowed: True or unset"
    if kind == CHOICE and not 1 <= len(sampling.choice.choices) <= MAX_CHOICES:
        yield "sampling.choice", f"{len(sampling.choice.choices)} choices are not allowed; allowed: 1 to {MAX_CHOICES}"
    if sampling.ignore_eos:
        yield (
            "sampling.ignore_eos",
            f"True is not allowed together with {kind}, which ends the output; allowed: False",
        )
    if not model.eos_token_ids:
        yield f"sampling.{kind}", "the model has no token that ends an output; allowed: unset"


def _sampling_violations(sampling: api.SamplingParams) -> Iterable[tuple[str, str]]:
    """Those that ``violations`` does not find."""
    if sampling.HasField("max_tokens"):
        if sampling.max_tokens < 1:
            yield "sampling.max_tokens", f"{sampling.max_tokens} is not allowed; allowed: 1 or more"
        elif sampling.min_tokens > sampling.max_tokens:
            yield (
                "sampling.min_tokens",
                f"{sampling.min_tokens} is not allowed; allowed: at most max_tokens, {sampling.max_tokens}",
            )
    if sampling.top_k < -1:
        yield "sampling.top_k", f"{sampling.top_k} is not allowed; allowed: -1 or 0 (keep all), or 1 and more"
    num_returned = _num_returned(sampling)
    if not 1 <= num_returned <= MAX_CONTINUATIONS:
        yield "sampling.n", f"{num_returned} is not allowed; allowed: 1 to {MAX_CONTINUATIONS}"
    if sampling.HasField("best_of") and not num_returned <= sampling.best_of <= MAX_CONTINUATIONS:
        yield (
            "sampling.best_of",
            f"{sampling.best_of} is not allowed; allowed: n, {num_returned}, to {MAX_CONTINUATIONS}",
        )
    if sampling.stop or sampling.stop_token_ids:
        yield from _stop_violations(sampling)


def _stop_violations(sampling: api.SamplingParams) -> Iterable[tuple[str, str]]:
    if len(sampling.stop) > MAX_STOPS:
        yield "sampling.stop", f"{len(sampling.stop)} entries are not allowed; allowed: at most {MAX_STOPS}"
    for place, stop in enumerate(sampling.stop[:MAX_STOPS]):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            yield f"sampling.stop[{place}]", f"{shown(stop)} is not allowed; allowed: 1 to {MAX_STOP_BYTES} bytes"
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield (
            "sampling.stop_token_ids",
            f"{len(sampling.stop_token_ids)} entries are not allowed; allowed: at most {MAX_STOP_TOKEN_IDS}",
        )


def _num_returned(sampling: api.SamplingParams) -> int:
    return sampling.n if sampling.HasField("n") else 1


def _num_continuations(sampling: api.SamplingParams) -> int:
    return sampling.best_of if sampling.HasField("best_of") else _num_returned(sampling)
