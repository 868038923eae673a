"""``headway batch`` against a real server: the answers of any other client, and none lost or doubled by a kill."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.child_server import ChildServer
from headway.client import Client

NUM_LINES = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ChildServer]:
    made = ChildServer(
        ["--grpc-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--log-level=warning", "--num-threads=1"]
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    with path.open("w") as file:
        for number in range(NUM_LINES):
            body: dict[str, Any] = {"max_tokens": 8 + number % 32}
            if number % 2:
                line = body | {"prompt": f"Number {number}", "temperature": number % 3 / 2}
            else:
                body["messages"] = [{"role": "user", "content": f"What is {number}?"}]
                line = {"custom_id": f"own-{number}", "url": "/v1/chat/completions", "method": "POST", "body": body}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"prompt": "x", "max_tokens": 1_000_000}) + "\n")
    return path


def command(source: Path, output: Path, server: ChildServer) -> list[str]:
    words = ["batch", str(source), str(output), f"--url={server.http_url}", "--concurrency=4"]
    return [sys.executable, "-m", "headway", *words]


def told(path: Path) -> list[Any]:
    """The answers without what differs between two runs of one request: ids and times."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    for answer in answers:
        del answer["response"]["request_id"]
        for name in ("id", "created"):
            answer["response"]["body"].pop(name, None)
        answer["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return answers


@pytest.fixture(scope="module")
def undisturbed(server: ChildServer, source: Path) -> list[Any]:
    output = source.with_name("whole.jsonl")
    done = subprocess.run(command(source, output, server), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr  # one line is refused
    assert f"{NUM_LINES + 1} requests answered, 1 with status 400; " in done.stderr
    return told(output)


def test_the_answers_are_those_of_other_clients(server: ChildServer, undisturbed: list[Any]) -> None:
    with Client(server.address) as client:
        expected = client.generate("Number 3", max_tokens=11, temperature=0.0).result().text
    answer = undisturbed[3]
    assert answer["custom_id"] == "line-4"
    assert answer["id"].startswith("batch_req_4_")
    assert answer["response"]["body"]["choices"][0]["text"] == expected
    assert undisturbed[-1]["response"]["body"]["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("moments", [4, pytest.param(20, marks=pytest.mark.deep)])
def test_a_kill_at_any_moment_loses_and_doubles_no_line(
    server: ChildServer, source: Path, undisturbed: list[Any], tmp_path: Path, moments: int
) -> None:
    output = tmp_path / "out.jsonl"
    part = output.with_name("out.jsonl.part")
    for moment in range(moments):
        process = subprocess.Popen(command(source, output, server), stderr=subprocess.DEVNULL)
        # At so many lines, or before the first, or in the middle of one.
        wanted = NUM_LINES * moment // moments
        while process.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < wanted):
            time.sleep(0.005)
        process.kill()
        process.wait()
    done = subprocess.run(command(source, output, server), capture_output=True, text=True, check=False, timeout=120)
    assert "of them before)" in done.stderr, done.stderr
    assert told(output) == undisturbed
    assert not part.exists()


def test_an_address_is_a_base_url_of_other_clients_too(server: ChildServer, source: Path, tmp_path: Path) -> None:
    """And a run that begins behind a refused line ends with 1 as well."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(source.read_text().splitlines(keepends=True)[-2:]))
    words = [*command(few, tmp_path / "out", server)[:-2], "--url"]
    done = subprocess.run([*words, f"{server.http_url}/v1/"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    assert [answer["response"]["status_code"] for answer in told(tmp_path / "out")] == [200, 400]
    (tmp_path / "out").rename(tmp_path / "out.part")
    again = subprocess.run([*words, server.http_url], capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 1
    assert "2 requests answered (2 of them before), 1 with status 400; " in again.stderr
    (tmp_path / "out").unlink()
    for url in ("127.0.0.1:80", "http://[::1", "http://x:99999", "http://", "http://x y"):
        wrong = subprocess.run([*words, url], capture_output=True, text=True, check=False, timeout=60)
        assert wrong.returncode == 2
        allowed = "http://HOST:PORT or https://HOST:PORT"
        assert wrong.stderr == f"headway batch: --url: '{url}' is not allowed; allowed: {allowed}\n"


def test_it_brings_a_server_of_its_own_and_ends_it(source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join(source.read_text().splitlines(keepends=True)[:3]))
    words = ["batch", str(small), str(tmp_path / "out.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "headway", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith("headway batch: 3 requests answered; ")
    assert all(line.startswith("headway serve: not ready after ") for line in before)  # on a slow machine
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
