"""What ``gpu_check`` runs, in its order: speeds first, then what is right, then what is slow.

Owns: the commands, what each needs, how long each may take. Must not know: how they are run.

The seconds are for one large device; nobody has measured them yet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ESSENTIAL = ("torch", "triton", "cupy", "numpy", "msgspec", "safetensors", "llguidance")
"""Modules without which no task runs."""

_TESTS = ("pytest", "hypothesis")
_COMPARED = (*_TESTS, "transformers", "tokenizers", "mypy_extensions")
_SERVICES = ("headway.commands.serve", "headway.client", "headway_gateway.process", "headway_scheduler.process")
_SANITIZED = ("prompts_beside_decodes", "swapped_out_and_in", "parameters_mixed_in_a_batch", "copied_blocks")
"""Scenarios that together launch every kernel; each takes a hundred times as long under the sanitizer."""

_UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Inside of torch's own large allocations, the sanitizer sees no bounds."""


@dataclass(frozen=True)
class Task:
    """A command of this interpreter, or of ``program`` with it as an argument. ``seconds``: expected. ``adds_lines``: it
    takes ``--lines``.
    """

    name: str
    command: tuple[str, ...]
    seconds: int
    limit: int
    needs: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    adds_lines: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def modules_of(chosen: Iterable[Task]) -> tuple[str, ...]:
    """The modules that these tasks need, each once."""
    return tuple(dict.fromkeys(name for task in chosen for name in task.needs))


