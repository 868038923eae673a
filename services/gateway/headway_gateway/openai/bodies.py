"""Bodies of requests. A field that is not here is refused by its name. Must not know: what the fields mean."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info

from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_proto.wording import shown

UInt32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
PriorityName = Literal["realtime", "high", "normal", "low"]

NOTHING = msgspec.Raw(b"null")
"""JSON that is not there."""

_NOT_TEXT = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file", "input_file")
_WHY = {
    "'item_reference'": ", since nothing is stored: send the item itself, as clients do that are told store: false",
    **{repr(kind): ", since only text is read here" for kind in _NOT_TEXT},
}
_IN_PLACE = {
    "ebnf": "grammar",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "json_schema": "response_format",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "stop_sequences": "stop",
}
"""What other servers, or earlier versions of them, call a field."""
_AT = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<allowed>.*?)(?:, got .*)?", re.DOTALL)
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(rb"(?:%b(?!%b)|%b(?<!%b%b))(?<!\\\\u[0-9a-fA-F]{4})" % (_HIGH, _LOW, _LOW, _HIGH, _LOW))
"""Nearly: behind an escaped backslash none is seen."""
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream has beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """The tokens so far in each event, as vLLM has it."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema; its name and description do nothing, and it is always followed strictly."""

    name: str = ""
    schema: msgspec.Raw = NOTHING
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of an output. Objects may have a ``schema``, as llama.cpp has it; a structural tag has the last fields."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = NOTHING
    structures: msgspec.Raw = NOTHING
    triggers: msgspec.Raw = NOTHING
    format: msgspec.Raw = NOTHING


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint, as vLLM has it. ``json`` is a schema, or a text that holds one, and so is ``structural_tag`` a tag."""

    json: msgspec.Raw = NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NOTHING


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every request may have. ``user`` and ``metadata`` are accepted and do nothing, as is ``store`` false."""

    model: str | None = None
    user: str | None = None
    request_id: str | None = None
    tenant: str | None = None
    adapter: str | None = None
    priority: PriorityName | None = None
    ttft_slo_ms: UInt32 | None = None


class GenerationBody(Body, kw_only=True):
    """What every generation may have; names of ``headway.v1`` where OpenAI has none.

    ``safety_identifier`` does nothing, nor do those of ``prompt_cache``: prefixes are found by their tokens. Nor does
    ``service_tier``, which leaves the choice to the server.
    """

    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prompt_cache_options: msgspec.Raw = NOTHING
    service_tier: Literal["auto", "default"] | None = None
    metadata: msgspec.Raw = NOTHING
    store: bool | None = None
    itl_slo_ms: UInt32 | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    min_tokens: UInt32 | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None


class ChoicesBody(GenerationBody, kw_only=True):
    """Requests with several outputs. ``return_token_ids``: tokens come beside texts, also those of the prompt, as vLLM has it."""

    n: UInt32 | None = None
    max_tokens: UInt32 | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None


class CompletionBody(ChoicesBody, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | list[Int32] | Int32]
    best_of: UInt32 | None = None
    suffix: Literal[""] | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None
    prompt_logprobs: UInt32 | None = None


NoItems = Annotated[list[Any], Meta(max_length=0)]
"""A list that answers have and that is always empty here."""


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a message: text only. ``annotations`` and ``logprobs`` are of answers, which clients send back.

    In ``role`` and behind it, OpenAI's agents for JavaScript repeat what an answer has beside its content; all but the
    thoughts they have in the message, too.
    """

    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str
    annotations: NoItems | None = None
    logprobs: NoItems | None = None
    prompt_cache_breakpoint: msgspec.Raw = NOTHING
    role: Literal["assistant"] | None = None
    refusal: None = None
    tool_calls: msgspec.Raw = NOTHING
    reasoning_content: str | None = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the model has made. ``arguments`` is JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = None
    """What a client made of ``arguments``, which it sends back."""


class MadeCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in a message of the model."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class MessageBody(msgspec.Struct, forbid_unknown_fields=True):
    """A message of a chat. Only one with ``tool_calls`` may be without content.

    Answers of this API and of others have the last fields, and clients send their messages back; ``parsed`` is what they
    made of the content.
    """

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[MadeCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: NoItems | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function for the model. ``strict``: the arguments of calls follow its parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool for the model."""

    type: Literal["function"]
    function: Function


_ToolBody = TypeVar("_ToolBody")


class AllowedTools(msgspec.Struct, Generic[_ToolBody], forbid_unknown_fields=True):
    """The tools that may be called, by their names; the others are as if they were not there."""

    mode: Literal["auto", "required"]
    tools: list[_ToolBody]


MediumVerbosity = Literal["medium"]
"""OpenAI's default. A model is not told of another."""


