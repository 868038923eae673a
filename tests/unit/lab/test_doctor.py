"""``headway doctor``: what it finds, what it says of what is missing, and what it makes of the figures."""

import json
import re
import shlex
import subprocess
import sys

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import make_checkpoint
from headway.__main__ import main
from headway_executor.backend import BackendConfigError
from headway_executor.host import host_report
from headway_executor.memory import host_speed
from headway_executor.memory.host_speed import DeviceSpeed, HostSpeed
from headway_executor.models.families import read_model_config
from headway_executor.models.kv_layout import vectors_layout
from headway_executor.models.parameter_counts import layer_parameters
from headway_executor.models.part import whole
from headway_executor.startup import backend_report
from headway_executor.startup.backend_report import BackendReport, backend_reports
from headway_lab.doctor import command, examination, host
from headway_lab.doctor.examination import Model, examine, with_measurements
from headway_lab.doctor.expectation import StepDevice, expected_step
from headway_lab.doctor.findings import DeviceFinding, Figure, KernelFinding
from headway_lab.doctor.rendering import best_flags, text_of
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_process.installation import install_advice

SHAPE = MODEL_SHAPES["llama-3-8b"]
SPEED = HostSpeed(copy_bytes_per_s=20e9, float32_flops=100e9)
TORCH = BackendReport(name="torch", flags=("--backend torch --device cpu",))
SIMULATED = BackendReport(name="simulated", flags=("--backend simulated",), runs_models=False)


@pytest.fixture(scope="module")
def found():
    """This host, with the backends that every checkout has."""
    return msgspec.structs.replace(examine(), backends=(SIMULATED, TORCH))


@pytest.fixture
def fast_figures(monkeypatch):
    def measure(say):
        say("copying in main memory")
        return SPEED

    monkeypatch.setattr(host_speed, "measure_host", measure)
    monkeypatch.setattr(command, "examine", lambda: msgspec.structs.replace(examine(), devices=()))


def test_the_report_of_this_host(capsys, fast_figures):
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    sections = [line for line in said.out.splitlines() if line and not line.startswith((" ", "This host"))]
    assert [title.partition(":")[0] for title in sections] == [
        *("host", "packages", "devices", "backends", "measured"),
        "decode step at these rates",
    ]
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", said.out, re.MULTILINE)
    assert "--backend torch --device cpu" in said.out
    assert "20 GB/s" in said.out
    assert "100 GFLOP/s" in said.out
    assert "This host can run models: headway serve --backend " in said.out
    assert said.err == "headway doctor: copying in main memory\n"


@pytest.mark.parametrize(("free_gib", "size"), [(140, 8192), (3.0, 4096), (0.7, 2048), (0.1, 2048)])
def test_the_product_that_is_measured_is_as_large_as_the_memory_allows(free_gib, size):
    assert host_speed._gemm_size(int(free_gib * 2**30)) == size


def test_quick_measures_nothing(capsys, monkeypatch):
    monkeypatch.setattr(host_speed, "measure_host", lambda say: pytest.fail("measured"))
    assert main(["doctor", "--quick"]) == 0
    said = capsys.readouterr()
    assert "measured" not in said.out
    assert "decode step" not in said.out
    assert not said.err


