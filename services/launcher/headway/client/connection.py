"""Channels, credentials and stubs, for threads or for an event loop."""

from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from headway.client.calls import AnswerT, Call
from headway.client.generation import Generation, Patience
from headway.client.requests import GenerateOptions, Prompt, generate_request, timeout_of
from headway_process.addresses import channel_options
from headway_proto import admin_pb2, admin_pb2_grpc, generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_RETRY_S = 30.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # By its name a pause, this is how long an attempt may take: a busy machine needs more than that of the pauses.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A gateway's address and credentials. Certificates (PEM) or ``tls`` turn TLS on."""

    address: str
    token: str | None = None
    tls: bool = False
    root_certificates: bytes | None = None
    client_certificate: tuple[bytes, bytes] | None = None

    @property
    def encrypts(self) -> bool:
        """Whether channels use TLS."""
        return self.tls or self.root_certificates is not None or self.client_certificate is not None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self) -> grpc.Channel:
        """Connect, for threads."""
        if not self.encrypts:
            return grpc.insecure_channel(self.address, options=self._options())
        return grpc.secure_channel(self.address, self._credentials(), options=self._options())

    def aio_channel(self, options: tuple[tuple[str, int], ...] = ()) -> grpc.aio.Channel:
        """Connect, for the running event loop."""
        if not self.encrypts:
            return grpc.aio.insecure_channel(self.address, options=(*self._options(), *options))
        return grpc.aio.secure_channel(self.address, self._credentials(), options=(*self._options(), *options))

    def _options(self) -> tuple[tuple[str, int], ...]:
        return (*_CHANNEL_OPTIONS, *channel_options(self.address))

    def _credentials(self) -> grpc.ChannelCredentials:
        certificate, key = self.client_certificate or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, key, certificate)


class Connection:
    """The stubs of one channel."""

    def __init__(
        self, channel: grpc.Channel | grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], patience: Patience
    ) -> None:
        self._metadata = metadata
        self._patience = patience
        self._stubs: dict[str, Any] = {
            "generation": generation_pb2_grpc.GenerationStub(channel),  # type: ignore[no-untyped-call]
            "admin": admin_pb2_grpc.AdminStub(channel),  # type: ignore[no-untyped-call]
            "health": health_pb2_grpc.HealthStub(channel),
        }

    def expect_answers(self) -> None:
        """The address is right, also if nobody answers there now."""
        self._patience.has_heard = True

    def start(self, call: Call[AnswerT]) -> Any:
        """Start a call; with ``grpc.aio`` the response is an awaitable."""
        method = getattr(self._stubs[call.service], call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._metadata)

    def answer(self, call: Call[AnswerT], response: Any) -> AnswerT:
        """Read a response."""
        self.expect_answers()
        return call.read(response)

    def generation(self, prompt: Prompt, options: GenerateOptions) -> Generation:
        """Return a new generation, still unsent."""
        return Generation(generate_request(prompt, options), timeout_of(options), self._patience)

    def open_stream(self, generation: Generation) -> Any:
        """Send a generation's next request."""
        return self._stubs["generation"].Generate(
            generation.next_request(), timeout=generation.remaining_s(), metadata=self._metadata
        )

    def open_flight_log(self) -> Any:
        """Return the stream of flight log pieces."""
        return self._stubs["admin"].ReadFlightLog(admin_pb2.ReadFlightLogRequest(), metadata=self._metadata)
