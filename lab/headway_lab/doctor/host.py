"""The host: packages, processor, memory, compiled core. Must not know: torch."""

import importlib.metadata
import os
import platform
from pathlib import Path

import msgspec

from headway_executor.host.torch_build import cuda_advice
from headway_process.installation import install_advice
from headway_process.processors import num_usable_cores
from headway_scheduler.compiled_core import runs_compiled

_CPUINFO = Path("/proc/cpuinfo")

# Our name of a package, the distributions that bring it, and Headway's extra that asks for it.
_PACKAGES = (
    ("msgspec", ("msgspec",), ""),
    ("numpy", ("numpy",), ""),
    ("pyzmq", ("pyzmq",), ""),
    ("grpcio", ("grpcio",), "gateway"),
    ("tokenizers", ("tokenizers",), "gateway"),
    ("torch", ("torch",), "executor"),
    ("safetensors", ("safetensors",), "executor"),
    ("triton", ("triton",), "cuda"),
    ("cupy", ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"), "cuda"),
)


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package that Headway uses."""

    name: str
    version: str
    install: str


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. ``num_cores`` are this process's; memory is in bytes."""

    system: str
    python: str
    headway: str
    processor: str
    num_cores: int
    num_all_cores: int
    memory_bytes: int
    runs_compiled_core: bool


def describe_host() -> Host:
    """Describe this host."""
    num_all_cores = os.cpu_count() or 1
    return Host(
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        headway=_version(("headway",)),
        processor=processor_name(),
        num_cores=num_usable_cores(),
        num_all_cores=num_all_cores,
        memory_bytes=_memory_bytes(),
        runs_compiled_core=runs_compiled(),
    )


def installed_packages() -> tuple[Package, ...]:
    """Return the packages that Headway uses."""
    return tuple(
        Package(
            name=name,
            version=_version(distributions),
            install=cuda_advice() if extra == "cuda" else install_advice(extra),
        )
        for name, distributions, extra in _PACKAGES
    )


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's name, or its architecture."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