class ChatBody(ChoicesBody, kw_only=True):
    """``POST /v1/chat/completions``. The last fields are as they would be if they were unset.

    With ``continue_final_message``, the model goes on with the last message, and without ``add_generation_prompt`` nothing
    asks it for an answer, as vLLM has them.
    """

    messages: list[MessageBody]
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt32 | None = None
    verbosity: MediumVerbosity | None = None
    modalities: list[Literal["text"]] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The form of a response. Answers have it, too."""

    format: "TextFormat | None" = None
    verbosity: MediumVerbosity | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """As ``ResponseFormat``, in one object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: msgspec.Raw = NOTHING
    description: str | None = None
    strict: bool | None = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of a response's input: a message, a thought, a call of the model, or what came of one.

    One of an earlier response has the last fields; they do nothing.
    """

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: NoItems | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None
    namespace: None = None
    caller: None = None
    is_async: Literal[False] | None = msgspec.field(name="async", default=None)


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How much the model thinks, in words of its template. Thoughts come as they are, in place of a summary."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What the stream of a response has."""

    include_obfuscation: bool | None = None


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True):
    """As ``Tool``, in one object."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None

    @property
    def function(self) -> Function:
        """Return it as a chat has it."""
        return Function(self.name, self.description, self.parameters, self.strict)


class ResponsesBody(GenerationBody, kw_only=True):
    """``POST /v1/responses``: text in, text out, nothing kept. The last fields are as they would be if they were unset.

    Thoughts come as they are, so ``include`` has nothing to add.
    """

    input: str | list[InputItem]
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    instructions: str | None = None
    max_output_tokens: UInt32 | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    context_management: None = None
    moderation: None = None
    access_programs: None = None
    background_options: None = None
    image: None = None
    client_metadata: msgspec.Raw = NOTHING
    """Codex's."""
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None


class EmbeddingsBody(Body, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | list[str | list[Int32] | Int32]
    dimensions: UInt32 | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean", "cls"] | None = None
    normalize: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: a text, or a chat with all that its prompt depends on."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Int32]


_Body = TypeVar("_Body")


def read(content: bytes, kind: type[_Body]) -> _Body:
    """Return a body.

    Raises:
        CallRefusedError: INVALID_ARGUMENT with the field, the value and what is allowed.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(content, str(error), kind) from None
    except (ValueError, RecursionError) as error:
        if lone := _LONE_SURROGATE.search(content):
            held = lone[0].decode()
            raise invalid_argument("body", f"a text in it holds the lone surrogate {held}; allowed: Unicode") from None
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise invalid_argument("body", f"it is not readable ({reason}); allowed: a JSON object") from None


def _wrong_field(content: bytes, message: str, kind: type) -> CallRefusedError:
    match = _AT.match(message)
    assert match is not None
    problem, path = match["problem"], (match["path"] or "$").removeprefix("key` in `")
    field = path.removeprefix("$").removeprefix(".")
    unknown = _UNKNOWN.fullmatch(problem)
    if unknown is not None:
        name = unknown["name"] if unknown["name"].isprintable() else shown(unknown["name"])
        ours = "" if field else _IN_PLACE.get(name, "")
        instead = (
            f", with {ours} in its place" if ours.partition(".")[0] in getattr(kind, "__struct_fields__", ()) else ""
        )
        where = f"{field}.{name}".removeprefix(".")[:200]
        return invalid_argument(where, f"it is not known here; allowed: unset{instead}")
    missing = _MISSING.fullmatch(problem)
    if missing is not None:
        return invalid_argument(f"{field}.{missing['name']}".removeprefix("."), "it is missing")
    expected = _EXPECTED.fullmatch(problem)
    if expected is None:
        allowed = _choices(kind, path)
        if not allowed:  # such as a number that no type holds
            return invalid_argument(field or "body", f"it is not allowed ({problem[:200]})")
    else:
        allowed = expected["allowed"].replace("`", "").replace(" | ", " or ")
    value = _value_at(content, path)
    return invalid_argument(field or "body", f"{value} is not allowed{_WHY.get(value, '')}; allowed: {allowed}")


def _choices(kind: type, path: str) -> str:
    """The values of the enumeration that stands at ``path`` in a body of this kind; "" if none does."""
    found = _alternatives(type_info(kind))
    for name, _ in _steps(path):
        found = [one for outer in found for inner in _inside(outer, name) for one in _alternatives(inner)]
    return ", ".join(str(value) or "''" for one in found if isinstance(one, LiteralType) for value in one.values)


def _alternatives(info: Type) -> list[Type]:
    return list(info.types) if isinstance(info, UnionType) else [info]


def _inside(info: Type, name: str) -> list[Type]:
    """``name`` is empty for an item of a list."""
    if isinstance(info, StructType):
        return [field.type for field in info.fields if field.encode_name == name]
    return [info.item_type] if isinstance(info, ListType) and not name else []


def _value_at(content: bytes, path: str) -> str:
    """``[...]`` stands for some value of a mapping; then the whole mapping is shown."""
    try:
        value: Any = msgspec.json.decode(content)
    except (ValueError, RecursionError):  # behind the wrong field there may be more
        return "the value"
    for name, place in _steps(path):
        if place == "...":
            break
        value = value[int(place)] if place else value[name]
    return shown(value)


def _steps(path: str) -> Iterable[tuple[str, str]]:
    return _STEP.findall(path)
