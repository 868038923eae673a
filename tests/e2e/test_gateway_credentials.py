"""Who may call what: tokens, roles, tenants, certificates, and changing them while streams run."""

import asyncio
import contextlib
import hashlib
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import grpc
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from e2e.running_server import command, finished
from e2e.test_gateway_process import GatewayProcess, ingress, start  # noqa: F401  (fixtures)
from e2e.test_gateway_serving import Stage, stage
from fake_scheduler import FakeScheduler
from headway.client import AsyncClient, AuthenticationError, OverloadedError, UnavailableError
from headway_gateway import certificates as certificate_files
from headway_gateway.accepting import Entrance
from headway_gateway.certificates import CertificateFiles
from headway_gateway.config import GatewayConfig
from headway_gateway.listening import listening_sockets
from headway_gateway.lost_connections import LostConnections
from headway_proto import admin_pb2, admin_pb2_grpc
from headway_proto import generation_pb2 as api

TOKENS = f"""
# name  roles           token
alice   generate        sha256:{hashlib.sha256(b"alices").hexdigest()}  tenant=blue
bob     generate        bobs
watcher admin           watchers
ops     generate,admin  opss
"""
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


def bearing(*values: str) -> tuple[tuple[str, str], ...]:
    return tuple(("authorization", value) for value in values)


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def reflected(on: Stage, metadata: tuple[tuple[str, str], ...] = ()) -> bool:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(on.channel)
    return [one async for one in stub.ServerReflectionInfo(iter([request]), metadata=metadata)] != []


