"""Finds the request that brings the executor down, without failing the requests that ran beside it.

Owns: which requests were in lost steps, which has to run alone because of it, and which is found guilty; the pause after a
step that failed. Must not know: rows, frames, the clock, or why an executor was lost.

When an executor is lost, or a step fails, any request of the steps in flight may be to blame, or none: perhaps somebody
pulled a plug. So everything is tried again first. A request that is lost ``LOSSES_BEFORE_TRIAL`` times without progress in
between is a *suspect* and runs alone: one suspect at a time, the newest first. The requests of a first loss start again a
few at a time (``core.start_window``), so that few become suspects. A suspect that gets the tokens that the lost steps would
have brought is acquitted. A request that is lost for the ``MAX_LOSSES``th time, and alone, is guilty. So one bad request
costs at most ``MAX_LOSSES`` executors, and the others a pause.

A request that gets further before each loss is never found guilty: it made progress each time.
"""

from typing import NamedTuple

from headway_scheduler.live_sequences import Name

LOSSES_BEFORE_TRIAL = 2
MAX_LOSSES = 3
MAX_SUSPICIONS = 1 << 16
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_MAX_DOUBLINGS = 16


class _Suspicion(NamedTuple):
    """``num_losses`` in a row, the last with ``num_tokens`` tokens known."""

    num_losses: int
    num_tokens: int


class Brake:
    """Counts losses, answers and ends; says which request has to run alone.

    A suspect is acquitted after ``num_trial_tokens`` more tokens: as many as steps can be in flight.
    """

    def __init__(self, num_trial_tokens: int) -> None:
        self._num_trial_tokens = num_trial_tokens
        self._suspicions: dict[Name, _Suspicion] = {}
        self._suspects: dict[Name, None] = {}
        self._num_failures = 0

    @property
    def suspects(self) -> list[Name]:
        """The sequences that have to run alone, one after the other, in this order."""
        return list(reversed(self._suspects))

    @property
    def has_suspects(self) -> bool:
        """Whether a sequence has to run alone."""
        return bool(self._suspects)

    def num_losses_of(self, name: Name) -> int:
        """How often in a row it was lost."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_losses

    def count_loss(self, in_flight: list[tuple[Name, int]]) -> Name | None:
        """Steps were lost; ``in_flight`` are the sequences in them, each with its known tokens. Return the guilty one."""
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
        """The tokens, prompt and output, that acquit a suspect: as many as the lost steps would have brought."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_tokens + self._num_trial_tokens

    def is_acquitted(self, name: Name, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens acquit a suspect; if so it is forgotten."""
        if num_tokens < self.num_tokens_wanted(name):
            return False
        self.forget(name)
        return True

    def forget(self, name: Name) -> None:
        """Remove a sequence that has ended or is no suspect any more."""
        self._suspicions.pop(name, None)
        self._suspects.pop(name, None)

    def count_answer(self) -> None:
        """A step was answered."""
        self._num_failures = 0

    def pause_s(self) -> float:
        """The pause after one more step that failed; none after the first failure since an answer.

        Without it, a backend that always fails would be called as fast as it can fail.
        """
        self._num_failures += 1
        if self._num_failures == 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 2, _MAX_DOUBLINGS), LONGEST_PAUSE_S)
