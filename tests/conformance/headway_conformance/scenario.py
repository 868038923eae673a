"""One scenario: a name, the sentence that it proves, and the script."""

from collections.abc import Callable
from dataclasses import dataclass

from headway_conformance.checkpoints import LLAMA
from headway_conformance.stage import Stage


@dataclass(frozen=True)
class Scenario:
    """``run`` raises ``ConformanceFailure``. ``family`` names its model."""

    name: str
    proves: str
    run: Callable[[Stage], None]
    family: str = LLAMA

    def __str__(self) -> str:
        return self.name


def scenario(run: Callable[[Stage], None]) -> Scenario:
    """Make a scenario; the function's docstring is what it proves."""
    proves = " ".join((run.__doc__ or "").split())
    return Scenario(name=run.__name__, proves=proves, run=run)
