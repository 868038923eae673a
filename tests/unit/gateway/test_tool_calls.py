"""Tool calls in growing texts: the same whatever the pieces, and nothing that is none is lost."""

# ruff: noqa: RUF001, ISC004 (marks of DeepSeek have full-width lines; long texts)

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from headway_gateway.openai import tool_calls
from headway_gateway.openai.pieces import MarkedText
from headway_gateway.openai.tool_calls import (
    COHERE,
    DEEPSEEK,
    DEEPSEEK_CALL,
    FORCED,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GRANITE,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    PHI,
    QWEN_CODER,
    SEED,
    CallForm,
    ToolCall,
    ToolText,
    form_of,
)

CALL = '{"name": "look", "arguments": {"at": "a < b"}}'
LOOK = ToolCall("look", '{"at":"a < b"}')
GO = ToolCall("go", "{}")
CASES = {
    "text": (HERMES, "Hello <b> there\n", ["Hello <b> there\n"]),
    "call": (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", [LOOK]),
    "text and calls": (
        HERMES,
        f'I look. \n<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "go"}}</tool_call>\n',
        ["I look.", LOOK, GO],
    ),
    "text behind": (HERMES, f"<tool_call>{CALL}</tool_call> and more", [LOOK, " and more"]),
    "no json": (HERMES, "<tool_call>nothing</tool_call>!", ["<tool_call>nothing</tool_call>!"]),
    "cut": (HERMES, '<tool_call>{"name": "lo', ['<tool_call>{"name": "lo']),
    "without an end": (HERMES, f"<tool_call>{CALL}", [LOOK]),
    "a name that no tool has": (HERMES, '<tool_call>{"name": "nowhere"}</tool_call>', [ToolCall("nowhere", "{}")]),
    "part of a mark": (HERMES, "a <tool", ["a <tool"]),
    "mistral": (MISTRAL, f"Yes.[TOOL_CALLS][{CALL}]</s>", ["Yes.", LOOK]),
    "mistral text": (MISTRAL, "Yes [TOOL] </s>", ["Yes [TOOL] "]),
    "mistral no json": (MISTRAL, "[TOOL_CALLS]x", ["[TOOL_CALLS]x"]),
    "mistral by name": (MISTRAL, 'Yes.[TOOL_CALLS]look[ARGS]{"at": "a < b"}</s>', ["Yes.", LOOK]),
    "mistral by name, twice": (
        MISTRAL,
        '[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"at": "a < b"}[TOOL_CALLS]go[CALL_ID]bcdefghij[ARGS]{}</s>',
        [LOOK, GO],
    ),
    "mistral by name, cut": (MISTRAL, '[TOOL_CALLS]look[ARGS]{"at":', ['[TOOL_CALLS]look[ARGS]{"at":']),
    "granite": (GRANITE, f"<|tool_call|>[{CALL}]</s>", [LOOK]),
    "granite, cut": (GRANITE, f"<|tool_call|>[{CALL}", [f"<|tool_call|>[{CALL}"]),
    "llama": (LLAMA, ' {"name": "look", "parameters": {"at": "a < b"}}', [LOOK]),
    "llama twice": (LLAMA, '{"name": "go"}; {"name": "look", "parameters": {"at": "a < b"}}', [GO, LOOK]),
    "llama json": (LLAMA, '{"a": 1}', ['{"a": 1}']),
    "llama text": (LLAMA, "Well {", ["Well {"]),
    "llama, behind text": (LLAMA, f"a{CALL}", [f"a{CALL}"]),
    "llama, behind a line": (LLAMA, f"\nI look.\n{CALL}\n", [f"\nI look.\n{CALL}\n"]),
    "deepseek v3": (
        DEEPSEEK,
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        '```json\n{"at": "a < b"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜></s>",
        ["I look.", LOOK, GO],
    ),
    "deepseek v3.1": (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "a < b"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜></s>",
        [LOOK, GO],
    ),
    "deepseek v3.1, a tool called function": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜></s>",
        [ToolCall("function", "{}")],
    ),
    "deepseek, cut": (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at":',
        ['<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at":'],
    ),
    "deepseek text": (DEEPSEEK, "a <｜tool▁ca", ["a <｜tool▁ca"]),
    "cohere": (
        COHERE,
        'I look.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"at": "a < b"}},\n'
        '    {"tool_call_id": "1", "tool_name": "go", "parameters": {}}\n]<|END_ACTION|></s>',
        ["I look.", LOOK, GO],
    ),
    "cohere, no name": (
        COHERE,
        '<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>',
        ['<|START_ACTION|>[{"parameters": {}}]<|END_ACTION|>'],
    ),
    "phi": (PHI, f"<|tool_call|>[{CALL}]<|/tool_call|></s>", [LOOK]),
    "phi, one by one": (
        PHI,
        f"Yes.<|tool_call|>{CALL}<|/tool_call|><|tool_call|>{CALL}<|/tool_call|>",
        ["Yes.", LOOK, LOOK],
    ),
    "phi, nothing": (PHI, "<|tool_call|><|/tool_call|>", ["<|tool_call|><|/tool_call|>"]),
    "coder": (
        QWEN_CODER,
        "I look.\n<tool_call>\n<function=look>\n<parameter=at>\na < b\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=go>\n</function>\n</tool_call>",
        ["I look.", LOOK, GO],
    ),
    "coder, no function": (QWEN_CODER, f"<tool_call>{CALL}</tool_call>", [f"<tool_call>{CALL}</tool_call>"]),
    "coder, cut within a value": (
        QWEN_CODER,
        "<tool_call>\n<function=look>\n<parameter=at>\nrm -rf /\n",
        ["<tool_call>\n<function=look>\n<parameter=at>\nrm -rf /\n"],
    ),
    "coder without its end": (
        QWEN_CODER,
        "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n",
        [ToolCall("look", '{"at":"x"}')],
    ),
    "coder, cut": (QWEN_CODER, "<tool_call>\n<function=look", ["<tool_call>\n<function=look"]),
    "seed": (
        SEED,
        "I look.<seed:tool_call>\n<function=look>\n<parameter=at>a < b</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=go>\n</function>\n</seed:tool_call>",
        ["I look.", LOOK, GO],
    ),
    "minimax": (
        MINIMAX,
        'I look.\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">a < b</parameter>\n</invoke>\n'
        '<invoke name="go">\n</invoke>\n</minimax:tool_call>',
        ["I look.", LOOK, GO],
    ),
    "minimax, no name": (
        MINIMAX,
        "<minimax:tool_call><invoke>look</invoke></minimax:tool_call>",
        ["<minimax:tool_call><invoke>look</invoke></minimax:tool_call>"],
    ),
    "glm": (
        GLM,
        "I look.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a < b</arg_value>\n</tool_call>\n<tool_call>go\n</tool_call>",
        ["I look.", LOOK, GO],
    ),
    "glm 4.7": (GLM, "<tool_call>look<arg_key>at</arg_key><arg_value>a < b</arg_value></tool_call>", [LOOK]),
    "glm, json": (GLM, f"<tool_call>{CALL}</tool_call>", [f"<tool_call>{CALL}</tool_call>"]),
    "glm, lines": (
        GLM,
        "<tool_call>x\n<arg_key>a</arg_key>\n<arg_value>\n b\n</arg_value>\n<arg_key>c</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        [ToolCall("x", '{"a":"\\n b\\n","c":"5"}')],
    ),
    "gemma": (
        FUNCTION_GEMMA,
        "I look.<start_function_call>call:look{at:<escape>a < b<escape>}<end_function_call>"
        "<start_function_call>call:go{}<end_function_call>",
        ["I look.", LOOK, GO],
    ),
    "gemma, values": (
        FUNCTION_GEMMA,
        '<start_function_call>call:x{a:3,b:[true, 1.5,<escape>c:{"d", e:<escape>],f-g:{h:null}}<end_function_call>',
        [ToolCall("x", '{"a":3,"b":[true,1.5,"c:{\\"d\\", e:"],"f-g":{"h":null}}')],
    ),
    "gemma, no call": (
        FUNCTION_GEMMA,
        "<start_function_call>call:look{at:sun}<end_function_call>",
        ["<start_function_call>call:look{at:sun}<end_function_call>"],
    ),
    "gemma 4": (
        GEMMA_4,
        'I look.<|tool_call>call:look{at:<|"|>a < b<|"|>}<tool_call|><|tool_call>call:go{}<tool_call|>',
        ["I look.", LOOK, GO],
    ),
    "gemma 4, values": (
        GEMMA_4,
        '<|tool_call>call:x{a:3,b:[true,1.5,<|"|>c:{"d", e:<|"|>],f-g:{h:null}}<tool_call|>',
        [ToolCall("x", '{"a":3,"b":[true,1.5,"c:{\\"d\\", e:"],"f-g":{"h":null}}')],
    ),
    "forced": (FORCED, f'[{CALL}, {{"name": "go", "parameters": {{}}}}]', [LOOK, GO]),
    "forced, cut": (FORCED, '[{"name": "lo', ['[{"name": "lo']),
}

