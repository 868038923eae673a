"""The committed stubs are what the ``.proto`` files generate."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_committed_stubs_match_the_proto_files():
    check = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "generate_stubs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
