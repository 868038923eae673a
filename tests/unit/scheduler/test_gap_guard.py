"""With ``protect_itl``, lower classes sit out steps that would make a higher class miss its objective on gaps."""

from itertools import pairwise

import pytest

from core_driver import CoreDriver
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.step_shape import StepShape

STEP_S, TOKEN_S = 10e-3, 1e-3
FIRST, LOW = 1, 4


def taught(aging_s: float = 1e9, **limits: object) -> CoreDriver:
    """A core that knows that steps take 10 ms and 1 ms per token."""
    capacity = ExecutorCapacity(num_blocks=200, block_size=16, max_model_len=256, vocab_size=2, max_num_rows=32)
    run = CoreDriver(SchedulerLimits(**{"protect_itl": True, "aging_s": aging_s, **limits}), capacity)
    for number in range(60):
        shape = StepShape(1 + number % 32, 1 + number % 32, 7 * number % 50, 0)
        shape = shape if number % 3 else shape.with_prompt(64 + number, 0)
        run.core.step_times.observe(shape, STEP_S + TOKEN_S * shape.num_tokens)
    return run


def decoding(run: CoreDriver, num_low: int, itl_slo_ms: int) -> None:
    """Request 0 of the highest class has the objective; 1 to ``num_low`` are of the lowest."""
    run.add(0, 1, 200, priority=FIRST, itl_slo_ms=itl_slo_ms)
    for handle in range(1, num_low + 1):
        run.add(handle, 1, 200, priority=LOW)
    step(run)


def step(run: CoreDriver) -> list[int]:
    """Run a step for as long as it takes; return its requests."""
    ran = run.schedule()
    assert ran is not None
    run.now += STEP_S + TOKEN_S * sum(ran.values())
    run.update()
    return sorted(ran)


def test_as_many_of_a_lower_class_run_as_the_objective_allows_and_each_in_its_turn():
    run = taught()
    decoding(run, num_low=10, itl_slo_ms=15)
    steps = [step(run) for _ in range(30)]
    assert all(0 in ran and 4 <= len(ran) <= 5 for ran in steps)
    for handle in range(1, 11):
        turns = [number for number, ran in enumerate(steps) if handle in ran]
        assert all(after - before <= 4 for before, after in pairwise(turns))
        assert len(turns) >= 7
    assert run.core.counters.num_preemptions == 0


def test_nobody_sits_out_if_that_would_not_be_enough():
    run = taught()
    decoding(run, num_low=10, itl_slo_ms=5)
    assert all(len(step(run)) == 11 for _ in range(5))


@pytest.mark.parametrize("limits", [{"protect_itl": False}, {}])
def test_nobody_sits_out_without_the_setting_or_an_objective(limits: dict[str, object]):
    run = taught(**limits)
    decoding(run, num_low=10, itl_slo_ms=15 if limits else 0)
    assert all(len(step(run)) == 11 for _ in range(5))


def test_rows_of_the_same_class_do_not_sit_out():
    run = taught()
    run.add(0, 1, 200, priority=LOW, itl_slo_ms=15)
    for handle in range(1, 11):
        run.add(handle, 1, 200, priority=LOW)
    assert all(len(step(run)) == 11 for _ in range(5))


def test_of_a_lower_class_the_least_slack_runs_first():
    run = taught()
    run.add(0, 1, 200, priority=FIRST, itl_slo_ms=14)
    for handle in range(1, 9):
        run.add(handle, 1, 200, priority=LOW, itl_slo_ms=40 if handle == 5 else 0)
    step(run)
    steps = [step(run) for _ in range(12)]
    assert all(0 in ran and 5 in ran and len(ran) <= 4 for ran in steps)


def test_a_row_runs_once_it_had_no_token_for_the_aging_time():
    run = taught(aging_s=0.2)
    decoding(run, num_low=3, itl_slo_ms=12)  # one other row at most
    run.add(9, 1, 200, priority=LOW - 1, itl_slo_ms=30)
    step(run)
    last = dict.fromkeys(range(4), run.now)
    for _ in range(100):
        for handle in step(run):
            last[handle] = run.now
        assert all(run.now - time < 0.25 for time in last.values())


def test_a_prompt_of_a_lower_class_gets_what_fits_and_all_of_it_after_the_aging_time():
    run = taught(aging_s=0.2)
    decoding(run, num_low=0, itl_slo_ms=100)
    run.add(1, 200, 5, priority=LOW)
    assert run.schedule() == {0: 1, 1: 64}
    run.now += 75e-3
    run.update()
    run.abort(1)
    run.add(2, 20, 5, priority=FIRST)
    assert 2 in step(run)
    for request in (0, 2):
        run.abort(request)
    run.add(3, 1, 200, priority=FIRST, itl_slo_ms=20)
    step(run)
    began = run.now
    run.add(4, 100, 5, priority=LOW)
    while 4 not in step(run):
        assert run.now - began < 0.25
    assert run.now - began >= 0.2


def test_prompts_get_the_least_allotment_beside_an_objective_that_nothing_can_keep():
    """With the budget that is fixed, too: a model that has seen only full steps may be wrong about small ones."""
    run = taught()
    decoding(run, num_low=2, itl_slo_ms=5)
    run.add(5, 200, 5, priority=LOW)
    assert run.schedule() == {0: 1, 1: 1, 2: 1, 5: 64}


def test_a_batch_that_is_too_small_takes_the_least_slack_and_then_the_longest_wait():
    run = taught(batching="orca", max_num_seqs=2, max_steps_in_flight=2)
    for handle in range(4):
        run.add(handle, 1, 200, itl_slo_ms=15 if handle == 2 else 0)
    assert [run.schedule(), run.schedule()] == [{0: 1, 1: 1}, {2: 1, 3: 1}]  # both batches
    run.update()
    run.update()
    turns = [step(run) for _ in range(9)]
    assert all(2 in ran and len(ran) == 2 for ran in turns)
    others = [min(handle for handle in ran if handle != 2) for ran in turns]
    assert all(sorted(others[begin : begin + 3]) == [0, 1, 3] for begin in (0, 3, 6))
