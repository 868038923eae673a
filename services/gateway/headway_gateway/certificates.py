"""The gateway's TLS files, read again when they change. Half-written or unmatched files change nothing."""

import ssl
from pathlib import Path

from headway_gateway.config import GatewayConfig
from headway_process.late_logs import log_of
from headway_process.tls import tls_context
from headway_proto.wording import shown

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

    def context(self, protocol: str) -> ssl.SSLContext:
        """Return a context that asks this object before each handshake; ``protocol`` is ALPN's name of what is served."""
        first = latest = self._initial
        first.set_alpn_protocols([protocol])

        def renew(connection: ssl.SSLObject, name: str | None, initial: ssl.SSLContext) -> None:  # noqa: ARG001
            nonlocal latest
            newer = self.newer()
            if newer is not None:
                newer.set_alpn_protocols([protocol])
                latest = newer
            connection.context = latest

        first.sni_callback = renew
        return first

    def newer(self) -> ssl.SSLContext | None:
        """Return a context of changed and valid contents, else None."""
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
        log_of(__name__).info("certificate read again", tls_cert_file=self._config.tls_cert_file)
        return newer

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log_of(__name__).error("certificate not read again", reason=problem)

    def _signature(self) -> _Signature:
        found = [path.stat() for path in self._paths]
        return tuple((status.st_ctime_ns, status.st_size, status.st_ino) for status in found)

    def _read(self) -> ssl.SSLContext:
        config = self._config
        context = tls_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # For an encrypted key OpenSSL would ask the terminal for its password, and wait.
            context.load_cert_chain(config.tls_cert_file, config.tls_key_file, password="")
        except OSError as error:
            raise ValueError(
                f"tls_cert_file: {shown(config.tls_cert_file)} cannot be used; "
                "allowed: a PEM certificate chain whose private key is in tls_key_file"
            ) from error
        _require_whole_pem("tls_cert_file", config.tls_cert_file)
        if config.tls_client_ca_file:
            _load_authorities(context, config.tls_client_ca_file)
        return context


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ValueError(
            f"tls_client_ca_file: {shown(path)} cannot be used; allowed: PEM certificates of authorities"
        ) from error
    _require_whole_pem("tls_client_ca_file", path)
    context.verify_mode = ssl.CERT_REQUIRED


def _require_whole_pem(field: str, path: str) -> None:
    """OpenSSL would ignore a file that ends inside a certificate's first line."""
    last_line = Path(path).read_bytes().rstrip().rpartition(b"\n")[2]
    if last_line.startswith(b"-") and not last_line.startswith(b"-----END "):
        raise ValueError(f"{field}: {shown(path)} is cut short; allowed: whole PEM certificates")
