"""Several Headways behind the real smg: those of ``serve --replicas``, and those that smg finds in Kubernetes."""

import asyncio
import contextlib
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

pytest.importorskip("openai", reason="needs the openai client (extra dev)")
pytest.importorskip("smg", reason="needs smg (extra smg)")
pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine (extra smg)")

import openai
import psutil

import headway
from e2e.running_server import Command, command, environment, finished, wait_until
from e2e.test_gateway_serving import MODEL, eventually, stage
from fake_scheduler import FakeScheduler
from headway.client import Client
from headway.planning import openai_front
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_process.free_ports import free_ports
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = Path(headway.__file__).parent / "demo_model"
ASKED = {"model": "demo", "prompt": "A dictionary is", "max_tokens": 4, "temperature": 0}
SMG = Path(sys.executable).with_name("smg")
SERVICES = {"scheduler", "executor", "gateway"}


def openai_client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=30.0)


def processes_by_replica(server: Command) -> dict[str, dict[str, psutil.Process]]:
    """The processes of each replica by name; its number is that of its links."""
    found: dict[str, dict[str, psutil.Process]] = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            links = [word for word in words if word.startswith(("--step-address=", "--ingress-address="))]
            if links and words[4] in SERVICES:
                found.setdefault(links[0].rpartition("-")[2], {})[words[4]] = child
    return found


def test_a_killed_replica_comes_back_and_the_other_serves_meanwhile(tmp_path: Path) -> None:
    openai_address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    flags = ("--backend", "simulated", "--grpc-address", "127.0.0.1:0", "--flight-log", str(tmp_path / "flight"))
    with command("serve", "--replicas", "2", *flags, "--openai-address", openai_address) as server:
        addresses = server.wait_for_ready().split(",")
        assert len(set(addresses)) == 2
        for address in addresses:
            with Client(address) as native:
                assert len(native.generate("x", max_tokens=3, ignore_eos=True).result().token_ids) == 3
        told = f"headway serve: OpenAI API on http://{openai_address}/v1\n"
        wait_until(lambda: told in server.err, 60.0, "smg with both replicas")
        before = processes_by_replica(server)
        assert {replica: set(found) for replica, found in before.items()} == {"0": SERVICES, "1": SERVICES}

        for process in before["1"].values():
            process.kill()
        with openai_client(openai_address) as client:
            for _ in range(6):
                assert client.completions.create(**ASKED).usage.completion_tokens == 4
            with Client(addresses[1]) as native:
                native.wait_ready(30)
            wait_until(lambda: addresses[1] in openai_front.ready_gateways(openai_address), 30.0, "the replica")
            assert client.completions.create(**ASKED).usage.completion_tokens == 4
        after = processes_by_replica(server)
        assert after["0"] == before["0"], "nobody has touched the other replica"
        assert set(after["1"]) == SERVICES
        assert not any(process.is_running() for process in before["1"].values())
        for service in SERVICES:
            assert any(f"{service}-1 ended (signal 9); starting it again" in line for line in server.err)
        assert any("process=scheduler" in line and "replica=1" in line for line in server.err)
        assert {log.name for log in (tmp_path / "flight").iterdir()} == {"replica-0", "replica-1"}

        of_replicas = {process for found in after.values() for process in found.values()}
        (smg,) = set(psutil.Process(server.process.pid).children()) - of_replicas
        server.process.send_signal(signal.SIGTERM)
        wait_until(
            lambda: any("stopping: smg, then gateway-0 and gateway-1, then" in line for line in server.err), 10, ""
        )
        smg.kill()  # Which keeps its port open for seconds more, for load balancers that are to notice.
        assert server.wait() == 0
        assert not any(process.is_running() for process in of_replicas)
    assert [line for line in server.err if "Traceback" in line] == []


def test_replicas_that_cannot_be_are_refused_in_one_line() -> None:
    refused = finished("serve", "--replicas", "2", "--device", "cuda:0")
    assert refused.process.returncode == 2
    assert refused.err == [
        "headway serve: --device: 'cuda:0' is not allowed; allowed: cuda, of which each of 2 replicas takes one, or cpu\n"
    ]


