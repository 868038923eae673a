"""Every call but ``generate``, as data: method, request, and reading of the response."""

# ruff: noqa: D103 (``Client`` describes the calls)

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from headway.client.errors import UnavailableError, error_of
from headway.client.requests import (
    BatchOptions,
    ChatMessage,
    EmbedOptions,
    Input,
    Prompt,
    checked_timeout,
    embed_request,
    pin_request,
    plain_request,
    score_request,
    timeout_of,
    tokenize_request,
)
from headway_proto import admin_pb2, generation_pb2

READY_POLL_S = 0.1
GENERATION_SERVICE = "headway.v1.Generation"

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Call(Generic[AnswerT]):
    """One call; ``read`` makes the answer."""

    service: Literal["generation", "admin", "health"]
    method: str
    request: Any
    read: Callable[[Any], AnswerT]
    timeout_s: float | None = None


class ReadinessPoll:
    """Asks until the gateway serves a model."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = checked_timeout(timeout_s)
        self._deadline = time.monotonic() + self._timeout_s

    def next_call(self) -> Call[bool]:
        """Return the next question."""
        return Call(
            "health",
            "Check",
            health_pb2.HealthCheckRequest(service=GENERATION_SERVICE),
            lambda response: bool(response.status == health_pb2.HealthCheckResponse.SERVING),
            timeout_s=max(0.05, self._deadline - time.monotonic()),
        )

    def require_time_left(self) -> None:
        """Check the time.

        Raises:
            UnavailableError: it has passed.
        """
        if time.monotonic() >= self._deadline:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, f"not ready within {self._timeout_s:g} s")


def require_may_wait(error: grpc.RpcError) -> None:
    """Raise an error that waiting cannot mend.

    Raises:
        AuthenticationError: the token is wrong.
    """
    call: Any = error
    if call.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise error_of(error) from error


def _nothing(_response: object) -> None:
    return None


def tokenize(text: str | Sequence[ChatMessage]) -> Call[list[int]]:
    return Call("generation", "Tokenize", tokenize_request(text), lambda response: list(response.token_ids))


def detokenize(token_ids: Sequence[int]) -> Call[str]:
    request = generation_pb2.DetokenizeRequest(token_ids=token_ids)
    return Call("generation", "Detokenize", request, lambda response: str(response.text))


def embed(inputs: Sequence[Input], options: EmbedOptions) -> Call[generation_pb2.EmbedResponse]:
    request = embed_request(inputs, options)
    return Call("generation", "Embed", request, lambda response: response, timeout_of(options))


def score(prompt: Input, continuations: Sequence[Input], options: BatchOptions) -> Call[generation_pb2.ScoreResponse]:
    request = score_request(prompt, continuations, options)
    return Call("generation", "Score", request, lambda response: response, timeout_of(options))


def model() -> Call[generation_pb2.GetModelResponse]:
    return Call("generation", "GetModel", generation_pb2.GetModelRequest(), lambda response: response)


def status() -> Call[admin_pb2.GetStatusResponse]:
    return Call("admin", "GetStatus", admin_pb2.GetStatusRequest(), lambda response: response)


def requests() -> Call[list[admin_pb2.RequestState]]:
    return Call("admin", "ListRequests", admin_pb2.ListRequestsRequest(), lambda response: list(response.requests))


def explain(request_id: str) -> Call[admin_pb2.ExplainResponse]:
    return Call(
        "admin", "Explain", plain_request(admin_pb2.ExplainRequest, request_id=request_id), lambda response: response
    )


def pause() -> Call[None]:
    return Call("admin", "Pause", admin_pb2.PauseRequest(), _nothing)


def resume() -> Call[None]:
    return Call("admin", "Resume", admin_pb2.ResumeRequest(), _nothing)


def drain() -> Call[None]:
    return Call("admin", "Drain", admin_pb2.DrainRequest(), _nothing)


def drain_executor(executor: int) -> Call[None]:
    return Call("admin", "DrainExecutor", plain_request(admin_pb2.DrainExecutorRequest, executor=executor), _nothing)


def undrain_executor(executor: int) -> Call[None]:
    return Call(
        "admin", "UndrainExecutor", plain_request(admin_pb2.UndrainExecutorRequest, executor=executor), _nothing
    )


def set_executor_role(executor: int, role: str) -> Call[None]:
    request = plain_request(admin_pb2.SetExecutorRoleRequest, executor=executor, role=role)
    return Call("admin", "SetExecutorRole", request, _nothing)


def load_adapter(name: str, directory: str) -> Call[None]:
    request = plain_request(admin_pb2.LoadAdapterRequest, name=name, directory=directory)
    return Call("admin", "LoadAdapter", request, _nothing)


def unload_adapter(name: str) -> Call[None]:
    return Call("admin", "UnloadAdapter", plain_request(admin_pb2.UnloadAdapterRequest, name=name), _nothing)


def adapters() -> Call[tuple[admin_pb2.LoadedAdapter, ...]]:
    return Call("admin", "ListAdapters", admin_pb2.ListAdaptersRequest(), lambda response: tuple(response.adapters))


def cancel(request_id: str) -> Call[None]:
    return Call("admin", "Cancel", plain_request(admin_pb2.CancelRequest, request_id=request_id), _nothing)


def pin_prefix(name: str, prefix: Prompt, tenant: str) -> Call[admin_pb2.PinnedPrefix]:
    return Call("admin", "PinPrefix", pin_request(name, prefix, tenant), lambda response: response.pinned)


def unpin_prefix(name: str) -> Call[None]:
    return Call("admin", "UnpinPrefix", plain_request(admin_pb2.UnpinPrefixRequest, name=name), _nothing)


def pinned_prefixes(executor: int) -> Call[list[admin_pb2.PinnedPrefix]]:
    request = plain_request(admin_pb2.ListPinnedPrefixesRequest, executor=executor)
    return Call("admin", "ListPinnedPrefixes", request, lambda response: list(response.prefixes))
