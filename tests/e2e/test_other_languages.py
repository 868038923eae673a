"""A client in another language, which knows the API only by reflection, streams from a running server."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from e2e.running_server import command

ROOT = Path(__file__).parents[2]
NODE_CLIENT = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def node_client(tmp_path_factory):
    """The Node client with its locked dependencies, installed outside of the source tree."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", ".npmrc", "stream.mjs"):
        shutil.copy(NODE_CLIENT / name, directory)
    install = subprocess.run(
        ["npm", "ci", "--silent", "--ignore-scripts"], cwd=directory, capture_output=True, text=True, check=False
    )
    if install.returncode != 0:
        pytest.skip(f"npm cannot install the client's dependencies: {install.stderr.strip()[-200:]}")
    return directory


def node(node_client: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", *words], cwd=node_client, capture_output=True, text=True, check=False, timeout=60)


def stream(node_client: Path, address: str, prompt: str) -> subprocess.CompletedProcess[str]:
    return node(node_client, "stream.mjs", address, prompt, "8")


def test_node_streams_by_reflection(node_client):
    with command("serve", "--backend", "simulated", "--grpc-address", "127.0.0.1:0") as server:
        address = server.wait_for_ready()
        run = stream(node_client, address, "A dictionary is")
        assert run.returncode == 0, run.stderr
        services, accepted, *deltas, finished = run.stdout.splitlines()
        assert "headway.v1.Generation" in services.split()
        assert accepted == "accepted: 3 prompt tokens"
        assert len(deltas) >= 1
        assert all(line.startswith("delta: ") for line in deltas)
        assert finished == "finished: FINISH_REASON_LENGTH, 8 output tokens"
        refused = stream(node_client, address, "")
        assert refused.returncode == 1
        assert refused.stderr.startswith("INVALID_ARGUMENT: ")


def test_the_documented_client_runs_as_it_stands_there(node_client):
    (example,) = re.findall(r"```js\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    with command("serve", "--backend", "simulated", "--grpc-address", "127.0.0.1:0") as server:
        address = server.wait_for_ready()
        assert example.count("127.0.0.1:50051") == 1
        (node_client / "client.mjs").write_text(example.replace("127.0.0.1:50051", address))
        run = node(node_client, "client.mjs")
        assert (run.returncode, run.stderr) == (0, "")
        assert len(run.stdout.strip()) > 16


def test_without_arguments_it_tells_how_it_is_called(node_client):
    run = node(node_client, "stream.mjs")
    assert (run.returncode, run.stderr) == (2, "usage: node stream.mjs HOST:PORT PROMPT [MAX_TOKENS]\n")
