"""One continuation of a prompt on its way to the client: tokens in, deltas of text and tokens out.

Owns: how far a client has been told, the text that goes with each token, where a stop string ends the output, and the
figures told at the end.
Must not know: sockets, gRPC calls, the scheduler's link.

Whatever has come since the last delta goes into the next one, however much it is. So a client slower than the model,
or a gateway short of time, means larger deltas, never a queue of them.
"""

import math
import time
from collections.abc import Iterable

from headway_gateway.detokenization import Detokenizer
from headway_gateway.ingress_link import LiveSequence
from headway_gateway.stop_strings import StopMatcher
from headway_gateway.tracing import OutputTimes
from headway_proto import generation_pb2 as api
from headway_proto.ingress import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Finished,
    Rejected,
    TokenLogprobs,
)

_REASON_PREFIX = "FINISH_REASON_"
_REASONS = {
    FINISH_STOP: api.FINISH_REASON_STOP,
    FINISH_LENGTH: api.FINISH_REASON_LENGTH,
    FINISH_ABORT: api.FINISH_REASON_ABORT,
    FINISH_ERROR: api.FINISH_REASON_ERROR,
}


class OutputText:
    """Text of one output: detokenised, cut at a stop string, nothing let out that might still be taken back.

    Stop strings are looked for behind the first ``min_tokens`` tokens. ``num_tokens`` counts the tokens taken in, up
    to the one that completed a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the output."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: list[int]) -> str:
        """Take in tokens up to one that completes a stop string; return the text let out."""
        matcher = self._matcher
        if matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        texts = []
        for token_id in token_ids:  # One by one, to know which token completed a stop string.
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            texts.append(text if self.num_tokens <= self._min_tokens else matcher.push(text))
            if matcher.matched is not None:
                break
        return "".join(texts)

    def finish(self) -> str:
        """Return the text held back, now that no more tokens come. It too may complete a stop string."""
        text = self._detokenizer.finish()
        matcher = self._matcher
        if matcher is None or matcher.matched is not None:
            return text if matcher is None else ""
        return matcher.push(text) + matcher.finish()


class Continuation:
    """Continuation ``index`` of a request."""

    def __init__(self, *, index: int, sequence: LiveSequence, text: OutputText, num_prompt_tokens: int) -> None:
        """``text`` has been given the tokens that ``sequence`` held at submission."""
        self.index = index
        self.sequence = sequence
        self.is_over = False
        self.reason = ""
        """Why it is over, in a word."""
        self._written_at: float | None = None
        self._first_written_at: float | None = None
        self._ended_at: float | None = None
        self._text = text
        self._num_prompt_tokens = num_prompt_tokens
        self.num_told = sequence.num_held
        """Tokens of the output that the client has, those that it held included."""
        self._submitted_at = time.monotonic()
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = self._submitted_at

    @property
    def has_begun(self) -> bool:
        """Whether the scheduler has taken it, or it has ended otherwise than by refusal."""
        return self.sequence.has_run or isinstance(self.sequence.end, Finished)

    @property
    def refusal(self) -> Rejected | None:
        """The scheduler's refusal, if that is how it ended."""
        end = self.sequence.end
        return end if isinstance(end, Rejected) else None

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens told, where they have any; NaN without tokens."""
        values = [entry.logprob for entry in self.sequence.logprobs[: self.num_told - self.sequence.num_held]]
        return sum(values) / len(values) if values else math.nan

    def note_arrival(self) -> None:
        """Remember when its news came; to be called as they come."""
        now = time.monotonic()
        if self._admitted_at is None:
            self._admitted_at = now
        if len(self.sequence.tokens) > self.sequence.num_held:
            if self._first_token_at is None:
                self._first_token_at = now
            self._last_token_at = now

    def take(self) -> list[api.GenerateResponse]:
        """What the client must be told now: at most one delta, and the end. ``is_over`` is set with the end."""
        responses: list[api.GenerateResponse] = []
        if self.is_over:
            return responses
        sequence = self.sequence
        first = self.num_told
        token_ids = sequence.tokens[first:]
        text = self._text.push(token_ids) if token_ids else ""
        stop = self._text.matched_stop
        if stop is not None:
            del token_ids[self._text.num_tokens - first :]
        elif sequence.end is not None:
            text += self._text.finish()
            stop = self._text.matched_stop
        self.num_told = first + len(token_ids)
        if token_ids or text:
            delta = api.Delta(index=self.index, text=text, token_ids=token_ids, first_token_index=first)
            if sequence.logprobs:
                delta.logprobs.extend(self._logprobs(first, self.num_told))
            responses.append(api.GenerateResponse(delta=delta))
        if stop is not None or sequence.end is not None:
            self.is_over = True
            self._ended_at = self._last_token_at if stop is not None else time.monotonic()
            finished = self._finished(stop)
            self.reason = api.FinishReason.Name(finished.reason).removeprefix(_REASON_PREFIX).lower()
            responses.append(api.GenerateResponse(finished=finished))
        return responses

    def note_written(self, now: float) -> float | None:
        """A delta has been written; returns the seconds since the one before, None for the first."""
        before, self._written_at = self._written_at, now
        if before is None:
            self._first_written_at = now
            return None
        return now - before

    def times(self) -> OutputTimes:
        """How it went, for its trace: by the scheduler's own figures where it told them."""
        end, timings = self.sequence.end, self._timings()
        told = end if isinstance(end, Finished) else None
        ended_at = time.monotonic() if self._ended_at is None else self._ended_at
        seen_ms = 0.0 if self._admitted_at is None or self.refusal else (ended_at - self._submitted_at) * 1e3
        return OutputTimes(
            continuation=self.index,
            submitted_at=self._submitted_at,
            ended_at=ended_at,
            reason=self.reason,
            num_output_tokens=self.num_told,
            first_written_at=self._first_written_at,
            queue_ms=timings.queue_ms,
            ttft_ms=timings.ttft_ms,
            total_ms=told.total_ms if told else seen_ms,
            prefill_device_ms=told.prefill_device_ms if told else 0.0,
            decode_device_ms=told.decode_device_ms if told else 0.0,
            num_preemptions=timings.preemptions,
        )

    def _logprobs(self, first: int, last: int) -> Iterable[api.TokenLogprob]:
        offset = self.sequence.num_held
        for place in range(first, last):
            entry: TokenLogprobs = self.sequence.logprobs[place - offset]
            yield api.TokenLogprob(
                token_id=self.sequence.tokens[place],
                logprob=entry.logprob,
                top=[
                    api.TopLogprob(token_id=token_id, logprob=logprob)
                    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
                ],
            )

    def _finished(self, stop: str | None) -> api.Finished:
        end = self.sequence.end
        finished = api.Finished(
            index=self.index,
            usage=api.Usage(
                prompt_tokens=self._num_prompt_tokens,
                output_tokens=self.num_told,
                cached_tokens=self.sequence.num_cached_tokens or 0,
            ),
            timings=self._timings(),
        )
        if stop is not None:
            finished.reason = api.FINISH_REASON_STOP
            finished.stop = stop
        elif isinstance(end, Finished):
            finished.reason = _REASONS.get(end.reason, api.FINISH_REASON_ERROR)
            finished.error = end.error
            if end.stop_token_id >= 0:
                finished.stop_token_id = end.stop_token_id
        elif end is not None:
            finished.reason = api.FINISH_REASON_ERROR
            finished.error = end.message or end.reason
        return finished

    def _timings(self) -> api.Timings:
        """The scheduler's own figures where it told them; a stop string ends the output before it could."""
        num_gaps = self.num_told - self.sequence.num_held - 1
        first = self._first_token_at if self._first_token_at is not None else self._submitted_at
        mean_itl_ms = (self._last_token_at - first) * 1000 / num_gaps if num_gaps > 0 else 0.0
        end = self.sequence.end
        if isinstance(end, Finished):
            return api.Timings(
                queue_ms=end.queue_ms, ttft_ms=end.ttft_ms, mean_itl_ms=mean_itl_ms, preemptions=end.num_preemptions
            )
        admitted = self._admitted_at if self._admitted_at is not None else self._submitted_at
        return api.Timings(
            queue_ms=(admitted - self._submitted_at) * 1000,
            ttft_ms=(first - self._submitted_at) * 1000,
            mean_itl_ms=mean_itl_ms,
        )
