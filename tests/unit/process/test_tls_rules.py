"""Certificates are believed by the same rules with every Python."""

import contextlib
import socket
import ssl
import subprocess
import threading

import pytest

from headway_process.tls import tls_context


@pytest.fixture
def plain_authority(tmp_path):
    """An authority and a certificate with no more extensions than they need, as many private ones are."""

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=tmp_path)

    (tmp_path / "ca.cnf").write_text(
        "[req]\ndistinguished_name=dn\nx509_extensions=ca\n[dn]\n[ca]\nbasicConstraints=CA:TRUE\n"
    )
    (tmp_path / "leaf.cnf").write_text("subjectAltName=DNS:localhost\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca", "-subj", "/CN=authority", "-config", "ca.cnf")
    openssl("req", "-x509", *key, "-keyout", "x.key", "-out", "other", "-subj", "/CN=another", "-config", "ca.cnf")
    openssl("req", *key, "-keyout", "leaf.key", "-out", "request", "-subj", "/CN=localhost", "-config", "ca.cnf")
    openssl("x509", "-req", "-in", "request", "-CA", "ca", "-CAkey", "ca.key", "-out", "leaf", "-extfile", "leaf.cnf")
    return tmp_path


@pytest.fixture
def strict_python(monkeypatch):
    """As Python 3.13 and later make contexts."""
    make = ssl.create_default_context

    def strict(*arguments, **named):
        context = make(*arguments, **named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


def _name_shown_to(client, directory):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "leaf", directory / "leaf.key")
    ours, theirs = socket.socketpair()

    def serve():
        with ours, contextlib.suppress(OSError), server.wrap_socket(ours, server_side=True) as secured:
            secured.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with theirs, client.wrap_socket(theirs, server_hostname="localhost") as secured:
            return secured.getpeercert()["subject"]
    finally:
        thread.join()


def test_a_plain_authority_is_believed(plain_authority, strict_python):
    client = tls_context(cadata=(plain_authority / "ca").read_text())
    assert _name_shown_to(client, plain_authority) == ((("commonName", "localhost"),),)


def test_another_authority_is_not(plain_authority):
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate verify failed"):
        _name_shown_to(tls_context(cadata=(plain_authority / "other").read_text()), plain_authority)
