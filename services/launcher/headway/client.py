"""The Python client of a Headway gateway: ``Client`` and ``AsyncClient``, the same calls twice.

Owns: building requests from plain Python values, reading streams, taking up a broken stream where it broke.
Must not know: how the server works; and it imports nothing but gRPC, so it suits any host.

    from headway import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

A gateway may go away and come back. For ``retry_s`` seconds (30 unless the client is told otherwise) a stream that broke
is taken up where it broke, and a request that reached no gateway is sent again. Only a client that has never heard from a
gateway fails at once, so that a wrong address is told at once; ``wait_ready`` waits.

Errors, all ``HeadwayError`` with ``code``, ``message``, ``violations``, ``retry_after_s`` and ``reason``:

- ``InvalidRequestError``: the request cannot be served as it is (``violations`` names the fields);
- ``AuthenticationError``: token missing, wrong, or without the right;
- ``NotFoundError``, ``AlreadyExistsError``: no such request or model; a live request has this id;
- ``OverloadedError``: try again after ``retry_after_s``;
- ``UnavailableError``: no gateway, no model, or it went away for longer than ``retry_s``;
- ``DeadlineError``: ``timeout_s`` passed; ``StreamCancelledError``: ``cancel`` was called;
- ``ServerError``: anything else.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, Unpack

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headway_proto import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
GENERATION_SERVICE = "headway.v1.Generation"
DEFAULT_RETRY_S = 30.0
_FIRST_RESUME_DELAY_S = 0.1
_LONGEST_RESUME_DELAY_S = 2.0
_MOST_DOUBLINGS = 16
_READY_POLL_S = 0.1

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class ChatMessage(TypedDict):
    """One message of a chat prompt."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate``. Ranges and defaults are those of generation.proto.

    At most one of the constraints: ``json_schema`` (a text, or the schema as Python values), ``json_object``, ``regex``,
    ``grammar``, ``choice``.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    n: int
    best_of: int
    echo: bool
    request_id: str
    priority: Literal["realtime", "high", "normal", "low"]
    ttft_slo_ms: int
    itl_slo_ms: int
    tenant: str
    model: str
    timeout_s: float
    json_schema: str | Mapping[str, Any] | bool
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one output token; ``top`` holds (token id, log probability), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of continuation ``index``: text, and token ids from place ``first_token_index`` of the output on."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    first_token_index: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one continuation."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds, from the request's arrival at the scheduler."""

    queue_ms: float
    ttft_ms: float
    mean_itl_ms: float
    preemptions: int


@dataclass(slots=True)
class PromptTokens:
    """The prompt itself, as far as ``echo`` (text and tokens) or ``prompt_logprobs`` asked for it.

    ``logprobs`` are of the tokens behind the first.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    """All of one continuation. ``finish_reason`` is None while it runs; ``error`` explains the reason "error".

    ``mean_logprob`` and ``seed`` are told where it was the best of several.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str = ""
    mean_logprob: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a stream brought in the end, one completion per continuation."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    seeds: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt: PromptTokens = field(default_factory=PromptTokens)

    @property
    def text(self) -> str:
        """The first continuation's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first continuation's tokens."""
        return self.completions[0].token_ids


class HeadwayError(Exception):
    """A call that failed. ``violations`` are (field, description) pairs; ``retry_after_s`` is the server's advice.

    ``reason`` is a word for why a gateway refused; it is empty where none did, such as where none could be reached.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: tuple[tuple[str, str], ...] = (),
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.reason = reason


class InvalidRequestError(HeadwayError):
    """The request cannot be served as it is."""


class AuthenticationError(HeadwayError):
    """The token is missing, wrong, or lacks the right."""


class NotFoundError(HeadwayError):
    """No such request or model."""


class AlreadyExistsError(HeadwayError):
    """A live request has this id."""


class OverloadedError(HeadwayError):
    """Too much work at the moment."""


class UnavailableError(HeadwayError):
    """Nobody there to serve."""


class DeadlineError(HeadwayError):
    """The time given has passed."""


class StreamCancelledError(HeadwayError):
    """The stream was cancelled."""


class ServerError(HeadwayError):
    """The server failed in some other way."""


_ERROR_TYPES: dict[grpc.StatusCode, type[HeadwayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: StreamCancelledError,
}

_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}

_PRIORITIES = {
    "realtime": generation_pb2.PRIORITY_REALTIME,
    "high": generation_pb2.PRIORITY_HIGH,
    "normal": generation_pb2.PRIORITY_NORMAL,
    "low": generation_pb2.PRIORITY_LOW,
}

_SCALAR_SAMPLING_OPTIONS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "best_of",
)
_REQUEST_OPTIONS = ("request_id", "ttft_slo_ms", "itl_slo_ms", "tenant", "model", "echo")
CONSTRAINT_OPTIONS = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Of which a request has one at most."""

