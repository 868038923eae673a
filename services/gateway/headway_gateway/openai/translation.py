"""Bodies as ``headway.v1``, and the names of its fields in OpenAI's words. Must not know: sockets, answers.

It checks only what the other side has no words for; ranges are checked behind it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from headway_gateway.openai.bodies import (
    Body,
    CalledFunction,
    ChatBody,
    ChoicesBody,
    CompletionBody,
    ContentPart,
    EmbeddingsBody,
    GenerationBody,
    InputItem,
    MadeCall,
    MessageBody,
    ResponsesBody,
    ResponseStreamOptions,
    StreamOptions,
    TokenizeBody,
    Tool,
)
from headway_gateway.openai.constraints import constrain, constraint_of
from headway_gateway.openai.tool_choice import ToolsBody, forced_tools, offered_tools
from headway_gateway.openai.tool_schemas import schema_of_calls
from headway_gateway.requests.input_checks import MAX_INPUTS
from headway_gateway.requests.validation import (
    MAX_CHAT_PIECES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOOLS_BYTES,
    MAX_VARIABLES_BYTES,
    too_many_biases,
)
from headway_gateway.statuses import invalid_argument
from headway_proto import generation_pb2 as api
from headway_proto.sampling import MAX_LOGIT_BIAS_ENTRIES
from headway_proto.wording import one_line, shown

MAX_PROMPTS = 256
MAX_EMBEDDED = 2048
"""OpenAI's."""

_MOST_BYTES_OF_EACH = 1 << 19
"""Of a request of several, without its prompt: more than what is allowed takes."""

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's."""

