"""Any history under any policies, recorded and replayed: the core decides the same, to the byte.

So does a core that was restored from a checkpoint at any time: here the one that is recorded is restored again and again,
and the one that replays never is.
"""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule

from drawn_examples import FACTOR
from flight_logs import RecordedCore, RecordedExactCore
from property.test_any_history_ends_well import AnyHistory


class AnyRecordedHistory(AnyHistory):
    """The same histories; when everybody has been served, all of it is replayed."""

    core_type = RecordedExactCore

    @rule()
    def restore_from_a_checkpoint(self) -> None:
        assert isinstance(self.run.core, RecordedCore)
        self.run.core.restore()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "run"):
            assert isinstance(self.run, RecordedExactCore)
            replay = self.run.replay()
            assert replay.num_steps == self.run.core.counters.num_steps
            assert replay.core is not None
            assert replay.core.counters == self.run.core.counters


TestReplaysAreIdentical = AnyRecordedHistory.TestCase
TestReplaysAreIdentical.settings = settings(
    max_examples=25 * FACTOR,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
