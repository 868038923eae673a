"""Which request brings the executor down, found without failing those that ran beside it.

Owns: who was in the steps that were lost, who has to run alone because of it, and who is found guilty; how long to wait
after a step that failed.
Must not know: rows, frames, the clock, or why an executor was lost.

When an executor is lost, or a step fails, any request of the steps in flight may be to blame, or none: somebody may have
pulled a plug. So everything is tried again first. A request that is lost ``LOSSES_BEFORE_TRIAL`` times without having come
further in between is *suspect*, and runs alone: one suspect at a time, the newest first, and nobody else meanwhile. So that
this does not take long, those who were in lost steps once come back a few at a time (``core.start_window``). Whoever
comes as far as the lost steps would have brought it is acquitted. Whoever is lost for the ``MAX_LOSSES``th time, and alone,
is guilty. So one bad request costs ``MAX_LOSSES`` executors at most, and the others a pause.

A request that dies further on each time, by its own or by bad luck, is not found: it has always come further.
"""

from typing import NamedTuple

LOSSES_BEFORE_TRIAL = 2
MAX_LOSSES = 3
MAX_SUSPICIONS = 1 << 16
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_MAX_DOUBLINGS = 16


class Name(NamedTuple):
    """A sequence by its public name, which outlives its gateway's link."""

    request_id: str
    continuation: int


class _Suspicion(NamedTuple):
    """``num_losses`` in a row, the last with ``num_tokens`` tokens known."""

    num_losses: int
    num_tokens: int


class Brake:
    """Told of losses, answers and ends; answers who has to run alone.

    ``num_trial_tokens``: how many tokens a suspect must get to be acquitted, as many as steps can be in flight.
    """

    def __init__(self, num_trial_tokens: int) -> None:
        self._num_trial_tokens = num_trial_tokens
        self._suspicions: dict[Name, _Suspicion] = {}
        self._suspects: dict[Name, None] = {}
        self._num_failures = 0

    @property
    def suspects(self) -> list[Name]:
        """Who has to run alone, one after the other, the first in the list first."""
        return list(reversed(self._suspects))

    @property
    def has_suspects(self) -> bool:
        """Whether anybody has to run alone."""
        return bool(self._suspects)

    def num_losses_of(self, name: Name) -> int:
        """How often in a row it has been lost."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_losses

    def note_loss(self, in_flight: list[tuple[Name, int]]) -> Name | None:
        """Steps were lost; ``in_flight`` are the requests in them, each with the tokens known of it. Who is guilty of it."""
        for name, num_tokens in in_flight:
            before = self._suspicions.pop(name, None)
            has_come_further = before is not None and num_tokens - before.num_tokens >= self._num_trial_tokens
            num_losses = 1 if before is None or has_come_further else before.num_losses + 1
            self._suspicions[name] = _Suspicion(num_losses, num_tokens)
            self._suspects.pop(name, None)
            if num_losses >= LOSSES_BEFORE_TRIAL:
                self._suspects[name] = None
        while len(self._suspicions) > MAX_SUSPICIONS:
            self.forget(next(iter(self._suspicions)))
        if len(in_flight) == 1 and self.num_losses_of(in_flight[0][0]) >= MAX_LOSSES:
            guilty = in_flight[0][0]
            self.forget(guilty)
            return guilty
        return None

    def num_tokens_wanted(self, name: Name) -> int:
        """With how many tokens, prompt and output, a suspect has come as far as the lost steps would have brought it."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_tokens + self._num_trial_tokens

    def is_acquitted(self, name: Name, num_tokens: int) -> bool:
        """Whether a suspect with ``num_tokens`` tokens by now has come far enough; if so it is none any more."""
        if num_tokens < self.num_tokens_wanted(name):
            return False
        self.forget(name)
        return True

    def forget(self, name: Name) -> None:
        """It has ended, or nothing speaks against it any more."""
        self._suspicions.pop(name, None)
        self._suspects.pop(name, None)

    def note_answer(self) -> None:
        """A step was answered."""
        self._num_failures = 0

    def pause_s(self) -> float:
        """How long to send nothing after one more step that failed: not at all, unless nothing was answered since the last.

        A backend that always fails would otherwise be asked as fast as it can fail.
        """
        self._num_failures += 1
        if self._num_failures == 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 2, _MAX_DOUBLINGS), LONGEST_PAUSE_S)
