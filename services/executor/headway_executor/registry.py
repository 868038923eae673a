"""Backends by name, found through the entry point group ``headway.executor_backends``.

Owns: the look-up, and the advice when a backend is unknown or its Python packages are not installed.
Must not know: any backend; a third party's is loaded in the same way as a built-in one.
"""

from importlib.metadata import EntryPoint, entry_points

from headway_executor.backend import BackendConfigError, ExecutorBackend
from headway_proto.installation import install_advice

ENTRY_POINT_GROUP = "headway.executor_backends"

_EXTRA_OF_PACKAGE = {"torch": "executor", "safetensors": "executor", "triton": "cuda", "cupy": "cuda"}


def backend_names() -> tuple[str, ...]:
    """The names of the installed backends, sorted. Imports none of them."""
    return tuple(sorted(entry_points(group=ENTRY_POINT_GROUP).names))


def create_backend(name: str) -> ExecutorBackend:
    """Import the backend called ``name`` and construct it.

    Raises:
        BackendConfigError: no backend has this name, or a Python package that it needs is not installed.
    """
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise BackendConfigError(f"backend: {name!r:.64} is not allowed; allowed: {', '.join(backend_names())}")
    backend: ExecutorBackend = _load(found[0])()
    return backend


def _load(entry_point: EntryPoint) -> type[ExecutorBackend]:
    try:
        loaded: type[ExecutorBackend] = entry_point.load()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF_PACKAGE.get(package)
        advice = install_advice(extra) if extra else f"install the Python package {package!r}"
        raise BackendConfigError(
            f"backend: {entry_point.name!r} needs {error.name!r}, which is not installed; {advice}"
        ) from error
    return loaded