def test_json_is_one_object_with_everything(capsys, fast_figures):
    assert main(["doctor", "--json", "--shape", "llama-3-8b"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"host", "packages", "kernels", "devices", "backends", "figures", "expected_steps"} <= document.keys()
    assert document["model"] == "llama-3-8b"
    assert [step["batch"] for step in document["expected_steps"]] == [1, 64, 256]


WITHOUT_TORCH = """
import importlib.metadata, sys
missing = {"torch", "triton", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "safetensors"}
for name in ("torch", "triton", "cupy", "safetensors"):
    sys.modules[name] = None
true_version = importlib.metadata.version
def version(name):
    if name in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return true_version(name)
importlib.metadata.version = version
from headway.__main__ import main
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("flags", [[], ["--quick"]])
def test_a_host_without_torch_is_told_what_to_install(flags):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = dict(re.findall(r"^  (\w+) +(.+)$", done.stdout, re.MULTILINE))
    advice = f"install the extra executor: {shlex.quote(sys.executable)} -m pip install "
    assert lines["safetensors"].startswith(f"not installed: {advice}")
    assert "'torch>=" in lines["safetensors"]
    assert lines["triton"]
    assert f"  torch        not installed: {advice}" in done.stdout
    assert f"  torch      cannot run: needs 'torch', which is not installed; {advice}" in done.stdout
    assert "--backend simulated  (no model: for tests)" in done.stdout
    assert done.stdout.endswith("This host can run no model: see backends.\n")
    assert ("not measured  anything: needs torch" in done.stdout) == (not flags)


@pytest.mark.parametrize(
    ("flags", "exit_code", "message"),
    [
        (["--shape", "gpt-9"], 2, "--shape: 'gpt-9' is not allowed; allowed: llama-2-13b, llama-2-70b, llama-2-7b"),
        (["--model", "nowhere"], 3, "--model: nowhere: no such model directory"),
    ],
)
def test_a_model_that_is_not_there(capsys, flags, exit_code, message):
    assert main(["doctor", *flags]) == exit_code
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_quietly(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "examine", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "headway doctor: cancelled\n"


# What is expected of a step.


def test_one_row_reads_every_weight_and_its_cache():
    device = StepDevice(name="cuda:0", bytes_per_s=1e12, flops=1e15, memory_bytes=80 << 30)
    step = expected_step(SHAPE, device, batch=1)
    parameters = 32 * (4096 * 128 * (64 + 16) + 3 * 4096 * 14336) + 128256 * 4096
    cache = 2 * 32 * 8 * 128 * 1024
    assert step.step_ms == pytest.approx(1e3 * 2 * (parameters + cache) / 1e12)
    assert step.tokens_per_s == pytest.approx(1e3 / step.step_ms)
    assert (step.bound, step.fits) == ("memory", True)


def test_many_rows_are_bound_by_arithmetic_where_it_is_slow():
    device = StepDevice(name="cpu", bytes_per_s=1e12, flops=1e12, memory_bytes=0, weight_bytes=4, cache_bytes=4)
    step = expected_step(SHAPE, device, batch=64)
    parameters = SHAPE.num_layer_parameters + SHAPE.num_head_parameters
    operations = 64 * (2 * parameters + 4 * 32 * 32 * 128 * 1024)
    assert step.step_ms == pytest.approx(1e3 * operations / 1e12)
    assert step.bound == "arithmetic"


def test_of_experts_only_those_are_read_and_multiplied_that_tokens_choose():
    shape = msgspec.structs.replace(SHAPE, own_parameters=10**9, expert_parameters=4 * 10**9, expert_share=0.25)
    reading = StepDevice(name="cpu", bytes_per_s=1e12, flops=1e18, memory_bytes=0)
    cache, head = 2 * 32 * 8 * 128 * 1024, SHAPE.num_head_parameters
    for batch, experts in ((1, 10**9), (2, 1.75 * 10**9), (1000, 4 * 10**9)):
        numbers = 10**9 + experts + head + batch * cache
        assert expected_step(shape, reading, batch).step_ms == pytest.approx(1e3 * 2 * numbers / 1e12)
    slow = msgspec.structs.replace(reading, flops=1e9)
    operations = 2 * (2 * 10**9 + head) + 4 * 32 * 32 * 128 * 1024
    assert expected_step(shape, slow, 64).step_ms == pytest.approx(1e3 * 64 * operations / 1e9)
    little = msgspec.structs.replace(reading, memory_bytes=8 << 30)
    assert not expected_step(shape, little, 1).fits


@pytest.mark.parametrize("name", ["llama-bias", "gemma4-keys", "laguna", "deepseek_v3", "qwen3_5_moe", "gpt2", "dbrx"])
def test_layers_have_as_many_parameters_as_are_stored(tmp_path, name):
    make_checkpoint(tmp_path, name)
    config = read_model_config(tmp_path)
    counted = layer_parameters(config)
    prefix = config.names.layer.partition("{}")[0]
    stored = load_file(tmp_path / "model.safetensors").items()
    stored_in_layers = sum(tensor.numel() for tensor_name, tensor in stored if tensor_name.startswith(prefix))
    assert counted.of_all_tokens + counted.of_experts == stored_in_layers
    assert (counted.of_experts > 0) == (config.experts is not None)
    assert 0 < counted.share <= 1


@pytest.mark.parametrize(
    ("name", "numbers"), [("llama3", 3 * 2 * 2 * 12), ("deepseek_v3", 3 * 32), ("deepseek_v32", 3 * 2 * 32)]
)
def test_a_token_takes_what_is_stored_of_it(tmp_path, name, numbers):
    """Of latent attention one row for all heads, and perhaps an index's key of its width."""
    make_checkpoint(tmp_path, name)
    config = read_model_config(tmp_path)
    assert config.num_kv_numbers == numbers
    layout = vectors_layout(config, whole(config), 8, torch.float32, "auto")
    assert layout.block_bytes == 8 * 4 * numbers


def test_wider_numbers_take_longer_to_read():
    narrow = StepDevice(name="cpu", bytes_per_s=1e9, flops=1e15, memory_bytes=0)
    wide = msgspec.structs.replace(narrow, weight_bytes=4, cache_bytes=4)
    assert expected_step(SHAPE, wide, 8).step_ms == pytest.approx(2 * expected_step(SHAPE, narrow, 8).step_ms)


def test_what_does_not_fit_has_no_time(found):
    device = StepDevice(name="cuda:0", bytes_per_s=1e12, flops=1e15, memory_bytes=8 << 30)
    step = expected_step(SHAPE, device, batch=1)
    assert (step.fits, step.step_ms, step.tokens_per_s) == (False, 0.0, 0.0)
    assert "does not fit in memory" in text_of(msgspec.structs.replace(found, expected_steps=(step,)))


@pytest.mark.parametrize(("used", "is_bfloat16", "ratio"), [("avx2", True, 1), ("avx2", False, 2), ("", True, 2)])
def test_the_kernels_alone_keep_bfloat16_weights_as_they_are(found, monkeypatch, used, is_bfloat16, ratio):
    monkeypatch.setattr(host_speed, "measure_host", lambda say: msgspec.structs.replace(SPEED, float32_flops=1e18))
    here = msgspec.structs.replace(
        found,
        host=msgspec.structs.replace(found.host, memory_bytes=0),
        kernels=KernelFinding(used=used),
        devices=(),
    )
    model = Model(shape=SHAPE, is_bfloat16=is_bfloat16)
    first, *_ = with_measurements(here, model, lambda _: None).expected_steps
    weights = 2 * ratio * (SHAPE.num_layer_parameters + SHAPE.num_head_parameters)
    assert first.step_ms == pytest.approx(1e3 * (weights + 2 * 1024 * SHAPE.kv_bytes_per_token()) / 20e9)


# Devices that are not here.

GPU = DeviceFinding(
    device="cuda:0", name="NVIDIA X1", capability="9.0", memory_bytes=80 << 30, free_memory_bytes=79 << 30
)


def test_a_host_with_a_gpu(found, monkeypatch):
    device_speed = DeviceSpeed(
        index=0, copy_bytes_per_s=3e12, from_host_bytes_per_s=50e9, to_host_bytes_per_s=51e9, bfloat16_flops=7e14
    )
    monkeypatch.setattr(host_speed, "measure_host", lambda say: SPEED)
    monkeypatch.setattr(host_speed, "measure_device", lambda index, say: device_speed)
    here = msgspec.structs.replace(
        found,
        cuda="12.8",
        driver="570.1",
        devices=(GPU,),
        cuda_problem="",
        triton_problem="",
        cupy_problem="not installed; pip install 'triton>=3.2'",
        backends=(
            TORCH,
            BackendReport(name="triton", problem="cupy not installed; pip install 'triton>=3.2'"),
        ),
    )
    text = text_of(with_measurements(here, Model(shape=SHAPE), lambda _: None))
    assert "  cuda:0  NVIDIA X1, capability 9.0, 80.0 GiB, 79.0 GiB free" in text
    assert "  driver  570.1; torch is built for CUDA 12.8" in text
    assert "  triton  runs kernels" in text
    assert "  cupy    not installed; pip install 'triton>=3.2'" in text
    assert "  triton  cannot run: cupy not installed; pip install 'triton>=3.2'" in text
    assert re.search(r"cuda:0: product in bfloat16 +700 TFLOP/s", text)
    assert re.search(r"cuda:0: copy in memory, read and written +3 TB/s", text)
    assert re.search(r"^  cuda:0 +1 +5\.05 ms +198  memory$", text, re.MULTILINE)


def test_a_measurement_that_fails_is_told_and_the_others_stay(found, monkeypatch):
    def fail(index, say):
        raise RuntimeError("CUDA error:\n out of memory")

    monkeypatch.setattr(host_speed, "measure_host", lambda say: SPEED)
    monkeypatch.setattr(host_speed, "measure_device", fail)
    measured = with_measurements(
        msgspec.structs.replace(found, devices=(GPU,), torch_problem=""), Model(shape=SHAPE), lambda _: None
    )
    assert measured.measurement_problems == ("CUDA error: out of memory",)
    assert {step.device for step in measured.expected_steps} == {"cpu"}
    assert "not measured" in text_of(measured)


def test_rates_are_shown_with_the_prefix_that_fits(found):
    figures = tuple(
        Figure(name=str(place), device="cpu", value=value, unit="B/s")
        for place, value in enumerate((5e6, 2.345e9, 1e15))
    )
    text = text_of(msgspec.structs.replace(found, figures=figures))
    assert re.findall(r"cpu: \d +(.*)", text) == ["5 MB/s", "2.35 GB/s", "1 PB/s"]


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ({"torch": ("--backend torch --device cpu",)}, "--backend torch --device cpu"),
        ({"torch": ("--device cpu", "--device cuda:0", "--device cuda:1")}, "--device cuda:0"),
        (
            {"torch": ("--device cpu", "--device cuda"), "triton": ("--backend triton --device cuda",)},
            "--backend triton --device cuda",
        ),
        ({"torch": (), "mine": ("--backend mine",)}, "--backend mine"),
        ({"torch": ()}, ""),
    ],
)
def test_the_fastest_way_is_recommended(found, flags, best):
    reports = tuple(BackendReport(name=name, flags=given) for name, given in flags.items())
    assert best_flags(msgspec.structs.replace(found, backends=(SIMULATED, *reports))) == best


