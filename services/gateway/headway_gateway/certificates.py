"""The gateway's TLS files, read again when they change. Half-written or unmatched files change nothing."""

import ssl
from pathlib import Path

import grpc
import structlog

from headway_gateway.config import GatewayConfig

_log = structlog.get_logger(__name__)

_Signature = tuple[tuple[int, int, int], ...]


class CertificateFiles:
    """The TLS files of ``config``."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read the files.

        Raises:
            ValueError: the message names the setting.
        """
        self._config = config
        self._paths = tuple(
            Path(path) for path in (config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file) if path
        )
        self._seen = self._signature()
        self._problem = ""
        self._initial = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that ask this object before each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._initial,
            self.newer,  # type: ignore[arg-type]  # the stubs lack the None that gRPC documents
            require_client_authentication=bool(self._config.tls_client_ca_file),
        )

    def context(self) -> ssl.SSLContext:
        """Return a context that asks this object before each handshake; not for an object that gave credentials."""
        first = latest = self._new_context()

        def renew(connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext) -> None:  # noqa: ARG001
            nonlocal latest
            if self.newer() is not None:
                latest = self._new_context()
            connection.context = latest

        first.sni_callback = renew
        return first

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """Return changed and valid contents, else None. Any thread may call this."""
        signature: _Signature | None = None
        try:
            signature = self._signature()
            if signature == self._seen:
                return None
            newer = self._read()
            if signature != self._signature():
                return None  # the files may have changed after the check; the next handshake looks again
        except (OSError, ValueError) as error:  # a file is half written, or missing while it is replaced
            self._seen = signature or self._seen
            self._log_problem(str(error))
            return None
        self._seen, self._problem = signature, ""
        _log.info("certificate read again", tls_cert_file=self._config.tls_cert_file)
        return newer

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _log.error("certificate not read again", reason=problem)

    def _signature(self) -> _Signature:
        found = [path.stat() for path in self._paths]
        return tuple((status.st_ctime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        try:
            # gRPC itself would only report that it cannot listen.
            self._loaded()
        except OSError as error:
            raise ValueError(
                f"tls_cert_file: {config.tls_cert_file[:64]!r} cannot be used; "
                "allowed: a PEM certificate chain whose private key is in tls_key_file"
            ) from error
        pair = (Path(config.tls_key_file).read_bytes(), _whole_pem("tls_cert_file", config.tls_cert_file))
        authorities = _client_authorities(config.tls_client_ca_file) if config.tls_client_ca_file else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # For an encrypted key OpenSSL would ask the terminal for its password, and wait.
        context.load_cert_chain(self._config.tls_cert_file, self._config.tls_key_file, password="")
        return context

    def _new_context(self) -> ssl.SSLContext:
        context = self._loaded()
        if self._config.tls_client_ca_file:
            context.load_verify_locations(self._config.tls_client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["http/1.1"])
        return context


def _client_authorities(path: str) -> bytes:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=path)
    except OSError as error:
        raise ValueError(
            f"tls_client_ca_file: {path[:64]!r} cannot be used; allowed: PEM certificates of authorities"
        ) from error
    return _whole_pem("tls_client_ca_file", path)


def _whole_pem(field: str, path: str) -> bytes:
    """OpenSSL would ignore a file that ends inside a certificate's first line."""
    content = Path(path).read_bytes()
    last_line = content.rstrip().rpartition(b"\n")[2]
    if last_line.startswith(b"-") and not last_line.startswith(b"-----END "):
        raise ValueError(f"{field}: {path[:64]!r} is cut short; allowed: whole PEM certificates")
    return content
