"""``headway serve`` and its siblings as real processes: readiness, supervision, stops."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.running_server import command, environment, finished, free_port, sockets_in, wait_until
from headway import Client
from headway.client import UnavailableError

SIMULATED = ("--backend", "simulated", "--grpc-address", "127.0.0.1:0", "--log-level", "warning")
PROMPT = "To open a file"


def tokens_of(address: str, max_tokens: int = 24) -> list[int]:
    with Client(address) as client:
        return client.generate(PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True).result().token_ids


def test_one_readiness_line_a_stream_and_a_clean_exit(tmp_path: Path):
    with command("serve", *SIMULATED, TMPDIR=str(tmp_path)) as server:
        address = server.wait_for_ready()
        assert len(tokens_of(address)) == 24
        children = server.children()
        assert set(children) == {"scheduler", "executor", "gateway"}
        (directory,) = sockets_in(tmp_path)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert server.stop(signal.SIGTERM) == 0
        assert len(server.out) == 1
        assert not any(child.is_running() for child in children.values())
        assert sockets_in(tmp_path) == []
    assert [line for line in server.err if "Traceback" in line] == []


def test_ctrl_c_is_a_clean_exit_too_with_openais_api_and_a_client_that_stays_connected():
    with command("serve", *SIMULATED, "--http-address", "127.0.0.1:0") as server:
        server.wait_for_ready()
        wait_until(lambda: "OpenAI API on" in "".join(server.err), 5, "the address")
        address = re.search(r"OpenAI API on http://(\S+)/v1", "".join(server.err))
        with contextlib.closing(http.client.HTTPConnection(address[1], timeout=20)) as client:
            body = json.dumps({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True})
            client.request("POST", "/v1/completions", body)
            answer = json.load(client.getresponse())
            assert answer["usage"]["completion_tokens"] == 4
            assert server.stop(signal.SIGINT) == 0
    assert [line for line in server.err if "Traceback" in line] == []


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_killed_process_is_replaced_and_a_running_stream_goes_on(victim):
    options = ("--backend-option", "step_base_us=10000")
    with command("serve", *SIMULATED, *options) as server:
        address = server.wait_for_ready()
        expected = tokens_of(address, max_tokens=120)
        with Client(address) as client:
            received: list[int] = []
            for delta in client.generate(PROMPT, max_tokens=120, temperature=0, ignore_eos=True):
                if not received:
                    server.children()[victim].kill()
                assert delta.first_token_index == len(received)
                received += delta.token_ids
        assert received == expected
        assert server.stop() == 0


def test_a_killed_gateway_comes_back_on_the_same_address():
    with command("serve", *SIMULATED) as server:
        address = server.wait_for_ready()
        server.children()["gateway"].kill()
        with Client(address) as client:
            deadline = time.monotonic() + 20
            while True:
                try:
                    client.wait_ready(20)
                    tokens = client.generate(PROMPT, max_tokens=3, ignore_eos=True).result().token_ids
                    break
                except UnavailableError:
                    assert time.monotonic() < deadline
        assert len(tokens) == 3
        assert server.stop() == 0


def test_children_end_with_a_launcher_that_is_killed():
    with command("serve", *SIMULATED) as server:
        server.wait_for_ready()
        children = list(server.children().values())
        assert len(children) == 3
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
def test_children_that_are_still_starting_end_too(delay_s):
    with command("serve", *SIMULATED) as server:
        wait_until(lambda: len(psutil.Process(server.process.pid).children()) == 3, 20, "three children")
        children = psutil.Process(server.process.pid).children()
        time.sleep(delay_s)
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        for orphan in alive:
            orphan.kill()
        assert alive == []


def test_a_second_signal_kills_at_once():
    with command("serve", *SIMULATED, "--backend-option", "step_base_us=200000") as server:
        address = server.wait_for_ready()
        children = list(server.children().values())
        with Client(address) as client:
            stream = client.generate(PROMPT, max_tokens=500, ignore_eos=True)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert server.process.poll() is None, "the first signal waits for the stream"
            assert server.stop(signal.SIGTERM, timeout_s=5) == 128 + signal.SIGTERM
            stream.cancel()
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_lets_a_running_stream_finish(number):
    with command("serve", *SIMULATED, "--backend-option", "step_base_us=20000") as server:
        address = server.wait_for_ready()
        with Client(address) as client:
            stream = client.generate(PROMPT, max_tokens=50, ignore_eos=True)
            next(stream)
            server.process.send_signal(number)
            result = stream.result()
        assert len(result.token_ids) == 50
        assert result.completions[0].finish_reason == "length"
        assert server.wait() == 0


def test_nohup_is_heard():
    script = 'trap "" HUP; exec "$0" -m headway serve "$@"'
    words = ["sh", "-c", script, sys.executable, *SIMULATED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert "headway is ready" in process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.0)
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_the_processes_alone_in_any_order_over_tcp():
    step, ingress, grpc = (free_port() for _ in range(3))
    links = {
        "gateway": ("--ingress-address", f"tcp://127.0.0.1:{ingress}", "--grpc-address", f"127.0.0.1:{grpc}"),
        "executor": ("--step-address", f"tcp://127.0.0.1:{step}", "--backend", "simulated"),
        "scheduler": (
            *("--step-address", f"tcp://127.0.0.1:{step}"),
            *("--ingress-address", f"tcp://127.0.0.1:{ingress}"),
        ),
    }
    with (
        command("gateway", "--model", "demo", *links["gateway"]) as gateway,
        command("executor", "--model", "demo", *links["executor"]) as executor,
        command("scheduler", *links["scheduler"]) as scheduler,
    ):
        with Client(f"127.0.0.1:{grpc}") as client:
            client.wait_ready(30)
            assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).result().token_ids) == 5
        assert [process.stop() for process in (gateway, scheduler, executor)] == [0, 0, 0]


def test_links_with_keys_admit_those_who_have_them_and_nobody_else(tmp_path: Path):
    assert finished("keys", str(tmp_path / "keys")).process.returncode == 0
    assert finished("keys", str(tmp_path / "others")).process.returncode == 0
    step, ingress, grpc = (free_port() for _ in range(3))
    at_scheduler = (f"--step-address=tcp://0.0.0.0:{step}", f"--ingress-address=tcp://0.0.0.0:{ingress}")
    at_executor = (f"--step-address=tcp://127.0.0.1:{step}", "--backend=simulated", "--model=demo")
    at_gateway = (f"--ingress-address=tcp://127.0.0.1:{ingress}", f"--grpc-address=127.0.0.1:{grpc}", "--model=demo")

    def keys(of: str, made: str = "keys") -> str:
        return f"--curve-keys={tmp_path / made / of}"

    with (
        command("scheduler", *at_scheduler, keys("scheduler")),
        command("gateway", *at_gateway, keys("gateway")),
        Client(f"127.0.0.1:{grpc}") as client,
    ):
        with (
            command("executor", *at_executor),
            command("executor", *at_executor, keys("executor", "others")),
            pytest.raises(UnavailableError),
        ):
            client.wait_ready(4)
        with command("executor", *at_executor, keys("executor")):
            client.wait_ready(20)
            assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).result().token_ids) == 5


def test_settings_come_from_file_and_environment_and_are_told_at_start(tmp_path: Path):
    file = tmp_path / "headway.toml"
    file.write_text(
        '[serve]\nbackend = "simulated"\ngrpc_address = "127.0.0.1:0"\nlog_level = "debug"\n[scheduler]\nmax_num_seqs = 7\n'
    )
    with command("serve", "--config", str(file), HEADWAY_SCHEDULER_MAX_NUM_BATCHED_TOKENS="64") as server:
        with Client(server.wait_for_ready()) as client:
            status = client.status()
        assert (status.max_num_seqs, status.max_num_batched_tokens) == (7, 64)
        assert server.stop() == 0
    (line,) = (line for line in server.err if "configuration" in line and "service=scheduler" in line)
    assert "max_num_seqs=7" in line
    assert "max_num_batched_tokens=64" in line


def test_health_and_generate_commands(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"prompt": "two"}\n')
    with command("serve", *SIMULATED) as server:
        address = server.wait_for_ready()
        health = finished("health", address)
        assert (health.process.returncode, health.out) == (0, ["SERVING\n"])
        single = finished("generate", "--address", address, "--prompt", "hello", "--max-tokens", "5")
        assert single.process.returncode == 0
        many = finished("generate", "--address", address, "--file", str(prompts), "--max-tokens", "4", "--ignore-eos")
        assert many.process.returncode == 0
        text = "".join(many.out)
        assert "[1] one\n" in text
        assert "[2] two\n" in text
        assert "total: 2 requests; 7 output tokens" in text
        refused = finished("generate", "--address", address, "--prompt", "x", "--temperature", "-1")
        assert refused.process.returncode == 1
        (message,) = refused.err
        assert message.startswith("headway generate: INVALID_ARGUMENT: sampling.temperature")
    gone = finished("health", address)
    assert (gone.process.returncode, gone.out) == (1, ["UNREACHABLE\n"])
    assert gone.err == [f"headway health: UNAVAILABLE: no server at {address} (Connection refused)\n"]
    unreachable = finished("generate", "--address", address, "--prompt", "x")
    assert unreachable.process.returncode == 1
    assert len(unreachable.err) == 1


def test_tls_and_a_token(tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate, token = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "token"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    token.write_text("open-sesame\n")
    secured = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--auth-token-file", str(token))
    with command("serve", *SIMULATED, "--grpc-address", "0.0.0.0:0", *secured) as server:
        port = server.wait_for_ready().rpartition(":")[2]
        health = ("health", f"127.0.0.1:{port}", "--root-certificates", str(certificate))
        assert finished(*health, "--token-file", str(token)).out == ["SERVING\n"]
        nameless = finished(*health)
        assert nameless.out == ["UNREACHABLE\n"]
        assert nameless.err == ["headway health: UNAUTHENTICATED: authorization is missing; send: Bearer TOKEN\n"]
        generate = ("generate", "--address", f"localhost:{port}", "--prompt", "hi", "--max-tokens", "3")
        trusting = (*generate, "--root-certificates", str(certificate))
        assert finished(*trusting, "--token-file", str(token)).process.returncode == 0
        refused = finished(*trusting)
        assert refused.process.returncode == 1
        assert "UNAUTHENTICATED" in refused.err[0]


def test_a_scheduler_that_is_stopped_as_soon_as_it_has_a_socket_ends_well(tmp_path: Path):
    """It makes its socket for gateways after the one for executors: a signal may come in between."""
    step = tmp_path / "step"
    with command(
        "scheduler", "--step-address", f"ipc://{step}", "--ingress-address", f"ipc://{tmp_path}/ingress"
    ) as scheduler:
        while not step.exists():
            assert scheduler.process.poll() is None
        assert scheduler.stop() == 0


def test_the_scheduler_is_up_after_less_than_a_second_of_work(tmp_path: Path):
    took = []
    for attempt in range(3):
        step = tmp_path / f"step{attempt}"
        with command(
            "scheduler", "--step-address", f"ipc://{step}", "--ingress-address", f"ipc://{step}i"
        ) as scheduler:
            wait_until(step.exists, 10, "the scheduler's socket")
            # Not by the clock, which counts what other processes take as well.
            worked = psutil.Process(scheduler.process.pid).cpu_times()
            took.append(worked.user + worked.system)
            assert scheduler.stop() == 0
    assert min(took) < 1.0, took


def test_a_killed_launcher_leaves_nothing_behind_once_the_next_has_started(tmp_path: Path):
    with command("serve", *SIMULATED, "--backend-option", "step_base_us=20000", TMPDIR=str(tmp_path)) as server:
        address = server.wait_for_ready()
        children = list(server.children().values())
        with Client(address) as client:
            stream = client.generate(PROMPT, max_tokens=500, ignore_eos=True)
            next(stream)  # nobody is left to finish it, so nobody waits for it
            server.process.kill()
            _, alive = psutil.wait_procs(children, timeout=8)
            assert alive == []
    assert len(sockets_in(tmp_path)) == 1
    with command("serve", *SIMULATED, TMPDIR=str(tmp_path)) as server:
        server.wait_for_ready()
        assert len(sockets_in(tmp_path)) == 1
        assert server.stop() == 0
    assert sockets_in(tmp_path) == []


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_what_is_killed_while_the_fleet_drains_comes_back_and_the_stream_is_finished(victim):
    with command("serve", *SIMULATED, "--backend-option", "step_base_us=10000") as server:
        address = server.wait_for_ready()
        expected = tokens_of(address, max_tokens=150)
        with Client(address) as client:
            stream = client.generate(PROMPT, max_tokens=150, temperature=0, ignore_eos=True)
            received = list(next(stream).token_ids)
            children = server.children()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            children[victim].kill()
            for delta in stream:
                assert delta.first_token_index == len(received)
                received += delta.token_ids
        assert received == expected
        assert server.wait() == 0


@contextlib.contextmanager
def broken_log(how: str) -> Iterator[int]:
    """A descriptor onto a pipe that nobody reads and that is full, a pipe that is closed, or a disk that is full."""
    reader, writer = os.pipe()
    if how == "full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    elif how == "unread pipe":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
    else:
        os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)
        if how != "closed pipe":
            os.close(reader)


@pytest.mark.parametrize("how", ["unread pipe", "closed pipe", "full disk"])
def test_a_log_that_cannot_be_written_harms_nobody(how):
    address = f"127.0.0.1:{free_port()}"
    words = ("--backend", "simulated", "--log-level", "debug", "--grpc-address", address)
    with broken_log(how) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", "serve", *words], stdout=subprocess.DEVNULL, stderr=log, env=environment()
        )
        try:
            with Client(address) as client:
                client.wait_ready(40)
            assert len(tokens_of(address)) == 24
            children = psutil.Process(process.pid).children()
            next(child for child in children if child.cmdline()[4] == "executor").kill()
            assert len(tokens_of(address, max_tokens=200)) == 200
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_process_that_was_stopped_is_replaced_and_the_stream_goes_on(victim):
    with command("serve", *SIMULATED, "--hang-s", "2", "--backend-option", "step_base_us=10000") as server:
        address = server.wait_for_ready()
        expected = tokens_of(address, max_tokens=150)
        with Client(address) as client:
            received: list[int] = []
            for delta in client.generate(PROMPT, max_tokens=150, temperature=0, ignore_eos=True):
                if not received:
                    server.children()[victim].suspend()
                received += delta.token_ids
        assert received == expected
        assert any(f"{victim} gives no sign of life" in line for line in server.err)
        assert server.stop() == 0


def test_a_fleet_that_is_stopped_as_a_whole_goes_on_as_a_whole():
    with command("serve", *SIMULATED, "--hang-s", "1") as server:
        address = server.wait_for_ready()
        processes = [psutil.Process(server.process.pid), *server.children().values()]
        for process in processes:
            process.suspend()
        time.sleep(3)
        for process in reversed(processes):
            process.resume()
        with Client(address) as client:
            client.wait_ready(20)
        assert len(tokens_of(address)) == 24
        assert not any("no sign of life" in line for line in server.err)
        assert server.stop() == 0
