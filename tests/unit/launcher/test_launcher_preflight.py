"""What ``headway serve`` finds out before it starts anything, and whom it takes for its own gateway."""

import asyncio
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headway.__main__ import main, parser_of
from headway.commands.serve import serve
from headway.planning.model_source import DEMO_MODEL_DIRECTORY
from headway.planning.plan import Plan, make_plan, without_settings
from headway.running.health import SERVING, UNREACHABLE, Target, health_of
from headway_executor.backend import BackendConfigError
from headway_executor.config import ExecutorConfig
from headway_executor.host import torch_build as of_build
from headway_executor.host.torch_build import TorchBuild, cuda_advice, torch_build
from headway_executor.startup import preflight as of_executor
from headway_gateway.listening import problem_of_listening
from headway_proto import generation_pb2, generation_pb2_grpc

CUDA_BUILD = TorchBuild("2.13.0+cu128", "12.8", "")


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> int:
        pytest.fail("processes were started")

    monkeypatch.setattr("headway.commands.serve.serve", started)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIRECTORY, directory)
    return directory


def refusal(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert main(["serve", "--grpc-address", "127.0.0.1:0", *words]) == code
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    return line.removeprefix("headway serve: ")


MISTAKES = [
    ("--backend vllm", "--backend: 'vllm' is not allowed; allowed: simulated, torch, triton"),
    ("--quantization fp8", "--quantization 'fp8' is not allowed; allowed: none, int8, int4"),
    ("--backend-option kernels=fast", "--backend-option kernels 'fast' is not allowed; allowed: auto, compiled, eager"),
    ("--backend-option oops=1", "--backend-option 'oops' is not allowed; allowed: kernels.*"),
    ("--tensor-parallel 65", "--tensor-parallel: 65 is not allowed; allowed: 1 to 64"),
    ("--backend simulated --backend-option oops=1", "--backend-option: 'oops' is not known; allowed: vocab_size.*"),
    (
        "--speculation draft",
        "--draft-model '' is not allowed with speculation draft; allowed: a checkpoint directory.*",
    ),
    ("--num-kv-blocks 1", "--num-kv-blocks 1 is not allowed; .* so allowed: 64 or more"),
    ("--max-model-len 9999", "--max-model-len 9999 is not allowed; allowed: 1 to the model's context, 1024, .*"),
    ("--quantization int8 --dtype float16", "--dtype 'float16' is not allowed with quantization int8; .*"),
    (f"--flight-log {__file__}/log", "--flight-log: '.*' cannot be used: .*test_launcher_preflight.py is no directory"),
    ("--backend triton --device cpu", "--device 'cpu' is not allowed for backend 'triton'; allowed: cuda, .*"),
    (
        "--grpc-address nowhere.invalid:1 --allow-insecure-bind",
        "--grpc-address: cannot listen on 'nowhere.invalid:1'.*",
    ),
    ("--grpc-address 192.0.2.1:0 --allow-insecure-bind", "--grpc-address: '192.0.2.1:0' cannot be bound: .*"),
    ("--grpc-address 192.0.2.1:7 --allow-insecure-bind", "--grpc-address: cannot listen on '192.0.2.1:7' .*"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_line_before_anything_starts(capsys, monkeypatch, words, message):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert re.fullmatch(message, refusal(capsys, *words.split()))


def test_the_line_names_the_source_of_the_value(capsys, monkeypatch):
    monkeypatch.setenv("HEADWAY_EXECUTOR_BACKEND", "vllm")
    assert refusal(capsys).startswith("HEADWAY_EXECUTOR_BACKEND: 'vllm' is not allowed")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["config.json", "model.safetensors", "tokenizer.json"], "{model}: no config.json and no model.safetensors; allowed: .*"),
        (["config.json"], "{model}: no config.json; allowed: a Hugging Face checkpoint directory .*"),
        (["model.safetensors"], "{model}: no model.safetensors; allowed: a Hugging Face checkpoint directory .*"),
        (["tokenizer.json"], "{model}: no tokenizer.json; allowed: a directory with a Hugging Face tokenizer file"),
    ],
    ids=["everything", "configuration", "weights", "tokenizer"],
)  # fmt: skip
def test_a_file_that_the_model_lacks(capsys, model, missing, message):
    for name in missing:
        (model / name).unlink()
    assert re.fullmatch(message.format(model=model), refusal(capsys, "--model", str(model), code=3))


def test_a_model_that_cannot_be_served(capsys, model):
    (model / "config.json").write_text('{"architectures": ["Mamba"]}')
    assert "architectures ['Mamba'] is not supported" in refusal(capsys, "--model", str(model), code=3)


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("tokenizers", "", "gateway"),
        ("llguidance", "", "gateway"),
        ("torch", "", "executor"),
        ("safetensors", "", "executor"),
        ("cupy", "--backend triton --device cuda", "cuda"),
        ("prometheus_client", "--metrics-port 45001", "metrics"),
        ("opentelemetry", "--otel-endpoint http://127.0.0.1:4317", "traces"),
    ],
)
def test_a_missing_package_and_the_extra_that_brings_it(capsys, monkeypatch, package, words, extra):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    line = refusal(capsys, *words.split())
    assert package in line
    assert f"install the extra {extra}: " in line


