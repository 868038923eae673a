"""One generation: its output, and the request that continues a broken stream. It does no I/O."""

import time
from collections.abc import Iterable

import grpc

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
from headway.client.errors import (
    AlreadyExistsError,
    DeadlineError,
    OverloadedError,
    ServerError,
    StreamCancelledError,
    UnavailableError,
    error_of,
)
from headway_proto import generation_pb2

_FIRST_RESUME_DELAY_S = 0.1
_LONGEST_RESUME_DELAY_S = 2.0
_MOST_DOUBLINGS = 16

_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


class Patience:
    """How long a client retries."""

    def __init__(self, retry_s: float) -> None:
        if not retry_s >= 0:
            raise ValueError(f"retry_s: {retry_s} is not allowed; allowed: 0 or more seconds")
        self.retry_s = retry_s
        self.has_heard = False


class Generation:
    """The state of one generation."""

    def __init__(self, request: generation_pb2.GenerateRequest, timeout_s: float | None, patience: Patience) -> None:
        self._request = request
        self._patience = patience
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_continuations = request.sampling.n if request.sampling.HasField("n") else 1
        self.prompt = PromptTokens()
        self._accepted: generation_pb2.Accepted | None = None
        self._num_failures = 0
        """Failures since the last output; the first of them was at ``_failing_since``."""
        self._failing_since = 0.0
        self._completions = [Completion(index) for index in range(max(1, self._num_continuations))]
        self.is_cancelled = False

    @property
    def request_id(self) -> str:
        """Empty until known."""
        return self._accepted.request_id if self._accepted is not None else self._request.request_id

    def remaining_s(self) -> float | None:
        """Seconds left of ``timeout_s``."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def next_request(self) -> generation_pb2.GenerateRequest:
        """Return the request; after a break it continues the output."""
        if self._accepted is None:
            return self._request
        request = generation_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        resume = generation_pb2.Resume(seed=self._accepted.seeds[0])
        if request.sampling.best_of <= self._num_continuations:  # else outputs come whole
            first, *others = (completion.token_ids for completion in self._completions)
            resume.token_ids.extend(first)
            resume.others.extend(generation_pb2.TokenIds(ids=held) for held in others)
        request.resume.CopyFrom(resume)
        if request.resume.token_ids:  # the prompt came before its first token
            request.sampling.ClearField("prompt_logprobs")
            request.echo = False
        return request

    def accept(self, response: generation_pb2.GenerateResponse) -> Delta | None:
        """Process an event; return new output."""
        self._patience.has_heard = True
        event = response.WhichOneof("event")
        if event == "accepted":
            if self._accepted is None:
                self._accepted = response.accepted
        elif event == "prompt":
            self._accept_prompt(response.prompt)
        elif event == "delta":
            delta = self._accept_delta(response.delta)
            if delta is not None:
                self._num_failures = 0
            return delta
        elif event == "finished":
            self._accept_finished(response.finished)
        return None

    def delay_before_resuming(self, error: grpc.RpcError) -> float:
        """Return the wait in seconds.

        Raises:
            HeadwayError: another attempt is useless.
        """
        failure = error_of(error)
        is_gone = isinstance(failure, UnavailableError) or (
            isinstance(failure, StreamCancelledError) and not self.is_cancelled  # a server that shut down cancelled it
        )
        # After its gateway died, the old request may live on for a moment, and other clients come back too.
        is_passing = isinstance(failure, AlreadyExistsError | OverloadedError) and self._num_failures > 0
        # What has not been accepted may be refused, and that is final.
        can_go_on = self._accepted is not None or (self._patience.has_heard and (is_passing or not failure.reason))
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
        """Check after a wait.

        Raises:
            StreamCancelledError: the user cancelled it.
        """
        if self.is_cancelled:
            raise StreamCancelledError(grpc.StatusCode.CANCELLED, "the stream was cancelled")

    def result(self) -> GenerationResult:
        """Return the output of a finished stream."""
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

    def _accept_prompt(self, message: generation_pb2.Prompt) -> None:
        # A resumed stream sends the pieces from the start.
        prompt = self.prompt
        if message.first_token_index == 0:
            prompt.text, prompt.token_ids, prompt.logprobs = message.text, [], []
        prompt.token_ids += message.token_ids
        prompt.logprobs += _logprobs(message.logprobs)

    def _accept_delta(self, message: generation_pb2.Delta) -> Delta | None:
        completion = self._completions[message.index]
        # A resumed stream tells the ends again of all that had ended, and outputs again that come whole.
        if completion.finish_reason is not None or message.first_token_index < len(completion.token_ids):
            return None
        delta = Delta(
            index=message.index,
            text=message.text,
            token_ids=tuple(message.token_ids),
            first_token_index=message.first_token_index,
            logprobs=_logprobs(message.logprobs),
        )
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        completion.logprobs += delta.logprobs
        return delta

    def _accept_finished(self, message: generation_pb2.Finished) -> None:
        completion = self._completions[message.index]
        if completion.finish_reason is not None:
            return
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
