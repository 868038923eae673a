"""``max_decode_only_steps``: how long steps may only decode while a prompt waits."""

import numpy as np
import pytest

from core_driver import CoreDriver
from headway_scheduler.core.state.counters import Preemption, PreemptionMode, PreemptionReason
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.step_shape import StepShape

PREEMPTED_FOR_IT = Preemption(PreemptionMode.RECOMPUTE, PreemptionReason.LATE_FIRST_TOKEN)


def start(**limits: object) -> CoreDriver:
    capacity = ExecutorCapacity(num_blocks=200, block_size=16, max_model_len=256, vocab_size=2, max_num_rows=32)
    return CoreDriver(SchedulerLimits(**limits), capacity)


def steps_before(run: CoreDriver, handle: int, most: int = 40) -> int:
    """How many steps run before this request starts."""
    for number in range(most):
        if handle in run.next_steps(1)[0]:
            return number
    return most


@pytest.mark.parametrize(("cap", "num_steps"), [(0, 40), (1, 1), (5, 5)])
def test_a_request_of_a_lower_class_makes_way_once_so_many_steps_have_only_decoded(cap: int, num_steps: int):
    run = start(max_num_seqs=2, max_decode_only_steps=cap)
    run.add(0, 4, 200, priority=3)
    run.add(1, 4, 200, priority=4)
    run.next_steps(1)
    run.add(2, 4, 100, priority=3)
    assert steps_before(run, 2) == num_steps
    assert run.core.counters.preemptions[PREEMPTED_FOR_IT] == (cap > 0)
    assert 0 in run.running


def test_nobody_makes_way_for_the_own_class():
    run = start(max_num_seqs=1, max_decode_only_steps=3)
    run.add(0, 4, 30)
    run.add(1, 4, 5)
    assert steps_before(run, 1) == 30
    assert run.core.counters.num_preemptions == 0


def test_steps_count_only_while_a_prompt_waits():
    run = start(max_num_seqs=2, max_decode_only_steps=5)
    run.add(0, 4, 200, priority=3)
    run.add(1, 4, 200, priority=4)
    run.next_steps(20)
    run.add(2, 4, 100, priority=3)
    assert steps_before(run, 2) == 5


@pytest.mark.parametrize(("cap", "num_steps"), [(0, 40), (4, 4)])
def test_an_objective_on_gaps_keeps_prompts_out_for_no_longer(cap: int, num_steps: int):
    run = start(budget="slo", max_decode_only_steps=cap)
    rng = np.random.default_rng(1)
    for number in range(100):
        shape = StepShape(1 + number % 32, 1 + number % 32, int(rng.integers(0, 500)), 0)
        shape = shape if number % 3 else shape.with_prompt(64 + number, 0)
        run.core.step_times.observe(shape, 10e-3 + 1e-3 * shape.num_tokens)
    run.add(0, 4, 200, itl_slo_ms=40)  # a step with the least allotment of 64 prompt tokens takes longer
    run.next_steps(1)
    run.add(1, 4, 5)
    run.add(2, 4, 5)
    assert steps_before(run, 1) == num_steps
    assert steps_before(run, 2) == num_steps  # one at a time


def test_a_pause_and_a_closed_batch_are_respected():
    run = start(max_num_seqs=4, max_decode_only_steps=2)
    run.add(0, 4, 200)
    run.next_steps(1)
    run.core.paused = True
    run.add(1, 4, 5)
    assert steps_before(run, 1, most=10) == 10
    run.core.paused = False
    assert steps_before(run, 1) == 0
    run = start(batching="static", max_decode_only_steps=2)
    run.add(0, 4, 20)
    run.next_steps(2)
    run.add(1, 4, 5)
    assert steps_before(run, 1) == 18
