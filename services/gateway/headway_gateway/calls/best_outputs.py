"""The best of several outputs: held until all have ended, then ranked."""

import math
from collections.abc import Iterable

from headway_gateway.text.continuation import Continuation
from headway_proto import generation_pb2 as api


class HeldOutput:
    """One unsent output."""

    def __init__(self, continuation: Continuation, seed: int, *, shows_logprobs: bool) -> None:
        """Without ``shows_logprobs``, log probabilities only serve the ranking."""
        self.continuation = continuation
        self._seed = seed
        self._shows_logprobs = shows_logprobs
        self._delta = api.Delta()
        self._texts: list[str] = []
        self._finished = api.Finished()

    def hold_news(self) -> None:
        """Keep what is new of the output."""
        response = self.continuation.take()
        if response is not None:
            delta = response.delta
            self._texts.append(delta.text)
            self._delta.token_ids.extend(delta.token_ids)
            if self._shows_logprobs:
                self._delta.logprobs.extend(delta.logprobs)
        if self.continuation.is_over:
            self._finished = self.continuation.ending().finished

    @property
    def mean_logprob(self) -> float:
        """Minus infinity for a failure or no tokens."""
        mean = self.continuation.mean_logprob
        is_usable = self._finished.reason in {api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH}
        return mean if is_usable and not math.isnan(mean) else -math.inf

    def responses(self, index: int) -> list[api.GenerateResponse]:
        """Return the events, as output ``index``."""
        finished = self._finished
        finished.index = self._delta.index = index
        self._delta.text = "".join(self._texts)
        finished.seed = self._seed
        if math.isfinite(self.mean_logprob):
            finished.mean_logprob = self.mean_logprob
        events = [api.GenerateResponse(delta=self._delta)] if self._delta.token_ids or self._delta.text else []
        return [*events, api.GenerateResponse(finished=finished)]


def ranked(outputs: Iterable[HeldOutput]) -> list[HeldOutput]:
    """Return the best first."""
    return sorted(outputs, key=lambda output: (-output.mean_logprob, output.continuation.index))
