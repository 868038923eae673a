"""A step while it is put together."""

import numpy as np

from headway_scheduler.core.state.step_plan import StepPlan


def test_a_row_that_is_preempted_leaves_no_trace_in_the_message() -> None:
    plan = StepPlan(budget=8, now=0.0)
    plan.exceptions = [(1, 0), (2, 0)]
    plan.held_back = [1, 3]
    plan.add_blocks(np.array([1, 3]), np.array([10, 11]))
    plan.drop_row(1)
    assert plan.exceptions == [(2, 0)]
    assert plan.held_back == [3]
    assert plan.new_blocks() == np.array([3, 11], dtype=np.int32).tobytes()
