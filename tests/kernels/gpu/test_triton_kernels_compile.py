"""Every Triton kernel compiles for sm_80, sm_90 and sm_100, in the variants that a backend launches."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway_kernels import gpu

FOLDER = Path(__file__).parent
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one block of threads may use (CUDA C++ Programming Guide, table of technical specifications)."""

SHARED_OF_ALL = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Of a multiprocessor; a block takes 1 KiB more than it asks for."""
REGISTERS = 64 * 1024
KNOWN_LOCAL = {
    80: {"decode 512 *fp32 for 8.x": 8, "chunk 80 *fp16 for 8.x": 32, "shrink bf16 128 heads=128": 8},
    90: {"chunk 512 *bf16 for 9.x": 16, "decode 512 *fp32 for 9.x": 56},
    100: {
        "multiply_pairs Qwen3 bf16 INT4 group=32 gathers=False": 168,
        "multiply_pairs gpt-oss fp32 DENSE group=None gathers=False": 8,
        "add_layer_norm fp32 4096 bias=False": 8,
        "chunk 64 *fp32 for 10.x": 16,
        "chunk 64 *fp16 for 9.x, alibi": 800,
        "decode 512 *fp32 for 10.x": 80,
    },
}
"""Bytes of local memory of a thread. The assembler for sm_100 spares registers where it need not."""
IN_GROUPS = re.compile(r"skinny|heads b|float8 (product|pairs)|chunk (?!512)\d+ \*..16|chunk \d+\+\d+ \*..16 for 9\.x$")
"""From sm_90 on, a group of warps multiplies together, if it has 64 rows."""
COPIES_WIDELY = re.compile(
    r"(chunk|decode) \d+ \*..16|heads b|(skinny|product) ..16 (DENSE|INT8_PAIRS|FP8_PAIRS)|float8 (product|pairs)"
)
MODULES = sorted(path.stem for path in FOLDER.glob("cases_*.py"))
IN_A_PROCESS = (MODULES[:1], MODULES[1:6], MODULES[6:])
"""To import torch and Triton takes as long as to compile what some modules have."""
AHEAD = "prefetch.global.L2"


@pytest.fixture(scope="module")
def compiled_once(request):
    """A folder for binaries that stays from run to run; they are found by their sources."""
    return str(request.config.cache.mkdir("triton"))


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.deep), 90, pytest.param(100, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize(
    "modules",
    [*IN_A_PROCESS, pytest.param(["cases_attention:of_every_head"], marks=pytest.mark.deep)],
    ids=lambda modules: modules[0],
)
def test_kernels_compile(modules, capability, compiled_once):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": compiled_once, "PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
    command = [sys.executable, str(FOLDER / "triton_compilation.py"), str(capability), *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    # sm_80 does not multiply codes.
    expected = {module for module in modules if capability >= 89 or not module.startswith("cases_float8")}
    assert {entry["module"] for entry in compiled} == expected
    assert {entry["capability"] for entry in compiled} <= {capability}
    for entry in compiled:
        assert entry["registers"] > 0
        assert entry["shared_bytes"] <= SHARED_BYTES[capability], entry
        # A probability has the same bits in every kernel: nothing is fused with its products.
        assert entry["fused"] in {None, 0}, entry
        check_the_binary(entry, capability)


def test_every_kernel_that_is_launched_is_compiled_here():
    kernels = Path(gpu.__file__).parent
    launches = re.compile(r"^ +(\w+)\[.*\]\(", re.MULTILINE)
    launched = {
        name for path in kernels.rglob("*.py") if path.name != "trial.py" for name in launches.findall(path.read_text())
    }
    compiled = "".join((FOLDER / f"{module}.py").read_text() for module in MODULES)
    assert len(launched) > 25
    assert {name for name in launched if not re.search(rf"\.{name}\b", compiled)} == set()


def check_the_binary(entry, capability):
    """What the speed of a kernel rests on; only a device can measure the speed itself."""
    name = entry["name"]
    assert entry["local_bytes"] <= KNOWN_LOCAL.get(capability, {}).get(name, 0), entry
    threads = 32 * entry["num_warps"]
    assert entry["blocks"] * threads * -(-entry["registers"] // 8) * 8 <= REGISTERS, entry
    assert entry["blocks"] * (entry["shared_bytes"] + 1024) <= SHARED_OF_ALL[capability], entry
    # Before the grid before has ended, only weights may be touched.
    assert entry["before_wait"] == ([AHEAD] if entry["fetches_ahead"] else []), entry
    if capability >= 90 and IN_GROUPS.match(name):
        assert entry["group_products"] > 0, entry
    if name.startswith("float8 p"):
        assert entry["float8_products"] > 0, entry
    if name.startswith("skinny"):
        assert entry["copied_bytes"], entry
    if COPIES_WIDELY.match(name):
        # As codes, the keys of a decode take as many copies as numbers of 16 bits, of half as much. Exponents may be copied.
        narrower = {"0x8", "0x4"} if name.endswith("codes") else set()
        assert set(entry["copied_bytes"]) - narrower == {"0x10"}, entry
