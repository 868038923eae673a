"""Why a server cannot be asked for its health: each reason is one line."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.__main__ import main
from headway.client.connection import Endpoint
from headway.flags.settings import ConfigurationError
from headway.running import health, readiness
from headway.running.health import UNREACHABLE, Health, Target, client_certificate, health_of, root_certificates
from headway_process.addresses import channel_options


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        _openssl(
            *(
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", directory / f"{name}.key", "-out", directory / name),
        )
    request = directory / "request"
    _openssl("req", "-new", "-key", directory / "server.key", "-subj", "/CN=localhost", "-out", request)
    _openssl(
        "x509", "-req", "-in", request, "-signkey", directory / "server.key", "-days", "-1", "-out", directory / "old"
    )
    _openssl("ec", "-in", directory / "server.key", "-aes256", "-passout", "pass:x", "-out", directory / "locked.key")
    return directory


@contextlib.contextmanager
def _tls_server(certificate: Path, key: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("shows", "trusts", "reason"),
    [("old", "old", "certificate has expired"), ("server", "other", "self-signed certificate")],
)
def test_a_certificate_that_is_not_trusted(certificates, shows, trusts, reason):
    with _tls_server(certificates / shows, certificates / "server.key") as address:
        health = health_of(Target(address=address, certificates=(certificates / trusts).read_bytes()))
    assert health.status == UNREACHABLE
    assert health.reason == f"the server at {address} shows a certificate that is not trusted here: {reason}"


@pytest.mark.parametrize("encrypts", [False, True])
def test_nobody_answers(certificates, encrypts):
    trusted = (certificates / "server").read_bytes() if encrypts else None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        health = health_of(Target(address=address, certificates=trusted), timeout_s=0.2)
    assert health.reason == f"no answer from {address} within 0.2 s"


def test_an_unknown_name(certificates):
    target = Target(address="no-such-host.invalid:50051", certificates=(certificates / "server").read_bytes())
    assert health_of(target).reason.startswith("no server at no-such-host.invalid:50051 (")


def test_what_is_said_beside_the_status(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert main(["health", address]) == 1
    told = capsys.readouterr()
    assert told.out == "UNREACHABLE\n"
    assert told.err == f"headway health: UNAVAILABLE: no server at {address} (Connection refused)\n"


@pytest.mark.parametrize("words", [("localhost",), ("localhost:x",), (":1",), ("a:70000",), ("a:1", "--timeout", "0")])
def test_an_address_or_time_out_that_is_none(words, capsys):
    assert main(["health", *words]) == 2
    assert "is not allowed; allowed: " in capsys.readouterr().err


def test_an_encrypted_key_is_refused_without_asking_the_terminal(certificates):
    with pytest.raises(ConfigurationError, match="with its private key, not encrypted"):
        client_certificate(str(certificates / "server"), str(certificates / "locked.key"), "--client-certificate")


def test_root_certificates_without_a_certificate(certificates, tmp_path):
    with pytest.raises(ConfigurationError, match=r"server\.key' cannot be used; allowed: PEM certificates"):
        root_certificates(str(certificates / "server.key"), "--root-certificates")
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ConfigurationError, match="allowed: PEM certificates"):
        root_certificates(str(empty), "--root-certificates")
    commented = tmp_path / "commented"
    commented.write_bytes("Zürich\n".encode() + (certificates / "server").read_bytes())
    assert root_certificates(str(commented), "--root-certificates") == commented.read_bytes()


@pytest.mark.parametrize(
    ("address", "reason", "names_target", "told"),
    [
        (None, "certificate has expired", False, ": certificate has expired"),
        (None, "", False, ""),
        (None, "", True, ": ADDRESS does not serve"),
        ("127.0.0.1:1", "not asked", False, ""),
        ("127.0.0.1:1", "not asked", True, ": 127.0.0.1:1 does not serve"),
        ("224.0.0.1:1", "not asked", False, ": no server at 224.0.0.1:1 (Network is unreachable)"),
    ],
)
def test_serve_tells_why_its_own_gateway_cannot_be_asked(monkeypatch, address, reason, names_target, told):
    monkeypatch.setattr(health, "health_of", lambda _: Health(UNREACHABLE, reason))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address or f"127.0.0.1:{server.getsockname()[1]}"
        told = told.replace("ADDRESS", address)
        assert readiness._why([Target(address=address)], [], names_target=names_target) == told


def test_no_proxy_leads_to_this_machine(monkeypatch):
    """A gateway beside the launcher would never be ready."""
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        proxy.setblocking(False)
        health_of(Target(address=f"127.0.0.1:{server.getsockname()[1]}"), timeout_s=0.5)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert channel_options("192.0.2.1:5") == ()
    assert Endpoint("localhost:5")._options()[-1] == channel_options("[::1]:5")[0] == ("grpc.enable_http_proxy", 0)
