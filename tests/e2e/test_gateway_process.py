"""The gateway as real processes: exit codes, signals, several workers on one port, TLS."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq.auth

import headway
from e2e.running_server import eventually, free_port
from fake_scheduler import FakeScheduler
from headway.client import AsyncClient, InvalidRequestError, StreamCancelledError, UnavailableError
from headway_gateway.config import GatewayConfig

DEMO = Path(headway.__file__).parent / "demo_model"


class GatewayProcess:
    """``headway_gateway.process.run`` in a process of its own."""

    def __init__(self, **config: object) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        settings = {"model": str(DEMO), "grpc_address": self.address, "log_format": "json"} | config
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway_gateway.worker"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.process.stdin.write(msgspec.json.encode(GatewayConfig(**settings)))
        self.process.stdin.close()

    async def ended(self, timeout_s: float = 20.0) -> tuple[int, str]:
        """Exit code and standard error."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "the process does not end"
            await asyncio.sleep(0.02)
        return self.process.returncode, self.process.stderr.read().decode()

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.process.stderr.close()


@pytest.fixture
async def ingress() -> AsyncIterator[str]:
    directory = tempfile.mkdtemp(prefix="hw")
    yield f"ipc://{directory}/i"
    shutil.rmtree(directory)


@pytest.fixture
def start():
    started: list[GatewayProcess] = []

    def make(**config: object) -> GatewayProcess:
        started.append(GatewayProcess(**config))
        return started[-1]

    yield make
    for process in started:
        process.clean_up()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
async def test_bad_configuration_and_files_exit_with_one_line(start, ingress, workers):
    cases = [
        (2, {"grpc_address": "0.0.0.0:1234"}, "grpc_address: '0.0.0.0:1234' is not allowed"),
        (2, {"ingress_address": "udp://x"}, "ingress_address: 'udp://x' is not allowed"),
        (3, {"model": "/nowhere"}, "model: '/nowhere' is not a directory"),
    ]
    processes = [
        (code, words, start(**({"ingress_address": ingress, "workers": workers} | config)))
        for code, config, words in cases
    ]
    for code, words, process in processes:
        exit_code, error = await process.ended()
        assert exit_code == code
        assert words in error
        assert error.count("\n") == 1


async def test_a_broken_tokenizer_file_exits_with_one_line(start, ingress, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    process = start(model=str(tmp_path), ingress_address=ingress)
    code, error = await process.ended()
    assert code == 3
    assert error.startswith("headway gateway: ")
    assert "not a usable tokenizer" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_chat_template_that_cannot_be_used_is_one_warning_and_takes_only_chats_with_it(
    start, ingress, tmp_path, workers
):
    model = shutil.copytree(DEMO, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% nope %}")
    async with FakeScheduler(ingress):
        gateway = start(ingress_address=ingress, model=str(model), workers=workers)
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
            assert not (await client.model()).has_chat_template
            for prompt in ("x", [1, 2]):
                assert (await client.generate(prompt, max_tokens=3).result()).token_ids
            with pytest.raises(
                InvalidRequestError, match=r"chat: this model's chat template cannot be used \(chat_temp"
            ):
                await client.generate([{"role": "user", "content": "x"}], max_tokens=3).result()
        gateway.process.send_signal(signal.SIGTERM)
        code, error = await gateway.ended()
    assert code == 0
    (warning,) = [line for line in error.splitlines() if "chat template" in line]
    assert '"level": "warning"' in warning
    assert "chat_template.jinja: it cannot be compiled: Encountered unknown tag 'nope'" in warning


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_port_in_use_exits_2(start, ingress, workers):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, error = await start(grpc_address=address, ingress_address=ingress, workers=workers).ended()
    assert code == 2
    assert f"grpc_address: cannot listen on '{address}'" in error
    assert "Traceback" not in error


async def test_another_groups_port_is_not_joined_by_accident(start, ingress):
    async with (
        FakeScheduler(ingress),
        AsyncClient((first := start(ingress_address=ingress, workers=2)).address) as client,
    ):
        await client.wait_ready(20)
        code, error = await start(grpc_address=first.address, ingress_address=ingress, workers=2).ended()
        assert code == 2
        assert "cannot listen" in error


async def test_sigterm_drains_and_exits_0(start, ingress):
    async with FakeScheduler(ingress, step_interval_s=0.01) as scheduler:
        gateway = start(ingress_address=ingress)
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
            stream = client.generate("x", max_tokens=60)
            await anext(stream)
            gateway.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            assert gateway.process.poll() is None, "a stream is still open"
            assert len((await stream.result()).token_ids) == 60
            code, error = await gateway.ended()
        assert code == 0, error
        assert not scheduler.running


async def test_a_second_signal_ends_at_once_and_the_scheduler_is_told(start, ingress):
    async with FakeScheduler(ingress, step_interval_s=0.05) as scheduler:
        gateway = start(ingress_address=ingress, grace_s=60.0)
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
            stream = client.generate("x", n=2)
            await anext(stream)
            gateway.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.6)  # Sooner, it would be the same wish.
            gateway.process.send_signal(signal.SIGTERM)
            code, error = await gateway.ended(5.0)
            assert code == 0, error
            with pytest.raises((UnavailableError, StreamCancelledError)):
                await stream.result()
        await eventually(lambda: not scheduler.running, 3.0)
        assert len(scheduler.aborts) == 2


