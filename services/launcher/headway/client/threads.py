"""The client for threads."""

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from headway.client import calls
from headway.client.answers import Delta, GenerationResult, PromptTokens
from headway.client.calls import AnswerT, Call
from headway.client.connection import DEFAULT_ADDRESS, DEFAULT_RETRY_S, Connection, Endpoint
from headway.client.errors import own_errors
from headway.client.generation import Generation, Patience
from headway.client.requests import BatchOptions, ChatMessage, EmbedOptions, GenerateOptions, Input, Prompt
from headway_proto import admin_pb2, generation_pb2


class GenerationStream:
    """A running generation. Iterate over its deltas, or collect them with ``text`` or ``result``.

    After a loss of the gateway, the stream continues without a gap or a repetition, if a gateway is back within
    ``retry_s`` (not with ``n`` or ``best_of`` above 1). Leaving a ``with`` block cancels it.
    """

    def __init__(self, connection: Connection, generation: Generation) -> None:
        self._connection = connection
        self._generation = generation
        self._call = connection.open_stream(generation)

    @property
    def request_id(self) -> str:
        """The request's id; empty until known."""
        return self._generation.request_id

    @property
    def prompt(self) -> PromptTokens:
        """The prompt; complete before the first delta of continuation 0."""
        return self._generation.prompt

    def cancel(self) -> None:
        """End the stream; the server stops generating. Further iteration raises ``StreamCancelledError``."""
        self._generation.is_cancelled = True
        self._call.cancel()

    def text(self) -> str:
        """Wait for the end; return the first continuation's text."""
        return self.result().text

    def result(self) -> GenerationResult:
        """Wait for the end; return all output, including earlier deltas."""
        for _ in self:
            pass
        return self._generation.result()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                for response in self._call:
                    delta = self._generation.accept(response)
                    if delta is not None:
                        return delta
            except grpc.RpcError as error:
                time.sleep(self._generation.delay_before_resuming(error))
                self._generation.require_not_cancelled()
                self._call = self._connection.open_stream(self._generation)
                if self._generation.is_cancelled:  # another thread did it meanwhile, and cancelled the call before
                    self._call.cancel()
            else:
                raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """A connection to a gateway. Threads may share it.

    ``token`` is sent as bearer token. ``tls`` encrypts, and trusts ``root_certificates`` (PEM) or the system's.
    ``client_certificate`` is a PEM chain and its private key.

    ``retry_s`` limits how long a generation retries while its gateway is away, in seconds since its last output: 30 by
    default, 0 for never. The client then continues a broken stream, and resends a request that reached no gateway. It
    never repeats a refused request, or another call than ``generate``. A client that has never reached a gateway fails
    at once, because the address may be wrong; ``wait_ready`` waits.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        client_certificate: tuple[bytes, bytes] | None = None,
        retry_s: float = DEFAULT_RETRY_S,
    ) -> None:
        patience = Patience(retry_s)
        endpoint = Endpoint(address, token, tls, root_certificates, client_certificate)
        self._channel = endpoint.channel()
        self._connection = Connection(self._channel, endpoint.metadata(), patience)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generate from a text, token ids, or chat messages (``{"role": ..., "content": ...}``).

        Raises:
            InvalidRequestError: a value does not fit the message. Other errors come while iterating.
        """
        return GenerationStream(self._connection, self._connection.generation(prompt, options))

    def embed(self, inputs: Sequence[Input], **options: Unpack[EmbedOptions]) -> generation_pb2.EmbedResponse:
        """Make a vector of each text or list of token ids; see ``EmbedRequest`` in generation.proto.

        Raises:
            HeadwayError: one of the kinds above. A failed call is not repeated.
        """
        return self._call(calls.embed(inputs, options))

    def score(
        self, prompt: Input, continuations: Sequence[Input], **options: Unpack[BatchOptions]
    ) -> generation_pb2.ScoreResponse:
        """Score continuations of a prompt, or documents for a query; see ``ScoreRequest``. Raises as ``embed``."""
        return self._call(calls.score(prompt, continuations, options))

    def tokenize(self, text: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a text, or of a chat in the model's template."""
        return self._call(calls.tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of output tokens."""
        return self._call(calls.detokenize(token_ids))

    def model(self) -> generation_pb2.GetModelResponse:
        """Return the served model."""
        return self._call(calls.model())

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return the scheduler's figures."""
        return self._call(calls.status())

    def requests(self) -> list[admin_pb2.RequestState]:
        """Return every live request; continuations share an id. The scheduler's cost grows with their number."""
        return self._call(calls.requests())

    def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        """Return why a request is where it is.

        Raises:
            NotFoundError: it is not live.
        """
        return self._call(calls.explain(request_id))

    def pause(self) -> None:
        """Stop admitting waiting requests; running ones go on.

        Raises:
            InvalidRequestError: no executor has joined yet.
        """
        self._call(calls.pause())

    def resume(self) -> None:
        """Admit again.

        Raises:
            InvalidRequestError: no executor has joined yet.
        """
        self._call(calls.resume())

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones finish. Only a new scheduler ends this."""
        self._call(calls.drain())

    def drain_executor(self, executor: int) -> None:
        """Start nothing more on one executor; its requests go on elsewhere. Its restart does not end this.

        Raises:
            InvalidRequestError: there is no such number, or no other executor takes requests.
        """
        self._call(calls.drain_executor(executor))

    def undrain_executor(self, executor: int) -> None:
        """Use an executor again.

        Raises:
            InvalidRequestError: there is no such number.
        """
        self._call(calls.undrain_executor(executor))

    def set_executor_role(self, executor: int, role: str) -> None:
        """Say what an executor is for: "prefill", "decode" or "both". A restart of the scheduler ends this.

        Raises:
            InvalidRequestError: there is no such number or role, no executor would take prompts or none would decode, or
                the scheduler's placement ignores roles.
        """
        self._call(calls.set_executor_role(executor, role))

    def load_adapter(self, name: str, directory: str) -> None:
        """Let every executor load an adapter (LoRA) from a directory that it can read.

        Raises:
            InvalidRequestError: the name is wrong or taken, or an executor cannot load it.
        """
        self._call(calls.load_adapter(name, directory))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            InvalidRequestError: requests with it have not ended.
            NotFoundError: there is none of this name.
        """
        self._call(calls.unload_adapter(name))

    def adapters(self) -> tuple[admin_pb2.LoadedAdapter, ...]:
        """The loaded adapters, by name."""
        return self._call(calls.adapters())

    def cancel(self, request_id: str) -> None:
        """Cancel a request of any client.

        Raises:
            NotFoundError: the server never had it.
        """
        self._call(calls.cancel(request_id))

    def pin_prefix(self, name: str, prefix: Prompt, *, tenant: str = "") -> admin_pb2.PinnedPrefix:
        """Keep the beginning of prompts in the prefix cache: a text, token ids, or the first messages of chats.

        It replaces a pin of the same name. ``tenant`` matters if the scheduler keeps tenants apart.

        Raises:
            InvalidRequestError: it fills no block, or pins would take more than a quarter of the KV pool.
        """
        return self._call(calls.pin_prefix(name, prefix, tenant))

    def unpin_prefix(self, name: str) -> None:
        """Remove a pin.

        Raises:
            NotFoundError: no pin has this name.
        """
        self._call(calls.unpin_prefix(name))

    def pinned_prefixes(self, *, executor: int = 0) -> list[admin_pb2.PinnedPrefix]:
        """Return the pins, and how many blocks of each an executor has cached."""
        return self._call(calls.pinned_prefixes(executor))

    def read_flight_log(self) -> Iterator[admin_pb2.ReadFlightLogResponse]:
        """Read the flight log up to now in pieces, with the token ids of prompts and answers.

        Raises:
            InvalidRequestError: the scheduler records nothing.
            ServerError: ABORTED: a file was removed before it was read; try again.
        """
        with own_errors():
            yield from self._connection.open_flight_log()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the gateway serves a model.

        Raises:
            UnavailableError: ``timeout_s`` passed.
        """
        poll = calls.ReadinessPoll(timeout_s)
        while not self._is_ready(poll):
            poll.require_time_left()
            time.sleep(calls.READY_POLL_S)

    def close(self) -> None:
        """Close the connection; open streams end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: Call[AnswerT]) -> AnswerT:
        with own_errors():
            response = self._connection.start(call)
        return self._connection.answer(call, response)

    def _is_ready(self, poll: calls.ReadinessPoll) -> bool:
        call = poll.next_call()
        try:
            return self._connection.answer(call, self._connection.start(call))
        except grpc.RpcError as error:
            calls.require_may_wait(error)
            return False