def code_of(refusal: "pytest.ExceptionInfo[grpc.aio.AioRpcError]") -> grpc.StatusCode:
    return refusal.value.code()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ((), "missing"),
        (bearing("bobs"), "malformed"),
        (bearing("Basic bobs"), "malformed"),
        (bearing("bearer bobs"), "malformed"),
        (bearing("Bearer "), "malformed"),
        (bearing("Bearer"), "malformed"),
        (bearing("Bearer bobs", "Bearer bobs"), "malformed"),
        (bearing("Bearer " + "x" * 5000), "malformed"),
        (bearing("Bearer bob"), "not valid"),
        (bearing("Bearer bobss"), "not valid"),
        (bearing(f"Bearer sha256:{hashlib.sha256(b'alices').hexdigest()}"), "not valid"),
        (bearing("Bearer alice"), "not valid"),
    ],
)
async def test_a_call_without_a_valid_token_learns_nothing(tokens: Path, metadata: tuple, words: str) -> None:
    async with stage(auth_token_file=str(tokens)) as on, FakeScheduler(on.ingress):
        admin = admin_pb2_grpc.AdminStub(on.channel)
        health = health_pb2_grpc.HealthStub(on.channel)
        for call in (
            lambda: on.stub.GetModel(api.GetModelRequest(), metadata=metadata),
            lambda: anext(aiter(on.stub.Generate(api.GenerateRequest(text="x"), metadata=metadata))),
            lambda: admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata),
            lambda: health.Check(health_pb2.HealthCheckRequest(), metadata=metadata),
            lambda: reflected(on, metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call()
            assert code_of(refusal) is UNAUTHENTICATED
            details = refusal.value.details()
            assert details is not None
            assert words in details
            assert len(details) < 80
            assert not any(secret in details for secret in ("bob", "alice", "xxx", "sha256", str(tokens)))


async def test_roles(tokens: Path) -> None:
    async with stage(auth_token_file=str(tokens)) as on, FakeScheduler(on.ingress):
        allowed = {"alices": (True, False), "bobs": (True, False), "watchers": (False, True), "opss": (True, True)}
        for token, (may_generate, may_administer) in allowed.items():
            async with AsyncClient(on.address, token=token) as client:
                await client.wait_ready(5)
                calls = ((client.model, may_generate), (client.status, may_administer))
                for call, may in calls:
                    if may:
                        await call()
                        continue
                    with pytest.raises(AuthenticationError) as refusal:
                        await call()
                    assert refusal.value.code is DENIED
                    assert "needs a token with the role" in str(refusal.value)
            assert await reflected(on, bearing(f"Bearer {token}"))


async def test_a_tokens_tenant_wins_over_the_requests(tokens: Path) -> None:
    async with stage(auth_token_file=str(tokens)) as on, FakeScheduler(on.ingress) as scheduler:
        for token, asked, given in (("alices", "red", "blue"), ("alices", "", "blue"), ("bobs", "red", "red")):
            async with AsyncClient(on.address, token=token) as client:
                await client.wait_ready(5)
                await client.generate("x", max_tokens=1, tenant=asked).result()
            assert scheduler.submits[-1].tenant == given


async def test_health_and_reflection_are_open_only_where_it_is_set(tokens: Path) -> None:
    async with stage(auth_token_file=str(tokens), open_health=True) as on, FakeScheduler(on.ingress):
        await on.client.wait_ready(5)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await reflected(on)
        assert code_of(refusal) is UNAUTHENTICATED
    async with stage(auth_token_file=str(tokens), open_reflection=True) as on, FakeScheduler(on.ingress):
        assert await reflected(on)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await on.health()
        assert code_of(refusal) is UNAUTHENTICATED


async def test_what_a_stranger_sends_is_not_parsed(tokens: Path) -> None:
    async with stage(auth_token_file=str(tokens)) as on, FakeScheduler(on.ingress):
        call = on.channel.unary_unary("/headway.v1.Generation/GetModel")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(b"\xff\xff no protobuf")
        assert code_of(refusal) is UNAUTHENTICATED


async def test_tokens_change_while_a_stream_runs(tokens: Path) -> None:
    async with (
        stage(auth_token_file=str(tokens)) as on,
        FakeScheduler(on.ingress, step_interval_s=0.01),
        AsyncClient(on.address, token="bobs") as bob,
        AsyncClient(on.address, token="carols") as carol,
    ):
        await bob.wait_ready(5)
        stream = bob.generate("x", max_tokens=200)
        await anext(stream)
        with pytest.raises(AuthenticationError):
            await carol.model()
        rewrite(tokens, "carol generate carols\n")
        await asyncio.sleep(0.6)
        await carol.model()
        with pytest.raises(AuthenticationError):
            await bob.model()
        assert len((await stream.result()).token_ids) == 200  # What was allowed to begin is allowed to end.
        rewrite(tokens, "carol generate\n")
        await asyncio.sleep(0.6)
        await carol.model()  # A file that cannot be used changes nothing.


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_reads_the_tokens_again(start, ingress, tokens: Path, workers: int) -> None:  # noqa: F811
    async with FakeScheduler(ingress, step_interval_s=0.01):
        gateway: GatewayProcess = start(ingress_address=ingress, auth_token_file=str(tokens), workers=workers)
        async with AsyncClient(gateway.address, token="bobs") as bob:
            await bob.wait_ready(20)
            stream = bob.generate("x", max_tokens=100)
            await anext(stream)
            rewrite(tokens, "carol generate carols\n")
            gateway.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.3)
            async with AsyncClient(gateway.address, token="carols") as carol:
                await carol.model()
            assert len((await stream.result()).token_ids) == 100
        gateway.process.send_signal(signal.SIGTERM)
        code, _ = await gateway.ended()
        assert code == 0


async def test_a_tenant_that_asks_too_often_is_told_when_to_come_again(tokens: Path) -> None:
    async with (
        stage(auth_token_file=str(tokens), max_tenant_requests_per_s=2.0) as on,
        FakeScheduler(on.ingress),
        AsyncClient(on.address, token="alices") as alice,
        AsyncClient(on.address, token="bobs") as bob,
    ):
        await alice.wait_ready(5)
        for _ in range(2):
            await alice.generate("x", max_tokens=1, tenant="another").result()
        with pytest.raises(OverloadedError, match="allowed: 2 per second") as refusal:
            await alice.generate("x", max_tokens=1, tenant="yet another", timeout_s=5, request_id="r").result()
        assert refusal.value.retry_after_s is not None
        assert 0 < refusal.value.retry_after_s <= 0.5
        await bob.generate("x", max_tokens=1, tenant="his own").result()