_SEED_SPACE = 1 << 64
_MOST_INT32 = (1 << 31) - 1
_PRIORITIES = {
    "realtime": api.PRIORITY_REALTIME,
    "high": api.PRIORITY_HIGH,
    "normal": api.PRIORITY_NORMAL,
    "low": api.PRIORITY_LOW,
}
_PLAIN_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos"),
)
_ITEM_FIELDS = {
    "message": {"role", "content"},
    "reasoning": {"content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}
"""What each item of a response's input must have."""

CHAT_PROMPT_NAMES = (
    ("chat.messages", "messages"),
    ("chat.tools", "tools"),
    ("chat.variables", "chat_template_kwargs"),
    ("chat.continue_final_message", "continue_final_message"),
    ("chat", "messages"),
)
CHAT_NAMES = (("sampling.logprobs", "top_logprobs"), ("sampling.", ""), *CHAT_PROMPT_NAMES)
RESPONSES_NAMES = (
    ("sampling.max_tokens", "max_output_tokens"),
    ("sampling.", ""),
    ("chat.messages", "input"),
    ("chat.tools", "tools"),
    ("chat.variables", "chat_template_kwargs"),
    ("chat", "input"),
)
"""Pairs of prefixes: ours, the caller's. Those of ``constraint_names`` come before them."""


def completion_requests(body: CompletionBody, tenant: str | None) -> list[api.GenerateRequest]:
    """Return a request for each prompt.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    base = _generation(body, tenant)
    _add_choices(base, body)
    echoes = bool(body.echo)
    base.echo = echoes or bool(body.return_token_ids)
    if body.best_of is not None:
        base.sampling.best_of = body.best_of
    if body.logprobs is not None:
        base.sampling.logprobs = body.logprobs
    wanted = [count for count in (body.logprobs if echoes else None, body.prompt_logprobs) if count is not None]
    if wanted:
        base.sampling.prompt_logprobs = max(wanted)
    base.sampling.max_tokens = _most_tokens(body)
    return _with_prompts(base, _inputs(body.prompt, "prompt", "prompts ", MAX_PROMPTS))


def completion_names(body: CompletionBody, place: int) -> Iterable[tuple[str, str]]:
    """Return the names of a request's fields; ``place``: which of the prompts it is for."""
    prompt = f"prompt[{place}]" if _is_list(body.prompt) else "prompt"
    wanted = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"  # echo asks for those, too
    return (("sampling.prompt_logprobs", wanted), ("sampling.", ""), ("token_ids.ids", prompt), ("text", prompt))


def drops_output(body: CompletionBody) -> bool:
    """Whether only the prompt is wanted; the model samples a token all the same."""
    return body.max_tokens == 0


def _most_tokens(body: CompletionBody) -> int:
    if body.max_tokens is None:
        return _DEFAULT_COMPLETION_TOKENS
    if body.max_tokens == 0 and not body.echo:
        raise invalid_argument("max_tokens", "0 is not allowed; allowed: 1 or more, or 0 together with echo")
    return max(1, body.max_tokens)


def _with_prompts(base: api.GenerateRequest, prompts: Sequence[str | list[int]]) -> list[api.GenerateRequest]:
    size = base.ByteSize()
    if len(prompts) > 1 and size > _MOST_BYTES_OF_EACH:
        problem = f"{len(prompts)} prompts are not allowed with other fields of {size} bytes, which each of them gets; "
        raise invalid_argument("prompt", f"{problem}allowed: {_MOST_BYTES_OF_EACH} bytes")
    requests = []
    for place, prompt in enumerate(prompts):
        request = api.GenerateRequest()
        request.CopyFrom(base)
        if len(prompts) > 1:
            request.request_id = f"{base.request_id}-{place}"
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def chat_request(body: ChatBody, tenant: str | None) -> api.GenerateRequest:
    """Return the request.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    request = _generation(body, tenant)
    _add_choices(request, body)
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise invalid_argument(
            "max_completion_tokens",
            f"{body.max_completion_tokens} is not allowed with max_tokens {body.max_tokens}; allowed: one of them",
        )
    for limit in limits:
        request.sampling.max_tokens = limit
    if body.top_logprobs and not body.logprobs:
        raise invalid_argument("top_logprobs", f"{body.top_logprobs} is not allowed without logprobs true")
    if body.logprobs:
        request.sampling.logprobs = body.top_logprobs or 0
    add_chat(request.chat, body)
    request.echo = bool(body.return_token_ids)
    _force_calls(request, body)
    return request


def _force_calls(request: api.GenerateRequest, body: ChatBody | ResponsesBody) -> None:
    if forced := forced_tools(body):
        # The form of an answer's text does not matter where there is no text.
        if request.sampling.WhichOneof("constraint") not in {None, "json_schema", "json_object"}:
            raise invalid_argument("tool_choice", "a call is not allowed together with another constraint")
        most = 1 if body.parallel_tool_calls is False else None
        try:
            request.sampling.json_schema = msgspec.json.encode(schema_of_calls(forced, most)).decode()
        except RecursionError:
            raise invalid_argument("tools", "their schemas are nested too deeply; allowed: 300 levels") from None


def add_chat(chat: api.Chat, body: ChatBody | TokenizeBody) -> None:
    """Add all that a chat's prompt depends on.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    _require_few("messages", body.messages or ())
    add_messages(chat, body.messages or ())
    _add_tools(chat, body)
    add_variables(chat, body.chat_template_kwargs, body.reasoning_effort)
    chat.continue_final_message = bool(body.continue_final_message)
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt


def _add_tools(chat: api.Chat, body: ToolsBody) -> None:
    forced_tools(body)
    if not (tools := offered_tools(body)):
        return
    told = msgspec.json.encode([Tool("function", function) for function in tools])
    if len(told) > MAX_TOOLS_BYTES:
        raise invalid_argument("tools", f"{len(told)} bytes are not allowed; allowed: at most {MAX_TOOLS_BYTES}")
    chat.tools = told.decode()


def add_variables(chat: api.Chat, given: msgspec.Raw, effort: str | None) -> None:
    """Add variables of the template.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    variables = {**_variables(bytes(given)), **({} if effort is None else {"reasoning_effort": effort})}
    if variables:
        chat.variables = msgspec.json.encode(variables).decode()


def _variables(given: bytes) -> dict[str, Any]:
    field, num_bytes = "chat_template_kwargs", len(given)
    if num_bytes > MAX_VARIABLES_BYTES:
        raise invalid_argument(field, f"{num_bytes} bytes are not allowed; allowed: at most {MAX_VARIABLES_BYTES}")
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | None) or {}
    except (ValueError, RecursionError) as error:
        raise invalid_argument(field, f"{one_line(error)}; allowed: an object") from None


def responses_request(body: ResponsesBody, tenant: str | None) -> api.GenerateRequest:
    """Return the request.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    request = _generation(body, tenant)
    _check_switch("background", body.background, "nothing is stored")
    _check_stream(body.stream_options)
    if body.previous_response_id is not None:
        raise invalid_argument(
            "previous_response_id",
            f"{shown(body.previous_response_id)} is not allowed, since nothing is stored; allowed: unset, with the earlier "
            "turns in input",
        )
    if body.max_output_tokens is not None:
        request.sampling.max_tokens = body.max_output_tokens
    if body.instructions is not None:
        request.chat.messages.add(role="system", content=body.instructions)
    if isinstance(body.input, str):
        request.chat.messages.add(role="user", content=body.input)
    else:
        _require_few("input", body.input)
        add_messages(request.chat, _messages(body.input))
    _add_tools(request.chat, body)
    _force_calls(request, body)
    add_variables(
        request.chat, body.chat_template_kwargs, body.reasoning.effort if body.reasoning is not None else None
    )
    return request


def _require_few(field: str, items: Sequence[MessageBody | InputItem]) -> None:
    number = len(items)
    for item in items:
        more = item.tool_calls if isinstance(item, MessageBody) else item.output
        number += sum(len(one) for one in (item.content, more) if isinstance(one, list))
    if number > MAX_CHAT_PIECES:
        raise invalid_argument(
            field, f"{number} messages, parts and calls are not allowed; allowed: at most {MAX_CHAT_PIECES}"
        )


def _messages(items: Iterable[InputItem]) -> Iterable[MessageBody]:
    """Return the items as messages: a thought, an answer and calls behind each other are one of the model."""
    answer: _Answer | None = None
    for place, item in enumerate(items):
        _check_item(item, f"input[{place}]")
        is_of_model = item.type in {"reasoning", "function_call"} or item.role == "assistant"
        if answer is not None and not (is_of_model and answer.goes_on_with(item)):
            yield answer.message()
            answer = None
        if is_of_model:
            answer = answer or _Answer()
            answer.add(item, f"input[{place}]")
        elif item.type == "function_call_output":
            yield MessageBody("tool", item.output, tool_call_id=item.call_id)
        else:
            assert item.role is not None
            yield MessageBody(item.role, item.content, name=item.name)
    if answer is not None:
        yield answer.message()


def _check_item(item: InputItem, field: str) -> None:
    wanted = _ITEM_FIELDS[item.type]
    for name in ("role", "content", "call_id", "name", "arguments", "output"):
        value = getattr(item, name)
        if value is None and name in wanted:
            raise invalid_argument(f"{field}.{name}", "it is missing")
        if value is not None and name not in wanted and (item.type, name) != ("message", "name"):
            raise invalid_argument(
                f"{field}.{name}", f"it is not allowed in an item of type {item.type}; allowed: unset"
            )


class _Answer:
    """What the model said in one turn, as it comes in several items."""

    def __init__(self) -> None:
        self._content: str | list[ContentPart] | None = ""
        self._thoughts: list[str] = []
        self._calls: list[MadeCall] = []

    def goes_on_with(self, item: InputItem) -> bool:
        """Whether an item belongs to it: a thought comes first, and calls last."""
        return item.type == "function_call" or not (self._calls or self._content)

    def add(self, item: InputItem, field: str) -> None:
        """Take the next item."""
        if item.type == "function_call":
            assert item.call_id is not None
            assert item.name is not None
            assert item.arguments is not None
            self._calls.append(MadeCall(item.call_id, CalledFunction(item.name, item.arguments)))
            _arguments(self._calls[-1], f"{field}.arguments")
        elif item.type == "reasoning":
            self._thoughts.append(_text(item.content or ""))
        else:
            self._content = item.content

    def message(self) -> MessageBody:
        """Return all of it."""
        thought = "".join(self._thoughts) if self._thoughts else None
        return MessageBody("assistant", self._content, tool_calls=self._calls or None, reasoning_content=thought)


class EmbedPart(NamedTuple):
    """A request for some of the inputs, with the names of its fields."""

    request: api.EmbedRequest
    names: Sequence[tuple[str, str]]


def embed_parts(body: EmbeddingsBody, tenant: str | None) -> list[EmbedPart]:
    """Return a request for each ``MAX_INPUTS`` inputs.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    inputs = _inputs(body.input, "input", "", MAX_EMBEDDED)
    parts = []
    for first in range(0, len(inputs), MAX_INPUTS):
        request = _embed_request(body, tenant, inputs[first : first + MAX_INPUTS])
        if first:
            request.request_id = f"{request.request_id}-{first}"
        names = [f"input[{first + place}]" if _is_list(body.input) else "input" for place in range(len(request.inputs))]
        ours = (".text", ".token_ids.ids", "")
        parts.append(EmbedPart(request, [(f"inputs[{n}]{one}", name) for n, name in enumerate(names) for one in ours]))
    return parts


def _embed_request(body: EmbeddingsBody, tenant: str | None, inputs: Iterable[str | list[int]]) -> api.EmbedRequest:
    request = api.EmbedRequest(
        **names_of(body, tenant),
        dimensions=body.dimensions or 0,
        pooling=None if body.pooling is None else f"POOLING_{body.pooling.upper()}",
    )
    if body.normalize is not None:
        request.normalize = body.normalize
    for one in inputs:
        if isinstance(one, str):
            request.inputs.add(text=one)
        else:
            request.inputs.add().token_ids.ids.extend(one)
            request.inputs[-1].token_ids.SetInParent()
    return request


def add_messages(chat: api.Chat, messages: Iterable[MessageBody]) -> None:
    """Add messages; several texts of one reach the template as they are, or joined by newlines where it wants one."""
    chat.SetInParent()
    for place, message in enumerate(messages):
        more = _more(message, place)
        if message.content is None and "tool_calls" not in more:
            raise invalid_argument(f"messages[{place}].content", "it is missing; allowed: a text")
        several = message.content if isinstance(message.content, list) and len(message.content) > 1 else []
        if several:
            more["content"] = [{"type": "text", "text": part.text} for part in several]
        text = "" if message.content is None or several else _text(message.content)
        chat.messages.add(role=message.role, content=text, more=msgspec.json.encode(more).decode() if more else "")


def _more(message: MessageBody, place: int) -> dict[str, Any]:
    thought = _thought(message)
    given = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": thought}
    more: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if message.tool_calls:
        if thought and not message.content:
            more["thinking"] = thought  # gpt-oss's name; its template refuses it beside content
        more["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    # Templates want values, not a text.
                    "arguments": _arguments(call, f"messages[{place}].tool_calls[{number}].function.arguments"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return more


def _thought(message: MessageBody) -> str | None:
    parts = message.content if isinstance(message.content, list) else ()
    thoughts = (message.reasoning_content, *(part.reasoning_content for part in parts))
    return next((thought for thought in thoughts if thought is not None), None)


def _arguments(call: MadeCall, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (ValueError, RecursionError):
        raise invalid_argument(
            field, f"{shown(call.function.arguments)} is not allowed; allowed: a JSON object"
        ) from None


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _inputs(given: str | list[str | list[int] | int], field: str, noun: str, most: int) -> Sequence[str | list[int]]:
    """One text, one list of token ids, or a list of either, 1 to ``most``."""
    if isinstance(given, str):
        return [given]
    if not (given and isinstance(given[0], int)) and not 1 <= len(given) <= most:
        raise invalid_argument(field, f"{len(given)} {noun}are not allowed; allowed: 1 to {most}")
    numbers = [one for one in given if isinstance(one, int)]
    if numbers and len(numbers) != len(given):
        raise invalid_argument(field, "it mixes token ids with other prompts; allowed: one kind")
    return [numbers] if numbers else [one for one in given if not isinstance(one, int)]


def _is_list(given: str | list[str | list[int] | int]) -> bool:
    """Whether it is a list of what ``_inputs`` yields."""
    return isinstance(given, list) and not isinstance(given[0], int)


def names_of(body: Body, tenant: str | None) -> dict[str, Any]:
    """Return what every request may have, with the caller's tenant."""
    names = {
        "model": body.model or "",
        "request_id": body.request_id or "",
        "tenant": tenant if tenant is not None else body.tenant or "",
        "adapter": body.adapter or "",
        "ttft_slo_ms": body.ttft_slo_ms or 0,
    }
    return {**names, "priority": _PRIORITIES.get(body.priority or "", api.PRIORITY_UNSPECIFIED)}


def _generation(body: GenerationBody, tenant: str | None) -> api.GenerateRequest:
    request = api.GenerateRequest(
        **names_of(body, tenant),
        itl_slo_ms=body.itl_slo_ms or 0,
        keep_special_tokens=body.skip_special_tokens is False,
    )
    sampling = request.sampling
    _check_switch("store", body.store, "nothing is stored")
    constraint = constraint_of(body)
    if constraint is not None:
        constrain(sampling, constraint)
    for name in _PLAIN_SAMPLING:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    if body.seed is not None:
        sampling.seed = _seed(body.seed)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for name, entries, most in (
        ("stop", stops, MAX_STOPS),
        ("stop_token_ids", body.stop_token_ids or [], MAX_STOP_TOKEN_IDS),
    ):
        if len(entries) > most:
            raise invalid_argument(name, f"{len(entries)} entries are not allowed; allowed: at most {most}")
        getattr(sampling, name).extend(entries)
    if body.logit_bias is not None and len(body.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise too_many_biases("logit_bias", len(body.logit_bias))
    for token_id, bias in (body.logit_bias or {}).items():
        sampling.logit_bias.add(token_id=_token_id(token_id), bias=bias)
    return request


def _check_switch(name: str, value: bool | None, reason: str) -> None:
    if value:
        raise invalid_argument(name, f"True is not allowed, since {reason}; allowed: false or unset")


def _check_stream(options: StreamOptions | ResponseStreamOptions | None) -> None:
    if options is not None:
        _check_switch("stream_options.include_obfuscation", options.include_obfuscation, "events are not padded")


def _add_choices(request: api.GenerateRequest, body: ChoicesBody) -> None:
    _check_stream(body.stream_options)
    if body.n is not None:
        request.sampling.n = body.n


def _seed(seed: int) -> int:
    if not -(_SEED_SPACE // 2) <= seed < _SEED_SPACE:
        raise invalid_argument("seed", f"{shown(seed)} is not allowed; allowed: 64 bits")
    return seed % _SEED_SPACE


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST_INT32):
        raise invalid_argument("logit_bias", f"{shown(text)} is not a token id")
    if len(text) > 1 and text[0] == "0":  # it would be a second entry of the same token
        raise invalid_argument("logit_bias", f"{shown(text)} is not allowed; allowed: {int(text)}")
    return int(text)
