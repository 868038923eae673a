"""When work stands still."""

from headway_gateway.operators.health import ProgressWatch


def test_idle_is_never_stalled():
    watch = ProgressWatch(stall_s=2.0)
    assert not any(watch.is_stalled(num_steps=5, num_unfinished=0, now=float(now)) for now in range(100))


def test_pending_work_without_steps_is_stalled_until_a_step_is_made():
    watch = ProgressWatch(stall_s=2.0)
    assert not watch.is_stalled(num_steps=5, num_unfinished=0, now=10.0)
    assert not watch.is_stalled(num_steps=5, num_unfinished=1, now=12.0)
    assert watch.is_stalled(num_steps=5, num_unfinished=1, now=12.1)
    assert not watch.is_stalled(num_steps=6, num_unfinished=1, now=12.2)
    assert watch.is_stalled(num_steps=6, num_unfinished=1, now=14.3)
    assert not watch.is_stalled(num_steps=6, num_unfinished=0, now=14.4)


def test_a_restarted_scheduler_counts_as_progress():
    watch = ProgressWatch(stall_s=2.0)
    watch.is_stalled(num_steps=500, num_unfinished=1, now=0.0)
    assert not watch.is_stalled(num_steps=0, num_unfinished=1, now=5.0)