@pytest.fixture
def installed(monkeypatch):
    """Backends by name, each with the error that creating it raises."""

    def create(name):
        if backends[name] is not None:
            raise backends[name]

    backends = {}
    monkeypatch.setattr(backend_report, "backend_names", lambda: tuple(sorted(backends)))
    monkeypatch.setattr(backend_report, "create_backend", create)
    return backends


def test_backends_on_two_gpus(installed):
    installed.update(simulated=None, torch=None, triton=None, mine=None)
    reports = {report.name: report for report in backend_reports(num_devices=2, kernels_problem="")}
    assert reports["triton"].flags == ("--backend triton --device cuda:0", "--backend triton --device cuda:1")
    assert reports["torch"].flags[0] == "--backend torch --device cpu"
    assert len(reports["torch"].flags) == 3
    assert reports["mine"].flags == ("--backend mine",)
    assert [name for name, report in reports.items() if not report.runs_models] == ["simulated"]


def test_backends_on_a_host_without_a_gpu(installed):
    installed.update(torch=None, triton=None, mine=BackendConfigError("backend: 'mine' needs 'x'; pip install x"))
    installed["broken"] = OSError("libfoo.so:\n no such file")
    reports = {report.name: report for report in backend_reports(num_devices=0, kernels_problem="needs a CUDA device")}
    assert reports["torch"].flags == ("--backend torch --device cpu",)
    assert (reports["triton"].flags, reports["triton"].problem) == ((), "needs a CUDA device")
    assert reports["mine"].problem == "needs 'x'; pip install x"
    assert reports["broken"].problem == "cannot be imported: libfoo.so: no such file"


