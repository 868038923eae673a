"""One generation: the continuations of one prompt. Must not know: ZeroMQ, tokenising."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

import grpc
import structlog

from headway_gateway.calls.best_outputs import HeldOutput, ranked
from headway_gateway.calls.call_context import CallContext
from headway_gateway.calls.client_patience import ClientPatience
from headway_gateway.calls.pacing import WritePace
from headway_gateway.calls.prompt_events import PromptEvents
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.figures.tracing import RequestTrace
from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.link.scheduler_client import SchedulerClient
from headway_gateway.requests.validation import CheckedRequest, held_beyond_end
from headway_gateway.statuses import RETRY_S, CallRefusedError
from headway_gateway.text.constraint_check import Beginning
from headway_gateway.text.continuation import Continuation, OutputText
from headway_gateway.text.tokenization import TextModel
from headway_gateway.wakeup import Wakeup
from headway_proto import generation_pb2 as api
from headway_proto.columns import encode_column
from headway_proto.ingress import (
    FINISH_LENGTH,
    FINISH_STOP,
    REJECT_ALREADY_EXISTS,
    REJECT_INVALID,
    REJECT_NOT_FOUND,
    REJECT_OUT_OF_RANGE,
    REJECT_OVERLOADED,
    REJECT_UNSUPPORTED,
    Finished,
    Rejected,
)
from headway_proto.sampling import NO_LOGPROBS

REQUEST_ID_METADATA_KEY = "headway-request-id"
_MOST_BEHIND = 32
"""Tokens at a prompt's end that its answer's text is said to be behind; one of them is a word."""

_PRINTABLE_ASCII = "".join(map(chr, range(0x20, 0x7F)))

_log = structlog.get_logger("headway.gateway.generation")

_REFUSAL_CODES = {
    REJECT_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    REJECT_OUT_OF_RANGE: grpc.StatusCode.OUT_OF_RANGE,
    REJECT_ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    REJECT_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    REJECT_UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    REJECT_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}


class GenerationParts(NamedTuple):
    """The shared parts of a gateway process."""

    client: SchedulerClient
    text_model: TextModel
    pace: WritePace
    statistics: GatewayStatistics
    slow_client_s: float


async def at_once() -> None:
    """Wait for nothing."""


class OpenCall(NamedTuple):
    """One Generate call. ``write`` sends an event; ``once_checked`` is awaited before anything runs."""

    context: CallContext
    write: Callable[[api.GenerateResponse], Awaitable[None]]
    trace: RequestTrace
    arrived_at: float
    once_checked: Callable[[], Awaitable[object]] = at_once


class Prompt(NamedTuple):
    """A tokenised prompt. ``text`` is for a client that wants it."""

    token_ids: list[int]
    text: str


class Generation:
    """One request's continuations and their events."""

    def __init__(
        self,
        parts: GenerationParts,
        call: OpenCall,
        request: CheckedRequest,
        *,
        prompt: Prompt,
        max_tokens: int,
        end_ids: frozenset[int],
        beginning: Beginning,
    ) -> None:
        """``end_ids`` end an output."""
        self._client = parts.client
        self._text_model = parts.text_model
        self._pace = parts.pace
        self._statistics = parts.statistics
        self._slow_client_s = parts.slow_client_s
        self._call = call
        self._send = call.write
        self._arrived_at = call.arrived_at
        self._request = request
        self._num_prompt_tokens = len(prompt.token_ids)
        self._prompt_column = encode_column(prompt.token_ids)
        # The answer of a chat begins a text of its own.
        self._goes_on_behind = () if request.request.HasField("chat") else tuple(prompt.token_ids[-_MOST_BEHIND:])
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._beginning = beginning
        self._wakeup = Wakeup()
        self._sequences = [self._sequence(index) for index in range(request.num_continuations)]
        self._continuations: list[Continuation] = []
        self._prompt: PromptEvents | None = None
        wants_logprobs = request.sampling.prompt_logprobs != NO_LOGPROBS
        if wants_logprobs or request.request.echo:
            sequence = self._sequences[0] if wants_logprobs else None
            self._prompt = PromptEvents(prompt.token_ids, prompt.text, sequence)

    async def run(self) -> None:
        """Stream until all have ended.

        Raises:
            CallRefusedError: the scheduler refused before any had begun.
        """
        try:
            self._client.submit(submitted := [one for one in self._sequences if one.end is None])
            # This comes after submitting, so that the scheduler already works.
            self._continuations += map(self._continuation, self._sequences)
            self._call.context.offer_initial_metadata(((REQUEST_ID_METADATA_KEY, in_ascii(self._request.request_id)),))
            await self._stream([one for one in self._continuations if one.sequence in submitted])
        finally:
            # However the call ended (client, deadline, error), the scheduler must stop the sequences
            # before they are dropped here. It ignores ended ones.
            self._client.abort(self._sequences)
            self._call.trace.record_outputs(self._continuations, self._num_cached_tokens)

    def cost(self) -> dict[str, float]:
        """Its tokens."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "output_tokens": sum(continuation.num_sent for continuation in self._continuations),
        }

    async def _until_begun(self, submitted: list[Continuation]) -> None:
        while True:
            for continuation in submitted:
                if continuation.refusal is not None:
                    raise refused(continuation.refusal)
            if not submitted or any(continuation.has_begun for continuation in submitted):
                return
            await self._wakeup.wait()

    async def _stream(self, submitted: list[Continuation]) -> None:
        """Those that are not ``submitted`` have ended. A client that does not read holds blocks and a row."""
        self._pace.begin()
        try:
            async with ClientPatience(self._slow_client_s) as patience:
                accepted = self._accepted()  # made while the scheduler works
                await self._until_begun(submitted)
                await self._accept(accepted, patience)
                await (self._write_best(patience) if self._request.is_choice else self._write_all(patience))
        except TimeoutError:
            if not patience.has_ended:
                raise
            raise CallRefusedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the client has read nothing for {self._slow_client_s:g} s",
                reason="slow_client",
            ) from None
        finally:
            self._pace.end()

    async def _accept(self, accepted: api.Accepted, patience: ClientPatience) -> None:
        accepted.cached_tokens = self._num_cached_tokens
        patience.begin_write()
        await self._send(api.GenerateResponse(accepted=accepted))
        _log.debug("generation accepted", prompt_tokens=self._num_prompt_tokens, tenant=self._request.request.tenant)

    async def _write_all(self, patience: ClientPatience) -> None:
        open_continuations = list(self._continuations)
        while open_continuations:
            for continuation in open_continuations:
                of_prompt, delta = self._events_of_prompt(continuation), continuation.take()
                self._abort_if_stopped(continuation)
                await self._write_of_prompt(of_prompt, patience)
                if delta is not None:
                    await self._write(continuation, delta, patience)
                if continuation.is_over:
                    await self._write(continuation, continuation.ending(), patience)
            patience.rest()
            open_continuations = [one for one in open_continuations if not one.is_over]
            if open_continuations:
                pause_s = self._pace.pause_s
                if pause_s:
                    await asyncio.sleep(pause_s)
                await self._wakeup.wait()

    async def _write_best(self, patience: ClientPatience) -> None:
        shows_logprobs = self._request.sampling.logprobs != NO_LOGPROBS
        outputs = [
            HeldOutput(one, self._request.sampling_of(one.index).seed, shows_logprobs=shows_logprobs)
            for one in self._continuations
        ]
        left = outputs
        while left:
            for output in left:
                of_prompt = self._events_of_prompt(output.continuation)
                output.hold_news()
                self._abort_if_stopped(output.continuation)
                await self._write_of_prompt(of_prompt, patience)
            patience.rest()
            left = [output for output in left if not output.continuation.is_over]
            if left:
                await self._wakeup.wait()
        for index, output in enumerate(ranked(outputs)[: self._request.num_returned]):
            for response in output.responses(index):
                await self._write(output.continuation, response, patience)

    def _events_of_prompt(self, continuation: Continuation) -> Iterator[api.GenerateResponse]:
        """They go before the first output's."""
        return iter(()) if self._prompt is None or continuation.index else self._prompt.take()

    async def _write_of_prompt(self, responses: Iterator[api.GenerateResponse], patience: ClientPatience) -> None:
        for response in responses:
            patience.begin_write()
            await self._send(response)
            await asyncio.sleep(0)  # others get their turns between

    def _abort_if_stopped(self, continuation: Continuation) -> None:
        """The scheduler does not know stop strings."""
        if continuation.is_over and continuation.sequence.end is None:
            self._client.abort((continuation.sequence,))

    async def _write(
        self, continuation: Continuation, response: api.GenerateResponse, patience: ClientPatience
    ) -> None:
        patience.begin_write()
        await self._send(response)
        if response.HasField("finished"):
            self._count_end(continuation, response.finished)
            return
        now = time.monotonic()
        if continuation.first_written_at is None:
            await asyncio.sleep(0)  # the first token leaves before the rest of the work
        gap_s = continuation.record_written(now)
        self._statistics.count_delta(len(response.delta.token_ids), gap_s, now - self._arrived_at)

    def _count_end(self, continuation: Continuation, finished: api.Finished) -> None:
        reason = continuation.reason
        self._statistics.ends[reason,] += 1
        if finished.error:
            _log.warning("generation failed", continuation=finished.index, error=finished.error)
        else:
            _log.debug(
                "generation finished",
                continuation=finished.index,
                reason=reason,
                output_tokens=finished.usage.output_tokens,
                ttft_ms=finished.timings.ttft_ms,
            )

    def _sequence(self, index: int) -> LiveSequence:
        submission = self._request.submission(
            index,
            handle=self._client.next_handle(),
            prompt=self._prompt_column,
            max_tokens=self._max_tokens,
            traceparent=self._call.trace.traceparent,
        )
        held = self._request.held_by(index)
        sequence = LiveSequence(submission, held, self._wakeup.ring)
        if held:
            sequence.end = self._end_of_held(index, held)
        return sequence

    def _new_text(self, held: Sequence[int]) -> OutputText:
        """Return an output's text, with the tokens that the client holds of it."""
        request = self._request.request
        detokenizer = self._text_model.new_detokenizer(
            keeps_special_tokens=request.keep_special_tokens, behind=self._goes_on_behind
        )
        text = OutputText(detokenizer, tuple(request.sampling.stop), self._request.sampling.min_tokens)
        if held:
            text.push(list(held))
        return text

    def _continuation(self, sequence: LiveSequence) -> Continuation:
        text = self._new_text(sequence.tokens[: sequence.num_held])
        if sequence.end is not None:
            text.finish()  # the client has that, too: it came with the last token
        continuation = Continuation(sequence, text)

        def on_news() -> None:
            continuation.record_arrival()
            if len(sequence.tokens) > sequence.num_held:
                self._beginning.has_begun()
            self._wakeup.ring()

        sequence.on_news = on_news
        return continuation

    def _end_of_held(self, index: int, held: Sequence[int]) -> Finished | None:
        """The client's own tokens may contain the end."""
        text = self._new_text(held)
        end_place = next((place for place, token_id in enumerate(held) if token_id in self._end_ids), len(held))
        num_until_end = min(text.num_tokens, end_place + 1)
        if num_until_end < len(held):
            raise held_beyond_end(index, len(held), f"the output ended after {num_until_end}")
        if end_place < len(held):
            return Finished(handle=0, reason=FINISH_STOP, num_output_tokens=len(held), stop_token_id=held[end_place])
        if text.matched_stop is not None:
            return Finished(handle=0, reason=FINISH_STOP, num_output_tokens=len(held))
        if held and len(held) == self._max_tokens:
            return Finished(handle=0, reason=FINISH_LENGTH, num_output_tokens=len(held))
        return None

    @property
    def _num_cached_tokens(self) -> int:
        cached = max([sequence.num_cached_tokens or 0 for sequence in self._sequences])
        return min(cached, self._num_prompt_tokens)

    def _accepted(self) -> api.Accepted:
        """All of it but ``cached_tokens``, which the scheduler tells."""
        return api.Accepted(
            request_id=self._request.request_id,
            prompt_tokens=self._num_prompt_tokens,
            seeds=[self._request.sampling_of(index).seed for index in range(self._request.num_continuations)],
        )


def in_ascii(request_id: str) -> str:
    """Return an id as a header can carry it."""
    if request_id.isascii() and request_id.isprintable():
        return request_id
    return quote(request_id, safe=_PRINTABLE_ASCII)


def refused(rejected: Rejected) -> CallRefusedError:
    """Return the scheduler's refusal as the call's."""
    message = rejected.message or rejected.reason
    retry_after_s = rejected.retry_after_ms / 1000 if rejected.retry_after_ms else None
    if rejected.reason == REJECT_OVERLOADED and retry_after_s is None:
        retry_after_s = RETRY_S
    return CallRefusedError(
        _REFUSAL_CODES.get(rejected.reason, grpc.StatusCode.UNAVAILABLE),
        f"{rejected.field}: {message}" if rejected.field else message,
        violations=((rejected.field, message),) if rejected.field and rejected.reason == REJECT_INVALID else (),
        retry_after_s=retry_after_s,
        reason=f"scheduler_{rejected.reason}",
    )
