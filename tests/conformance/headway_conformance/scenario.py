"""One scenario: a name, what it proves, and the script.

Owns: the shape of a scenario. Must not know: any one of them, or how backends are opened.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headway_conformance.checkpoints import LLAMA
from headway_conformance.stage import Stage


@dataclass(frozen=True)
class Scenario:
    """``run`` raises ``ConformanceFailure`` where the backend on its stage does not conform.

    ``proves`` is one sentence. ``family`` names the model that the backend is opened with.
    """

    name: str
    proves: str
    run: Callable[[Stage], None]
    family: str = LLAMA

    def __str__(self) -> str:
        return self.name


def scenario(run: Callable[[Stage], None]) -> Scenario:
    """A function as a scenario of its name; its docstring tells what it proves."""
    proves = " ".join((run.__doc__ or "").split())
    return Scenario(name=run.__name__, proves=proves, run=run)
