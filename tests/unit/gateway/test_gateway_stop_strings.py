"""Stop strings against the plain definition: the first character position at which some stop string is complete."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headway_gateway.text.stop_strings import StopMatcher

ALPHABET = "aab é🙂"


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


@given(
    text=st.text(ALPHABET, max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 100), max_size=10),
)
def test_pieces_give_what_the_whole_gives(text, stops, cuts):
    matcher = StopMatcher(stops)
    let_out = ""
    expected, stop = reference(text, stops)
    for piece in pieces_of(text, cuts):
        let_out += matcher.push(piece)
        assert expected.startswith(let_out), "nothing is let out that a stop string takes back"
    assert matcher.matched == stop
    assert let_out + matcher.finish() == expected


@given(text=st.text(ALPHABET, max_size=30), stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    let_out = "".join(matcher.push(character) for character in text)
    if matcher.matched is None:
        held = text[len(let_out) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_match_everything_is_swallowed():
    matcher = StopMatcher(["END"])
    assert matcher.push("an E") == "an "
    assert matcher.push("ND and more") == ""
    assert matcher.push("more") == ""
    assert matcher.finish() == ""
    assert matcher.matched == "END"