_KNOWN_OPTIONS = GenerateOptions.__annotations__.keys()


def _generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    unknown = options.keys() - _KNOWN_OPTIONS
    if unknown:
        raise TypeError(f"generate() has no option {min(unknown)!r}")
    values: Mapping[str, Any] = options
    stop = options.get("stop", ())
    try:
        request = generation_pb2.GenerateRequest(
            **{name: values[name] for name in _REQUEST_OPTIONS if name in values},
            sampling=generation_pb2.SamplingParams(
                **{name: values[name] for name in _SCALAR_SAMPLING_OPTIONS if name in values},
                logit_bias=[
                    generation_pb2.LogitBias(token_id=token_id, bias=bias)
                    for token_id, bias in options.get("logit_bias", {}).items()
                ],
                stop=[stop] if isinstance(stop, str) else stop,
                stop_token_ids=options.get("stop_token_ids", ()),
                **_constraint(values),
            ),
        )
        _set_prompt(request, prompt)
    except (ValueError, UnicodeEncodeError) as error:
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    if "priority" in options:
        if options["priority"] not in _PRIORITIES:
            raise InvalidRequestError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"priority: {options['priority']!r:.64} is not allowed; allowed: {', '.join(_PRIORITIES)}",
            )
        request.priority = _PRIORITIES[options["priority"]]
    return request


def _constraint(values: Mapping[str, Any]) -> dict[str, Any]:
    """The field of the request that says what the output must be, if one of the options does."""
    given = [name for name in CONSTRAINT_OPTIONS if name in values]
    if len(given) > 1:
        raise ValueError(f"{given[1]}: not allowed together with {given[0]}; allowed: one constraint")
    if not given:
        return {}
    name, value = given[0], values[given[0]]
    if name == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    if name == "choice":
        value = generation_pb2.Choice(choices=value)
    return {name: value}


def _set_prompt(request: generation_pb2.GenerateRequest | admin_pb2.PinPrefixRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(prompt))
    else:
        request.token_ids.CopyFrom(generation_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]


def _chat(messages: Sequence[Any]) -> generation_pb2.Chat:
    return generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role=message["role"], content=message["content"]) for message in messages]
    )