MARKS_WITHIN = {
    form: (text.removesuffix("</s>").replace("a < b", f"a {mark} {ends} b"), f"a {mark} {ends} b")
    for form, text, mark, ends in (
        (HERMES, CASES["call"][1], "<tool_call>", "</tool_call>"),
        (MISTRAL, CASES["mistral by name"][1], "[TOOL_CALLS]", "[ARGS]{}"),
        (PHI, CASES["phi"][1], "<|tool_call|>", "<|/tool_call|>"),
        (COHERE, CASES["cohere"][1], "<|START_ACTION|>", "<|END_ACTION|>"),
        (DEEPSEEK, CASES["deepseek v3"][1], DEEPSEEK_CALL, "<｜tool▁call▁end｜>\\n<｜tool▁calls▁end｜>"),
        (QWEN_CODER, CASES["coder"][1], "<tool_call><function=x>", "</function></tool_call>"),
        (SEED, CASES["seed"][1], "<seed:tool_call><function=x>", "</function></seed:tool_call>"),
        (MINIMAX, CASES["minimax"][1], '<invoke name="x">', "</invoke></minimax:tool_call>"),
        (GLM, CASES["glm"][1], "<tool_call>", "</tool_call>"),
        (FUNCTION_GEMMA, CASES["gemma"][1], "<start_function_call>", "<end_function_call>"),
        (GEMMA_4, CASES["gemma 4"][1], "<|tool_call>", "<tool_call|>"),
        (LLAMA, CASES["llama twice"][1], ";", "; {"),
    )
}


