"""Every Triton kernel compiles for sm_80, sm_90 and sm_100, in the variants that a backend launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one block of threads may use (CUDA C++ Programming Guide, table of technical specifications)."""

SHARED_OF_ALL = 228 * 1024
"""Of a multiprocessor from 9.0 on; a block takes 1 KiB more than it asks for."""
REGISTERS = 64 * 1024
KNOWN_LOCAL = {
    100: {
        "multiply_pairs Qwen3 bf16 INT4 group=32 gathers=False": 160,
        "multiply_pairs gpt-oss fp32 DENSE group=None gathers=False": 8,
        "add_layer_norm fp32 4096 bias=False": 8,
    }
}
"""Bytes of local memory of a thread. The assembler for sm_100 spares registers where it need not."""
COPIES_WIDELY = ("skinny", "chunk", "decode", "product bf16 INT8_PAIRS", "product bf16 FP8_PAIRS")
AHEAD = "prefetch.global.L2"


@pytest.fixture(scope="module")
def compiled_once(request):
    """A folder for binaries that stays from run to run; they are found by their sources."""
    return str(request.config.cache.mkdir("triton"))


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.deep), 90, pytest.param(100, marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("module", sorted(path.stem for path in FOLDER.glob("cases_*.py")))
def test_kernels_compile(module, capability, compiled_once):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": compiled_once, "PYTHONPATH": os.pathsep.join((str(FOLDER), *sys.path))}
    command = [sys.executable, str(FOLDER / "triton_compilation.py"), str(capability), module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    assert {entry["capability"] for entry in compiled} == {capability}
    for entry in compiled:
        assert entry["registers"] > 0
        assert entry["shared_bytes"] <= SHARED_BYTES[capability], entry
        # A probability has the same bits in every kernel: nothing is fused with its products.
        assert entry["fused"] in {None, 0}, entry
        if capability >= 90:
            check_the_binary(entry, capability)


def check_the_binary(entry, capability):
    """What the speed of a kernel rests on; only a device can measure the speed itself."""
    name = entry["name"]
    assert entry["local_bytes"] <= KNOWN_LOCAL.get(capability, {}).get(name, 0), entry
    threads = 32 * entry["num_warps"]
    assert entry["blocks"] * threads * -(-entry["registers"] // 8) * 8 <= REGISTERS, entry
    assert entry["blocks"] * (entry["shared_bytes"] + 1024) <= SHARED_OF_ALL, entry
    # Before the grid before has ended, only weights may be touched.
    assert entry["before_wait"] == ([AHEAD] if entry["fetches_ahead"] else []), entry
    if name.startswith(("skinny", "chunk")) and "fp32" not in name:
        assert entry["group_products"] > 0, entry
    if name.startswith(COPIES_WIDELY) and "fp32" not in name:
        # As codes, the keys of a decode take as many copies as numbers of 16 bits, of half as much. Exponents may be copied.
        narrower = {"0x8", "0x4"} if name.endswith("codes") else set()
        assert set(entry["copied_bytes"]) - narrower == {"0x10"}, entry
