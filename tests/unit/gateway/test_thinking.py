"""What a model thinks is divided from what it answers, whatever the pieces."""

import random

import pytest

from headway_gateway.openai.thinking import (
    COHERE,
    GRANITE,
    MAGISTRAL,
    OLDER_GRANITE,
    SEED,
    USUAL,
    ThinkingText,
    Thought,
    ThoughtForm,
    thoughts_of,
)

CASES: dict[str, tuple[bool | ThoughtForm, str, str, str]] = {
    "none": (False, "Hello <think>", "", "Hello <think>"),
    "thought": (False, "<think>\nHm < 3</think>\n\nYes.", "\nHm < 3", "Yes."),
    "spaces": (False, "\n <think>a</think>b", "a", "b"),
    "cut": (False, "<think>Hm </thi", "Hm </thi", ""),
    "cut at once": (False, "<thi", "", "<thi"),
    "begun": (True, "Hm.</think>Yes </think>", "Hm.", "Yes </think>"),
    "empty": (False, "<think>\n\n</think>\n\nYes", "\n\n", "Yes"),
    "nothing": (True, "</think>Yes", "", "Yes"),
    "magistral": (MAGISTRAL, "[THINK]Hm [/x][/THINK]Yes [THINK]", "Hm [/x]", "Yes [THINK]"),
    "cohere": (
        COHERE,
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes <|END_x.<|END_RESPONSE|>",
        "Hm.",
        "Yes <|END_x.",
    ),
    "cohere, no thought": (COHERE, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>\n", "", "Yes."),
    "cohere, cut": (COHERE, "<|START_RESPONSE|>Yes.<|END_RESP", "", "Yes.<|END_RESP"),
    "cohere, no marks": (COHERE, "Yes.<|END_RESPONSE|>", "", "Yes.<|END_RESPONSE|>"),
    "cohere, a call": (COHERE, "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[]", "Hm.", "<|START_ACTION|>[]"),
    "granite": (GRANITE, "<think>Hm.</think>\n<response><a></response></a></response>", "Hm.", "<a></response></a>"),
    "granite, no marks": (GRANITE, "<a></response>", "", "<a></response>"),
    "older granite": (
        OLDER_GRANITE,
        "Here is my thought process:\nHm.\n\nHere is my response:\nYes.",
        "\nHm.\n\n",
        "Yes.",
    ),
    "older granite, no thought": (OLDER_GRANITE, "Here is my response:", "", "Here is my response:"),
}


@pytest.mark.parametrize("name", CASES)
def test_thoughts_and_answers(name: str) -> None:
    how, text, thought, answer = CASES[name]
    for seed in range(30):
        rng = random.Random(seed)
        form, has_begun = (USUAL, how) if isinstance(how, bool) else (how, False)
        parser = ThinkingText(form, has_begun=has_begun)
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
    assert ThinkingText(COHERE, has_begun=False).push("<|START_RESPONSE|>Hello <|END") == ["Hello "]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ x.split('</think>') }}", USUAL),
        ("{{ x }}", None),
        ("{%- set think_end_token = '</seed:think>' -%}", SEED),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", MAGISTRAL),
        ("<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>", COHERE),
        ("Write your thoughts between <think></think> and write your response between <response></response>", GRANITE),
        ("after 'Here is my thought process:' and write your response after 'Here is my response:'", OLDER_GRANITE),
    ],
)
def test_the_form_is_that_of_the_template(template: str, form: ThoughtForm | None) -> None:
    assert thoughts_of(template) is form
