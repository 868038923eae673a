"""Every Triton kernel compiles for sm_80 and sm_90, in the variants that a backend launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""What one block of threads may use (CUDA C++ Programming Guide, table of technical specifications)."""

KNOWN_STACK = {"survey": 8}
"""One number in 64 bits too many."""


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.deep), 90])
@pytest.mark.parametrize("module", sorted(path.stem for path in FOLDER.glob("cases_*.py")))
def test_kernels_compile(module, capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
    command = [sys.executable, str(FOLDER / "triton_compilation.py"), str(capability), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    assert {entry["capability"] for entry in compiled} == {capability}
    for entry in compiled:
        assert entry["cubin_bytes"] > 0
        assert entry["shared_bytes"] <= SHARED_BYTES[entry["capability"]], entry
        if capability == 90:
            assert entry["stack_bytes"] <= KNOWN_STACK.get(entry["name"], 0), entry
