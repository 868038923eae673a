"""Serves metrics to Prometheus: GET /metrics over HTTP, on a separate thread.

Owns: the HTTP server, access, limits. Must not know: the figures. A scrape costs the main loop one copy of its figures.
Beyond loopback it needs ``authorization: Bearer TOKEN``, compared in constant time and sent in clear: put TLS in front
beyond a trusted network.
"""

import contextlib
import hashlib
import hmac
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from headway_process.installation import install_advice
from headway_process.token_files import text_of_token_file
from headway_proto.wording import shown

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.metrics_core import Metric

SWITCH_INTERVAL_S = 0.0005
"""How long the formatting thread may hold the interpreter."""
MAX_READERS = 4
_READER_TIMEOUT_S = 5.0
"""How long a reader may send and take nothing."""
_MOST_READING_S = 15.0
"""How long it may take in all."""
_POLL_INTERVAL_S = 0.1
_LEAST_TOKEN_CHARACTERS = 16
_MAX_TOKEN_FILE_BYTES = 1 << 20


class MetricsEndpoint:
    """Listens from construction to ``close``.

    Args:
        address: checked HOST:PORT; port 0 for a free one.
        token_file: one bearer token a line; empty if none is needed.
        collect: called for each scrape, in this thread; ``TimeoutError`` becomes status 503.

    Raises:
        ValueError: the address is taken, the file cannot be used, or prometheus-client is not installed.
    """

    def __init__(self, address: str, token_file: str, collect: "Callable[[], Iterable[Metric]]") -> None:
        application = _with_token(_application(address, collect), _digests(token_file) if token_file else None)
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
            server_class = _ServerOverIpv6 if family == socket.AF_INET6 else _Server
            self._server: WSGIServer = make_server(host, int(port), application, server_class, _Handler)
        except OSError as error:
            raise ValueError(
                f"metrics_address: cannot listen on {shown(address)} ({error.strerror}); allowed: a free address"
            ) from None
        self.port: int = self._server.server_address[1]
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _POLL_INTERVAL_S}, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._readers = threading.BoundedSemaphore(MAX_READERS)
        self._since: dict[socket.socket, float] = {}
        super().__init__(*arguments, **options)

    def server_bind(self) -> None:
        """Bind without ``HTTPServer``'s name lookup."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._readers.acquire(blocking=False):
            self._since[request] = time.monotonic()
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._since[request]
            self._readers.release()

    def service_actions(self) -> None:
        """Now and then: end the readers that send or take a byte now and then for ever."""
        for request, since in list(self._since.items()):
            if time.monotonic() - since > _MOST_READING_S:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore readers that disconnect."""


class _ServerOverIpv6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _READER_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: scrapes are frequent."""


def _application(address: str, collect: "Callable[[], Iterable[Metric]]") -> "WSGIApplication":
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
    except ImportError:
        raise ValueError(
            f"metrics_address: {shown(address)} needs prometheus-client; allowed: '', or {install_advice('metrics')}"
        ) from None

    class Collector:
        def collect(self) -> "Iterable[Metric]":
            return collect()

        def describe(self) -> "Iterable[Metric]":
            return ()  # else registering asks for figures

    registry = CollectorRegistry()
    registry.register(Collector())
    ProcessCollector(registry=registry)
    application = make_wsgi_app(registry)

    def metrics(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            return _refuse(start_response, "404 Not Found", "the metrics are at /metrics")
        try:
            answer: Iterable[bytes] = application(environ, start_response)
        except TimeoutError as error:
            return _refuse(start_response, "503 Service Unavailable", str(error))
        return answer

    return metrics


def _with_token(application: "WSGIApplication", digests: tuple[bytes, ...] | None) -> "WSGIApplication":
    if digests is None:
        return application

    def guarded(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        scheme, _, token = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(digest, known) for known in digests]
        if scheme == "Bearer" and any(matches):
            return application(environ, start_response)
        return _refuse(start_response, "401 Unauthorized", "send authorization: Bearer TOKEN", "Bearer")

    return guarded


def _refuse(start_response: "StartResponse", status: str, text: str, challenge: str = "") -> list[bytes]:
    headers = [("Content-Type", "text/plain"), *([("WWW-Authenticate", challenge)] if challenge else [])]
    start_response(status, headers)
    return [text.encode() + b"\n"]


def _digests(token_file: str) -> tuple[bytes, ...]:
    """No token stays in memory."""
    try:
        text = text_of_token_file(Path(token_file), _MAX_TOKEN_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"metrics_token_file: {shown(token_file)} cannot be used: {error}") from None
    tokens = [line.strip() for line in text.splitlines() if line.strip()]
    if not tokens or not text.isascii() or min(map(len, tokens)) < _LEAST_TOKEN_CHARACTERS:
        raise ValueError(
            f"metrics_token_file: {shown(token_file)} is not allowed; allowed: a file with a token of at least "
            f"{_LEAST_TOKEN_CHARACTERS} ASCII characters on each line"
        )
    return tuple(hashlib.sha256(token.encode()).digest() for token in tokens)
