"""How a message names a value and tells another's error."""

from pathlib import PurePosixPath

import pytest

from headway_proto.wording import one_line, shown

LONG_PATH = "/home/somebody/models/" + "a-folder-with-a-long-name/" * 4 + "model.gguf"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("vllm", "'vllm'"),
        ("", "''"),
        (65, "65"),
        (None, "None"),
        ([1, "a"], "[1, 'a']"),
        ("two\nlines\x1b[31m", r"'two\nlines\x1b[31m'"),
        (PurePosixPath("/a/b"), "'/a/b'"),
        ("x" * 64, f"'{'x' * 64}'"),
    ],
)
def test_a_value_is_shown_as_python_writes_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_of_a_long_value_both_ends_are_left_and_the_quotes_are_closed() -> None:
    text = shown(PurePosixPath(LONG_PATH))
    assert text == "'/home/somebody/models/a-folder-...er-with-a-long-name/model.gguf'"
    assert len(text) == 66
    assert shown("x" * 65, 11) == "'xxxx...xxxx'"
    assert len(shown(list(range(1000)), 80)) == 82


@pytest.mark.parametrize(
    ("said", "most", "line"),
    [
        ("  one\n\ttwo  ", None, "one two"),
        (ValueError("no\nsuch file"), None, "no such file"),
        (ValueError("no\nsuch file"), 4, "no s"),
        (TimeoutError(), None, "TimeoutError"),
        (TimeoutError(" \n "), 20, "TimeoutError"),
        ("", None, ""),
    ],
)
def test_what_an_error_says_is_one_line(said: object, most: int | None, line: str) -> None:
    assert one_line(said, most) == line
