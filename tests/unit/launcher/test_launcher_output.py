"""Where a command's output cannot be written: no traceback, and an exit code that says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*words: str, output) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "headway", *words], stdout=output, stderr=subprocess.PIPE, text=True, check=False
    )


def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        ended = _run("version", output=full)
    assert (ended.returncode, ended.stderr) == (
        1,
        "headway version: the output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize("words", [("version",), ("completion", "bash")])
def test_a_reader_that_has_seen_enough_is_no_error_to_tell(words):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = _run(*words, output=writing)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("version",), 0, ""),
        (("nothing",), 2, "headway: unknown command nothing"),
        (
            ("generate", "--file", "-", "--address", "127.0.0.1:1"),
            2,
            "headway generate: --file: '-' has no prompt in it",
        ),
    ],
)
def test_a_standard_stream_that_is_closed_leads_nowhere(words, code, told):
    for closed in ("<&-", ">&-", "<&- >&-"):
        shell = ["sh", "-c", f'exec "$0" -m headway "$@" {closed}', sys.executable, *words]
        ended = subprocess.run(shell, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
        assert (ended.returncode, ended.stderr.strip()[: len(told) or None]) == (code, told)
    silent = ["sh", "-c", 'exec "$0" -m headway "$@" 2>&-', sys.executable, *words]
    assert subprocess.run(silent, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode == code
