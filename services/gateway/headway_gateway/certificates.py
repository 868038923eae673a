"""The gateway's certificate, its key and the authorities of clients: read from files, and again when those change.

Owns: the check that what the files hold can be used, and when they are looked at. Must not know: addresses, tokens, or who
connects.

gRPC asks before each handshake, so a certificate that was renewed on disk serves from the next connection on; connections
that are there keep theirs. Files that are half written, or do not belong together, change nothing.
"""

import contextlib
import ssl
from pathlib import Path

import grpc
import structlog

from headway_gateway.config import GatewayConfig

_log = structlog.get_logger(__name__)

_Signature = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """What TLS is served with, from the files that ``config`` names (``tls_cert_file`` is not empty)."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read the files.

        Raises:
            ValueError: they cannot be used; the message names the setting.
        """
        self._config = config
        self._paths = tuple(
            Path(path) for path in (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file) if path
        )
        self._seen = self._signature()
        self._initial = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """For a port; asks this object again before each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._initial,
            self.newer,  # type: ignore[arg-type]  # the stubs lack the None that gRPC documents
            require_client_authentication=bool(self._config.tls_client_ca_file),
        )

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold, if they have changed and can be used; None to go on as before. From any thread."""
        with contextlib.suppress(OSError):  # One is missing for a moment, while it is replaced.
            signature = self._signature()
            if signature == self._seen:
                return None
            self._seen = signature
            try:
                newer = self._read()
            except ValueError as error:
                _log.error("certificate not read again", reason=str(error))
                return None
            _log.info("certificate read again", tls_cert_file=self._config.tls_cert_file)
            return newer
        return None

    def _signature(self) -> _Signature:
        found = [path.stat() for path in self._paths]
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        try:
            # gRPC itself would only say that it cannot listen.
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
        except OSError as error:
            raise ValueError(
                f"tls_cert_file: {config.tls_cert_file[:64]!r} cannot be used; "
                "allowed: a PEM certificate chain whose private key is in tls_key_file"
            ) from error
        pair = (Path(config.tls_key_file).read_bytes(), Path(config.tls_cert_file).read_bytes())
        authorities = _client_authorities(config.tls_client_ca_file) if config.tls_client_ca_file else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _client_authorities(path: str) -> bytes:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=path)
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"tls_client_ca_file: {path[:64]!r} cannot be used; allowed: PEM certificates of those who sign clients'"
        ) from error
