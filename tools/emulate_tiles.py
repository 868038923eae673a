"""The kernels' tests of the AMX variant, on a processor without AMX.

Owns: how that variant is compiled with ``emulated_tiles.h`` in place of the matrix unit. Must not know: what the kernels
compute.

    make emulate            # a minute on two cores

It needs AVX-512 with AVX512_BF16, as Zen 4 and 5 have. Speeds mean nothing: a product of tiles takes a hundred times as long.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headway_kernels.cpu import build
from headway_proto.wording import one_line

ROOT = Path(__file__).resolve().parents[1]
TILES = "amx"
TESTS = (
    *(f"tests/kernels/test_cpu_{what}.py" for what in ("kernels", "blocks", "codes", "ranks")),
    "tests/kernels/test_experts.py",
    "tests/unit/executor/test_adapters.py",
)
WHICH = f"{TILES} or matrix_unit"
_HEADER = Path(__file__).with_name("emulated_tiles.h")
_WITHOUT_TILES = ("-mcpu=x86_64_v4+avx512vnni+avx512bf16", "-D__AMX_BF16__", "-D__AMX_INT8__", "-include", str(_HEADER))


def can_be_emulated(variant: build.Variant) -> bool:
    """Whether ``variant`` lacks nothing here but a matrix unit."""
    return variant.name == TILES and bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def emulated(variant: build.Variant) -> build.Variant:
    """Return the same for processors without a matrix unit."""
    options = [option for option in variant.options if not option.startswith("-mcpu")]
    return replace(variant, options=(*options, *_WITHOUT_TILES))


def admit(package: Path) -> None:
    """Let the copy of the kernels' package in ``package`` take an emulated variant for one that runs here."""
    with (package / "cpu" / "library.py").open("a") as library:
        library.write(f'\n_FEATURES["{TILES}"] = (*_AVX512, "avx512_bf16")\n')


def _compile(package: Path, variant: build.Variant, work: Path) -> None:
    """Write a copy of the kernels' package, with this variant emulated and the others as they are."""
    shutil.copytree(
        build.LIBRARIES.parent, package, ignore=shutil.ignore_patterns(f"*{variant.library}", "__pycache__")
    )
    admit(package)
    sources, slow = build.read_sources(build.SOURCES), emulated(variant)
    build.compile_library(sources, slow, build.stamp_of(sources, slow, build.compiler_version()), package / "cpu", work)


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests, with more words for pytest; their exit code, or 2 if they cannot run here."""
    variant = next((one for one in build.variants_here() if can_be_emulated(one)), None)
    if variant is None:
        sys.stderr.write("emulate_tiles: needs a processor with AVX512_BF16 and a platform with the AMX variant\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="headway-emulated-") as place:
        try:
            _compile(Path(place, "headway_kernels"), variant, Path(place))
        except build.KernelBuildError as error:
            sys.stderr.write(f"emulate_tiles: {one_line(error)}\n")
            return 1
        path = os.pathsep.join(filter(None, (place, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WHICH, *TESTS]
        more = sys.argv[1:] if words is None else words
        return subprocess.run(
            [*command, *more], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
