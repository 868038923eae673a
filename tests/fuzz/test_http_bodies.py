"""Bodies of requests over HTTP: each becomes a request of ``headway.v1``, or is refused in one line."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fake_scheduler import MODEL
from fuzz.limits import MOST_S, bounded, examples
from headway_gateway.openai import bodies, translation
from headway_gateway.openai.bodies import ChatBody, CompletionBody, EmbeddingsBody, ResponsesBody, TokenizeBody
from headway_gateway.requests.input_checks import check_embed, check_score
from headway_gateway.requests.validation import check_request
from headway_gateway.statuses import CallRefusedError
from headway_proto import generation_pb2 as api

TRANSLATIONS: dict[type[msgspec.Struct], Callable[[Any], list[Any]]] = {
    CompletionBody: lambda body: translation.completion_requests(body, None),
    ChatBody: lambda body: [translation.chat_request(body, None)],
    ResponsesBody: lambda body: [translation.responses_request(body, "tenant")],
    EmbeddingsBody: lambda body: [part.request for part in translation.embed_parts(body, None)],
    TokenizeBody: lambda body: [translation.add_chat(api.Chat(), body)][:0],
}
NEEDED = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x"}

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=10),
    st.sampled_from([10**400, 1 << 63, 1 << 64, 1e308, "\ud800", "auto", "json_schema", "allowed_tools", "text", "high", "user", "\0"]),
)  # fmt: skip
jsons = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=6), inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "schema", "json_schema", "json", "mode", "tools"]),
            inner,
            max_size=4,
        ),
    ),
)


def bodies_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    names = [field.name for field in msgspec.structs.fields(kind)]
    needed = {name: value for name, value in NEEDED.items() if name in names}
    drawn = st.dictionaries(st.one_of(st.sampled_from(names), st.text(max_size=4)), jsons, max_size=4)
    if "tools" in names:
        forced = jsons.map(lambda schema: {"tools": [with_schema(schema)], "tool_choice": "required"})
        drawn = st.one_of(drawn, forced)
    return drawn.map(lambda more: json.dumps(needed | more).encode())


def with_schema(schema: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "x", "parameters": {"properties": schema}}}


def read_or_refuse(kind: type[msgspec.Struct], content: bytes) -> None:
    refusal = None
    with bounded():
        try:
            requests = TRANSLATIONS[kind](bodies.read(content, kind))
            for request in requests:
                request.SerializeToString()
                if isinstance(request, api.GenerateRequest):
                    check_request(request, MODEL)
        except CallRefusedError as error:
            refusal = error
    if refusal is not None:
        assert "\n" not in refusal.message
        assert len(refusal.message) < 1000
        refusal.message.encode()


@pytest.mark.parametrize("kind", TRANSLATIONS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@examples(40)
def test_any_fields_make_a_request_or_a_refusal(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    read_or_refuse(kind, data.draw(bodies_of(kind)))


@pytest.mark.parametrize("depth", [200, 450, 600, 900, 100_000])
def test_schemas_of_forced_calls_nest_or_are_refused(depth: int) -> None:
    chat = json.dumps(NEEDED | {"tools": [with_schema("HERE")], "tool_choice": "required"})
    body = chat.replace('"HERE"', '{"$ref":' * depth + '"#"' + "}" * depth).replace('"prompt": "x", ', "")
    read_or_refuse(ChatBody, body.replace(', "input": "x"', "").encode())


CALL = {"id": "", "function": {"name": "a", "arguments": ""}}
ITEM = {"type": "function_call", "call_id": "", "name": "a", "arguments": ""}


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": ""}] * 350_000}, "messages"),
        (TokenizeBody, {"messages": [{"role": "user", "content": ""}] * 350_000}, "messages"),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 350_000}]}, "messages"),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 175_000}]}, "messages"),
        (ChatBody, {"messages": [{"role": "user", "content": ""}], "tools": [with_schema({})] * 175_000}, "tools"),
        (ResponsesBody, {"input": [ITEM] * 175_000}, "input"),
        (ResponsesBody, {"input": [ITEM, {"type": "reasoning", "content": "x" * 900}] * 8193}, "input"),
    ],
    ids=["messages", "messages to tokenize", "parts", "calls", "tools", "items of calls", "items of thoughts"],
)
def test_many_small_pieces_are_refused_before_each_is_read(
    kind: type[msgspec.Struct], body: dict[str, Any], field: str
) -> None:
    read = bodies.read(json.dumps(body).encode(), kind)
    with pytest.raises(CallRefusedError, match=r"are not allowed; allowed: at most 16384$") as refusal:
        TRANSLATIONS[kind](read)
    assert [violated for violated, _ in refusal.value.violations] == [field]


ASKED = {"messages": [{"role": "user", "content": ""}]}
NAMES = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(8000)]
STRUCTURES = [{"begin": f"{number}x", "end": ""} for number in range(4000)]
TAGS = {"type": "structural_tag", "triggers": [f"{number}x" for number in range(4000)], "structures": STRUCTURES}
UNTRIGGERED = {**TAGS, "triggers": [f"{number}y" for number in range(4000)]}


@pytest.mark.parametrize(
    "body",
    [
        {
            "tools": NAMES,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": NAMES}},
        },
        {"response_format": TAGS},
        {"response_format": UNTRIGGERED},
        {"response_format": {**TAGS, "structures": STRUCTURES * 20}},
        {"tools": [with_schema({"x": [0] * 100_000})], "tool_choice": "required"},
        {"tools": [with_schema({"x": [0] * 1_000_000})], "tool_choice": "required"},
        {"stop": ["x"] * 1_000_000},
        {"stop_token_ids": [1] * 1_000_000},
    ],
    ids=[
        "allowed tools",
        "tags",
        "tags without triggers",
        "too many tags",
        "a schema",
        "too large a schema",
        "stops",
        "ids",
    ],
)
def test_large_fields_are_read_or_refused_soon(body: dict[str, Any]) -> None:
    content = json.dumps(ASKED | body).encode()
    read = bodies.read(content, ChatBody)
    began_at = time.process_time()
    with contextlib.suppress(CallRefusedError):
        check_request(translation.chat_request(read, None), MODEL)
    assert time.process_time() - began_at < MOST_S


MANY = json.dumps({"a": [{"": []}] * 400_000})


@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody, TokenizeBody], ids=lambda kind: kind.__name__)
def test_variables_are_measured_before_they_are_read(kind: type[msgspec.Struct]) -> None:
    asked = "input" if kind is ResponsesBody else "messages"
    content = json.dumps({asked: ASKED["messages"]})[:-1] + f', "chat_template_kwargs": {MANY}}}'
    read = bodies.read(content.encode(), kind)
    began_at = time.process_time()
    with pytest.raises(
        CallRefusedError, match=r"^chat_template_kwargs: [0-9]+ bytes are not allowed; allowed: at most 1048576$"
    ):
        TRANSLATIONS[kind](read)
    assert time.process_time() - began_at < MOST_S


@pytest.mark.parametrize("given", ["[]", "1", '"x"'])
def test_variables_are_an_object(given: str) -> None:
    content = json.dumps(ASKED)[:-1] + f', "chat_template_kwargs": {given}}}'
    with pytest.raises(CallRefusedError, match=r"^chat_template_kwargs: Expected `object.*; allowed: an object$"):
        translation.chat_request(bodies.read(content.encode(), ChatBody), None)


@pytest.mark.parametrize("field", ["variables", "tools"])
def test_what_a_chat_brings_in_json_is_measured_before_it_is_read(field: str) -> None:
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="x")], **{field: MANY})
    request = api.GenerateRequest(chat=chat)
    with pytest.raises(
        CallRefusedError, match=f"^chat.{field}: [0-9]+ characters are not allowed; allowed: at most 1048576$"
    ):
        check_request(request, MODEL)


@pytest.mark.parametrize("kind", [EmbeddingsBody, CompletionBody], ids=lambda kind: kind.__name__)
def test_inputs_are_counted_before_they_are_read(kind: type[msgspec.Struct]) -> None:
    field, most = ("input", 2048) if kind is EmbeddingsBody else ("prompt", 256)
    read = bodies.read(json.dumps({field: [[1]] * 500_000}).encode(), kind)
    began_at = time.process_time()
    with pytest.raises(CallRefusedError, match=f"^{field}: 500000 .*are not allowed; allowed: 1 to {most}$"):
        TRANSLATIONS[kind](read)
    assert time.process_time() - began_at < MOST_S / 10


@pytest.mark.parametrize(("kind", "check"), [(api.EmbedRequest, check_embed), (api.ScoreRequest, check_score)])
def test_millions_of_inputs_are_counted_before_one_is_made_an_object(
    kind: type[Any], check: Callable[..., Any]
) -> None:
    field = "inputs" if kind is api.EmbedRequest else "continuations"
    tag = bytes([kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2, 0])
    request = kind.FromString(tag * 2_000_000)
    model = msgspec.structs.replace(MODEL, embedding_size=8, supports_prompt_logprobs=True)
    began_at = time.process_time()
    with pytest.raises(CallRefusedError, match=f"{field}: 2000000 are not allowed; allowed: 1 to 64"):
        check(request, model)
    assert time.process_time() - began_at < MOST_S / 10


def test_what_the_model_said_in_several_items_is_one_message() -> None:
    thoughts = [{"type": "reasoning", "content": f"{number}," + "x" * 900} for number in range(8000)]
    calls = [ITEM | {"call_id": str(number)} for number in range(8000)]
    said = [*thoughts, {"role": "assistant", "content": "y"}, *calls]
    content = json.dumps(
        {"input": [{"role": "user", "content": "q"}, *said, {"role": "user", "content": "r"}]}
    ).encode()
    chat = translation.responses_request(bodies.read(content, ResponsesBody), None).chat
    more = json.loads(chat.messages[1].more)
    assert [(one.role, one.content) for one in chat.messages] == [("user", "q"), ("assistant", "y"), ("user", "r")]
    assert more["reasoning_content"] == "".join(str(one["content"]) for one in thoughts)
    assert [call["id"] for call in more["tool_calls"]] == [call["call_id"] for call in calls]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (rb"\ud800", rb"\ud800"),
        (rb"a\uD83Db", rb"\uD83D"),
        (rb"\udc00", rb"\udc00"),
        (rb"\ud83d\ude00\ude00", rb"\ude00"),
        (rb"\ud83d\ud83d\ude00", rb"\ud83d"),
        (rb"\\ud800 \udfff", rb"\udfff"),
    ],
)
@pytest.mark.parametrize("body", [b'{"prompt":"%b"}', b'{"prompt":"x","stop":["%b"],"max_tokens":12345678}'])
def test_a_lone_surrogate_is_named(body: bytes, text: bytes, held: bytes) -> None:
    with pytest.raises(CallRefusedError) as refusal:
        bodies.read(body % text, CompletionBody)
    assert refusal.value.message == f"body: a text in it holds the lone surrogate {held.decode()}; allowed: Unicode"


@pytest.mark.parametrize("text", [rb"\ud83d\ude00", rb"\\ud800", rb"\\\\ud800\\udc00"])
def test_what_is_no_lone_surrogate_is_not_taken_for_one(text: bytes) -> None:
    assert bodies.read(b'{"prompt":"%b"}' % text, CompletionBody).prompt == json.loads(b'"%b"' % text)
    with pytest.raises(CallRefusedError, match=r"^body: it is not readable \(JSON is malformed"):
        bodies.read(b'{"prompt":"%b",}' % text, CompletionBody)


@given(content=st.binary(max_size=200))
@example(content=b'{"prompt":' + b"[" * 200_000)
@example(content=b'{"prompt": "' + b"\\ud800" + b'"}')
@example(content=b'{"\\n": 1, "prompt": "x"}')
@examples(40)
def test_any_bytes_are_a_body_or_refused(content: bytes) -> None:
    read_or_refuse(CompletionBody, content)