def test_one_gpu_needs_no_number(installed):
    installed.update(triton=None)
    (report,) = backend_reports(num_devices=1, kernels_problem="")
    assert report.flags == ("--backend triton --device cuda",)


@pytest.mark.parametrize(
    ("built_for", "warning", "driver", "problem"),
    [
        (None, "", "", "is built without CUDA; install a CUDA build"),
        ("12.8", "", "", "no NVIDIA driver; install it"),
        ("12.8", "", "570.1", "the NVIDIA driver shows no device; look at nvidia-smi"),
        (
            "12.8",
            "The NVIDIA driver on your system\nis too old",
            "450.1",
            "The NVIDIA driver on your system is too old",
        ),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, built_for, warning, driver, problem):
    def is_available():
        if warning:
            import warnings

            warnings.warn(warning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(host_report, "_driver_version", lambda: driver)
    devices, told = host_report._cuda_devices()
    assert devices == ()
    assert problem in told
    assert "\n" not in told


def test_a_gpu_that_cannot_be_used_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def fail(index):
        raise RuntimeError("CUDA error: busy")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert host_report._cuda_devices() == ((), "a CUDA device cannot be used: CUDA error: busy")


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    path = tmp_path / "version"
    monkeypatch.setattr(host_report, "_DRIVER_VERSION", path)
    assert not host_report._driver_version()
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 13\n")
    assert host_report._driver_version() == "550.54.15"


def test_a_toolkit_that_runs_no_kernel_is_told(monkeypatch):
    def fail(device):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    assert host_report._problem_of("json", fail) == (
        "does not run a kernel: Failed to find C compiler. Please specify via CC"
    )
    assert not host_report._problem_of("json", lambda device: None)
    assert host_report._problem_of("no_such_toolkit", fail) == f"not installed; {install_advice('cuda')}"
    monkeypatch.setattr(host_report.shutil, "which", lambda name: None)
    monkeypatch.setattr(host_report, "_missing", lambda package: "")
    assert host_report._problem_of("triton", fail) == "needs a C compiler on this host; install gcc or clang"


@pytest.mark.parametrize(
    ("built", "paths", "runs", "used", "problem"),
    [
        (True, ["avx512", "avx2"], ["avx2"], "avx2", ""),
        (True, ["avx2"], [], "", "this processor runs none of them"),
        (True, [], [], "", "not compiled, PyTorch operators run instead; run: make kernels"),
        (False, [], [], "", "there are none for"),
    ],
)
def test_which_kernels_run(monkeypatch, tmp_path, built, paths, runs, used, problem):
    libraries = [tmp_path / f"libheadway_cpu.{name}.so" for name in paths]
    monkeypatch.setattr(host_report, "variants_here", lambda: (object(),) if built else ())
    monkeypatch.setattr(host_report, "installed_variants", lambda: libraries)
    monkeypatch.setattr(host_report, "runs_here", lambda path: path.suffixes[0][1:] in runs)
    kernels = host_report._kernel_variants()
    assert kernels.installed == tuple(paths)
    assert kernels.used == used
    assert problem in kernels.problem
    assert bool(problem) == bool(kernels.problem)


def test_the_cpu_is_measured_within_the_free_memory(monkeypatch):
    monkeypatch.setattr(host_speed, "_MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(host_speed, "_CPU_GEMM", 64)
    monkeypatch.setattr(host_speed, "free_host_bytes", lambda: 1 << 22)
    said = []
    speed = host_speed.measure_host(said.append)
    assert speed.copy_bytes_per_s > 1e6
    assert speed.float32_flops > 1e6
    assert said == ["copying in main memory", "multiplying in float32 on the CPU"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured():
    speed = host_speed.measure_device(0, lambda _: None)
    assert min(speed.copy_bytes_per_s, speed.from_host_bytes_per_s, speed.to_host_bytes_per_s) > 1e9
    assert speed.bfloat16_flops > 1e11


def test_the_processor_says_its_name(tmp_path):
    path = tmp_path / "cpuinfo"
    assert host.processor_name(path)
    path.write_text("processor\t: 0\nmodel name\t: Fast One 9000\nprocessor\t: 1\nmodel name\t: Fast One 9000\n")
    assert host.processor_name(path) == "Fast One 9000"


def test_a_broken_torch_is_told(monkeypatch):
    def broken():
        raise OSError("libtorch.so: cannot open\n shared object file")

    monkeypatch.setattr(host_report, "examine_host", broken)
    findings = examination.examine()
    assert findings.torch_problem == "cannot be used: libtorch.so: cannot open shared object file"
    assert findings.torch_problem in text_of(findings)
