"""Backends by name: the built-in ones, and those of the entry point group ``headway.executor_backends``.

Owns: the look-up, where the built-in ones are. Must not know: how a backend works.
"""

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from headway_executor.backend import BackendConfigError, ExecutorBackend
from headway_executor.host.torch_build import cuda_advice
from headway_executor.setting_checks import BUILT_IN
from headway_process.entry_points import ByName
from headway_process.installation import install_advice
from headway_proto.wording import shown

PLACES: Mapping[str, str] = MappingProxyType(
    {
        "simulated": "headway_executor.backends.simulated:SimulatedBackend",
        "torch": "headway_executor.backends.torch_backend:TorchBackend",
        "triton": "headway_executor.backends.triton_backend:TritonBackend",
    }
)
"""Known without the metadata of an installation: a checkout may run as it is."""

BACKENDS = ByName("headway.executor_backends", PLACES)

_OF_EXECUTOR = frozenset({"torch", "safetensors"})
_OF_CUDA = frozenset({"triton", "cupy"})


def backend_names() -> tuple[str, ...]:
    """Return the sorted names; import nothing."""
    return BACKENDS.names


def create_backend(name: str) -> ExecutorBackend:
    """Import and construct a backend.

    Raises:
        BackendConfigError: the name is unknown, or a Python package is missing.
    """
    _check_known(name)
    try:
        return cast(type[ExecutorBackend], BACKENDS.load(name))()
    except ModuleNotFoundError as error:
        raise _lacking(name, error.name or "") from error


def check_installed(name: str) -> None:
    """Check for a backend and its packages; import nothing.

    Raises:
        BackendConfigError: see ``create_backend``.
    """
    _check_known(name)
    for package in BUILT_IN[name].packages if name in BUILT_IN else ():
        if importlib.util.find_spec(package) is None:
            raise _lacking(name, package)


def _check_known(name: str) -> None:
    if name not in BACKENDS:
        raise BackendConfigError(f"backend: {shown(name)} is not allowed; allowed: {', '.join(BACKENDS.names)}")


def _lacking(backend: str, module: str) -> BackendConfigError:
    package = module.partition(".")[0]
    advice = f"install the Python package {package!r}"
    if package in _OF_EXECUTOR:
        advice = install_advice("executor")
    elif package in _OF_CUDA:
        advice = cuda_advice()
    return BackendConfigError(f"backend: {backend!r} needs {module!r}, which is not installed; {advice}")
