"""Finds the request that brings the executor down, without failing the requests beside it.

Owns: suspects, guilt, the pause after a failed step. Must not know: rows, frames, the clock.

Any request of a lost step may be the cause, or none, so all run again. A request lost ``LOSSES_BEFORE_TRIAL`` times
without progress is a *suspect*: it runs alone, the newest first. The tokens that the lost steps would have brought
acquit it. An executor may also be lost for another reason, while some suspect happens to run. So who was lost alone waits
until all other suspects have run, and is guilty if it is lost alone ``LOSSES_ALONE`` times. A bad request costs four
executors, or ``LEAST_LOSSES`` if nothing ever ran beside it. A request that makes progress before each loss is never
guilty.

A gateway that loses its link submits all its requests again. So what is known of a request is kept by its name: a suspect
waits *aside* until it comes back, and the guilty one is told its verdict again, which the lost link may have swallowed.
"""

from typing import NamedTuple

from headway_scheduler.cells.live_sequences import Name

LOSSES_BEFORE_TRIAL = 2
LOSSES_ALONE = 2
LEAST_LOSSES = 3
MAX_SUSPICIONS = 1 << 16
MAX_VERDICTS = 1 << 10
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_MAX_DOUBLINGS = 16


class Suspicion(NamedTuple):
    """Losses of a sequence in a row, how many of them with nothing beside it, and its tokens at the last."""

    num_losses: int
    num_alone: int
    num_tokens: int


_NOTHING = Suspicion(0, 0, 0)


class Brake:
    """Counts losses and ends, in all cells. ``num_trial_tokens``: a suspect is acquitted after so many more tokens."""

    def __init__(self, num_trial_tokens: int) -> None:
        self._num_trial_tokens = num_trial_tokens
        self._suspicions: dict[Name, Suspicion] = {}
        self._suspects: dict[Name, None] = {}
        self._verdicts: dict[Name, str] = {}

    @property
    def suspects(self) -> list[Name]:
        """In the order in which they run: the newest first, those that were lost alone behind the others."""
        newest_first = list(reversed(self._suspects))
        newest_first.sort(key=lambda name: self._suspicions[name].num_alone)
        return newest_first

    @property
    def has_suspects(self) -> bool:
        """Whether a sequence must run alone."""
        return bool(self._suspects)

    def suspicion_of(self, name: Name) -> Suspicion:
        """Return what speaks against it."""
        return self._suspicions.get(name, _NOTHING)

    def count_loss(self, in_flight: list[tuple[Name, int]], *, is_alone: bool) -> Name | None:
        """Count the loss of these (sequence, known tokens). Return the guilty one.

        ``is_alone``: there is one, and nothing else was in these steps, such as a request that was cancelled since.
        """
        for name, num_tokens in in_flight:
            before = self._suspicions.pop(name, _NOTHING)
            if num_tokens - before.num_tokens >= self._num_trial_tokens:
                before = _NOTHING
            found = Suspicion(before.num_losses + 1, before.num_alone + is_alone, num_tokens)
            self._suspicions[name] = found
            self._suspects.pop(name, None)
            if found.num_losses >= LOSSES_BEFORE_TRIAL:
                self._suspects[name] = None
        while len(self._suspicions) > MAX_SUSPICIONS:
            self.forget(next(iter(self._suspicions)))
        if not is_alone or not in_flight:
            return None
        name = in_flight[0][0]
        found = self.suspicion_of(name)
        return name if found.num_losses >= LEAST_LOSSES and found.num_alone >= LOSSES_ALONE else None

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

    def set_aside(self, name: Name) -> None:
        """A suspect is not here: others need not wait for its trial."""
        self._suspects.pop(name, None)

    def submitted(self, name: Name, *, has_run: bool) -> str | None:
        """A sequence comes. ``has_run``: again, from an earlier link. Return the verdict on it, if there is one."""
        if not has_run:
            self._verdicts.pop(name, None)  # another request of this name
        elif self.suspicion_of(name).num_losses >= LOSSES_BEFORE_TRIAL:
            self._suspects[name] = None
        return self._verdicts.get(name)

    def convict(self, name: Name, verdict: str) -> None:
        """Remove a guilty sequence, and keep the verdict."""
        self.forget(name)
        self._verdicts[name] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def forget(self, name: Name) -> None:
        """Remove a sequence that is acquitted, or has ended."""
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
