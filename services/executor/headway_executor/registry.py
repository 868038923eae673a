"""Backends by name: the built-in ones, and those of the entry point group ``headway.executor_backends``.

Owns: the look-up, where the built-in ones are. Must not know: how a backend works.
"""

import importlib.util
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType

from headway_executor.backend import BackendConfigError, ExecutorBackend
from headway_executor.setting_checks import BUILT_IN
from headway_executor.torch_build import cuda_advice
from headway_process.entry_points import entry_points
from headway_process.installation import install_advice

ENTRY_POINT_GROUP = "headway.executor_backends"

PLACES: Mapping[str, str] = MappingProxyType(
    {
        "simulated": "headway_executor.backends.simulated:SimulatedBackend",
        "torch": "headway_executor.backends.torch_backend:TorchBackend",
        "triton": "headway_executor.backends.triton_backend:TritonBackend",
    }
)
"""Known without the metadata of an installation: a checkout may run as it is."""

_OF_EXECUTOR = frozenset({"torch", "safetensors"})
_OF_CUDA = frozenset({"triton", "cupy"})


def backend_names() -> tuple[str, ...]:
    """Return the sorted names; import nothing."""
    return tuple(sorted({*PLACES, *entry_points(group=ENTRY_POINT_GROUP).names}))


def create_backend(name: str) -> ExecutorBackend:
    """Import and construct a backend.

    Raises:
        BackendConfigError: the name is unknown, or a Python package is missing.
    """
    backend: ExecutorBackend = _load(_find(name))()
    return backend


def check_installed(name: str) -> None:
    """Check for a backend and its packages; import nothing.

    Raises:
        BackendConfigError: see ``create_backend``.
    """
    entry_point = _find(name)
    for package in BUILT_IN[name].packages if name in BUILT_IN else ():
        if importlib.util.find_spec(package) is None:
            raise _lacking(entry_point.name, package)


def _find(name: str) -> EntryPoint:
    for installed in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return installed
    if name not in PLACES:
        raise BackendConfigError(f"backend: {name!r:.64} is not allowed; allowed: {', '.join(backend_names())}")
    return EntryPoint(name, PLACES[name], ENTRY_POINT_GROUP)


def _load(entry_point: EntryPoint) -> type[ExecutorBackend]:
    try:
        loaded: type[ExecutorBackend] = entry_point.load()
    except ModuleNotFoundError as error:
        raise _lacking(entry_point.name, error.name or "") from error
    return loaded


def _lacking(backend: str, module: str) -> BackendConfigError:
    package = module.partition(".")[0]
    advice = f"install the Python package {package!r}"
    if package in _OF_EXECUTOR:
        advice = install_advice("executor")
    elif package in _OF_CUDA:
        advice = cuda_advice()
    return BackendConfigError(f"backend: {backend!r} needs {module!r}, which is not installed; {advice}")
