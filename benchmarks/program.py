"""The parts that all benchmarks share.

Owns: reading counts, the flags --seed and --json, provenance, writing the result or single lines of it, the collector
before a measurement. Must not know: what is measured.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from headway_process.collector import relax_collector
from headway_proto.wording import shown


def count(text: str) -> int:
    """Read a count, at least 1; for ``argparse``."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed; allowed: a whole number, 1 or more")
    return int(text)


def count_or_none(text: str) -> int:
    """Read a count that may be 0; for ``argparse``."""
    return 0 if text == "0" else count(text)


def counts(text: str) -> list[int]:
    """Read counts with commas between them; for ``argparse``."""
    return [count(part) for part in text.split(",")]


def rest_collector() -> None:
    """Collect what came before, then collect as rarely as a process that serves."""
    gc.collect()
    relax_collector()


def parser_of(doc: str | None, *, seed: int | None = None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark with this docstring; with a default ``seed``, it has --seed and --json."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed, help=f"of everything that is drawn (default: {seed})")
        parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser


def write_result(path: Path | None, result: Mapping[str, object]) -> None:
    """Write a result as JSON, or nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def add_line(path: Path | None, line: Mapping[str, object]) -> None:
    """Add a line of JSON to a file, or nothing without a path: what was measured survives what comes after it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def provenance(seed: int) -> dict[str, object]:
    """Return where a result comes from: hardware, commit, versions."""
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
    """Return the processor's name, and the vector extensions that matter for products."""
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
    """Return the commit of a directory's checkout, marked if the tree differs from it; "unknown" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607 (whichever git is there)
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
