"""Files that a user names: what has no end, no line end or no reader is one line."""

import io
from pathlib import Path

import pytest

from headway.__main__ import main
from headway.flags.named_files import MOST_BYTES, bytes_of_file, lines_of, lines_of_file
from headway.flags.settings import ConfigurationError

ENDLESS = "/dev/zero"


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--config", ENDLESS),
        ("health", "127.0.0.1:1", "--root-certificates", ENDLESS),
        ("health", "127.0.0.1:1", "--token-file", ENDLESS),
        ("generate", "--file", ENDLESS),
        ("generate", "x", "--json-schema", ENDLESS),
        ("simulate", "--hardware-file", ENDLESS),
        ("simulate", "--trace", ENDLESS),
    ],
)
def test_a_file_without_an_end_is_refused(words, capsys):
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headway {words[0]}: --")
    assert f"{ENDLESS!r} is too l" in line
    assert "; allowed: " in line


def test_what_cannot_be_read_is_told_with_the_reason(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), ("a\0b", "embedded null")):
        for read in (bytes_of_file, lambda name, flag: list(lines_of_file(name, flag))):
            with pytest.raises(ConfigurationError, match=f"^--flag: cannot read .*: {reason}"):
                read(str(path), "--flag")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\xef\xbb\xbfa\r\n\r\nb", [(1, b"a"), (2, b""), (3, b"b")]),
        ("a\u2028b\x0cc\n".encode(), [(1, "a\u2028b\x0cc".encode())]),
    ],
)
def test_lines_end_at_their_ends_alone(content, lines):
    assert list(lines_of(io.BytesIO(content), "x", "--file")) == lines


def test_a_line_may_be_as_long_as_is_said(tmp_path: Path):
    path = tmp_path / "long"
    path.write_bytes(b"\n" + b"a" * (MOST_BYTES - 1) + b"\n" + b"b" * (MOST_BYTES + 1))
    lines = lines_of_file(str(path), "--file")
    assert [len(next(lines)[1]) for _ in range(2)] == [0, MOST_BYTES - 1]
    with pytest.raises(ConfigurationError, match=rf"^--file: line 3 of .* is too long; allowed: {MOST_BYTES} bytes"):
        next(lines)
