"""What this host has to run a backend: compiled kernels, CUDA devices, toolkits.

Owns: finding them. Must not know: any speed.
"""

import importlib
import platform
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from headway_executor.host.torch_build import cuda_advice
from headway_executor.memory.host_memory import free_host_bytes
from headway_kernels.cpu.build import variants_here
from headway_kernels.cpu.library import StaleKernelsError, installed_variants, load_library, runs_here, variant_of
from headway_proto.wording import one_line

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_CUDA_BUILD = "install a CUDA build, see https://pytorch.org/get-started/locally"
_SHOWN_CHARS = 160


class KernelVariants(msgspec.Struct, frozen=True, kw_only=True):
    """``problem`` says why ``used`` is empty."""

    installed: tuple[str, ...]
    used: str
    problem: str


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One CUDA device; memory in bytes."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    free_memory_bytes: int


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Each ``problem`` is one line, or empty. ``cuda`` is the version of torch's build."""

    free_memory_bytes: int
    num_torch_threads: int
    kernels: KernelVariants
    cuda: str
    driver: str
    devices: tuple[CudaDevice, ...]
    cuda_problem: str
    triton_problem: str
    cupy_problem: str


def examine_host() -> HostReport:
    """Examine everything; try a kernel of each toolkit."""
    devices, cuda_problem = _cuda_devices()
    return HostReport(
        free_memory_bytes=free_host_bytes(),
        num_torch_threads=torch.get_num_threads(),
        kernels=_kernel_variants(),
        cuda=torch.version.cuda or "",
        driver=_driver_version(),
        devices=devices,
        cuda_problem=cuda_problem,
        triton_problem=_without_device("triton") if cuda_problem else _problem_of("triton", _try_triton),
        cupy_problem=_without_device("cupy") if cuda_problem else _problem_of("cupy", _try_cupy),
    )


def _kernel_variants() -> KernelVariants:
    paths = installed_variants()
    usable, problem = [], ""
    try:
        usable = [path for path in paths if runs_here(path)]
        load_library()
    except StaleKernelsError as error:
        usable, problem = [], f"{error}; no model starts on the CPU before"
    if not variants_here():
        problem = f"there are none for {platform.system()} on {platform.machine()}: PyTorch operators run instead"
    elif not paths:
        problem = (
            "not compiled, PyTorch operators run instead; run: make kernels, or python -m headway_kernels.cpu.build"
        )
    elif not usable and not problem:
        problem = "this processor runs none of them: PyTorch operators run instead"
    return KernelVariants(
        installed=tuple(variant_of(path) for path in paths),
        used=variant_of(usable[0]) if usable else "",
        problem=problem,
    )


def _cuda_devices() -> tuple[tuple[CudaDevice, ...], str]:
    if not torch.version.cuda:
        return (), f"this torch ({torch.__version__}) is built without CUDA; {_CUDA_BUILD}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if warned:
            return (), one_line(warned[0].message, _SHOWN_CHARS)
        if not _driver_version():
            return (), "no NVIDIA driver; install it, and give a container the device (docker run --gpus all)"
        return (), "the NVIDIA driver shows no device; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    try:
        return tuple(_device(index) for index in range(count)), ""
    except RuntimeError as error:
        return (), f"a CUDA device cannot be used: {one_line(error, _SHOWN_CHARS)}"


def _device(index: int) -> CudaDevice:
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return CudaDevice(
        index=index,
        name=torch.cuda.get_device_name(index),
        capability=f"{major}.{minor}",
        memory_bytes=total,
        free_memory_bytes=free,
    )


def _driver_version() -> str:
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_VERSION.read_text())
    except OSError:
        return ""
    return found.group() if found else ""


def _without_device(package: str) -> str:
    return _missing(package) or "needs a CUDA device"


def _missing(package: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name == package:
            return f"not installed; {cuda_advice()}"
        return f"needs {error.name}, which is not installed"
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        return f"cannot be imported: {one_line(error, _SHOWN_CHARS)}"
    return ""


def _problem_of(package: str, trial: Callable[[torch.device], None]) -> str:
    missing = _missing(package)
    if missing:
        return missing
    try:
        trial(torch.device("cuda", 0))
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        compilers = () if package != "triton" else ("cc", "gcc", "clang")
        if compilers and not any(map(shutil.which, compilers)):
            return "needs a C compiler on this host; install gcc or clang"
        return f"does not run a kernel: {one_line(error, _SHOWN_CHARS)}"
    return ""


def _try_triton(device: torch.device) -> None:
    from headway_kernels.gpu.trial import try_triton

    with torch.cuda.device(device):
        try_triton(device)


def _try_cupy(device: torch.device) -> None:
    from headway_kernels.gpu.trial import try_cupy

    try_cupy(device)