def _error_of(error: grpc.RpcError) -> HeadwayError:
    """The exception for a failed call, with the details the server sent along."""
    call: Any = error  # Both flavours of RpcError are calls as well, which their types do not say.
    code: grpc.StatusCode = call.code()
    violations: list[tuple[str, str]] = []
    retry_after_s, reason = None, ""
    for key, value in call.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(bad_request):
                violations += [(item.field, item.description) for item in bad_request.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
            elif detail.Unpack(info):
                reason = info.reason.lower()
    return _ERROR_TYPES.get(code, ServerError)(code, call.details() or "", tuple(violations), retry_after_s, reason)


class _Patience:
    """For how many seconds a client tries to reach a gateway that went away, and whether it ever heard from one."""

    def __init__(self, retry_s: float) -> None:
        if not retry_s >= 0:
            raise ValueError(f"retry_s: {retry_s} is not allowed; allowed: 0 or more seconds")
        self.retry_s = retry_s
        self.has_heard = False


class _Progress:
    """What has come of one generation so far, and what to ask for when its stream breaks. No I/O."""

    def __init__(self, request: generation_pb2.GenerateRequest, timeout_s: float | None, patience: _Patience) -> None:
        self._request = request
        self._patience = patience
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_continuations = request.sampling.n if request.sampling.HasField("n") else 1
        self._is_resumable = max(self._num_continuations, request.sampling.best_of) <= 1
        self.prompt = PromptTokens()
        self._accepted: generation_pb2.Accepted | None = None
        self._num_failures = 0
        """Since the last output; the first of them was at ``_failing_since``."""
        self._failing_since = 0.0
        self._completions = [Completion(index) for index in range(max(1, self._num_continuations))]
        self.is_cancelled = False

    @property
    def request_id(self) -> str:
        """The public id, empty until the server has told it."""
        return self._accepted.request_id if self._accepted is not None else self._request.request_id

    def remaining_s(self) -> float | None:
        """Time left of ``timeout_s``."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def next_request(self) -> generation_pb2.GenerateRequest:
        """What to send: the request itself, or, once it was accepted, the request with what is held of it."""
        if self._accepted is None:
            return self._request
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.CopyFrom(
            generation_pb2.Resume(token_ids=self._completions[0].token_ids, seed=self._accepted.seeds[0])
        )
        if request.resume.token_ids:  # the prompt was told before the first of them
            request.sampling.ClearField("prompt_logprobs")
            request.echo = False
        return request

    def take(self, response: generation_pb2.GenerateResponse) -> Delta | None:
        """Take in one event; return it if it is new output."""
        self._patience.has_heard = True
        event = response.WhichOneof("event")
        if event == "accepted":
            if self._accepted is None:
                self._accepted = response.accepted
        elif event == "prompt":
            self._take_prompt(response.prompt)
        elif event == "delta":
            self._num_failures = 0
            return self._take_delta(response.delta)
        elif event == "finished":
            self._take_finished(response.finished)
        return None

    def delay_before_resuming(self, error: grpc.RpcError) -> float:
        """How long to wait before ``next_request`` is worth sending.

        Raises:
            HeadwayError: it is not.
        """
        failure = _error_of(error)
        is_gone = isinstance(failure, UnavailableError) or (
            isinstance(failure, StreamCancelledError) and not self.is_cancelled  # by a server that shut down
        )
        # The old stream's request may live on for a moment after its gateway died, and others come back with this one.
        is_passing = isinstance(failure, AlreadyExistsError | OverloadedError) and self._num_failures > 0
        if self._accepted is not None:
            can_go_on = self._is_resumable
        else:  # a gateway that refused it has said all there is to say
            can_go_on = self._patience.has_heard and (is_passing or not failure.reason)
        now = time.monotonic()
        if not self._num_failures:
            self._failing_since = now
        left_s = self._failing_since + self._patience.retry_s - now
        if not (is_gone or is_passing) or not can_go_on or left_s <= 0:
            raise failure from error
        delay_s = min(_LONGEST_RESUME_DELAY_S, _FIRST_RESUME_DELAY_S * 2.0 ** min(self._num_failures, _MOST_DOUBLINGS))
        delay_s = min(max(delay_s, failure.retry_after_s or 0.0), left_s)
        self._num_failures += 1
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s <= delay_s:
            raise DeadlineError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the stream broke: {failure.message}") from error
        return delay_s

    def require_not_cancelled(self) -> None:
        """To be called after a wait.

        Raises:
            StreamCancelledError: nobody wants it any more.
        """
        if self.is_cancelled:
            raise StreamCancelledError(grpc.StatusCode.CANCELLED, "the stream was cancelled")

    def result(self) -> GenerationResult:
        """All that has come, when the stream has ended."""
        accepted = self._accepted
        if accepted is None:
            raise ServerError(grpc.StatusCode.UNKNOWN, "the stream ended before the request was accepted")
        return GenerationResult(
            request_id=accepted.request_id,
            prompt_tokens=accepted.prompt_tokens,
            cached_tokens=accepted.cached_tokens,
            seeds=tuple(accepted.seeds),
            completions=tuple(self._completions),
            prompt=self.prompt,
        )

    def _take_prompt(self, message: generation_pb2.Prompt) -> None:
        """Take in a piece of the prompt; after a resumption they begin anew."""
        prompt = self.prompt
        if message.first_token_index == 0:
            prompt.text, prompt.token_ids, prompt.logprobs = message.text, [], []
        prompt.token_ids += message.token_ids
        prompt.logprobs += _logprobs(message.logprobs)

    def _take_delta(self, message: generation_pb2.Delta) -> Delta:
        delta = Delta(
            index=message.index,
            text=message.text,
            token_ids=tuple(message.token_ids),
            first_token_index=message.first_token_index,
            logprobs=_logprobs(message.logprobs),
        )
        completion = self._completions[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        completion.logprobs += delta.logprobs
        return delta

    def _take_finished(self, message: generation_pb2.Finished) -> None:
        completion = self._completions[message.index]
        completion.finish_reason = _FINISH_REASONS.get(message.reason, "error")
        matched = message.WhichOneof("matched")
        completion.stop = message.stop if matched == "stop" else None
        completion.stop_token_id = message.stop_token_id if matched == "stop_token_id" else None
        usage, timings = message.usage, message.timings
        completion.usage = Usage(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
        completion.timings = Timings(timings.queue_ms, timings.ttft_ms, timings.mean_itl_ms, timings.preemptions)
        completion.error = message.error
        if message.HasField("seed"):
            completion.seed = message.seed
        if message.HasField("mean_logprob"):
            completion.mean_logprob = message.mean_logprob


def _logprobs(entries: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(entry.token_id, entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in entries
    )


_OpenStream: TypeAlias = Callable[[generation_pb2.GenerateRequest, float | None], Any]


class GenerationStream:
    """A running generation. Iterate over its deltas, or collect them with ``text`` or ``result``.

    A stream that breaks because its gateway went away is taken up again behind the last token, for as long as the client's
    ``retry_s`` from then, without a gap or a repetition (not with ``n`` or ``best_of`` above 1). Leaving a ``with`` block
    cancels what still runs.
    """

    def __init__(self, open_stream: _OpenStream, progress: _Progress) -> None:
        self._open_stream = open_stream
        self._progress = progress
        self._call = self._open()

    @property
    def request_id(self) -> str:
        """The request's id; empty until the server has told it, unless it was given."""
        return self._progress.request_id

    @property
    def prompt(self) -> PromptTokens:
        """What has been told of the prompt so far: all of it, before the first delta of continuation 0."""
        return self._progress.prompt

    def cancel(self) -> None:
        """End the stream; the server stops generating. Iterating further raises ``StreamCancelledError``."""
        self._progress.is_cancelled = True
        self._call.cancel()

    def text(self) -> str:
        """Wait for the end; return the first continuation's text."""
        return self.result().text

    def result(self) -> GenerationResult:
        """Wait for the end; return all that came, what was iterated over before included."""
        for _ in self:
            pass
        return self._progress.result()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                for response in self._call:
                    delta = self._progress.take(response)
                    if delta is not None:
                        return delta
            except grpc.RpcError as error:
                time.sleep(self._progress.delay_before_resuming(error))
                self._progress.require_not_cancelled()
                self._call = self._open()
            else:
                raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _open(self) -> Any:
        return self._open_stream(self._progress.next_request(), self._progress.remaining_s())


class AsyncGenerationStream:
    """The asyncio twin of ``GenerationStream``."""

    def __init__(self, open_stream: _OpenStream, progress: _Progress) -> None:
        self._open_stream = open_stream
        self._progress = progress
        self._call = self._open()

    @property
    def request_id(self) -> str:
        """See ``GenerationStream``."""
        return self._progress.request_id

    @property
    def prompt(self) -> PromptTokens:
        """See ``GenerationStream``."""
        return self._progress.prompt

    def cancel(self) -> None:
        """See ``GenerationStream``."""
        self._progress.is_cancelled = True
        self._call.cancel()

    async def text(self) -> str:
        """See ``GenerationStream``."""
        return (await self.result()).text

    async def result(self) -> GenerationResult:
        """See ``GenerationStream``."""
        async for _ in self:
            pass
        return self._progress.result()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    delta = self._progress.take(response)
                    if delta is not None:
                        return delta
            except grpc.RpcError as error:
                await asyncio.sleep(self._progress.delay_before_resuming(error))
                self._progress.require_not_cancelled()
                self._call = self._open()
            except asyncio.CancelledError:
                if not self._progress.is_cancelled:
                    self._call.cancel()
                    raise
                raise StreamCancelledError(grpc.StatusCode.CANCELLED, "the stream was cancelled") from None
            else:
                raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _open(self) -> Any:
        return self._open_stream(self._progress.next_request(), self._progress.remaining_s())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect, and as whom; encrypted where there are certificates (PEM), or with ``tls`` alone."""

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
        """What goes with every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def channel(self) -> grpc.Channel:
        """Connect, for threads."""
        if not self.encrypts:
            return grpc.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return grpc.secure_channel(self.address, self._credentials(), options=_CHANNEL_OPTIONS)

    def aio_channel(self, options: tuple[tuple[str, int], ...] = ()) -> grpc.aio.Channel:
        """Connect, for the running event loop, with these channel options beside the usual ones."""
        if not self.encrypts:
            return grpc.aio.insecure_channel(self.address, options=(*_CHANNEL_OPTIONS, *options))
        return grpc.aio.secure_channel(self.address, self._credentials(), options=(*_CHANNEL_OPTIONS, *options))

    def _credentials(self) -> grpc.ChannelCredentials:
        certificate, key = self.client_certificate or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, key, certificate)