def completed(port: int, seed: int) -> str:
    body = json.dumps({"prompt": "x", "seed": seed, "max_tokens": 10}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=20) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


async def test_workers_share_a_port_are_replaced_and_leave_no_orphans(start, ingress):
    async with FakeScheduler(ingress, step_interval_s=0.002) as scheduler:
        http_port = free_port()
        gateway = start(ingress_address=ingress, workers=2, http_address=f"127.0.0.1:{http_port}")
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
        await eventually(lambda: len({hello.incarnation for hello in scheduler.hellos}) == 2)
        workers = children_of(gateway.process.pid)
        assert len(workers) == 2

        async def one(seed: int) -> list[int]:
            async with AsyncClient(gateway.address) as client:
                return (await client.generate("x", seed=seed, max_tokens=10).result()).token_ids

        results = await asyncio.gather(*(one(seed % 2) for seed in range(12)))
        assert len({tuple(result) for result in results}) == 2
        requests = [asyncio.to_thread(completed, http_port, seed % 2) for seed in range(12)]
        assert len(set(await asyncio.gather(*requests))) == 2

        os.kill(workers[0], signal.SIGKILL)
        await eventually(lambda: len({hello.incarnation for hello in scheduler.hellos}) == 3)
        assert len(await one(5)) == 10
        assert await asyncio.to_thread(completed, http_port, 0)

        gateway.process.send_signal(signal.SIGTERM)
        code, error = await gateway.ended()
        assert code == 0, error
        assert "a worker died" in error
        assert not any(is_running(pid) for pid in workers)


async def test_workers_end_with_their_killed_parent(start, ingress):
    async with FakeScheduler(ingress) as scheduler:
        gateway = start(ingress_address=ingress, workers=2)
        await eventually(lambda: len({hello.incarnation for hello in scheduler.hellos}) == 2)
        workers = children_of(gateway.process.pid)
        gateway.process.kill()
        await eventually(lambda: not any(is_running(pid) for pid in workers))


async def test_a_killed_gateway_costs_the_client_nothing(start, ingress):
    async with FakeScheduler(ingress, step_interval_s=0.01):
        gateway = start(ingress_address=ingress)
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
            whole = await client.generate("x", seed=3, max_tokens=120).result()
            stream = client.generate("x", seed=3, max_tokens=120)
            first = [await anext(stream) for _ in range(5)]
            gateway.process.kill()
            start(ingress_address=ingress, grpc_address=gateway.address)
            rest = [delta async for delta in stream]
            assert "".join(delta.text for delta in first + rest) == whole.text
            assert (await stream.result()).token_ids == whole.token_ids


def make_certificate(directory, name):
    """A self-signed certificate for localhost, and its key."""
    key, certificate = directory / f"{name}_key.pem", directory / f"{name}.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return key, certificate


@pytest.fixture
def key_and_certificate(tmp_path):
    return make_certificate(tmp_path, "served")


async def test_tls_with_a_token_beyond_loopback(start, ingress, key_and_certificate, tmp_path):
    key, certificate = key_and_certificate
    (tmp_path / "token").write_text("s3cret\n")
    port = free_port()
    async with FakeScheduler(ingress):
        start(
            ingress_address=ingress,
            grpc_address=f"0.0.0.0:{port}",
            tls_cert_file=str(certificate),
            tls_key_file=str(key),
            auth_token_file=str(tmp_path / "token"),
        )
        async with AsyncClient(
            f"localhost:{port}", token="s3cret", root_certificates=certificate.read_bytes()
        ) as client:
            await client.wait_ready(20)
            assert len((await client.generate("x", max_tokens=3).result()).token_ids) == 3
        async with AsyncClient(f"127.0.0.1:{port}") as plain:
            with pytest.raises(UnavailableError):
                await plain.wait_ready(0.5)


