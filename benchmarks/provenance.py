"""Where a result comes from: hardware, commit, versions.

Owns: the part of a result file that is the same for every benchmark. Must not know: what is measured.
"""

import os
import platform
import subprocess
from pathlib import Path


def provenance(seed: int) -> dict[str, object]:
    """What to store beside every measured figure."""
    return {
        "commit": commit_of(Path(__file__).parent),
        "seed": seed,
        "python": platform.python_version(),
        "hardware": _hardware(),
    }


def _hardware() -> dict[str, object]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": _processor(), "cores": os.cpu_count(), "memory_gib": round(memory_bytes / 2**30)}


def _processor() -> str:
    """The processor's name and the vector extensions that decide how fast it multiplies."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    extensions = [flag for flag in values.get("flags", "").split() if flag in wanted]
    return " ".join([values.get("model name", platform.machine()), *extensions])


def commit_of(directory: Path) -> str:
    """The commit of the checkout that a directory is in, marked when the tree differs from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607 (whichever git is there)
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