@pytest.mark.parametrize("form", MARKS_WITHIN, ids=lambda form: form.begin or "llama")
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_mark_within_an_argument_does_not_end_the_call(form: CallForm, size: int) -> None:
    text, value = MARKS_WITHIN[form]
    parser = ToolText(form)
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    calls = [piece for piece in (*pieces, *parser.finish()) if isinstance(piece, ToolCall)]
    look = next(call for call in calls if call.name == "look")
    assert json.loads(look.arguments) == {"at": value.replace("\\n", "\n")}
    assert [call for call in calls if call is not look] in ([], [GO])


def test_a_call_behind_one_whose_text_has_no_end_is_found_at_the_end() -> None:
    parser = ToolText(HERMES)
    broken = '<tool_call>{"name": "look</tool_call>'
    assert parser.push(f"{broken} so <tool_call>{CALL}</tool_call> and") == []
    assert parser.finish() == [broken, " so", LOOK, " and"]


@pytest.mark.parametrize("name", CASES)
def test_calls_come_out_whole_whatever_the_pieces(name: str) -> None:
    form, text, expected = CASES[name]
    for seed in range(30):
        rng = random.Random(seed)
        parser = MarkedText(None, ToolText(form), ("</s>",))
        pieces, place = [], 0
        while place < len(text):
            size = rng.randint(1, 12) if seed else len(text)
            pieces += parser.push(text[place : place + size])
            place += size
        pieces += parser.finish()
        joined: list[str | ToolCall] = []
        for piece in pieces:
            if joined and isinstance(piece, str) and isinstance(joined[-1], str):
                joined[-1] += piece
            else:
                joined.append(piece)
        assert joined == expected, seed
        assert parser.num_calls == sum(isinstance(piece, ToolCall) for piece in expected)
        assert all(isinstance(json.loads(piece.arguments), dict) for piece in joined if isinstance(piece, ToolCall))


