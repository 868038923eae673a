"""``make gpu-check`` cannot be wasted: it says what is missing, keeps what it has, and goes on where it was."""

import json
import os
import subprocess
import sys
import tomllib
import venv
from argparse import Namespace
from importlib.metadata import EntryPoint, EntryPoints
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import gpu_attention
import gpu_device
import gpu_floors
import gpu_stack
import gpu_steps
import gpu_tune
import program
from gpu_shapes import SHAPES, TINY, config_of
from headway_conformance import SCENARIOS
from headway_executor.backend import BackendConfigError
from headway_executor.startup import registry
from headway_kernels.gpu.attention.paged import paged_attention
from headway_process.entry_points import ByName

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "gpu_check.py"
needs_no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a device")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import gpu_check

    monkeypatch.setattr(gpu_check, "require", lambda found, rehearsal: None)
    monkeypatch.setattr(gpu_check, "look", lambda modules: gpu_check.Found({"absent": "is not installed"}, [], {}))
    return gpu_check


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python with nothing but its own library."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, symlinks=True)
    return str(home / "bin" / "python")


def run_bare(python, *words, **environment):
    """As on a host without git, pip, and anything on the path."""
    return subprocess.run(
        [python, *map(str, words)],
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_python_without_packages_is_told_in_one_line_what_it_lacks(bare, tmp_path):
    done = run_bare(bare, TOOL, "--output", tmp_path / "found")
    lacking = "no torch, no triton, no cupy, no numpy, no msgspec, no safetensors, no llguidance"
    assert done.stderr == f"gpu-check: {bare} has {lacking}; install them, or put them on PYTHONPATH\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "found").exists()


@needs_no_device
def test_a_host_without_a_device_is_told_so():
    done = subprocess.run([sys.executable, str(TOOL)], capture_output=True, text=True, check=False)
    assert done.stderr == "gpu-check: this host has no CUDA device that torch sees; `headway doctor` says why\n"
    assert done.returncode == 2


def test_a_bare_python_lists_the_tasks_and_finds_the_packages_of_the_checkout(bare, tool, monkeypatch):
    done = run_bare(bare, TOOL, "--list")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[:4]] == ["toolkits", "steps", "attention", "swap"]
    monkeypatch.delenv("PYTHONPATH", raising=False)
    packages = ("proto", "kernels", "scheduler", "executor", "gateway", "process", "lab", "conformance")
    names = ("headway", *(f"headway_{package}" for package in packages))
    looks = "import sys\nfrom importlib.util import find_spec\nprint([name for name in sys.argv[1:] if not find_spec(name)])"
    done = run_bare(bare, "-c", looks, *names, PYTHONPATH=tool.environment_of()["PYTHONPATH"])
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "steps,nothing"), "--only 'nothing' is not allowed; allowed: toolkits, steps, attention, swap, "),
        (("--minutes", "-1"), "'-1' is not allowed; allowed: a number above 0"),
        (("--output", "/proc/none"), "--output '/proc/none' is not allowed: No such file or directory"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tool, capsys, words, message):
    try:
        code = tool.main([*words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def python_task(tool, name, code, *, seconds=1, limit=30, **more):
    return tool.Task(name, ("-c", code), seconds, limit, **more)


MEASURE = """
import sys
open(sys.argv[2], "a").write('{"kind": "step", "name": "a step", "measured_ms": 2.0, "floor_ms": 1.0, "share": 0.5,'
    '"asked": 0.85, "shape": "tiny", "quantization": "none"}\\n')
raise SystemExit("a section has failed")
"""


def test_each_task_has_an_outcome_and_what_was_measured_stays(tool, monkeypatch, capsys, tmp_path):
    forever = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); time.sleep(60)"
    tasks = [
        python_task(tool, "good", "import os; assert os.environ['HERE'] == '1'", environment={"HERE": "1"}),
        python_task(tool, "measured", MEASURE, adds_lines=True),
        python_task(tool, "endless", forever, limit=1),
        python_task(tool, "unable", "", needs=("absent",)),
        python_task(tool, "toolless", "", program=("no-such-program",)),
    ]
    monkeypatch.setattr(tool, "tasks", lambda rehearsal: tasks)
    words = ["--output", str(tmp_path / "found")]
    assert tool.main(words) == 1
    lines = [json.loads(line) for line in (tmp_path / "found" / "lines.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["host", "outcome", "step", "outcome", "outcome"]
    assert [line["verdict"] for line in lines if line["kind"] == "outcome"] == [
        "held",
        "FAILED (exit code 1)",
        "FAILED (over its limit of 1 s)",
    ]
    said = capsys.readouterr().out.splitlines()
    assert "a section has failed" in said
    assert any(line.startswith("a step, tiny") and line.endswith("0.85  missed") for line in said)
    last = (
        "gpu-check: held: good; FAILED: measured (exit code 1), endless (over its limit of 1 s); "
        "lacks: unable (absent: is not installed), toolless (no-such-program is not installed)"
    )
    assert said[-1] == last
    # The folder has all that ended: nothing runs again, until it is named.
    assert tool.main(words) == 1
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert tool.main([*words, "--only", "good"]) == 0
    assert "== good" in capsys.readouterr().out


def test_what_does_not_fit_is_left_and_is_next(tool, monkeypatch, capsys, tmp_path):
    tasks = [
        python_task(tool, "long", "", seconds=400),
        python_task(tool, "short", "pass"),
        python_task(tool, "wrong", "import time; time.sleep(60)"),
    ]
    monkeypatch.setattr(tool, "tasks", lambda rehearsal: tasks)
    words = ["--output", str(tmp_path), "--minutes"]
    # 6 seconds, of which 5 are kept for the end.
    assert tool.main([*words, "0.12"]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "gpu-check: held: short; left: long; cut short: wrong"
    tasks[2] = python_task(tool, "wrong", "pass")
    assert tool.main([*words, "9"]) == 0
    said = capsys.readouterr().out
    assert "== short" not in said
    assert said.splitlines()[-1] == "gpu-check: held: long, short, wrong"


def test_the_tasks_are_of_what_there_is(tool):
    tasks = [*tool.tasks(rehearsal=False), *tool.tasks(rehearsal=True)]
    names = [task.name for task in tool.tasks(rehearsal=False)]
    assert len(names) == len(set(names))
    assert all(task.seconds <= task.limit < 600 for task in tasks), "some hosts lend ten minutes at a time"
    assert {task.environment["TRITON_INTERPRET"] for task in tool.tasks(rehearsal=False)} == {"0"}
    of_flag = {"--scenario": {scenario.name for scenario in SCENARIOS}, "--shape": {*SHAPES, "llama-3-8b"}}
    for task in tasks:
        for flag, value in zip(task.command, task.command[1:], strict=False):
            assert value in of_flag.get(flag, {value})
            if flag == "--sections":
                sections = gpu_tune.SECTIONS if "benchmarks/gpu_tune.py" in task.command else gpu_steps.SECTIONS
                assert {*value.split(",")} <= {*sections}
        paths = [word for word in task.command if word.endswith(".py")]
        assert all((ROOT / path).exists() for path in paths), task.name


def test_what_is_timed_begins_with_empty_caches_and_waits_for_no_launch(monkeypatch):
    said = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            said.append("event")

        def synchronize(self):
            said.append("waited")

        def elapsed_time(self, end):
            return 2.0

    class Memory:
        def zero_(self):
            said.append("evicted")

    monkeypatch.setattr(torch, "empty", lambda *_, **__: Memory())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: said.append("busy"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("synchronized"))
    assert gpu_device.Device("cuda").seconds(lambda: said.append("work"), 2, warm_ups=1) == 0.002
    assert said == ["work", "synchronized", *["evicted", "busy", "event", "work", "event", "waited"] * 2]


def test_nine_minutes_are_for_speeds_and_later_ones_for_the_rest(tool):
    tasks = tool.tasks(rehearsal=False)
    reached = list(accumulate(task.seconds for task in tasks))
    fitting = [task.name for task, seconds in zip(tasks, reached, strict=True) if seconds <= 9 * 60 - tool.MARGIN_S]
    assert fitting == ["toolkits", "steps", "attention", "swap", "stack"]
    commands = [" ".join(task.command) for task in tasks]
    for said in (
        "decode,prefill,mixed --quantization fp8",
        "--quantization int8",
        "--quantization int4",
        "prefill --shape qwen3-30b-a3b --quantization fp8",
        "sections adapters",
    ):
        assert any(said in command for command in commands), said
    for said in (
        "decode,attention --kv-cache-dtype fp8",
        "loss_of_codes.py --backend triton --device cuda --dtypes bfloat16 --of fp8",
        "gpu_tune.py",
        "test_chunk_libraries.py",
    ):
        assert any(said in command for command in commands), said


def offer(monkeypatch, *offered: EntryPoint) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints(offered))
    monkeypatch.setattr(registry, "BACKENDS", ByName(registry.BACKENDS.group, registry.PLACES))


def test_packages_offer_backends_under_names_that_are_not_taken(monkeypatch):
    group = registry.BACKENDS.group
    offer(
        monkeypatch,
        EntryPoint("mine", "headway_executor.backends.simulated:SimulatedBackend", group),
        EntryPoint("simulated", "nowhere:Nothing", group),
        EntryPoint("broken", "no_such_package.backend:Backend", group),
    )
    assert registry.backend_names() == ("broken", "mine", "simulated", "torch", "triton")
    assert type(registry.create_backend("mine")) is type(registry.create_backend("simulated"))
    with pytest.raises(BackendConfigError, match="'broken' needs 'no_such_package', which is not installed"):
        registry.create_backend("broken")
    with pytest.raises(BackendConfigError, match="'other' is not allowed; allowed: broken, mine, simulated, torch"):
        registry.create_backend("other")


def test_backends_are_found_without_an_installation(monkeypatch):
    offer(monkeypatch)
    assert registry.backend_names() == ("simulated", "torch", "triton")
    registry.check_installed("torch")
    assert type(registry.create_backend("simulated")).__name__ == "SimulatedBackend"
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert stated[registry.BACKENDS.group] == registry.PLACES


def test_steps_and_conformance_need_no_package_of_services():
    code = (
        "import sys\nfor name in ('grpc', 'google', 'zmq', 'structlog', 'pytest_asyncio', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import gpu_steps, headway_conformance.__main__, headway_conformance.suite\n"
        "from headway_executor.startup.registry import create_backend\n"
        "for name in ('torch', 'triton'):\n    create_backend(name)\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
@needs_no_device
def test_the_rehearsal_holds(tmp_path):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--rehearse", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1].startswith(
        "gpu-check: held: toolkits, steps, stack, conformance, truth, kernels, tune, kv loss, fp8 loss; lacks: memcheck "
    )
    assert done.returncode == 3


def test_tests_that_need_no_plugin_run_without_plugins():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:timeout", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/unit/process/test_histogram.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_git_a_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert program.provenance(0)["commit"] == "unknown"


def test_a_floor_is_that_of_each_phase():
    """A step that is bound by memory in one phase and by products in another takes the sum of both."""
    limits = gpu_floors.Limits(bandwidth=4e12, product_rate=8e14, out_bandwidth=1e10, in_bandwidth=1e10)
    floors = gpu_floors.Floors(config_of(SHAPES["llama3-8b"]), torch.bfloat16, "none", "auto", limits)
    line = floors.line("mixed", 10.0, [1024] * 64, 1024, 0.85)
    weights = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4096
    assert line.phases_ms == pytest.approx(
        {
            "products": 2 * weights * (64 + 1024) / 8e14 * 1e3,
            "attention": 131072 * (64 * 1024 + 64 + 1024) / 4e12 * 1e3,
            "head": 2 * 128256 * 4096 / 4e12 * 1e3,
        }
    )
    assert line.floor_ms == pytest.approx(sum(line.phases_ms.values()))
    assert line.share == pytest.approx(line.floor_ms / 10)
    mixture = gpu_floors.Floors(config_of(SHAPES["tiny-mixture"]), torch.float32, "none", "auto", limits)
    assert [phase.name for phase in mixture.phases([32])] == ["products", "experts", "attention", "head"]
    hybrid = gpu_floors.Floors(config_of(SHAPES["qwen3.5-9b"]), torch.bfloat16, "none", "auto", limits)
    of_hybrid = {phase.name: phase for phase in hybrid.phases([1024] * 3)}
    numbers = 24 * (32 * 128 * 128 + 8192 * 3)
    assert (of_hybrid["states"].num_bytes, of_hybrid["states"].operations) == (3 * 8 * numbers, 3 * 7 * numbers)
    assert of_hybrid["attention"].num_bytes == 8 * (2 * 4 * 256 * 2) * 3 * 1025
    latent = gpu_floors.Floors(config_of(SHAPES["deepseek-v2-lite"]), torch.bfloat16, "none", "auto", limits)
    of_latent = {phase.name: phase for phase in latent.phases([1024] * 3)}["attention"]
    assert of_latent.num_bytes == 27 * 2 * (512 + 64) * 3 * 1025
    assert of_latent.operations == 27 * 16 * 2 * (576 + 512) * 3 * 1025


@needs_no_device
def test_a_section_that_fails_costs_its_own_lines_only(monkeypatch, tmp_path, capsys):
    limits = gpu_floors.Limits(1e10, 1e10, 1e10, 1e10)
    monkeypatch.setattr(gpu_steps, "measure_limits", lambda device: limits)
    monkeypatch.setattr(gpu_attention, "paged_attention", failing_after(paged_attention, 3 + TINY.repetitions))

    def refused(*_):
        raise ValueError("no\nmemory")

    monkeypatch.setattr(gpu_steps, "StepBenchmark", refused)
    lines = tmp_path / "lines.jsonl"
    words = ["--shape", "tiny", "--device", "cpu", "--sections", "decode,attention", "--lines", str(lines)]
    assert gpu_steps.main(words) == 1
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["kind"] for line in found] == ["limits", "step", "failure", "failure"]
    assert found[1]["name"] == "attention, 2 decodes after 64"
    assert found[3]["reason"] == "opening the model: ValueError: no memory"
    assert "attention, 2 decodes after 64" in capsys.readouterr().out


def failing_after(work, count):
    calls = iter(range(count))

    def limited(*arguments, **named):
        if next(calls, None) is None:
            raise RuntimeError("the device is gone")
        return work(*arguments, **named)

    return limited


@needs_no_device
def test_a_server_that_cannot_start_ends_the_run_at_once(unused_tcp_port):
    words = ("--shape", "tiny", "--device", "cuda", "--no-peer", "--grpc-address", f"127.0.0.1:{unused_tcp_port}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_stack.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("gpu_stack: headway serve ended with exit code ")
    assert "allowed: cpu" in done.stderr


def test_a_peer_that_fails_costs_no_figure_of_ours(monkeypatch):
    def fails(arguments):
        raise subprocess.CalledProcessError(1, "peer")

    monkeypatch.setattr(gpu_stack, "run_peer", fails)
    theirs, problem = gpu_stack.try_peer(Namespace())
    assert theirs is None
    assert problem == "Command 'peer' returned non-zero exit status 1."