async def test_a_certificate_that_is_renewed_serves_from_the_next_connection_on(
    start, ingress, key_and_certificate, tmp_path
):
    key, certificate = key_and_certificate
    old_authority = certificate.read_bytes()
    port = free_port()
    async with FakeScheduler(ingress):
        start(
            ingress_address=ingress,
            grpc_address=f"127.0.0.1:{port}",
            tls_cert_file=str(certificate),
            tls_key_file=str(key),
        )
        async with AsyncClient(f"localhost:{port}", root_certificates=old_authority) as earlier:
            await earlier.wait_ready(20)
            # A key alone belongs to no certificate that is there: what is served stays.
            new_key, new_certificate = make_certificate(tmp_path, "renewed")
            new_authority = new_certificate.read_bytes()
            new_key.replace(key)
            async with AsyncClient(f"localhost:{port}", root_certificates=old_authority) as between:
                await between.wait_ready(20)
            new_certificate.replace(certificate)
            async with AsyncClient(f"localhost:{port}", root_certificates=new_authority) as later:
                await later.wait_ready(20)
            async with AsyncClient(f"localhost:{port}", root_certificates=old_authority) as distrustful:
                with pytest.raises(UnavailableError):
                    await distrustful.wait_ready(0.5)
            assert len((await earlier.generate("x", max_tokens=3).result()).token_ids) == 3


async def test_a_key_that_is_not_the_certificates_exits_2(start, ingress, key_and_certificate, tmp_path):
    _, certificate = key_and_certificate
    (tmp_path / "other.pem").write_text("-----BEGIN PRIVATE KEY-----\nbm90IGEga2V5\n-----END PRIVATE KEY-----\n")
    process = start(ingress_address=ingress, tls_cert_file=str(certificate), tls_key_file=str(tmp_path / "other.pem"))
    code, error = await process.ended()
    assert code == 2
    assert "tls_cert_file: " in error.splitlines()[-1]
    assert "allowed: a PEM certificate chain whose private key is in tls_key_file" in error
    assert "Traceback" not in error


async def test_the_link_may_be_encrypted(start, tmp_path):
    for owner in ("scheduler", "gateway"):
        zmq.auth.create_certificates(tmp_path, owner)
    for role in ("executors", "gateways"):
        (tmp_path / role).mkdir()
    (tmp_path / "gateway.key").rename(tmp_path / "gateways" / "gateway.key")
    step, ingress = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--step-address", step, "--ingress-address", ingress, "--curve-keys", str(tmp_path)]
    scheduler = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headway", "scheduler", "--log-level", "error", *flags
    )
    try:
        plain = start(ingress_address=ingress)
        keyed = start(ingress_address=ingress, curve_keys=str(tmp_path))
        async with AsyncClient(keyed.address) as client:
            await eventually_status(client)
        async with AsyncClient(plain.address) as client:
            with pytest.raises(UnavailableError):
                await client.status()
    finally:
        scheduler.terminate()
        await scheduler.wait()


async def test_unusable_keys_exit_2_with_one_line(start, ingress, tmp_path):
    code, error = await start(ingress_address=ingress, curve_keys=str(tmp_path)).ended()
    assert code == 2
    assert "curve_keys: " in error
    assert "allowed: a directory with a usable scheduler.key" in error
    assert error.count("\n") == 1


async def eventually_status(client: AsyncClient) -> None:
    """Wait until the scheduler answers an operator's call."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            assert (await client.status()).scheduler_state == "waiting for executor"
        except UnavailableError:
            assert time.monotonic() < deadline
        else:
            return


async def test_a_log_that_cannot_be_written_disturbs_nobody(start, ingress):
    async with FakeScheduler(ingress):
        gateway = start(ingress_address=ingress, log_level="debug")
        gateway.process.stderr.close()
        async with AsyncClient(gateway.address) as client:
            await client.wait_ready(20)
            assert len((await client.generate("x", max_tokens=3).result()).token_ids) == 3
            gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(10) == 0