def test_text_that_cannot_be_a_call_does_not_wait() -> None:
    assert ToolText(HERMES).push("Hello there") == ["Hello there"]
    assert ToolText(LLAMA).push("Hello") == ["Hello"]
    assert ToolText(MISTRAL).push("Hello [") == ["Hello"]


TYPED = {
    "type": "object",
    "$defs": {"Unit": {"enum": ["C", "F"]}, "Place": {"type": "object"}},
    "properties": {
        "count": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "deep": {"type": "boolean"},
        "names": {"type": "array"},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "unit": {"$ref": "#/$defs/Unit"},
        "code": {"type": "string"},
        "level": {"enum": [1, 2]},
        "loop": {"anyOf": [{"$ref": "#/properties/loop"}, {"$ref": "#/properties/again"}] * 9},
        "again": {"oneOf": [{"$ref": "#/properties/loop"}, {"$ref": "#/properties/again"}] * 9},
    },
}


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({"count": "3", "ratio": "0.5", "deep": "true"}, {"count": 3, "ratio": 0.5, "deep": True}),
        ({"count": "3.0", "ratio": "null", "deep": "False"}, {"count": 3, "ratio": None, "deep": False}),
        ({"count": "many", "ratio": "None", "deep": "1"}, {"count": "many", "ratio": None, "deep": "1"}),
        ({"names": '["a", 1]', "place": '{"x": [1]}'}, {"names": ["a", 1], "place": {"x": [1]}}),
        ({"names": "a", "place": "None"}, {"names": "a", "place": None}),
        ({"unit": "C", "code": "5", "level": "2", "loop": "7"}, {"unit": "C", "code": "5", "level": 2, "loop": "7"}),
        ({"code": "a\n<b>\n</parameter>\n", "other": "5"}, {"code": "a\n<b>\n</parameter>\n", "other": "5"}),
        ({"count": "9" * 30, "ratio": "1e999"}, {"count": int("9" * 30), "ratio": "1e999"}),
    ],
)
def test_values_of_markup_have_the_types_of_the_tools_schema(values: dict[str, str], arguments: dict) -> None:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=look>\n{written}</function>\n</tool_call>"
    (call,) = ToolText(QWEN_CODER, {"look": TYPED}).push(text)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments
    for broken in (None, [], {"properties": []}, {"properties": {"count": {"anyOf": 1, "type": 2, "$ref": 3}}}):
        (call,) = ToolText(QWEN_CODER, {"look": broken}).push(text)
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == values


