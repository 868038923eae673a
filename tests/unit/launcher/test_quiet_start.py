"""Ctrl-C while the command's modules are imported ends the process without a traceback, and afterwards raises."""

import signal
import subprocess
import sys

import pytest

HEARS = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
INTERRUPTED = "; os.kill(os.getpid(), signal.SIGINT); print('goes on')"


def outcome_of(source: str) -> tuple[int, str, str]:
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout.strip(), ended.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (HEARS + "import headway.quiet_start" + INTERRUPTED, (130, "", "")),
        (HEARS + "import headway.__main__" + INTERRUPTED, (-signal.SIGINT, "", "KeyboardInterrupt")),
        (
            "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import headway.quiet_start" + INTERRUPTED,
            (0, "goes on", ""),
        ),
    ],
    ids=["while importing", "afterwards", "in the background of a shell"],
)
def test_ctrl_c(source: str, outcome: tuple[int, str, str]) -> None:
    assert outcome_of(source) == outcome
