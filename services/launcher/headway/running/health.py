"""The health of a server and its model (``grpc.health.v1``).

gRPC is imported by the first question: ``headway serve`` starts its processes before.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from headway.flags.named_files import bytes_of_file
from headway.flags.settings import ConfigurationError
from headway_process.addresses import channel_options
from headway_process.tls import tls_context
from headway_proto.wording import shown

if TYPE_CHECKING:
    import grpc

    from headway_proto import generation_pb2

UNREACHABLE = "UNREACHABLE"
SERVING = "SERVING"

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # where to reach a server that listens everywhere


class ClientCertificate(msgspec.Struct, frozen=True):
    """A certificate and its private key: PEM, and files."""

    certificate: bytes
    key: bytes
    certificate_file: str
    key_file: str


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server. TLS trusts ``certificates`` (PEM); without them the channel is plain text.

    ``health_name`` is empty for the whole server.
    """

    address: str
    health_name: str = ""
    certificates: bytes | None = None
    token: str = ""
    client: ClientCertificate | None = None

    @property
    def reachable_address(self) -> str:
        """The address; loopback for a server on every interface."""
        host, _, port = self.address.rpartition(":")
        return f"{_ANY_HOST.get(host, host)}:{port}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def client_certificate(certificate_file: str | None, key_file: str | None, origin: str) -> ClientCertificate | None:
    """Read a client certificate, if named.

    Raises:
        ConfigurationError: a file is unreadable, or they are no pair.
    """
    if not certificate_file or not key_file:
        return None
    certificate, key = bytes_of_file(certificate_file, origin), bytes_of_file(key_file, origin)
    try:
        # For an encrypted key OpenSSL would ask the terminal for its password, and wait.
        ssl.create_default_context().load_cert_chain(certificate_file, key_file, password="")
    except OSError:
        raise ConfigurationError(
            f"{origin}: {shown(certificate_file)} cannot be used; allowed: a PEM certificate with its private key, not encrypted"
        ) from None
    return ClientCertificate(certificate or b"", key or b"", certificate_file, key_file)


def root_certificates(path: str | None, origin: str) -> bytes | None:
    """Read the certificates (PEM) to trust, if a file is named.

    Raises:
        ConfigurationError: the file is unreadable, or has no certificate.
    """
    trusted = bytes_of_file(path, origin)
    if trusted is None:
        return None
    try:
        _trusting(trusted)
    except OSError:
        raise ConfigurationError(f"{origin}: {shown(path)} cannot be used; allowed: PEM certificates") from None
    return trusted


class Health(msgspec.Struct, frozen=True):
    """SERVING, NOT_SERVING, ..., or UNREACHABLE and ``reason``, one line."""

    status: str
    reason: str = ""


def health_of(target: Target, *, timeout_s: float = 2.0) -> Health:
    """Ask a server once."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with _channel(target, timeout_s) as channel:
            response = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # absent from its stubs
                health_pb2.HealthCheckRequest(service=target.health_name), timeout=timeout_s, metadata=target.metadata
            )
    except grpc.RpcError as error:
        return Health(UNREACHABLE, _reason_of_call(error, target, timeout_s))
    except OSError as error:
        return Health(UNREACHABLE, _reason_of_connection(error, target, timeout_s))
    return Health(str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)))


def _reason_of_call(error: "grpc.RpcError", target: Target, timeout_s: float) -> str:
    import grpc

    from headway.client.errors import error_of

    known = error_of(error)
    if known.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer from {target.reachable_address} within {timeout_s:g} s"
    return str(known)


def _reason_of_connection(error: OSError, target: Target, timeout_s: float) -> str:
    address = target.reachable_address
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server at {address} shows a certificate that is not trusted here: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return f"no answer from {address} within {timeout_s:g} s"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with the server at {address}: {(error.reason or str(error)).replace('_', ' ').lower()}"
    return f"no server at {address} ({error.strerror or error})"


def listens(target: Target, *, timeout_s: float = 1.0) -> bool:
    """Return whether somebody takes connections there."""
    try:
        _connected(target, timeout_s).close()
    except OSError:
        return False
    return True


def why_not_asked(target: Target, *, timeout_s: float = 1.0) -> str:
    """Return why a server cannot be asked, as a certificate that has expired, or a network that is down.

    It is empty if the server can be asked, or does not listen yet.
    """
    try:
        _connected(target, timeout_s).close()
    except ConnectionRefusedError:
        return ""
    except OSError as error:
        return _reason_of_connection(error, target, timeout_s)
    return health_of(target).reason


def serves_within(target: Target, wait_s: float) -> bool:
    """Return True as soon as the server says that it serves, False after ``wait_s`` or if nobody answers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    try:
        with _channel(target, wait_s) as channel:
            statuses = health_pb2_grpc.HealthStub(channel).Watch(  # type: ignore[attr-defined]  # absent from its stubs
                health_pb2.HealthCheckRequest(service=target.health_name), timeout=wait_s, metadata=target.metadata
            )
            return any(one.status == health_pb2.HealthCheckResponse.SERVING for one in statuses)
    except (grpc.RpcError, OSError):
        return False


def model_of(target: Target, *, timeout_s: float = 5.0) -> "generation_pb2.GetModelResponse | None":
    """Return the served model, or None if the server does not tell."""
    import grpc

    from headway_proto import generation_pb2, generation_pb2_grpc

    with _channel(target, timeout_s) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        try:
            model: generation_pb2.GetModelResponse = stub.GetModel(
                generation_pb2.GetModelRequest(), timeout=timeout_s, metadata=target.metadata
            )
        except grpc.RpcError:
            return None
        return model


@contextlib.contextmanager
def _channel(target: Target, timeout_s: float) -> "Iterator[grpc.Channel]":
    import grpc

    address = target.reachable_address
    if target.certificates is None:
        channel = grpc.insecure_channel(address, channel_options(address))
    else:
        name = _certified_name(target, target.certificates, timeout_s)
        named = (("grpc.ssl_target_name_override", name),) if name else ()
        shown_pair = (target.client.key, target.client.certificate) if target.client else (None, None)
        credentials = grpc.ssl_channel_credentials(target.certificates, *shown_pair)
        channel = grpc.secure_channel(address, credentials, (*channel_options(address), *named))
    with channel:
        yield channel


def _certified_name(target: Target, certificates: bytes, timeout_s: float) -> str:
    """Return a name in the server's certificate, which must be one of ours."""
    context = _trusting(certificates)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if target.client:
        context.load_cert_chain(target.client.certificate_file, target.client.key_file, password="")
    with (
        _connected(target, timeout_s) as connection,
        context.wrap_socket(connection) as secured,
    ):
        certificate = secured.getpeercert() or {}
    names = [str(entry[1]) for entry in certificate.get("subjectAltName", ())]
    return names[0].replace("*", "headway", 1) if names else ""


def _trusting(certificates: bytes) -> ssl.SSLContext:
    """What is not ASCII is a comment between the certificates."""
    return tls_context(cadata=certificates.decode("ascii", "ignore") or "none")


def _connected(target: Target, timeout_s: float) -> socket.socket:
    host, _, port = target.reachable_address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
