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
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One variant of one kernel.

    ``kernel`` is the ``triton.jit`` function; ``signature`` maps its arguments to types as Triton writes them ("*bf16", "i32",
    "fp32"); ``constants`` its ``tl.constexpr`` arguments; ``aligned`` the arguments whose values are known multiples of
    16, as Triton finds of pointers and sizes at run time.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())


def compile_case(case: CompileCase, capability: int) -> dict[str, Any]:
    """Compile for ``sm_<capability>``.

    Returns bytes of shared memory of a block, and of the stack of a thread: what registers could not hold.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in case.constants]
    assert not missing, f"{case.name}: no type for {missing}"
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "name": case.name,
        "capability": capability,
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
        "stack_bytes": stack_bytes(compiled.asm["cubin"]),
    }


def stack_bytes(cubin: bytes) -> int:
    """As the tool reports it that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(found) for found in re.findall(r"STACK:(\d+)", report))


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
