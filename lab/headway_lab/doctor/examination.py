"""The examination of this host, with or without torch."""

from collections.abc import Callable

import msgspec

from headway_executor.startup.backend_report import backend_reports
from headway_lab.doctor.expectation import BATCHES, CONTEXT_TOKENS, StepDevice, expected_step
from headway_lab.doctor.findings import DeviceFinding, Figure, Findings, KernelFinding
from headway_lab.doctor.host import Host, Package, describe_host, installed_packages
from headway_lab.simulate.model_shapes import ModelShape
from headway_proto.wording import one_line

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_NO_TORCH = "needs torch"

Say = Callable[[str], None]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model whose steps are estimated."""

    shape: ModelShape
    is_bfloat16: bool = True


def examine() -> Findings:
    """Examine everything without measuring."""
    host, packages = describe_host(), installed_packages()
    try:
        from headway_executor.host.host_report import examine_host

        report = examine_host()
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        torch = next(package for package in packages if package.name == "torch")
        said = one_line(error)
        problem = f"cannot be used: {said:.160}" if torch.version else f"not installed: {torch.install}"
        return _without_torch(host, packages, problem)
    problems = {"triton": report.triton_problem, "cupy": report.cupy_problem}
    kernels_problem = "; ".join(f"{name} {problem}" for name, problem in problems.items() if problem)
    return Findings(
        host=host,
        packages=packages,
        torch_problem="",
        free_memory_bytes=report.free_memory_bytes,
        kernels=KernelFinding(
            installed=report.kernels.installed, used=report.kernels.used, problem=report.kernels.problem
        ),
        cuda=report.cuda,
        driver=report.driver,
        devices=tuple(
            DeviceFinding(
                device=f"cuda:{device.index}",
                name=device.name,
                capability=device.capability,
                memory_bytes=device.memory_bytes,
                free_memory_bytes=device.free_memory_bytes,
            )
            for device in report.devices
        ),
        cuda_problem=report.cuda_problem,
        triton_problem=report.triton_problem,
        cupy_problem=report.cupy_problem,
        backends=backend_reports(
            num_devices=len(report.devices),
            kernels_problem="needs a CUDA device" if report.cuda_problem else kernels_problem,
        ),
    )


def _without_torch(host: Host, packages: tuple[Package, ...], problem: str) -> Findings:
    return Findings(
        host=host,
        packages=packages,
        torch_problem=problem,
        free_memory_bytes=0,
        kernels=KernelFinding(problem=_NO_TORCH),
        cuda="",
        driver="",
        devices=(),
        cuda_problem=_NO_TORCH,
        triton_problem=_NO_TORCH,
        cupy_problem=_NO_TORCH,
        backends=backend_reports(num_devices=0, kernels_problem=_NO_TORCH),
    )


def with_measurements(findings: Findings, model: Model, say: Say) -> Findings:
    """Measure, and estimate a decode step."""
    if findings.torch_problem:
        return msgspec.structs.replace(findings, measurement_problems=(f"anything: {_NO_TORCH}",))
    figures: list[Figure] = []
    devices: list[StepDevice] = []
    problems: list[str] = []
    for measure in (_cpu, *(_gpu(device) for device in findings.devices)):
        try:
            found, device = measure(findings, model, say)
        except (RuntimeError, MemoryError) as error:
            problems.append(one_line(error, 160))
            continue
        figures += found
        devices.append(device)
    return msgspec.structs.replace(
        findings,
        figures=tuple(figures),
        measurement_problems=tuple(problems),
        model=model.shape.name,
        context_tokens=CONTEXT_TOKENS,
        expected_steps=tuple(expected_step(model.shape, device, batch) for device in devices for batch in BATCHES),
    )


_Measure = Callable[[Findings, Model, Say], tuple[list[Figure], StepDevice]]


def _cpu(findings: Findings, model: Model, say: Say) -> tuple[list[Figure], StepDevice]:
    """The kernels keep weights that are exact in bfloat16. PyTorch's operators and all caches use float32."""
    from headway_executor.memory.host_speed import measure_host

    speed = measure_host(say)
    figures = [
        Figure(name="copy in memory, read and written", device="cpu", value=speed.copy_bytes_per_s, unit="B/s"),
        Figure(name="product in float32", device="cpu", value=speed.float32_flops, unit="FLOP/s"),
    ]
    return figures, StepDevice(
        name="cpu",
        bytes_per_s=speed.copy_bytes_per_s,
        flops=speed.float32_flops,
        memory_bytes=findings.host.memory_bytes,
        weight_bytes=_BFLOAT16_BYTES if findings.kernels.used and model.is_bfloat16 else _FLOAT32_BYTES,
        cache_bytes=_FLOAT32_BYTES,
    )


def _gpu(device: DeviceFinding) -> _Measure:
    def measure(_findings: Findings, _model: Model, say: Say) -> tuple[list[Figure], StepDevice]:
        from headway_executor.memory.host_speed import measure_device

        speed = measure_device(int(device.device.partition(":")[2]), say)
        figures = [
            Figure(name=name, device=device.device, value=value, unit=unit)
            for name, value, unit in (
                ("copy in memory, read and written", speed.copy_bytes_per_s, "B/s"),
                ("from pinned main memory", speed.from_host_bytes_per_s, "B/s"),
                ("to pinned main memory", speed.to_host_bytes_per_s, "B/s"),
                ("product in bfloat16", speed.bfloat16_flops, "FLOP/s"),
            )
        ]
        return figures, StepDevice(
            name=device.device,
            bytes_per_s=speed.copy_bytes_per_s,
            flops=speed.bfloat16_flops,
            memory_bytes=device.memory_bytes,
        )

    return measure