def made_by_openssl(*words: str) -> None:
    made = subprocess.run(["openssl", *words], capture_output=True, check=False)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server and a client that it signed, and a client that another one signed."""
    at = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other-ca"):
        made_by_openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                        "-keyout", f"{at}/{name}.key", "-out", f"{at}/{name}.pem")  # fmt: skip
    for name, authority in (("localhost", "ca"), ("client", "ca"), ("stranger", "other-ca")):
        made_by_openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                        "-addext", f"subjectAltName=DNS:{name}", "-keyout", f"{at}/{name}.key", "-out", f"{at}/{name}.csr")  # fmt: skip
        made_by_openssl("x509", "-req", "-in", f"{at}/{name}.csr", "-CA", f"{at}/{authority}.pem",
                        "-CAkey", f"{at}/{authority}.key", "-CAcreateserial", "-days", "2", "-copy_extensions", "copy",
                        "-out", f"{at}/{name}.pem")  # fmt: skip
    return at


async def test_mutual_tls_beyond_loopback(start, ingress, certificates: Path) -> None:  # noqa: F811
    def client(name: str | None, port: int) -> AsyncClient:
        pair = tuple((certificates / f"{name}.{kind}").read_bytes() for kind in ("pem", "key")) if name else None
        return AsyncClient(
            f"localhost:{port}", root_certificates=(certificates / "ca.pem").read_bytes(), client_certificate=pair
        )

    async with FakeScheduler(ingress):
        gateway = start(
            ingress_address=ingress,
            tls_cert_file=str(certificates / "localhost.pem"),
            tls_key_file=str(certificates / "localhost.key"),
            tls_client_ca_file=str(certificates / "ca.pem"),
        )
        async with client("client", gateway.port) as known:
            await known.wait_ready(20)
            assert len((await known.generate("x", max_tokens=3).result()).token_ids) == 3
        for name in (None, "stranger"):
            async with client(name, gateway.port) as unknown:
                with pytest.raises(UnavailableError):
                    await unknown.model()


class _Closing(asyncio.Protocol):
    """Closes what has sent something."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:  # as asyncio's
        self._transport.close()


