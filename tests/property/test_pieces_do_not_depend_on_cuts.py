"""What is found in an output's text does not depend on where the text was cut, whatever the text is."""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_gateway.openai import thinking, tool_calls
from headway_gateway.openai.harmony import MARKS, HarmonyText
from headway_gateway.openai.pieces import MarkedText, Piece, Pieces
from headway_gateway.openai.thinking import ThinkingText, ThoughtForm
from headway_gateway.openai.tool_calls import CallForm, ToolText
from output_pieces import joined

CALLS = {name: form for name, form in vars(tool_calls).items() if isinstance(form, CallForm)}
THOUGHTS = {name: form for name, form in vars(thinking).items() if isinstance(form, ThoughtForm)}
ENDS = ("</s>", "<s>end")
CALL = '{"name": "look", "tool_name": "look", "arguments": {"at": 1}}'
INSIDE = (
    CALL,
    f"[{CALL}, {CALL}]",
    "\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n",
    'look[ARGS]{"at": 1}',
    "call:look{at:<escape>a < b<escape>}",
    '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": 1}<｜tool▁call▁end｜>',
)
COMMON = ("a", " ", "\n", "<", "[", "{", "}", "a < b", *ENDS)


def pieces_of(made: Pieces, parts: list[str]) -> tuple[list[Piece], int]:
    """Return what comes out, with neighbours of one kind joined."""
    found = [piece for some in (*map(made.push, parts), made.finish()) for piece in some]
    return joined(found), made.num_calls


def require_no_difference(make: Callable[[], Pieces], words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[first:last] for first, last in pairwise(places)]
    assert pieces_of(make(), parts) == pieces_of(make(), [text]) == pieces_of(make(), list(text))


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from([None, *CALLS.values()]), st.sampled_from([None, *THOUGHTS.values()]), st.data())
def test_marked_text(call_form: CallForm | None, thought_form: ThoughtForm | None, data: st.DataObject) -> None:
    marks = [*((call_form.begin, call_form.end) if call_form else ()), *(thought_form or ())]
    words = data.draw(
        st.lists(st.sampled_from([*COMMON, *INSIDE, *marks, *(mark[:-1] for mark in marks)]), max_size=12)
    )
    has_begun = data.draw(st.booleans())

    def make() -> MarkedText:
        return MarkedText(
            None if thought_form is None else ThinkingText(thought_form, has_begun=has_begun),
            None if call_form is None else ToolText(call_form, {"look": {"properties": {"at": {"type": "integer"}}}}),
            ENDS,
        )

    require_no_difference(make, words, data.draw(CUTS))


@given(
    st.lists(st.sampled_from([*COMMON, *MARKS, "analysis", "final", " to=functions.look", '{"at": 1}']), max_size=14),
    CUTS,
)
def test_channels(words: list[str], cuts: list[int]) -> None:
    require_no_difference(lambda: HarmonyText(divides_thoughts=True, calls=True, ends=ENDS), words, cuts)
