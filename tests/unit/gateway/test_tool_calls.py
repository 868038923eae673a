"""Tool calls in growing texts: the same whatever the pieces, and nothing that is none is lost."""

import json
import random

import pytest

from headway_gateway.openai.tool_calls import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    SPECIAL_FORMS,
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
}


@pytest.mark.parametrize("name", CASES)
def test_calls_come_out_whole_whatever_the_pieces(name: str) -> None:
    form, text, expected = CASES[name]
    for seed in range(30):
        rng = random.Random(seed)
        parser = ToolText(form, ("</s>",) if form in SPECIAL_FORMS else ())
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
        assert joined == expected
        assert parser.num_calls == sum(isinstance(piece, ToolCall) for piece in expected)
        assert all(isinstance(json.loads(piece.arguments), dict) for piece in joined if isinstance(piece, ToolCall))


def test_text_that_cannot_be_a_call_does_not_wait() -> None:
    assert ToolText(HERMES).push("Hello there") == ["Hello there"]
    assert ToolText(LLAMA).push("Hello") == ["Hello"]
    assert ToolText(MISTRAL).push("Hello [") == ["Hello"]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", ""),
        ("<tool_call>{{ tools }}", HERMES),
        ("<tool_call><function=x>", ""),
        ("<tool_call><arg_key>", ""),
        ("{% if tools %}[TOOL_CALLS]", MISTRAL),
        ("{% if tools %}<|tool_call|>", GRANITE),
        ("""{% if tools %}{"tool_name": "x", "parameters": {}}""", ""),
        ("""{% if tools %}{"name": function name, "parameters": dictionary}""", LLAMA),
    ],
)
def test_the_form_is_that_of_the_template(template: str, form: str) -> None:
    assert form_of(template) == form
