"""The findings as text."""

from collections.abc import Sequence

from headway.terminal.tables import aligned
from headway_lab.doctor.expectation import ExpectedStep
from headway_lab.doctor.findings import Figure, Findings

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_GIB = 1 << 30
_FASTEST_FIRST = ("triton", "torch")

Row = tuple[str, str]


def text_of(findings: Findings) -> str:
    """Return the whole report."""
    sections = [
        ("host", _host(findings)),
        ("packages", _packages(findings)),
        ("devices", _devices(findings)),
        ("backends", _backends(findings)),
    ]
    if findings.figures or findings.measurement_problems:
        sections.append(("measured", _measured(findings)))
    blocks = [_section(title, rows) for title, rows in sections]
    if findings.expected_steps:
        blocks.append(_expected(findings))
    return "\n".join((*blocks, f"{_verdict(findings)}\n"))


def _section(title: str, rows: Sequence[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join((title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows), ""))


def _host(findings: Findings) -> list[Row]:
    host = findings.host
    cores = f"{host.num_cores} core{'s' * (host.num_cores != 1)}"
    if host.num_cores != host.num_all_cores:
        cores += f" of {host.num_all_cores}"
    return [
        ("headway", host.headway or "not installed as a package"),
        ("python", f"{host.python} on {host.system}"),
        ("processor", f"{host.processor}, {cores}"),
        ("memory", _memory(host.memory_bytes, findings.free_memory_bytes)),
        (
            "scheduler",
            "runs its core compiled" if host.runs_compiled_core else "runs its core as it is written: slower",
        ),
    ]


def _memory(all_bytes: int, free_bytes: int) -> str:
    known = f"{all_bytes / _GIB:.1f} GiB" if all_bytes else "not known"
    return f"{known}, {free_bytes / _GIB:.1f} GiB free" if free_bytes else known


def _packages(findings: Findings) -> list[Row]:
    rows = {package.name: package.version or f"not installed: {package.install}" for package in findings.packages}
    if findings.torch_problem:
        rows["torch"] = findings.torch_problem
    return list(rows.items())


def _devices(findings: Findings) -> list[Row]:
    kernels = findings.kernels
    compiled = f"kernels compiled for {', '.join(kernels.installed)}" if kernels.installed else "kernels"
    cpu = f"{compiled}: {kernels.problem}" if kernels.problem else f"{compiled}; this processor takes {kernels.used}"
    rows = [("cpu", cpu)]
    rows += [
        (
            device.device,
            f"{device.name}, capability {device.capability}, {_memory(device.memory_bytes, device.free_memory_bytes)}",
        )
        for device in findings.devices
    ]
    if findings.cuda_problem:
        rows.append(("cuda", f"none: {findings.cuda_problem}"))
    if findings.devices:
        rows.append(("driver", f"{findings.driver or 'not known'}; torch is built for CUDA {findings.cuda}"))
    rows.append(("triton", findings.triton_problem or "runs kernels"))
    rows.append(("cupy", findings.cupy_problem or "runs kernels"))
    return rows


def _backends(findings: Findings) -> list[Row]:
    rows: list[Row] = []
    for backend in findings.backends:
        remark = "" if backend.runs_models else "  (no model: for tests)"
        lines = [f"{flags}{remark}" for flags in backend.flags] or [f"cannot run: {backend.problem}"]
        rows += zip((backend.name, *[""] * (len(lines) - 1)), lines, strict=True)
    return rows


def _measured(findings: Findings) -> list[Row]:
    rows = [(f"{figure.device}: {figure.name}", _rate(figure)) for figure in findings.figures]
    return rows + [("not measured", problem) for problem in findings.measurement_problems]


def _rate(figure: Figure) -> str:
    factor, prefix = next((unit for unit in _UNITS if figure.value >= unit[0]), _UNITS[-1])
    return f"{figure.value / factor:.3g} {prefix}{figure.unit}"


def _expected(findings: Findings) -> str:
    title = f"decode step at these rates: {findings.model}, {findings.context_tokens} tokens of context in each row"
    rows = [("device", "batch", "step", "tokens/s", "bound by"), *map(_expected_row, findings.expected_steps)]
    lines = aligned(rows, left=(0, len(rows[0]) - 1))
    return "\n".join((title, *(f"  {line}" for line in lines), ""))


def _expected_row(step: ExpectedStep) -> tuple[str, ...]:
    if not step.fits:
        return step.device, str(step.batch), "-", "-", "does not fit in memory"
    return step.device, str(step.batch), f"{_number(step.step_ms)} ms", _number(step.tokens_per_s), step.bound


def _verdict(findings: Findings) -> str:
    flags = best_flags(findings)
    return f"This host can run models: headway serve {flags}" if flags else "This host can run no model: see backends."


def best_flags(findings: Findings) -> str:
    """Return the flags of the probably fastest backend, if any."""
    ways = {backend.name: backend.flags for backend in findings.backends if backend.runs_models and backend.flags}
    for name in (*_FASTEST_FIRST, *ways):
        flags = ways.get(name, ())
        on_gpu = next((way for way in flags if "cuda" in way), "")
        if flags:
            return on_gpu or flags[0]
    return ""


def _number(value: float) -> str:
    """Return three digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
