"""Compiles Triton kernels for GPUs that are not there, and prints what came of it as JSON.

Owns: the description of a kernel's variant, and the compilation. Must run without ``TRITON_INTERPRET``, so in a process of
its own: ``python triton_compilation.py CAPABILITY MODULE ...``, where each module (``cases_*.py`` beside this file) has ``CASES``;
``MODULE:FUNCTION`` asks for those of a processor.
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
    ``shows_fusion``: the binary is read for fused multiply-adds, which takes a while. Processors before ``first`` and from
    ``below`` on have another variant. ``fetches_ahead``: weights, while the grid before ends.
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
    shows_fusion: bool = False
    first: int = 0
    below: int = 1000
    fetches_ahead: bool = False


def compile_case(case: CompileCase, capability: int) -> dict[str, Any]:
    """Compile for ``sm_<capability>``; return what its assembly and its binary say."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    of_processor = {"PDL": capability >= 90, "HAS_E4M3": capability >= 89}
    constants = {name: value for name, value in of_processor.items() if name in names} | case.constants
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
        "fetches_ahead": case.fetches_ahead and bool(constants.get("PDL")),
        "before_wait": before_wait(compiled.asm["ptx"]) if constants.get("PDL") else [],
        "copied_bytes": dict(
            Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global .*\], (0x[0-9a-f]+)", compiled.asm["ptx"]))
        ),
        "group_products": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", compiled.asm["ptx"])),
        "float8_products": len(
            re.findall(
                r"(?:wgmma\.mma_async|mma\.sync)\S*\.e4m3\.e4m3|tcgen05\.mma\S*kind::f8f6f4", compiled.asm["ptx"]
            )
        ),
        "fused": fused_instructions(compiled.asm["cubin"]) if case.shows_fusion else None,
    } | resources_in(compiled.asm["cubin"])


def before_wait(ptx: str) -> list[str]:
    """Instructions on global memory that come before the kernel waits for the grid before it; it must wait."""
    found = re.findall(r"\b(?:ld|st|atom|red|prefetch)\.[\w.:]*global[\w.:]*|cp\.async\.\w+|griddepcontrol\.\w+", ptx)
    return sorted(set(found[: found.index("griddepcontrol.wait")]) - {"griddepcontrol.launch_dependents"})


def resources_in(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and its bytes of local memory: what registers could not hold."""
    usage = _read_by("cuobjdump", "--dump-resource-usage", cubin)
    found = {name: sum(map(int, re.findall(name + r":(\d+)", usage))) for name in ("REG", "STACK", "LOCAL")}
    return {"registers": found["REG"], "local_bytes": found["STACK"] + found["LOCAL"]}


def fused_instructions(cubin: bytes) -> int:
    """Instructions of the binary that multiply and add in float32 at once."""
    return len(re.findall(r"\bFFMA", _read_by("nvdisasm", "--print-code", cubin)))


def _read_by(tool: str, option: str, cubin: bytes) -> str:
    """As a tool reports it that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(capability: int, modules: list[str]) -> int:
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    found = []
    for name in modules:
        module, _, function = name.partition(":")
        cases = importlib.import_module(module)
        for case in getattr(cases, function)(capability) if function else cases.CASES:
            if case.first <= capability < case.below:
                found.append({"module": name} | compile_case(case, capability))
                sys.stderr.write(f"compiled {case.name}\n")
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
