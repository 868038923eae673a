"""All scenarios, and running one against a backend.

Owns: their order, the handling of errors.
"""

import enum
from collections.abc import Callable, Mapping
from pathlib import Path

from headway_conformance.checkpoints import write_checkpoint
from headway_conformance.failures import CannotCheck, ConformanceFailure, NotApplicable
from headway_conformance.scenario import Scenario
from headway_conformance.scenarios import (
    blocks,
    chunks,
    constraints,
    epochs,
    errors,
    families,
    lifecycle,
    pooling,
    rows,
    sampling,
    speculation,
    swapping,
)
from headway_conformance.scenarios import steps_in_flight as flights
from headway_conformance.sizes import SMALL, Size
from headway_conformance.stage import Stage, Target
from headway_executor.backend import ExecutorBackend

SCENARIOS: tuple[Scenario, ...] = (
    *lifecycle.SCENARIOS,
    *chunks.SCENARIOS,
    *rows.SCENARIOS,
    *blocks.SCENARIOS,
    *swapping.SCENARIOS,
    *flights.SCENARIOS,
    *epochs.SCENARIOS,
    *sampling.SCENARIOS,
    *errors.SCENARIOS,
    *constraints.SCENARIOS,
    *speculation.SCENARIOS,
    *pooling.SCENARIOS,
    *families.SCENARIOS,
)
"""Every scenario, simple ones first."""

STEP_TIMEOUT_S = 120.0


class Outcome(enum.Enum):
    PASSED = "passed"
    NOT_APPLICABLE = "not applicable"


def check(
    scenario: Scenario,
    create_backend: Callable[[], ExecutorBackend],
    *,
    directory: Path,
    device: str = "cpu",
    dtype: str = "float32",
    options: Mapping[str, str] | None = None,
    size: Size = SMALL,
    numerics: bool | None = None,
    tolerance: float | None = None,
    timeout_s: float = STEP_TIMEOUT_S,
) -> Outcome:
    """Run one scenario on closed backends from ``create_backend``.

    ``numerics`` and ``tolerance``: see ``Target``. A step that takes ``timeout_s`` counts as never finished.

    Raises:
        ConformanceFailure: the backend does not conform; the message says how.
        CannotCheck: a package of the reference is missing, or the announced dtype has no tolerance.
    """
    target = Target(
        create_backend=create_backend,
        size=size,
        device=device,
        dtype=dtype,
        options=dict(options or {}),
        numerics=numerics,
        tolerance=tolerance,
        timeout_s=timeout_s,
    )
    model = write_checkpoint(directory, scenario.family, size)
    try:
        with Stage(target, model=model, family=scenario.family, seed=scenario.name) as stage:
            scenario.run(stage)
    except NotApplicable:
        return Outcome.NOT_APPLICABLE
    except CannotCheck:
        raise
    except ConformanceFailure as failure:
        raise ConformanceFailure(f"{scenario}: {failure}") from failure
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConformanceFailure(f"{scenario}: {type(error).__name__}: {text}") from error
    return Outcome.PASSED


def scenario_named(name: str) -> Scenario:
    return {scenario.name: scenario for scenario in SCENARIOS}[name]
