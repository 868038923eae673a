"""The findings, as ``--json`` prints them."""

import msgspec

from headway_executor.startup.backend_report import BackendReport
from headway_lab.doctor.expectation import ExpectedStep
from headway_lab.doctor.host import Host, Package


class KernelFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The compiled CPU kernels, or why there are none."""

    installed: tuple[str, ...] = ()
    used: str = ""
    problem: str = ""


class DeviceFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device; memory in bytes."""

    device: str
    name: str
    capability: str
    memory_bytes: int
    free_memory_bytes: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A measured rate per second; ``unit`` is "B/s" or "FLOP/s"."""

    name: str
    device: str
    value: float
    unit: str


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All findings. A ``problem`` is one line with its remedy, or empty."""

    host: Host
    packages: tuple[Package, ...]
    torch_problem: str
    free_memory_bytes: int
    kernels: KernelFinding
    cuda: str
    driver: str
    devices: tuple[DeviceFinding, ...]
    cuda_problem: str
    triton_problem: str
    cupy_problem: str
    backends: tuple[BackendReport, ...]
    figures: tuple[Figure, ...] = ()
    measurement_problems: tuple[str, ...] = ()
    model: str = ""
    context_tokens: int = 0
    expected_steps: tuple[ExpectedStep, ...] = ()

    @property
    def can_serve(self) -> bool:
        """Whether some backend can run models."""
        return any(backend.runs_models and backend.flags for backend in self.backends)
