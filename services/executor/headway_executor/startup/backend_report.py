"""The installed backends: which run on this host, and with which flags.

Owns: their needs. Must not know: torch, which may be missing.
"""

import msgspec

from headway_executor.backend import BackendConfigError
from headway_executor.startup.registry import backend_names, create_backend
from headway_proto.wording import one_line

_SIMULATED = "simulated"


class BackendReport(msgspec.Struct, frozen=True, kw_only=True):
    """The flags for each way to run it here, or its ``problem``."""

    name: str
    flags: tuple[str, ...] = ()
    problem: str = ""
    runs_models: bool = True


def backend_reports(*, num_devices: int, kernels_problem: str) -> tuple[BackendReport, ...]:
    """Try every installed backend."""
    return tuple(_report(name, num_devices, kernels_problem) for name in backend_names())


def _report(name: str, num_devices: int, kernels_problem: str) -> BackendReport:
    runs_models = name != _SIMULATED
    problem = _problem(name) or (kernels_problem if name == "triton" else "")
    if problem:
        return BackendReport(name=name, problem=problem, runs_models=runs_models)
    cuda = [f"cuda:{index}" for index in range(num_devices)] if num_devices > 1 else ["cuda"] * num_devices
    devices = {"torch": ["cpu", *cuda], "triton": cuda}.get(name, [""])
    flags = tuple(f"--backend {name}" + (f" --device {device}" if device else "") for device in devices)
    return BackendReport(name=name, flags=flags, runs_models=runs_models)


def _problem(name: str) -> str:
    try:
        create_backend(name)
    except BackendConfigError as error:
        return str(error).removeprefix(f"backend: {name!r} ")
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        return f"cannot be imported: {one_line(error, 160)}"
    return ""