def _tokenize_request(text: str | Sequence[ChatMessage]) -> generation_pb2.TokenizeRequest:
    if isinstance(text, str):
        return generation_pb2.TokenizeRequest(text=text)
    return generation_pb2.TokenizeRequest(chat=_chat(text))


def _pin_request(name: str, prefix: Prompt, tenant: str) -> admin_pb2.PinPrefixRequest:
    try:
        request = admin_pb2.PinPrefixRequest(name=name, tenant=tenant)
        _set_prompt(request, prefix)
    except (ValueError, UnicodeEncodeError) as error:
        raise InvalidRequestError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    return request


class Client:
    """A connection to a gateway. Threads may share it.

    ``token`` is sent as bearer token; ``tls`` encrypts, trusting ``root_certificates`` (PEM) or the system's.
    ``client_certificate`` is a PEM chain and its private key, for servers that want to see one.

    ``retry_s`` is how long a generation goes on trying while its gateway is away, in seconds from its last output: 30
    unless given, 0 for not at all. A stream that broke is then taken up where it broke, and a request that reached no
    gateway is sent again. A request that a gateway refused is not; nor does a client try that has never heard from a
    gateway, nor any other call than ``generate``.
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
        self._patience = _Patience(retry_s)
        endpoint = Endpoint(address, token, tls, root_certificates, client_certificate)
        self._metadata = endpoint.metadata()
        self._channel = endpoint.channel()
        self._generation: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Start generating behind a text, token ids, or chat messages (``{"role": ..., "content": ...}``).

        Raises:
            InvalidRequestError: a value that no message can carry. Other errors come while iterating.
        """
        progress = _Progress(_generate_request(prompt, options), options.get("timeout_s"), self._patience)
        return GenerationStream(self._open_stream, progress)

    def tokenize(self, text: str | Sequence[ChatMessage]) -> list[int]:
        """The token ids of a text, or of a chat as the model's template renders it."""
        response: generation_pb2.TokenizeResponse = self._call(self._generation.Tokenize, _tokenize_request(text))
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of output tokens."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        response: generation_pb2.DetokenizeResponse = self._call(self._generation.Detokenize, request)
        return response.text

    def model(self) -> generation_pb2.GetModelResponse:
        """What is served."""
        response: generation_pb2.GetModelResponse = self._call(
            self._generation.GetModel, generation_pb2.GetModelRequest()
        )
        return response

    def status(self) -> admin_pb2.GetStatusResponse:
        """The scheduler's figures."""
        response: admin_pb2.GetStatusResponse = self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        return response

    def requests(self) -> list[admin_pb2.RequestState]:
        """Every live request; the continuations of one share its id. Costs the scheduler time per live request."""
        response: admin_pb2.ListRequestsResponse = self._call(self._admin.ListRequests, admin_pb2.ListRequestsRequest())
        return list(response.requests)

    def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        """Why a request is where it is.

        Raises:
            NotFoundError: it is not live.
        """
        request = admin_pb2.ExplainRequest(request_id=request_id)
        response: admin_pb2.ExplainResponse = self._call(self._admin.Explain, request)
        return response

    def pause(self) -> None:
        """Admit no more waiting requests; running ones go on.

        Raises:
            InvalidRequestError: no executor has joined yet.
        """
        self._call(self._admin.Pause, admin_pb2.PauseRequest())

    def resume(self) -> None:
        """Admit again.

        Raises:
            InvalidRequestError: no executor has joined yet.
        """
        self._call(self._admin.Resume, admin_pb2.ResumeRequest())

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones finish. There is no way back but a new scheduler."""
        self._call(self._admin.Drain, admin_pb2.DrainRequest())

    def cancel(self, request_id: str) -> None:
        """End a request, whoever started it.

        Raises:
            NotFoundError: no such request was ever seen.
        """
        self._call(self._admin.Cancel, admin_pb2.CancelRequest(request_id=request_id))

    def pin_prefix(self, name: str, prefix: Prompt, *, tenant: str = "") -> admin_pb2.PinnedPrefix:
        """Keep the beginning of prompts in the prefix cache: a text, token ids, or the first messages of chats.

        A pin of the same name is replaced. ``tenant`` matters where the scheduler keeps tenants apart.

        Raises:
            InvalidRequestError: it fills no block, or more than a quarter of the KV pool would be pinned.
        """
        request = _pin_request(name, prefix, tenant)
        response: admin_pb2.PinPrefixResponse = self._call(self._admin.PinPrefix, request)
        return response.pinned

    def unpin_prefix(self, name: str) -> None:
        """Keep it no longer.

        Raises:
            NotFoundError: nothing is pinned under this name.
        """
        self._call(self._admin.UnpinPrefix, admin_pb2.UnpinPrefixRequest(name=name))

    def pinned_prefixes(self) -> list[admin_pb2.PinnedPrefix]:
        """What is pinned, and how many blocks of each are cached."""
        response: admin_pb2.ListPinnedPrefixesResponse = self._call(
            self._admin.ListPinnedPrefixes, admin_pb2.ListPinnedPrefixesRequest()
        )
        return list(response.prefixes)

    def read_flight_log(self) -> Iterator[admin_pb2.ReadFlightLogResponse]:
        """The scheduler's flight log up to now, file after file, in pieces: with the token ids of prompts and answers.

        Raises:
            InvalidRequestError: it records nothing.
            ServerError: ABORTED, a file went away before it was read; try again.
        """
        try:
            yield from self._admin.ReadFlightLog(admin_pb2.ReadFlightLogRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(error) from error

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the gateway serves a model.

        Raises:
            UnavailableError: it does not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready(deadline):
            if time.monotonic() >= deadline:
                raise UnavailableError(grpc.StatusCode.UNAVAILABLE, f"not ready within {timeout_s:g} s")
            time.sleep(_READY_POLL_S)

    def close(self) -> None:
        """Close the connection; open streams end."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_stream(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        return self._generation.Generate(request, timeout=timeout_s, metadata=self._metadata)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            response = method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(error) from error
        self._patience.has_heard = True
        return response

    def _is_ready(self, deadline: float) -> bool:
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        try:
            response = self._health.Check(
                request, timeout=max(0.05, deadline - time.monotonic()), metadata=self._metadata
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise _error_of(error) from error  # Waiting does not help.
            return False
        self._patience.has_heard = True
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class AsyncClient:
    """The asyncio twin of ``Client``; lives in one event loop."""

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
        self._patience = _Patience(retry_s)
        endpoint = Endpoint(address, token, tls, root_certificates, client_certificate)
        self._metadata = endpoint.metadata()
        self._channel = endpoint.aio_channel()
        self._generation: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerationStream:
        """See ``Client``."""
        progress = _Progress(_generate_request(prompt, options), options.get("timeout_s"), self._patience)
        return AsyncGenerationStream(self._open_stream, progress)

    async def tokenize(self, text: str | Sequence[ChatMessage]) -> list[int]:
        """See ``Client``."""
        response: generation_pb2.TokenizeResponse = await self._call(self._generation.Tokenize, _tokenize_request(text))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See ``Client``."""
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
        response: generation_pb2.DetokenizeResponse = await self._call(self._generation.Detokenize, request)
        return response.text

    async def model(self) -> generation_pb2.GetModelResponse:
        """See ``Client``."""
        response: generation_pb2.GetModelResponse = await self._call(
            self._generation.GetModel, generation_pb2.GetModelRequest()
        )
        return response

    async def status(self) -> admin_pb2.GetStatusResponse:
        """See ``Client``."""
        response: admin_pb2.GetStatusResponse = await self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        return response

    async def requests(self) -> list[admin_pb2.RequestState]:
        """See ``Client``."""
        response: admin_pb2.ListRequestsResponse = await self._call(
            self._admin.ListRequests, admin_pb2.ListRequestsRequest()
        )
        return list(response.requests)

    async def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        """See ``Client``."""
        request = admin_pb2.ExplainRequest(request_id=request_id)
        response: admin_pb2.ExplainResponse = await self._call(self._admin.Explain, request)
        return response

    async def pause(self) -> None:
        """See ``Client``."""
        await self._call(self._admin.Pause, admin_pb2.PauseRequest())

    async def resume(self) -> None:
        """See ``Client``."""
        await self._call(self._admin.Resume, admin_pb2.ResumeRequest())

    async def drain(self) -> None:
        """See ``Client``."""
        await self._call(self._admin.Drain, admin_pb2.DrainRequest())

    async def cancel(self, request_id: str) -> None:
        """See ``Client``."""
        await self._call(self._admin.Cancel, admin_pb2.CancelRequest(request_id=request_id))

    async def pin_prefix(self, name: str, prefix: Prompt, *, tenant: str = "") -> admin_pb2.PinnedPrefix:
        """See ``Client``."""
        request = _pin_request(name, prefix, tenant)
        response: admin_pb2.PinPrefixResponse = await self._call(self._admin.PinPrefix, request)
        return response.pinned

    async def unpin_prefix(self, name: str) -> None:
        """See ``Client``."""
        await self._call(self._admin.UnpinPrefix, admin_pb2.UnpinPrefixRequest(name=name))

    async def pinned_prefixes(self) -> list[admin_pb2.PinnedPrefix]:
        """See ``Client``."""
        response: admin_pb2.ListPinnedPrefixesResponse = await self._call(
            self._admin.ListPinnedPrefixes, admin_pb2.ListPinnedPrefixesRequest()
        )
        return list(response.prefixes)

    async def read_flight_log(self) -> AsyncIterator[admin_pb2.ReadFlightLogResponse]:
        """See ``Client``."""
        try:
            async for piece in self._admin.ReadFlightLog(admin_pb2.ReadFlightLogRequest(), metadata=self._metadata):
                yield piece
        except grpc.RpcError as error:
            raise _error_of(error) from error

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        """See ``Client``."""
        deadline = time.monotonic() + timeout_s
        while not await self._is_ready(deadline):
            if time.monotonic() >= deadline:
                raise UnavailableError(grpc.StatusCode.UNAVAILABLE, f"not ready within {timeout_s:g} s")
            await asyncio.sleep(_READY_POLL_S)

    async def close(self) -> None:
        """See ``Client``."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open_stream(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> Any:
        return self._generation.Generate(request, timeout=timeout_s, metadata=self._metadata)

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            response = await method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error_of(error) from error
        self._patience.has_heard = True
        return response

    async def _is_ready(self, deadline: float) -> bool:
        request = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        try:
            response = await self._health.Check(
                request, timeout=max(0.05, deadline - time.monotonic()), metadata=self._metadata
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise _error_of(error) from error  # Waiting does not help.
            return False
        self._patience.has_heard = True
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
