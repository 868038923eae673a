"""The definition of "a backend works": scenarios that any ``ExecutorBackend`` must pass.

Owns: the public names of the suite. Must not know: any backend under test, sockets, the scheduler, pytest.

    from headway_conformance import SCENARIOS, check

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
    def test_my_backend(scenario, tmp_path): check(scenario, MyBackend, directory=tmp_path)

For an installed backend: ``python -m headway_conformance --backend NAME``.

A scenario sends ``SchedulerOutput`` messages through ``BatchState`` to the backend, several steps ahead of the results.
The suite checks each answer's form, and compares tokens with a reference: for a real model the ``torch`` backend's
eager operators in float32, one request at a time; without a model, the backend with each request alone.
"""

from headway_conformance.failures import CannotCheck, ConformanceFailure
from headway_conformance.scenario import Scenario
from headway_conformance.sizes import LARGE, SIZES, SMALL, Size
from headway_conformance.suite import SCENARIOS, Outcome, check, scenario_named

__all__ = [
    "LARGE",
    "SCENARIOS",
    "SIZES",
    "SMALL",
    "CannotCheck",
    "ConformanceFailure",
    "Outcome",
    "Scenario",
    "Size",
    "check",
    "scenario_named",
]
