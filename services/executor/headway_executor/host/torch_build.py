"""What the installed PyTorch was built for, without importing it, and what CUDA packages fit beside it.

Owns: reading its version file. Must not know: backends, devices.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from headway_process.installation import install_advice


class TorchBuild(NamedTuple):
    """PyTorch's platforms; empty in a build for CPUs."""

    version: str
    cuda: str
    hip: str


def torch_build() -> TorchBuild | None:
    """Read PyTorch's version file; None if it is unknown."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    said = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *(None|'[^'\n]*')", text, re.MULTILINE))
    if said.keys() != {"__version__", "cuda", "hip"}:
        return None
    version, cuda, hip = (said[name].strip("'").replace("None", "") for name in ("__version__", "cuda", "hip"))
    return TorchBuild(version, cuda, hip)


def cuda_advice() -> str:
    """Return the command that installs the CUDA packages of PyTorch's own CUDA release."""
    build = torch_build()
    is_13 = build is not None and build.cuda.startswith("13.")
    return install_advice("cuda13") if is_13 else install_advice("cuda")
