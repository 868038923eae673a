"""All checks and measurements that need a CUDA device, in one command.

Owns: their list, running them, and the table at the end. Must not know: how any of them works.

    make gpu-check                           # all of it
    make gpu-check ARGS="--only tests,steps"

Checks decide the exit code: 0 if all passed. Measurements are shown beside their targets and stored in
``benchmarks/results/`` with hardware, commit and seed. A missed target fails nothing: this host may be another.
"""

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFORMANCE = ("-m", "headway_conformance", "--backend", "triton", "--device", "cuda")
DEVICE_TESTS = (
    "tests/kernels/gpu",
    "tests/unit/test_device_moves.py",
    "tests/unit/test_doctor.py",
    "tests/e2e/test_numerical_truth.py",
)
SANITIZED = ("prompts_beside_decodes", "swapped_out_and_in", "parameters_mixed_in_a_batch", "copied_blocks")
"""Scenarios that together launch every kernel; each takes a hundred times as long under the sanitizer."""


@dataclass(frozen=True)
class Task:
    """One command of this interpreter, or of ``program`` with it as an argument. ``decides``: its exit code counts."""

    name: str
    arguments: tuple[str, ...]
    decides: bool = True
    program: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The whole command line."""
        return [*self.program, sys.executable, *self.arguments]


@dataclass(frozen=True)
class Outcome:
    """How a task ended."""

    task: Task
    verdict: str
    seconds: float


def tasks() -> list[Task]:
    """All of them, quick ones first."""
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "86", "--target-processes", "all")
    chosen = [word for name in SANITIZED for word in ("--scenario", name)]
    return [
        Task("doctor", ("-m", "headway", "doctor", "--shape", "llama-3-8b")),
        Task("tests", ("-m", "pytest", "-q", *DEVICE_TESTS)),
        Task("conformance float32", (*CONFORMANCE, "--dtype", "float32")),
        Task("conformance bfloat16", (*CONFORMANCE, "--dtype", "bfloat16", "--size", "large")),
        Task("sanitizer", (*CONFORMANCE, "--dtype", "float32", *chosen), program=sanitizer),
        steps("steps"),
        steps("steps int8", "--sections", "decode", "--quantization", "int8"),
        steps("steps int4", "--sections", "decode", "--quantization", "int4"),
        steps("steps of experts", "--sections", "decode,prefill", "--shape", "qwen3-30b-a3b"),
        Task("stack", ("benchmarks/gpu_stack.py", "--json", str(RESULTS / "gpu_stack.json")), decides=False),
    ]


def steps(name: str, *arguments: str) -> Task:
    """Measures steps beside their floors."""
    result = RESULTS / f"gpu_{name.replace(' ', '_')}.json"
    return Task(name, ("benchmarks/gpu_steps.py", *arguments, "--json", str(result)), decides=False)


def run(task: Task) -> Outcome:
    """Run one task and show its output."""
    print(f"\n== {task.name}: {' '.join(task.command)}", flush=True)
    started = time.monotonic()
    if task.program and shutil.which(task.program[0]) is None:
        return Outcome(task, f"skipped: {task.program[0]} is not installed", 0.0)
    done = subprocess.run(task.command, cwd=ROOT, check=False)
    verdict = "passed" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"
    if not task.decides and done.returncode == 0:
        verdict = "measured"
    return Outcome(task, verdict, time.monotonic() - started)


def has_device() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    """Run the tasks; 0 if every check passed, 1 if not, 2 without a device."""
    all_tasks = tasks()
    parser = argparse.ArgumentParser(description="Every check and measurement that needs a CUDA device.")
    parser.add_argument("--only", default="", help=f"of {', '.join(task.name.split()[0] for task in all_tasks)}")
    arguments = parser.parse_args(argv)
    if not has_device():
        print("gpu-check: this host has no CUDA device that torch sees; `headway doctor` says why", file=sys.stderr)
        return 2
    wanted = set(filter(None, arguments.only.split(",")))
    outcomes = [run(task) for task in all_tasks if not wanted or task.name.split()[0] in wanted]
    print(f"\n{'':24} {'':36} {'seconds':>8}")
    for outcome in outcomes:
        print(f"{outcome.task.name:24} {outcome.verdict:36} {outcome.seconds:8.0f}")
    return int(any(outcome.task.decides and outcome.verdict.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