def test_values_that_nest_deeply_are_values_or_text() -> None:
    for depth in (10, *range(900, 1010), 100_000):
        value = "[" * depth + "]" * depth
        text = f"<tool_call><function=look><parameter=names>{value}</parameter></function></tool_call>"
        pieces = ToolText(QWEN_CODER, {"look": TYPED}).push(text)
        assert len(pieces) == 1
        ToolText(HERMES).push(f'<tool_call>{{"name": "look", "arguments": {{"names": {value}}}}}</tool_call>')


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", None),
        ("<tool_call>{{ tools }}", HERMES),
        ("<tool_call><function=x>", QWEN_CODER),
        ("<tool_call>{function-name}\n<arg_key>", GLM),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", MINIMAX),
        ("<seed:tool_call>\n<function=x>", SEED),
        ("{% if tools %}[TOOL_CALLS]", MISTRAL),
        ("{% if tools %}<|tool_call|>", GRANITE),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", PHI),
        ("<|tool|>{{ tools }}<|/tool|><|tool_call|>{}<|/tool_call|>", PHI),
        ("<|START_ACTION|>[", COHERE),
        ("{{- '<start_function_call>call:' -}}", FUNCTION_GEMMA),
        ("{{- '<|tool_call>call:' + name + '{' -}}", GEMMA_4),
        ("{{ '<｜tool▁calls▁begin｜>' }}", DEEPSEEK),
        ("""{% if tools %}{"tool_name": "x", "parameters": {}}""", None),
        ("""{% if tools %}{"name": function name, "parameters": dictionary}""", LLAMA),
    ],
)
def test_the_form_is_that_of_the_template(template: str, form: CallForm | None) -> None:
    assert form_of(template) is form


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "write", "arguments": {"text": "' + ";" * 50_000),
        (HERMES, '<tool_call>"' + '\\"' * 25_000 + "</tool_call>"),
        (GLM, "<tool_call>write" + "<arg_key>" * 15_000 + "</tool_call>"),
        (QWEN_CODER, "<tool_call><function=write>" + "<parameter=" * 15_000 + "</function></tool_call>"),
    ],
    ids=["marks in a text that is cut short", "escapes in one", "names that do not end", "names of Qwen3-Coder"],
)
def test_a_long_call_that_is_none_is_read_in_one_pass(form: CallForm, text: str) -> None:
    """All streams of a gateway wait meanwhile: this took 5 to 28 s."""
    began_at = time.process_time()
    divided = ToolText(form)
    assert "".join(map(str, [*divided.push(text), *divided.finish()]))
    assert time.process_time() - began_at < 2


SEGMENT = "<tool_call><function=a><parameter=b></tool_call>"


@pytest.mark.parametrize(
    ("form", "begin", "repeated", "end"),
    [
        (HERMES, '<tool_call>{"name": "a", "arguments": {"x": "', '</tool_call>\\"', '"}}</tool_call>'),
        (QWEN_CODER, SEGMENT, "</tool_call>", "</parameter></function></tool_call>"),
        (QWEN_CODER, SEGMENT, "<function=", "</parameter></function></tool_call>"),
        (QWEN_CODER, SEGMENT, SEGMENT, SEGMENT),
        (GLM, "<tool_call>a<arg_key>b</arg_key><arg_value>", "</tool_call>", "</arg_value></tool_call>"),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:a{x:<escape>",
            "<end_function_call>",
            "<escape>}<end_function_call>",
        ),
    ],
    ids=["json", "markup", "calls within a value", "values without an end", "unmarked name", "nearly json"],
)
def test_however_many_marks_arguments_have_each_part_is_read_once(
    form: CallForm, begin: str, repeated: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    def counted(is_open: Callable[..., bool]) -> Callable[..., bool]:
        def read(*given: Any) -> bool:
            nonlocal num_read
            num_read += len(given[-1])
            return is_open(*given)

        return read

    for name in ("is_in_value", "_is_in_json_text"):
        monkeypatch.setattr(tool_calls, name, counted(getattr(tool_calls, name)))
    text = ToolText(form)
    given = [begin, *[repeated] * 200, end]
    for piece in given:
        text.push(piece)
    text.finish()
    assert num_read <= 4 * len("".join(given))
