"""Compiles Triton kernels for GPUs that are not there, and prints what came of it as JSON.

Owns: the description of a kernel's variant, and the compilation. Must run without ``TRITON_INTERPRET``, so in a process of
its own: ``python triton_compilation.py CAPABILITY MODULE ...``, where each module (``cases_*.py`` beside this file) has ``CASES``.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One variant of one kernel.

    ``kernel`` is the ``triton.jit`` function; ``signature`` maps its arguments to types as Triton writes them ("*bf16", "i32",
    "fp32"); ``constants`` its ``tl.constexpr`` arguments; ``aligned`` the arguments whose values are known multiples of
    16, as Triton finds of pointers and sizes at run time. ``blocks`` shall fit a multiprocessor at a time.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())
    max_registers: int | None = None
    blocks: int = 1


def compile_case(case: CompileCase, capability: int) -> dict[str, Any]:
    """Compile for ``sm_<capability>``.

    Returns bytes of shared memory of a block, and of the stack of a thread: what registers could not hold.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    constants = ({"PDL": capability >= 90} if "PDL" in names else {}) | case.constants
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    assert not missing, f"{case.name}: no type for {missing}"
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "name": case.name,
        "capability": capability,
        "shared_bytes": compiled.metadata.shared,
        "blocks": case.blocks,
        "num_warps": case.num_warps,
        "is_dependent": constants.get("PDL", False),
    } | findings_in(compiled.asm["cubin"], capability)


def findings_in(cubin: bytes, capability: int) -> dict[str, Any]:
    """What the tools that come with Triton read from a binary: registers, and the instructions with their numbers.

    ``before_wait``: those that touch global memory before the grid dependency is waited for, in the order of the text.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # A line: /*address*/ @predicate INSTRUCTION operands ;
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]*)", text)
    wait = next((place for place, name in enumerate(found) if name.startswith("ACQBULK")), None)
    touching = ("LDG", "STG", "LDGSTS", "ATOM", "RED", "CCTL", "UBLKCP", "UTMA")
    return {
        "registers": max(int(number) for number in re.findall(r"REG:(\d+)", usage)),
        "stack_bytes": sum(int(number) for number in re.findall(r"STACK:(\d+)", usage)),
        "instructions": dict(Counter(found)),
        "waits": wait is not None,
        "before_wait": sorted({name for name in found[:wait] if name.startswith(touching)}) if wait is not None else [],
    }


def main(capability: int, modules: list[str]) -> int:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    found = []
    for module in modules:
        for case in importlib.import_module(module).CASES:
            found.append(compile_case(case, capability))
            sys.stderr.write(f"compiled {case.name}\n")
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
