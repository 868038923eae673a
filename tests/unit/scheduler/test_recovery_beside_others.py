"""Requests whose executor was lost are computed again beside rows that lost nothing: these hardly notice."""

import pytest

from core_driver import CoreDriver
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_shape import StepShape

STEP_S, TOKEN_S = 30e-3, 5e-6
NUM_LOST, PROMPT = 12, 200


def taught(budget: str) -> CoreDriver:
    """A core that knows that a step takes 30 ms, and 5 us per token."""
    capacity = ExecutorCapacity(num_blocks=2000, block_size=16, max_model_len=2048, vocab_size=2, max_num_rows=64)
    run = CoreDriver(SchedulerLimits(budget=budget, enable_prefix_caching=False), capacity)
    for number in range(60):
        shape = StepShape(1 + number % 32, 1 + number % 32, 0, 0)
        shape = shape if number % 3 else shape.with_prompt(64 * (1 + number % 20), 0)
        run.core.step_times.observe(shape, STEP_S + TOKEN_S * shape.num_tokens)
    return run


def step(run: CoreDriver) -> dict[int, int]:
    """Run a step for as long as it takes; return its tokens by request."""
    ran = run.schedule()
    assert ran is not None
    run.now += STEP_S + TOKEN_S * sum(ran.values())
    run.update()
    return ran


def lost(budget: str) -> list[Request]:
    """Requests that have run elsewhere; they have handles from 100 on."""
    run = taught(budget)
    for handle in range(100, 100 + NUM_LOST):
        run.add(handle, PROMPT, 100)
    for _ in range(3):
        step(run)
    return run.core.release_all()


@pytest.mark.parametrize("budget", sorted(TOKEN_BUDGETS))
def test_a_step_takes_a_tenth_longer_at_most_until_all_are_computed_again(budget: str) -> None:
    run = taught(budget)
    for handle in range(16):
        run.add(handle, 1, 400)
    alone = sum(step(run).values())
    for request in lost(budget):
        run.core.moving.adopt(request)
        run.num_output_tokens[request.new.origin.handle] = len(request.token_ids) - PROMPT
    limit_s = 1.1 * (STEP_S + TOKEN_S * (alone + NUM_LOST))
    num_recovered = 0
    while num_recovered < NUM_LOST * PROMPT:
        ran = step(run)
        assert all(ran[handle] == 1 for handle in range(16)), "no decode is left out"
        assert STEP_S + TOKEN_S * sum(ran.values()) <= limit_s
        num_recovered += sum(tokens for handle, tokens in ran.items() if handle >= 100 and tokens > 1)
    run.add(50, 1500, 10)
    assert step(run)[50] == 1500, "then a step is what the operator allows"


@pytest.mark.parametrize("budget", sorted(TOKEN_BUDGETS))
def test_without_others_to_spare_they_run_as_prompts_do(budget: str) -> None:
    run = taught(budget)
    for request in lost(budget):
        run.core.moving.adopt(request)
        run.num_output_tokens[request.new.origin.handle] = len(request.token_ids) - PROMPT
    assert sum(step(run).values()) == 2048
    assert sum(step(run).values()) > NUM_LOST * PROMPT - 2048
