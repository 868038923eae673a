"""What every format of an answer needs of a generation's events. Must not know: HTTP, any one format."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import grpc
import msgspec

from headway_gateway.calls.call_context import CallContext
from headway_gateway.calls.servicer import GenerationServicer
from headway_gateway.openai.bodies import StreamOptions
from headway_gateway.statuses import CallRefusedError, renamed
from headway_proto import generation_pb2 as api

Write: TypeAlias = Callable[[api.GenerateResponse], Awaitable[None]]
Names: TypeAlias = Iterable[tuple[str, str]]
"""Pairs of prefixes: ours, the caller's."""

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""

_REASONS = {api.FINISH_REASON_STOP: "stop", api.FINISH_REASON_LENGTH: "length"}


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens`` came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Tally:
    """Counts a request's tokens."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_cached = 0
        self.num_output = 0

    def count(self, accepted: api.Accepted) -> None:
        """Count a prompt."""
        self.num_prompt += accepted.prompt_tokens
        self.num_cached += accepted.cached_tokens

    def count_tokens(self, delta: api.Delta) -> None:
        """Count tokens of an output."""
        self.num_output += len(delta.token_ids)

    def usage(self) -> Usage:
        """Return all so far."""
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            total_tokens=self.num_prompt + self.num_output,
            prompt_tokens_details=PromptTokensDetails(self.num_cached),
        )


class PromptFirst:
    """Puts a generation's events behind its prompt, if that is wanted: another output may be ahead of it."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._waits = is_wanted
        self._num_tokens = 0
        self._held: list[api.GenerateResponse] = []
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[api.TokenLogprob | None] = []
        """Of each token; the first has none, nor has any if they are not wanted."""

    def push(self, event: api.GenerateResponse) -> list[api.GenerateResponse]:
        """Return what may be read now. One of kind ``prompt`` says that all of the prompt has come."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._num_tokens = event.accepted.prompt_tokens
        elif kind == "prompt":
            self._add(event.prompt)
            if len(self.token_ids) < self._num_tokens:
                return []
            self._waits = False
            held, self._held = self._held, []
            return [event, *held]
        elif self._waits:
            self._held.append(event)
            return []
        return [event]

    def _add(self, prompt: api.Prompt) -> None:
        self.text += prompt.text
        self.token_ids += prompt.token_ids
        self.logprobs += [*[None] * (len(prompt.token_ids) - len(prompt.logprobs)), *prompt.logprobs]


class StreamUsage(NamedTuple):
    """Which events of a stream have the usage."""

    tally: Tally
    is_last: bool
    is_each: bool

    @classmethod
    def of(cls, tally: Tally, options: StreamOptions | None) -> "StreamUsage":
        """Return what a request has asked for."""
        wanted = options is not None and bool(options.include_usage)
        return cls(tally, wanted, wanted and options is not None and bool(options.continuous_usage_stats))

    @property
    def of_event(self) -> Usage | msgspec.UnsetType | None:
        """Return the usage in an event that is not the last."""
        if self.is_each:
            return self.tally.usage()
        return None if self.is_last else msgspec.UNSET


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def reason_of(finished: api.Finished) -> str:
    """Return why an output ended.

    Raises:
        CallRefusedError: it failed, or was cancelled by an operator.
    """
    reason = _REASONS.get(finished.reason)
    if reason is not None:
        return reason
    if finished.reason == api.FINISH_REASON_ABORT:
        raise CallRefusedError(grpc.StatusCode.ABORTED, "an operator cancelled the request", reason="cancelled")
    raise CallRefusedError(
        grpc.StatusCode.INTERNAL,
        f"output {finished.index} could not be run: {finished.error}",
        reason="request_failed",
    )


async def run(
    generation: GenerationServicer,
    context: CallContext,
    requests: Sequence[tuple[api.GenerateRequest, Write, Names]],
) -> None:
    """Run all requests at once, none before all are checked; the first failure ends the others. Each comes with the caller's
    names of its fields.

    Raises:
        CallRefusedError: in the caller's field names.
    """
    all_are_checked = asyncio.Barrier(len(requests))

    async def one(request: api.GenerateRequest, write: Write, names: Names) -> None:
        try:
            # Else a stream of one could begin, with status 200, before another is refused.
            await generation.generate(request, context, write, all_are_checked.wait)
        except CallRefusedError as refusal:
            raise renamed(refusal, names) from refusal

    if len(requests) == 1:
        await one(*requests[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(one(*request))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
