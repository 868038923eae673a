"""The Python client: ``Client`` for threads and ``AsyncClient`` for asyncio, with the same calls.

Owns: the names that users import. Must not know: how the server works.

    from headway import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Every error is a ``HeadwayError`` with ``code``, ``message``, ``violations``, ``retry_after_s`` and ``reason``:

- ``InvalidRequestError``: the request is wrong; ``violations`` names the fields;
- ``AuthenticationError``: the token is missing, wrong, or lacks the right;
- ``NotFoundError``, ``AlreadyExistsError``: no such request or model; a live request has this id;
- ``OverloadedError``: try again after ``retry_after_s``;
- ``UnavailableError``: no gateway or no model, for longer than ``retry_s``;
- ``DeadlineError``: ``timeout_s`` passed; ``StreamCancelledError``: ``cancel`` was called;
- ``ServerError``: anything else.
"""

from headway.client.answers import (
    Completion,
    Delta,
    FinishReason,
    GenerationResult,
    PromptTokens,
    Timings,
    TokenLogprob,
    Usage,
)
from headway.client.calls import GENERATION_SERVICE
from headway.client.connection import DEFAULT_ADDRESS, DEFAULT_RETRY_S, Endpoint
from headway.client.errors import (
    AlreadyExistsError,
    AuthenticationError,
    DeadlineError,
    HeadwayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    StreamCancelledError,
    UnavailableError,
)
from headway.client.event_loop import AsyncClient, AsyncGenerationStream
from headway.client.requests import (
    CONSTRAINT_OPTIONS,
    BatchOptions,
    ChatMessage,
    EmbedOptions,
    GenerateOptions,
    Input,
    Prompt,
)
from headway.client.threads import Client, GenerationStream

__all__ = [
    "CONSTRAINT_OPTIONS",
    "DEFAULT_ADDRESS",
    "DEFAULT_RETRY_S",
    "GENERATION_SERVICE",
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncGenerationStream",
    "AuthenticationError",
    "BatchOptions",
    "ChatMessage",
    "Client",
    "Completion",
    "DeadlineError",
    "Delta",
    "EmbedOptions",
    "Endpoint",
    "FinishReason",
    "GenerateOptions",
    "GenerationResult",
    "GenerationStream",
    "HeadwayError",
    "Input",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "Prompt",
    "PromptTokens",
    "ServerError",
    "StreamCancelledError",
    "Timings",
    "TokenLogprob",
    "UnavailableError",
    "Usage",
]
