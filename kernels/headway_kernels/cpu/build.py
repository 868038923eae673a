"""Compiles the C sources in ``c/`` into shared libraries beside this module, one per instruction set.

Owns: instruction sets, the compiler's call. Must not know: what the sources compute.

Only a build needs the compiler, in the ``ziglang`` wheel. This module imports only the standard library, so it also
runs by its path:

    python -m headway_kernels.cpu.build        # or: make kernels
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = Path(__file__).resolve().parent
SOURCES = LIBRARIES / "c"
COMPILER = "ziglang"

# No -ffast-math: kernels exclude tokens by infinities, so infinities and NaNs must keep their meaning.
_OPTIONS = (
    *("-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined"),
    *("-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-g0"),
)
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-mcpu=x86_64_v3",),
        "avx512": ("-mcpu=x86_64_v4+avx512vnni", "-mprefer-vector-width=512"),
        "amx": (
            "-mcpu=x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
            "-mprefer-vector-width=512",
        ),
    },
    "aarch64": {"neon": ("-mcpu=baseline",)},
}
_ARCHITECTURES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}

# A library contains the digest of its sources, options and compiler, so that one rename replaces both.
# That of its sources alone is what a process that loads it compares.
_STAMP = "headway-cpu-kernels:"
_STAMP_SOURCE = """\
__attribute__((visibility("default"), used)) const char headway_cpu_kernels_stamp[] = "{stamp}";
__attribute__((visibility("default"), used)) const char headway_cpu_kernels_sources[] = "{sources}";
"""

Report = Callable[[str], None]


class KernelBuildError(Exception):
    """The libraries cannot be built."""


class CompilerMissingError(KernelBuildError):
    """There is no compiler."""


class CompilationError(KernelBuildError):
    """The compiler refused the sources."""

    def __init__(self, library: str, output: str) -> None:
        self.output = output
        lines = output.strip().splitlines() or ["the compiler failed and did not say why"]
        first_error = next((line for line in lines if "error:" in line), lines[-1])
        super().__init__(f"{library}: {first_error.strip()}")


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set, and how to compile for it."""

    name: str
    library: str
    options: tuple[str, ...]


def variants_of(system: str, machine: str, libc: str) -> tuple[Variant, ...]:
    """The variants of a platform, in the words of the ``platform`` module."""
    architecture = _ARCHITECTURES.get(machine.lower(), "")
    linking: tuple[str, ...] = ()
    if system == "Linux" and libc == "glibc":
        # The old glibc lets a library run on every distribution that PyTorch's wheels run on. An undefined symbol must
        # fail here, not in the process that loads the library.
        target, suffix, linking = f"{architecture}-linux-gnu.2.17", "so", ("-Wl,-z,defs",)
    elif system == "Darwin":
        target, suffix = f"{architecture}-macos", "dylib"
    else:
        return ()
    return tuple(
        Variant(name, f"libheadway_cpu.{name}.{suffix}", ("-target", target, *options, *linking))
        for name, options in _INSTRUCTION_SETS.get(architecture, {}).items()
    )


def variants_here() -> tuple[Variant, ...]:
    """The variants of this platform."""
    return variants_of(platform.system(), platform.machine(), platform.libc_ver()[0])


def instruction_sets_here() -> Collection[str]:
    """The variants for this processor's architecture. A processor need not have what each of them needs."""
    return _INSTRUCTION_SETS.get(_ARCHITECTURES.get(platform.machine().lower(), ""), {})


def read_sources(directory: Path) -> dict[str, bytes]:
    """The C sources and headers of a directory, sorted by name."""
    paths = sorted(path for path in directory.iterdir() if path.suffix in {".c", ".h"})
    return {path.name: path.read_bytes() for path in paths}


def stamp_of(sources: dict[str, bytes], variant: Variant, compiler_version: str) -> str:
    """The stamp in a library of these sources, variant and compiler."""
    made_with = (compiler_version.encode(), " ".join(variant.options).encode(), Path(__file__).read_bytes())
    return _STAMP + _digest([*made_with, digest_of(sources).encode()])