async def test_failed_handshakes_are_told_with_their_reasons_and_seldom(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_gateway.lost_connections._INTERVAL_S", 0.3)
    config = GatewayConfig(
        model="any",
        tls_cert_file=str(certificates / "localhost.pem"),
        tls_key_file=str(certificates / "localhost.key"),
        tls_client_ca_file=str(certificates / "ca.pem"),
    )
    context = LostConnections().context(CertificateFiles(config).context("h2"))

    async def connect(tls: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("localhost", port, ssl=tls)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()

    def distrust() -> None:
        with socket.create_connection(("localhost", port)) as plain, pytest.raises(ssl.SSLError):
            ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")  # asyncio would send no alert

    stranger = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with structlog.testing.capture_logs() as told:
        listening = listening_sockets("address", "127.0.0.1:0", reuse_port=False)
        port = listening[0].getsockname()[1]
        (acceptor,) = Entrance(listening, pytest.fail, context).open(_Closing)
        with socket.create_connection(("localhost", port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.1)
            assert told[0]["peers"] == [f"127.0.0.1:{plain.getsockname()[1]}"]
        assert told[0]["new"] == {"TLS: http request": 1}
        await asyncio.to_thread(distrust)
        await connect(stranger)  # has no certificate
        stranger.load_cert_chain(certificates / "stranger.pem", certificates / "stranger.key")
        await connect(stranger)
        stranger.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        await connect(stranger)
        assert len(told) == 1
        await asyncio.sleep(0.5)
        acceptor.close()
    assert len(told) == 2
    assert told[1]["total"] == 4
    assert len(told[1]["peers"]) == 3
    assert set(told[1]["new"]) == {
        "TLS: tlsv1 alert unknown ca",
        "TLS: peer did not return a certificate",
        "TLS: certificate verify failed: unable to get local issuer certificate",
    }


async def test_authorities_that_cannot_be_used_exit_2(start, ingress, certificates: Path) -> None:  # noqa: F811
    code, error = await start(
        ingress_address=ingress,
        tls_cert_file=str(certificates / "localhost.pem"),
        tls_key_file=str(certificates / "localhost.key"),
        tls_client_ca_file=str(certificates / "client.key"),
    ).ended()
    assert code == 2
    assert "tls_client_ca_file: " in error.splitlines()[-1]
    assert "Traceback" not in error


def test_serve_with_certificates_and_digests_asks_its_own_gateway(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice generate sha256:{hashlib.sha256(b'alices').hexdigest()}\n")
    (tmp_path / "token").write_text("alices\n")
    own, client = str(certificates / "localhost"), str(certificates / "client")
    secured = (
        *("--tls-cert-file", f"{own}.pem", "--tls-key-file", f"{own}.key"),
        *("--tls-client-ca-file", str(certificates / "ca.pem"), "--auth-token-file", str(tmp_path / "tokens")),
    )
    serve = ("serve", "--backend", "simulated", "--grpc-address", "0.0.0.0:0", "--log-level", "warning", *secured)
    refused = finished(*serve)
    assert refused.process.returncode == 2
    assert "--probe-cert-file is required together with --tls-client-ca-file" in refused.err[0]
    with command(*serve, "--probe-cert-file", f"{client}.pem", "--probe-key-file", f"{client}.key") as server:
        port = server.wait_for_ready().rpartition(":")[2]
        shown = ("--root-certificates", f"{own}.pem", "--client-certificate", f"{client}.pem",
                 "--client-key", f"{client}.key", "--token-file", str(tmp_path / "token"))  # fmt: skip
        assert finished("health", f"127.0.0.1:{port}", *shown).out == ["SERVING\n"]
        assert finished("health", f"127.0.0.1:{port}", *shown[:2], *shown[-2:]).out == ["UNREACHABLE\n"]
        shown = ("--root-certificates", str(certificates / "ca.pem"), *shown[2:])
        generated = finished("generate", "--address", f"localhost:{port}", "--prompt", "x", "--max-tokens", "3", *shown)
        assert generated.process.returncode == 0, generated.err
        assert server.stop() == 0


@pytest.mark.parametrize("field", ["tls_cert_file", "tls_client_ca_file"])
def test_certificates_that_are_cut_short_change_nothing(certificates: Path, tmp_path: Path, field: str) -> None:
    chain = (certificates / "localhost.pem").read_bytes() + (certificates / "ca.pem").read_bytes()
    path = tmp_path / "live.pem"
    path.write_bytes(chain)
    config = GatewayConfig(
        model="any",
        tls_cert_file=str(path),
        tls_key_file=str(certificates / "localhost.key"),
        tls_client_ca_file=str(path if field == "tls_client_ca_file" else certificates / "ca.pem"),
    )
    files = CertificateFiles(config)
    whole = len((certificates / "localhost.pem").read_bytes())
    with structlog.testing.capture_logs() as told:
        for length in [*range(0, whole - 1, 97), *range(whole + 1, len(chain) - 1, 31), *range(whole + 1, whole + 40)]:
            path.write_bytes(chain[:length])
            assert files.newer() is None, chain[:length]
            assert files.newer() is None
        path.unlink()
        assert files.newer() is files.newer() is None
        told.clear()
        assert files.newer() is None
    assert told == []
    path.write_bytes(chain)
    assert files.newer() is not None


def test_a_certificate_that_changes_while_it_is_read_is_read_again(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.pem"
    path.write_bytes((certificates / "localhost.pem").read_bytes())
    key = str(certificates / "localhost.key")
    files = CertificateFiles(
        GatewayConfig(model="any", tls_cert_file=str(path), tls_key_file=key, tls_client_ca_file=str(path))
    )
    path.write_bytes(path.read_bytes() + b"\n")
    require_whole = certificate_files._require_whole_pem

    def emptied_after_the_check(field: str, name: str) -> None:
        require_whole(field, name)
        path.write_bytes(b"")

    with monkeypatch.context() as patched:
        patched.setattr(certificate_files, "_require_whole_pem", emptied_after_the_check)
        assert files.newer() is None
    path.write_bytes((certificates / "localhost.pem").read_bytes())
    assert files.newer() is not None
