"""Finds the request that brings the executor down, without failing the requests beside it.

Owns: suspects, guilt, the pause after a failed step. Must not know: rows, frames, the clock.

Any request of a lost step may be the cause, or none, so all run again. A request lost ``LOSSES_BEFORE_TRIAL`` times
without progress is a *suspect*: it runs alone, the newest first. The tokens that the lost steps would have brought
acquit it; the ``MAX_LOSSES``th loss, alone, makes it guilty. So a bad request costs at most ``MAX_LOSSES`` executors. A
request that makes progress before each loss is never guilty.
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
    num_losses: int
    num_tokens: int


class Brake:
    """Counts losses and ends, in all cells. ``num_trial_tokens``: a suspect is acquitted after so many more tokens."""

    def __init__(self, num_trial_tokens: int) -> None:
        self._num_trial_tokens = num_trial_tokens
        self._suspicions: dict[Name, _Suspicion] = {}
        self._suspects: dict[Name, None] = {}

    @property
    def suspects(self) -> list[Name]:
        """In the order in which they run."""
        return list(reversed(self._suspects))

    @property
    def has_suspects(self) -> bool:
        """Whether a sequence must run alone."""
        return bool(self._suspects)

    def num_losses_of(self, name: Name) -> int:
        """Return the losses in a row."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_losses

    def count_loss(self, in_flight: list[tuple[Name, int]]) -> Name | None:
        """Count the loss of these (sequence, known tokens). Return the guilty one."""
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
        """Return the tokens, prompt and output, that acquit."""
        suspicion = self._suspicions.get(name)
        return 0 if suspicion is None else suspicion.num_tokens + self._num_trial_tokens

    def is_acquitted(self, name: Name, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens acquit; then forget it."""
        if num_tokens < self.num_tokens_wanted(name):
            return False
        self.forget(name)
        return True

    def forget(self, name: Name) -> None:
        """Remove a sequence."""
        self._suspicions.pop(name, None)
        self._suspects.pop(name, None)


class FailurePause:
    """The pause of one executor after steps that it could not run."""

    def __init__(self) -> None:
        self._num_failures = 0

    def count_answer(self) -> None:
        """End the row of failures."""
        self._num_failures = 0

    def count_failure(self) -> float:
        """A step failed. Return the pause in seconds: none at first, so that only a backend that keeps failing waits."""
        self._num_failures += 1
        if self._num_failures == 1:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 2, _MAX_DOUBLINGS), LONGEST_PAUSE_S)