def digest_of(sources: dict[str, bytes]) -> str:
    """Of the sources alone; a library has it as ``headway_cpu_kernels_sources``."""
    return _digest(part for name, content in sources.items() for part in (name.encode(), content))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:%b" % (len(part), part))
    return digest.hexdigest()


def is_up_to_date(library: Path, stamp: str) -> bool:
    """Whether a library exists with this stamp."""
    try:
        return stamp.encode() in library.read_bytes()
    except FileNotFoundError:
        return False


def compiler_version() -> str:
    """The compiler's version. Raises ``CompilerMissingError``: it is not installed."""
    try:
        return importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        raise CompilerMissingError(f"no compiler for the CPU kernels; pip install {COMPILER} brings one") from None


def compile_library(
    sources: dict[str, bytes], variant: Variant, stamp: str, destination: Path, workplace: Path
) -> None:
    """Compile one library and replace the old one at once.

    It compiles copies, so that the stamp fits even if a source changes meanwhile.

    Raises:
        CompilationError: the compiler refused.
    """
    code = workplace / variant.name
    code.mkdir()
    for name, content in sources.items():
        (code / name).write_bytes(content)
    (code / "stamp.c").write_text(_STAMP_SOURCE.format(stamp=stamp, sources=digest_of(sources)))
    units = [name for name in sources if name.endswith(".c")]
    # -P: files in the working directory must not hide the standard library.
    command = [sys.executable, "-P", "-m", COMPILER, "cc", *_OPTIONS, *variant.options]
    command += ["-o", variant.library, *units, "stamp.c", "-lm"]
    caches = {name: str(workplace / "cache") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    done = subprocess.run(
        command, cwd=code, env=caches | os.environ, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise CompilationError(variant.library, done.stderr)
    partial = destination / f".{variant.library}.{workplace.name}"
    try:
        shutil.copy(code / variant.library, partial)
        partial.replace(destination / variant.library)
    finally:
        partial.unlink(missing_ok=True)


def say(line: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def build_libraries(
    sources: Path = SOURCES, destination: Path = LIBRARIES, *, report: Report = say
) -> tuple[Path, ...]:
    """Compile missing and outdated libraries; return the paths of all, or none for an unknown platform.

    ZIG_GLOBAL_CACHE_DIR and ZIG_LOCAL_CACHE_DIR may name directories for the compiler's caches.

    Raises:
        KernelBuildError: no compiler, sources that do not compile, or a directory that cannot be read or written.
    """
    variants = variants_here()
    if not variants:
        report(f"no CPU kernels for {platform.system()} on {platform.machine()}: plain PyTorch runs instead")
        return ()
    try:
        return _build(read_sources(sources), variants, destination, report)
    except OSError as error:
        raise KernelBuildError(f"cannot build the CPU kernels: {error}") from error


def _build(
    sources: dict[str, bytes], variants: tuple[Variant, ...], destination: Path, report: Report
) -> tuple[Path, ...]:
    if not any(name.endswith(".c") for name in sources):
        report("no CPU kernels: there are no C sources")
        return ()
    version = compiler_version()
    with tempfile.TemporaryDirectory(prefix="headway-kernels-") as workplace:
        for variant in variants:
            stamp = stamp_of(sources, variant, version)
            if is_up_to_date(destination / variant.library, stamp):
                report(f"{variant.library}: up to date")
                continue
            start = time.perf_counter()
            compile_library(sources, variant, stamp, destination, Path(workplace))
            report(f"{variant.library}: compiled in {time.perf_counter() - start:.1f} s")
    return tuple(destination / variant.library for variant in variants)


def main() -> int:
    """Build the libraries; return 1 after a failure."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels that are missing or not up to date.")
    parser.parse_args()
    try:
        build_libraries()
    except KernelBuildError as error:
        sys.stderr.write(f"{error.output}\n" if isinstance(error, CompilationError) else "")
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
