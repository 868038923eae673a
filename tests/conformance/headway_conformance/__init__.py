"""What "a backend works" means: scenarios that any ``ExecutorBackend`` must pass.

Owns: the public names of the suite.
Must not know: any particular backend under test, sockets, the scheduler, pytest.

    from headway_conformance import SCENARIOS, check

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
    def test_my_backend(scenario, tmp_path):
        check(scenario, MyBackend, directory=tmp_path)

or, for a backend that is installed: ``python -m headway_conformance --backend NAME``.

A scenario is a script: it makes real ``SchedulerOutput`` messages, which pass through the executor's ``BatchState`` to
``move_blocks`` and ``execute``, on a thread of their own unless the backend executes inline, several steps ahead of what
is known of their results. What comes back is held to the shape that the protocol demands and to a reference: for a real
model the ``torch`` backend's eager operators in float32, one request at a time; for a backend without one, itself with
each request alone.
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
