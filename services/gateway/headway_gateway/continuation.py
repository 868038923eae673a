"""One continuation on its way to the client: tokens in, deltas out. Must not know: sockets, gRPC calls, the link."""

import math
import time
from collections.abc import Iterable

from headway_gateway.detokenization import Detokenizer
from headway_gateway.live_sequence import LiveSequence
from headway_gateway.stop_strings import StopMatcher
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
    """One output's text. Stop strings count after ``min_tokens``."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The completed stop string."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token_ids: list[int]) -> str:
        """Return the certain text, up to a stop string's end."""
        matcher = self._matcher
        if matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        texts = []
        for token_id in token_ids:  # one by one, to know which token completed a stop string
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            texts.append(text if self.num_tokens <= self._min_tokens else matcher.push(text))
            if matcher.matched is not None:
                break
        return "".join(texts)

    def finish(self) -> str:
        """Return the held text, which may complete a stop string."""
        text = self._detokenizer.finish()
        matcher = self._matcher
        if matcher is None or matcher.matched is not None:
            return text if matcher is None else ""
        return matcher.push(text) + matcher.finish()


class Continuation:
    """One output of a request."""

    def __init__(self, sequence: LiveSequence, text: OutputText) -> None:
        """``text`` contains the client's tokens."""
        self.index = sequence.submission.index
        self.sequence = sequence
        self.is_over = False
        self.reason = ""
        self.num_sent = sequence.num_held
        """The client has so many output tokens."""
        self.submitted_at = time.monotonic()
        self.first_written_at: float | None = None
        self._written_at: float | None = None
        self._ended_at: float | None = None
        self._text = text
        self._admitted_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = self.submitted_at

    @property
    def has_begun(self) -> bool:
        """Whether it was accepted or ended without refusal."""
        return self.sequence.has_run or isinstance(self.sequence.end, Finished)

    @property
    def refusal(self) -> Rejected | None:
        """The scheduler's refusal, if any."""
        end = self.sequence.end
        return end if isinstance(end, Rejected) else None

    @property
    def mean_logprob(self) -> float:
        """NaN without tokens."""
        values = [entry.logprob for entry in self.sequence.logprobs[: self.num_sent - self.sequence.num_held]]
        return sum(values) / len(values) if values else math.nan

    def record_arrival(self) -> None:
        """Record the time of news."""
        now = time.monotonic()
        if self._admitted_at is None:
            self._admitted_at = now
        if len(self.sequence.tokens) > self.sequence.num_held:
            if self._first_token_at is None:
                self._first_token_at = now
            self._last_token_at = now

    def take(self) -> api.GenerateResponse | None:
        """Return what is new as one delta, if anything is. Afterwards ``is_over`` tells whether ``ending`` comes next."""
        if self.is_over:
            return None
        sequence = self.sequence
        first = self.num_sent
        token_ids = sequence.tokens[first:]
        text = self._text.push(token_ids) if token_ids else ""
        stop = self._text.matched_stop
        if stop is not None:
            del token_ids[self._text.num_tokens - first :]
        elif sequence.end is not None:
            text += self._text.finish()
            stop = self._text.matched_stop
        self.num_sent = first + len(token_ids)
        if stop is not None or sequence.end is not None:
            self.is_over = True
            self._ended_at = self._last_token_at if stop is not None else time.monotonic()
        if not token_ids and not text:
            return None
        delta = api.Delta(index=self.index, text=text, token_ids=token_ids, first_token_index=first)
        if sequence.logprobs:
            delta.logprobs.extend(self._logprobs(first, self.num_sent))
        return api.GenerateResponse(delta=delta)

    def ending(self) -> api.GenerateResponse:
        """Return the end, which follows the last delta."""
        finished = self._finished(self._text.matched_stop)
        self.reason = api.FinishReason.Name(finished.reason).removeprefix(_REASON_PREFIX).lower()
        return api.GenerateResponse(finished=finished)

    def record_written(self, now: float) -> float | None:
        """Return the seconds since the previous delta."""
        before, self._written_at = self._written_at, now
        if before is None:
            self.first_written_at = now
            return None
        return now - before

    @property
    def ended_at(self) -> float:
        """Monotonic seconds; now, if it runs."""
        return time.monotonic() if self._ended_at is None else self._ended_at

    @property
    def total_ms(self) -> float:
        """Time at the scheduler; 0 if never accepted."""
        end = self.sequence.end
        if isinstance(end, Finished):
            return end.total_ms
        return 0.0 if self._admitted_at is None or end is not None else (self.ended_at - self.submitted_at) * 1e3

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
                prompt_tokens=self.sequence.submission.num_prompt_tokens,
                output_tokens=self.num_sent,
                cached_tokens=self.sequence.num_cached_tokens or 0,
            ),
            timings=self.timings(),
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

    def timings(self) -> api.Timings:
        """After a stop string, the figures are the gateway's own."""
        num_gaps = self.num_sent - self.sequence.num_held - 1
        first = self._first_token_at if self._first_token_at is not None else self.submitted_at
        mean_itl_ms = (self._last_token_at - first) * 1000 / num_gaps if num_gaps > 0 else 0.0
        end = self.sequence.end
        if isinstance(end, Finished):
            return api.Timings(
                queue_ms=end.queue_ms, ttft_ms=end.ttft_ms, mean_itl_ms=mean_itl_ms, preemptions=end.num_preemptions
            )
        admitted = self._admitted_at if self._admitted_at is not None else self.submitted_at
        return api.Timings(
            queue_ms=(admitted - self.submitted_at) * 1000,
            ttft_ms=(first - self.submitted_at) * 1000,
            mean_itl_ms=mean_itl_ms,
        )