def tasks(*, rehearsal: bool) -> list[Task]:
    """All of them; as a rehearsal, with everything as small as it gets."""
    found = _rehearsed() if rehearsal else [*_speeds(), *_checks(), *_other_speeds(), *_slow_checks()]
    # Some containers ask for TF32 in place of float32, which the checks compare.
    of_all = {"TRITON_INTERPRET": str(int(rehearsal)), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return [replace(task, environment={**task.environment, **of_all}) for task in found]


def _speeds() -> list[Task]:
    return [
        Task("toolkits", ("-c", _trial("try_triton", "try_cupy")), 20, 90),
        _steps("steps", 200, 400, "--sections", "decode,prefill,mixed"),
        _steps("attention", 60, 150, "--sections", "attention"),
        _steps("swap", 40, 120, "--sections", "swap"),
        _stack("stack", 150, 330, "--no-peer"),
    ]


def _checks() -> list[Task]:
    return [
        _conformance("conformance float32", 120, 480, "--dtype", "float32"),
        _pytest("truth", ("tests/unit/executor/test_triton_backend.py", "-k", "greedy_tokens"), 150, 480, _COMPARED),
        _pytest("stages", ("tests/unit/executor/test_triton_stages.py",), 60, 300, (*_COMPARED, "zmq", "psutil")),
        *[_sanitized("memcheck", scenario) for scenario in _SANITIZED],
        _sanitized("racecheck", "parameters_mixed_in_a_batch"),
    ]


def _other_speeds() -> list[Task]:
    return [
        _steps("steps fp8", 180, 400, "--sections", "decode,prefill,mixed", "--quantization", "fp8"),
        *[
            _steps(f"steps {kind}", 150, 330, "--sections", "decode", "--quantization", kind)
            for kind in ("int8", "int4")
        ],
        _steps("steps adapters", 150, 330, "--sections", "adapters"),
        _steps("steps kv fp8", 150, 330, "--sections", "decode,attention", "--kv-cache-dtype", "fp8"),
        _tune("tune attention", 350, 580, "--sections", "attention"),
        # Each trial compiles nine products.
        _tune("tune products", 450, 580, "--sections", "products", "--most", "14"),
        _steps("steps experts", 200, 400, "--sections", "decode,prefill", "--shape", "qwen3-30b-a3b"),
        _steps(
            "steps experts fp8", 250, 450, "--sections", "prefill", "--shape", "qwen3-30b-a3b", "--quantization", "fp8"
        ),
        _steps("steps states", 200, 400, "--sections", "decode,prefill", "--shape", "qwen3.5-9b"),
        _steps("steps latent", 250, 450, "--sections", "decode,prefill,attention", "--shape", "deepseek-v2-lite"),
        _tune("tune latent", 350, 580, "--sections", "attention", "--shape", "deepseek-v2-lite"),
        _stack("peer", 300, 540),
    ]


def _slow_checks() -> list[Task]:
    files = [path for path in (ROOT / "tests/kernels/gpu").glob("test_*.py") if "compile" not in path.name]
    truth = ("tests/e2e/test_numerical_truth.py", "-k", "triton")
    codes = ("tests/conformance/test_conformance.py", "-m", "deep", "-k", "8_bits and triton")
    return [
        _conformance("conformance bfloat16", 200, 540, "--dtype", "bfloat16", "--size", "large"),
        *[
            _pytest(f"kernels {path.stem.removeprefix('test_')}", (str(path.relative_to(ROOT)),), 120, 540, _TESTS)
            for path in sorted(files)
        ],
        _pytest("moves", ("tests/unit/executor/test_device_moves.py",), 30, 120, _TESTS),
        _pytest("conformance kv fp8", codes, 60, 300, _COMPARED),
        _pytest("truth over grpc", truth, 120, 400, (*_COMPARED, "pytest_asyncio", *_SERVICES)),
        _loss("kv loss", "--device", "cuda", "--dtypes", "bfloat16"),
        _loss("fp8 loss", "--device", "cuda", "--dtypes", "bfloat16", "--of", "fp8", "--chunk", "256"),
        Task(
            "hand-offs beside many cores",
            ("benchmarks/handoff.py",),
            150,
            400,
            (*_SERVICES, "headway_lab.flight.cells", "psutil"),
        ),
        Task("doctor", ("-m", "headway", "doctor", "--shape", "llama-3-8b"), 40, 120, ("headway_lab.doctor.command",)),
    ]


def _rehearsed() -> list[Task]:
    on_cpu = ("--device", "cpu")
    tiny = ("--shape", "tiny", *on_cpu)
    load = ("--concurrency", "2", "--requests", "3", "--prompt", "5", "--output", "4")
    return [
        Task("toolkits", ("-c", _trial("try_triton", device="cpu")), 10, 60),
        _steps("steps", 60, 400, "--sections", "decode,adapters,attention", *tiny),
        _stack("stack", 60, 400, "--no-peer", *tiny, *load),
        Task(
            "conformance",
            ("-m", "headway_conformance", "--backend", "triton", "--scenario", "prompts_beside_decodes"),
            60,
            300,
        ),
        _pytest(
            "truth", ("tests/unit/executor/test_triton_backend.py", "-k", "greedy_tokens and qwen2"), 60, 300, _COMPARED
        ),
        _pytest("kernels", ("tests/kernels/gpu/test_rows.py", "tests/kernels/gpu/test_trial.py"), 60, 300, _TESTS),
        _tune("tune", 30, 300, *tiny, "--most", "1", "--rounds", "1"),
        _loss("kv loss", *("--tokens", "14", "--window", "12", "--chunk", "8", "--dtypes", "float32")),
        _loss("fp8 loss", *("--of", "fp8", "--tokens", "71", "--window", "70", "--chunk", "70", "--dtypes", "float32")),
        _sanitized("memcheck", _SANITIZED[0]),
    ]


def _trial(*names: str, device: str = "cuda:0") -> str:
    calls = "; ".join(f"{name}(torch.device({device!r}))" for name in names)
    return f"import torch; from headway_kernels.gpu.trial import {', '.join(names)}; {calls}"


def _steps(name: str, seconds: int, limit: int, *arguments: str) -> Task:
    return Task(name, ("benchmarks/gpu_steps.py", *arguments), seconds, limit, adds_lines=True)


def _stack(name: str, seconds: int, limit: int, *arguments: str) -> Task:
    return Task(name, ("benchmarks/gpu_stack.py", *arguments), seconds, limit, _SERVICES, adds_lines=True)


def _tune(name: str, seconds: int, limit: int, *arguments: str) -> Task:
    return Task(name, ("benchmarks/gpu_tune.py", *arguments), seconds, limit, adds_lines=True)


def _loss(name: str, *arguments: str) -> Task:
    command = ("benchmarks/loss_of_codes.py", "--backend", "triton", *arguments)
    return Task(name, command, 60, 300, ("tokenizers", "headway"), adds_lines=True)


def _conformance(name: str, seconds: int, limit: int, *arguments: str) -> Task:
    command = ("-m", "headway_conformance", "--backend", "triton", "--device", "cuda", *arguments)
    return Task(name, command, seconds, limit)


def _sanitized(tool: str, scenario: str) -> Task:
    # What calls of CUDA return is the program's affair: libraries ask, for example, what is not there.
    own = ("--report-api-errors", "no") if tool == "memcheck" else ()
    program = (
        "compute-sanitizer",
        "--tool",
        tool,
        *own,
        "--error-exitcode",
        "86",
        "--target-processes",
        "application-only",
    )
    # A graph can be neither recorded without torch's caching nor looked into.
    without_graphs = ("--dtype", "float32", "--backend-option", "graphs=off", "--scenario", scenario)
    command = ("-m", "headway_conformance", "--backend", "triton", "--device", "cuda", *without_graphs)
    return Task(f"{tool} {scenario}", command, 150, 540, program=program, environment=_UNCACHED)


def _pytest(name: str, chosen: tuple[str, ...], seconds: int, limit: int, needs: tuple[str, ...]) -> Task:
    # Other versions of packages than ours deprecate other things.
    return Task(name, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *chosen), seconds, limit, needs)
