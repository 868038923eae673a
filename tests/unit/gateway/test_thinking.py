"""What a model thinks is divided from what it answers, whatever the pieces."""

import random

import pytest

from headway_gateway.openai.thinking import ThinkingText, Thought, teaches_thinking

CASES = {
    "none": (False, "Hello <think>", "", "Hello <think>"),
    "thought": (False, "<think>\nHm < 3</think>\n\nYes.", "\nHm < 3", "Yes."),
    "spaces": (False, "\n <think>a</think>b", "a", "b"),
    "cut": (False, "<think>Hm </thi", "Hm </thi", ""),
    "cut at once": (False, "<thi", "", "<thi"),
    "begun": (True, "Hm.</think>Yes </think>", "Hm.", "Yes </think>"),
    "empty": (False, "<think>\n\n</think>\n\nYes", "\n\n", "Yes"),
    "nothing": (True, "</think>Yes", "", "Yes"),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_and_answers(name: str) -> None:
    has_begun, text, thought, answer = CASES[name]
    for seed in range(30):
        rng = random.Random(seed)
        parser = ThinkingText(has_begun=has_begun)
        pieces, place = [], 0
        while place < len(text):
            size = rng.randint(1, 9) if seed else len(text)
            pieces += parser.push(text[place : place + size])
            place += size
        pieces += parser.finish()
        assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == thought
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == answer


def test_answers_do_not_wait() -> None:
    assert ThinkingText(has_begun=False).push("Hello") == ["Hello"]
    assert ThinkingText(has_begun=True).push("Hello <") == [Thought("Hello ")]
    assert teaches_thinking("{{ x.split('</think>') }}")
    assert not teaches_thinking("{{ x }}")