@pytest.mark.parametrize(
    ("device", "build", "count", "message"),
    [
        ("cuda", TorchBuild("2.13.0+cpu", "", ""), 8, r".*\(2.13.0\+cpu\) is built without CUDA, so allowed: cpu"),
        ("cuda", CUDA_BUILD, 0, "device 'cuda' is not allowed; this host has 0 CUDA devices"),
        ("cuda:2", CUDA_BUILD, 2, "device 'cuda:2' is not allowed; this host has 2 CUDA devices"),
        ("cuda:1", CUDA_BUILD, 2, ""),
        ("cuda", CUDA_BUILD, None, ""),
        ("cuda", TorchBuild("2.13.0+rocm7", "", "7.0"), 0, ""),
        ("cuda", None, 0, ""),
    ],
)  # fmt: skip
def test_a_device_that_this_host_lacks(monkeypatch, device, build, count, message):
    monkeypatch.setattr(of_executor, "torch_build", lambda: build)
    monkeypatch.setattr(of_executor, "num_cuda_devices", lambda: count)
    config = ExecutorConfig(model=str(DEMO_MODEL_DIRECTORY), device=device)
    if not message:
        return of_executor.check(config)
    with pytest.raises(BackendConfigError) as refused:
        of_executor.check(config)
    assert re.fullmatch(message, str(refused.value))
    return None


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
            TorchBuild("2.13.0+cu128", "12.8", ""),
        ),
        ("__version__ = '1'\ncuda = None\nhip = '7.0'\n", TorchBuild("1", "", "7.0")),
        ("__version__ = version('torch')\n", None),
    ],
)
def test_what_pytorch_was_built_for_is_read_without_importing_it(monkeypatch, tmp_path, text, build):
    (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(of_build, "find_spec", lambda _: spec)
    assert torch_build() == build


def test_the_installed_pytorch_says_what_it_was_built_for():
    torch = pytest.importorskip("torch")
    build = torch_build()
    assert build is not None
    assert build.version == torch.__version__
    assert build.cuda == (torch.version.cuda or "")


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda13"), ("12.8", "cuda"), ("", "cuda")])
def test_cuda_packages_are_those_of_pytorchs_own_release(monkeypatch, cuda, extra):
    monkeypatch.setattr(of_build, "torch_build", lambda: TorchBuild("2.13.0", cuda, ""))
    assert cuda_advice().startswith((f"install the extra {extra}: ", f"install: pip install '.[{extra}]'"))


def test_looking_imports_neither_pytorch_nor_a_kernel():
    code = (
        "import sys\nfrom headway.planning import preflight\nfrom headway.__main__ import parser_of\nfrom headway.planning.plan import make_plan\n"
        "from pathlib import Path\npreflight.check(make_plan(parser_of('serve').parse(['--grpc-address', '127.0.0.1:0']), {}, "
        "Path('/x')))\nassert not {'torch', 'triton', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ports_that_others_hold(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        in_use = r"cannot listen on '[\w.]+:[0-9]+' \(Address already in use\); allowed: a free address"
        for words, flag in (
            (f"--grpc-address 127.0.0.1:{port}", "--grpc-address"),
            (f"--grpc-address localhost:{port}", "--grpc-address"),
            (f"--grpc-address 0.0.0.0:{port} --allow-insecure-bind", "--grpc-address"),
            (f"--grpc-address 127.0.0.1:{port - 1} --replicas 2", "--grpc-address"),
            (f"--metrics-port {port - 2}", "--metrics-port"),
        ):
            assert re.fullmatch(f"{flag}: {in_use}", refusal(capsys, *words.split()))
        pytest.importorskip("smg", reason="needs smg (extra smg)")
        words = ("--openai-address", f"127.0.0.1:{port}", "--vllm-engine", "on")
        assert re.fullmatch(f"--openai-address: {in_use}", refusal(capsys, *words))
    assert problem_of_listening(f"127.0.0.1:{port}") == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bogus,1", "--smg-flags: '--bogus' is not allowed; allowed: flags of smg launch, see smg launch --help"),
        ("--policy,none", "--smg-flags: argument --policy: invalid choice: 'none' .*"),
    ],
)
def test_flags_that_smg_does_not_take(capsys, flags, message):
    pytest.importorskip("smg", reason="needs smg (extra smg)")
    words = ("--openai-address", "127.0.0.1:1", f"--smg-flags={flags}")
    assert re.fullmatch(message, refusal(capsys, *words))


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of another server that says it serves, as another Headway's gateway does."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)

    class Generation(generation_pb2_grpc.GenerationServicer):
        def GetModel(self, request, context):  # noqa: N802 (gRPC's name)
            return generation_pb2.GetModelResponse(name="another")

    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    generation_pb2_grpc.add_GenerationServicer_to_server(Generation(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_another_server_at_the_gateways_address_is_not_taken_for_it(stranger, tmp_path, capfd):
    """As where somebody takes the port after it was found free: nobody says "ready", and the reason is the last line."""
    assert health_of(Target(address=stranger)).status == SERVING
    plan = make_plan(
        parser_of("serve").parse(["--backend", "simulated", "--grpc-address", stranger, "--log-level", "error"]),
        {},
        tmp_path,
    )
    (target,) = plan.targets
    assert health_of(target).status == UNREACHABLE
    readiness: list[str] = []

    async def when_ready(line: str, address: str) -> bool:
        readiness.append(f"{line} {address}")
        return True

    assert asyncio.run(serve(plan, without_settings(os.environ), when_ready)) == 2
    assert readiness == []
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"headway gateway: grpc_address: cannot listen on '{stranger}' (Address already in use); allowed: a free address"
    )


def test_every_gateway_of_a_plan_has_the_name_and_every_plan_another(tmp_path):
    def plan() -> Plan:
        return make_plan(parser_of("serve").parse(["--replicas", "2", "--grpc-address", "127.0.0.1:0"]), {}, tmp_path)

    names = {target.health_name for target in plan().targets}
    assert len(names) == 1
    assert names != {target.health_name for target in plan().targets}
