"""Backends by name, from the entry point group ``headway.executor_backends``.

Owns: the look-up. Must not know: any backend.
"""

import importlib.util
from importlib.metadata import EntryPoint, entry_points

from headway_executor.backend import BackendConfigError, ExecutorBackend
from headway_executor.setting_checks import BUILT_IN
from headway_process.installation import install_advice

ENTRY_POINT_GROUP = "headway.executor_backends"

_EXTRA_OF_PACKAGE = {"torch": "executor", "safetensors": "executor", "triton": "cuda", "cupy": "cuda"}


def backend_names() -> tuple[str, ...]:
    """Return the sorted names; import nothing."""
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP).names))


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
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise BackendConfigError(f"backend: {name!r:.64} is not allowed; allowed: {', '.join(backend_names())}")
    return found[0]


def _load(entry_point: EntryPoint) -> type[ExecutorBackend]:
    try:
        loaded: type[ExecutorBackend] = entry_point.load()
    except ModuleNotFoundError as error:
        raise _lacking(entry_point.name, error.name or "") from error
    return loaded


def _lacking(backend: str, module: str) -> BackendConfigError:
    package = module.partition(".")[0]
    extra = _EXTRA_OF_PACKAGE.get(package)
    advice = install_advice(extra) if extra else f"install the Python package {package!r}"
    return BackendConfigError(f"backend: {backend!r} needs {module!r}, which is not installed; {advice}")
