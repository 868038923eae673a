"""The AMX variant on processors without AMX."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway_kernels.cpu import build
from headway_kernels.cpu.library import runs_here

TOOL = Path(__file__).resolve().parents[2] / "tools" / "emulate_tiles.py"


@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_an_emulated_matrix_unit_passes_the_tests_of_the_kernels():
    if any(runs_here(Path(one.library)) for one in build.variants_here() if one.name == "amx"):
        pytest.skip("this processor runs the variant itself")
    done = subprocess.run([sys.executable, TOOL, "-q"], capture_output=True, text=True, check=False)
    if done.returncode == 2 and "needs a processor" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout[-3000:]