@contextlib.contextmanager
def smg_with(*words: str, **extra_environment: str) -> Iterator[None]:
    """Run smg with these flags, and no waiting for anything."""
    smg = subprocess.Popen([SMG, "launch", *words], env=environment(**extra_environment), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        smg.kill()
        smg.wait()


async def test_smg_takes_in_a_headway_whose_model_comes_late() -> None:
    """It asks for a model once, of whoever answers that it is healthy or not; so nobody answers before there is one."""
    port, metrics_port = free_ports("127.0.0.1", 2)
    address = f"127.0.0.1:{port}"
    flags = ("--worker-startup-check-interval=1", "--history-backend=none", "--prometheus-host=127.0.0.1")
    async with stage() as on:
        here = ("--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics_port}")
        calls = on.server._statistics.calls
        with smg_with(*here, *flags, f"--worker-urls=grpc://{on.address}"):
            await eventually(lambda: any(method.endswith("VllmEngine/HealthCheck") for method, _ in calls), 30.0)
            async with FakeScheduler(on.ingress, model=MODEL, step_interval_s=0.001):
                deadline = time.monotonic() + 30.0
                while not await asyncio.to_thread(openai_front.is_serving, address):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)


class PodServer(http.server.ThreadingHTTPServer):
    """As much of Kubernetes' API as lists and watches pods: those that there are, and no change."""

    daemon_threads = True

    def __init__(self, pods: list[dict]) -> None:
        super().__init__(("127.0.0.1", 0), _PodRequest)
        self.pods = pods
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.ended = threading.Event()


class _PodRequest(http.server.BaseHTTPRequestHandler):
    server: PodServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlparse(self.path)
        asked = parse_qs(url.query)
        self.server.asked.append((url.path, asked))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if "watch" in asked:
            self.end_headers()
            self.wfile.flush()
            self.server.ended.wait()
            self.close_connection = True
            return
        wanted = dict(word.split("=") for word in asked["labelSelector"][0].split(","))
        found = [pod for pod in self.server.pods if wanted.items() <= pod["metadata"]["labels"].items()]
        told = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": found}
        content = json.dumps(told).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Tell nobody."""


@contextlib.contextmanager
def kubernetes_with(pods: list[dict], directory: Path) -> Iterator[tuple[PodServer, Path]]:
    """Serve these pods; the value is the server and a file that tells clients where it is."""
    server = PodServer(pods)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "headway"}}],
                "current-context": "x",
            }
        )
    )
    try:
        yield server, kubeconfig
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def deployments_of_the_example() -> dict[str, dict]:
    loaded = [
        one
        for name in ("replicas.yaml", "smg.yaml")
        for one in yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes" / name).read_text())
    ]
    return {one["metadata"]["name"]: one["spec"]["template"] for one in loaded if one["kind"] == "Deployment"}


def pod(name: str, labels: dict[str, str]) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "headway", "uid": name, "resourceVersion": "1", "labels": labels},
        "spec": {"containers": [{"name": "gateway", "image": "headway-gateway"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def test_smg_finds_the_pods_of_the_kubernetes_example(tmp_path: Path) -> None:
    """With the arguments that the example gives it; only ports and the API's address are this machine's."""
    templates = deployments_of_the_example()
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=256, options={"real_time": "false"})
    port, metrics_port = free_ports("127.0.0.1", 2)
    pods = [
        pod("headway-1", templates["headway"]["metadata"]["labels"]),
        pod("other", {"app.kubernetes.io/name": "other"}),
    ]
    (container,) = templates["smg"]["spec"]["containers"]
    with (
        running(tmp_path, DEMO, SimulatedBackend(), config, SchedulerLimits(), kv_events=True) as replica,
        kubernetes_with(pods, tmp_path) as (api, kubeconfig),
        Client(replica.address) as native,
    ):
        native.wait_ready()
        here = {
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--port=30000": f"--port={port}",
            "--prometheus-host=0.0.0.0": "--prometheus-host=127.0.0.1",
            "--prometheus-port=29000": f"--prometheus-port={metrics_port}",
            "--service-discovery-port=50051": f"--service-discovery-port={replica.address.rpartition(':')[2]}",
            "--service-discovery-namespace=$(NAMESPACE)": "--service-discovery-namespace=headway",
            "--api-key=$(API_KEY)": "--api-key=a-key",
        }
        assert set(here) <= set(container["args"])
        words = [here.get(word, word) for word in container["args"]]
        stranger = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="another", max_retries=0)
        with (
            smg_with(*words, KUBECONFIG=str(kubeconfig)),
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="a-key", max_retries=0) as client,
            stranger,
        ):
            answer = eventually_answered(client)
            with pytest.raises(openai.AuthenticationError):
                stranger.completions.create(**ASKED)
        assert answer.usage.completion_tokens == 4
        assert api.asked
        for path, asked in api.asked:
            assert path == "/api/v1/namespaces/headway/pods", "what its role allows"
            assert asked["labelSelector"]


def eventually_answered(client: openai.OpenAI, timeout_s: float = 30.0) -> openai.types.Completion:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return client.completions.create(**ASKED | {"model": DEMO.name})
        except openai.APIError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
