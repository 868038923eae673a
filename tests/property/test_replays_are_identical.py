"""Any history under any policies, recorded and replayed: the core decides the same, to the byte."""

from hypothesis import HealthCheck, settings

from flight_logs import RecordedExactCore
from property.test_any_history_ends_well import AnyHistory


class AnyRecordedHistory(AnyHistory):
    """The same histories; when everybody has been served, all of it is replayed."""

    core_type = RecordedExactCore

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
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
