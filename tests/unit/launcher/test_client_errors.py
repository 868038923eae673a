"""What a caller is told when no connection comes about."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from headway.client.errors import error_of

CLOSED = (
    "closed the connection; if it speaks TLS, name its root certificates; if it asks for a client certificate, "
    "name one that it trusts"
)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("certificate")
    for name in ("own", "other"):
        files = ("-keyout", directory / f"{name}.key", "-out", directory / name)
        subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
        command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        subprocess.run([*command, *files, *subject], check=True, capture_output=True)
    return directory


@pytest.mark.parametrize(
    ("server_has", "trusted", "told"),
    [
        (
            "own",
            None,
            CLOSED,
        ),
        (None, "own", "does not speak TLS; allowed: no certificates"),
        (
            "own",
            "other",
            "shows a certificate that is not trusted here; allowed: root certificates that have signed it",
        ),
    ],
)
def test_a_server_and_a_caller_of_different_minds_about_tls(certificate, server_has, trusted, told):
    server = grpc.server(ThreadPoolExecutor(1))
    if server_has:
        pair = ((certificate / f"{server_has}.key").read_bytes(), (certificate / server_has).read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    address = f"127.0.0.1:{port}"
    if trusted:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials((certificate / trusted).read_bytes()))
    else:
        channel = grpc.insecure_channel(address)
    try:
        with channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/a/B")(b"", timeout=5)
    finally:
        server.stop(None)
    assert str(error_of(error.value)) == f"UNAVAILABLE: the server at {address} {told}"
