"""The channels of gpt-oss: thoughts, calls and answers, whatever the pieces."""

import random

import pytest

from headway_gateway.openai.harmony import HarmonyText, speaks_harmony
from headway_gateway.openai.thinking import Thought
from headway_gateway.openai.tool_calls import ToolCall
from output_pieces import joined

HM = "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant"
LOOK = ToolCall("look", '{"at":"a < b"}')
ARGUMENTS = '{"at": "a < b"}'
CASES: dict[str, tuple[str, list[str | Thought | ToolCall]]] = {
    "answer": (HM + "<|channel|>final<|message|>Yes <|.<|return|>", [Thought("Hm < 3."), "Yes <|."]),
    "cut thought": ("<|channel|>analysis<|message|>Hm <", [Thought("Hm <")]),
    "cut head": (HM + "<|channel|>final", [Thought("Hm < 3.")]),
    "call": (
        HM + f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        [Thought("Hm < 3."), LOOK],
    ),
    "call as in the template": (f" to=functions.look<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", [LOOK]),
    "call without an end": (f" to=functions.look<|channel|>commentary<|message|>{ARGUMENTS}", [LOOK]),
    "text before a call": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.look<|message|>{ARGUMENTS}<|call|>",
        ["I look.", LOOK],
    ),
    "another end": ("<|channel|>final<|message|>Yes.<eos>", ["Yes."]),
    "cut call": (" to=functions.look<|channel|>commentary<|message|>{", ["{"]),
    "no channel": ('{"a": 1}<|return|>', ['{"a": 1}']),
    "spaces": (" to be", [" to be"]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("name", CASES)
def test_messages_come_out_whatever_the_pieces(name: str) -> None:
    text, expected = CASES[name]
    for seed in range(40):
        rng = random.Random(seed)
        parser = HarmonyText(divides_thoughts=True, calls=True, ends=("<eos>",))
        found: list[str | Thought | ToolCall] = []
        place = 0
        while place < len(text):
            size = rng.randint(1, 12) if seed else len(text)
            found += parser.push(text[place : place + size])
            place += size
        found += parser.finish()
        assert joined(found) == expected
        assert parser.num_calls == sum(isinstance(piece, ToolCall) for piece in expected)


def test_what_is_not_asked_for_is_text() -> None:
    parser = HarmonyText(divides_thoughts=False, calls=False)
    text = HM + f"<|channel|>commentary to=functions.look<|message|>{ARGUMENTS}<|call|>"
    assert "".join(map(str, parser.push(text) + parser.finish())) == "Hm < 3." + ARGUMENTS


def test_an_answer_does_not_wait() -> None:
    parser = HarmonyText(divides_thoughts=True, calls=True)
    assert parser.push("<|channel|>final<|message|>Hello") == ["Hello"]
    assert parser.push(" <") == [" "]
    assert parser.push("b>") == ["<b>"]


def test_a_template_has_channels_or_not() -> None:
    assert speaks_harmony("{{ '<|start|>assistant<|channel|>final<|message|>' }}")
    assert not speaks_harmony("{{ '<|im_start|>' }}")
