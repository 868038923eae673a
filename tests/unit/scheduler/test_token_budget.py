"""What each token budget grants, step by step."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.policies.step_time import PERSISTENT_RUN, WARM_UP_STEPS, StepTimeModel
from headway_scheduler.core.policies.token_budget import (
    FIRST_STEP_TOKENS,
    LARGE_TILE_TOKENS,
    SMALL_TILE_TOKENS,
    TOKEN_BUDGETS,
    JoiningRow,
    PromptLoad,
    SloBudget,
    TailRatio,
    TokenBudget,
)
from headway_scheduler.core.state.step_shape import StepShape

OBJECTIVE_S = 0.050
PLENTY = 1_000_000


def decodes(num_rows: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows * 1000, 0)


def linear_device(shape: StepShape) -> float:
    """5 ms, and 20 us per token: 2250 tokens in 50 ms."""
    return 5e-3 + 20e-6 * shape.num_tokens


def granted(
    budget: TokenBudget,
    num_rows: int,
    *,
    objective_s: float | None = OBJECTIVE_S,
    num_left: int = PLENTY,
    is_urgent: bool = False,
    spares: bool = False,
) -> int:
    load = PromptLoad(decodes(num_rows), objective_s, 0, num_left, is_urgent)
    return max(budget.step_tokens(PLENTY, lambda: load, spares=spares) - num_rows, 0)


def admits_more(budget: TokenBudget, num_rows: int, objective_s: float | None) -> bool:
    return budget.admits_more(lambda: JoiningRow(decodes(num_rows), objective_s, num_context_tokens=1000))


def taught(max_num_batched_tokens: int = 8192, *, noise: float = 0.0) -> SloBudget:
    budget = SloBudget(max_num_batched_tokens, StepTimeModel())
    rng = np.random.default_rng(1)
    for step in range(200):
        shape = decodes(int(rng.integers(20, 100)))
        if step % 3:
            shape = shape.with_prompt(int(rng.integers(64, 2000)), 0)
        budget.observe(shape, linear_device(shape) * math.exp(rng.normal(0.0, noise)), OBJECTIVE_S)
    return budget


def test_the_budgets_by_name():
    assert sorted(TOKEN_BUDGETS) == ["fixed", "slo"]


def test_a_fixed_budget_is_what_decodes_leave():
    budget = TOKEN_BUDGETS["fixed"](2048, StepTimeModel())
    assert granted(budget, 0) == 2048
    assert granted(budget, 48) == 2000
    assert granted(budget, 48, objective_s=1e-9) == 2000
    assert granted(budget, 3000) == 0
    assert admits_more(budget, 500, 1e-9)


@pytest.mark.parametrize("name", sorted(TOKEN_BUDGETS))
def test_what_a_loss_brings_adds_a_tenth_to_a_step_that_has_no_objective(name):
    budget = TOKEN_BUDGETS[name](8192, StepTimeModel())
    assert granted(budget, 64, objective_s=None, spares=True) == FIRST_STEP_TOKENS - 64, "nothing is known yet"
    for step in range(200):
        shape = decodes(32 + step % 64)
        shape = shape.with_prompt(64 * (step % 7), 0) if step % 3 else shape
        budget.observe(shape, 0.03 + 5e-6 * shape.num_tokens, None)
    num_tokens = granted(budget, 64, objective_s=None, spares=True)
    assert num_tokens == 576, "640 tokens in all: 600 tokens more would take a tenth longer, and tiles are whole"
    assert granted(budget, 64, objective_s=None) > 4 * num_tokens
    assert granted(budget, 64, objective_s=None, num_left=40, spares=True) >= 40


@pytest.mark.parametrize("name", sorted(TOKEN_BUDGETS))
def test_every_budget_lets_the_model_learn(name):
    model = StepTimeModel()
    budget = TOKEN_BUDGETS[name](2048, model)
    for _ in range(WARM_UP_STEPS + 1):
        budget.observe(decodes(10), 0.01, None)
    assert model.predict_s(decodes(10)) == pytest.approx(0.01)


def test_without_an_objective_it_is_a_fixed_budget():
    for budget in (SloBudget(2048, StepTimeModel()), taught(2048)):
        assert granted(budget, 48, objective_s=None) == 2000
        assert granted(budget, 48, objective_s=None, num_left=7) == 2000
        assert admits_more(budget, 500, None)


def test_a_step_is_at_most_twice_as_large_as_one_that_was_seen_to_work():
    budget = SloBudget(8192, StepTimeModel())
    totals = []
    for _ in range(12):
        total = 10 + granted(budget, 10)
        totals.append(total)
        shape = decodes(10).with_prompt(total - 10, 0)
        budget.observe(shape, linear_device(shape), OBJECTIVE_S)
    assert totals[: WARM_UP_STEPS + 2] == [FIRST_STEP_TOKENS] * (WARM_UP_STEPS + 1) + [2 * FIRST_STEP_TOKENS]
    assert all(later <= 2 * earlier for earlier, later in pairwise(totals))
    assert 2000 < totals[-1] <= 2250


def test_a_step_that_missed_its_objective_is_nothing_to_grow_from():
    budget = SloBudget(8192, StepTimeModel())
    for _ in range(20):
        budget.observe(decodes(10).with_prompt(1000, 0), 2 * OBJECTIVE_S, OBJECTIVE_S)
    assert granted(budget, 10, objective_s=1.0) == FIRST_STEP_TOKENS - 10


def test_the_largest_number_of_tiles_that_keeps_the_objective():
    budget = taught()
    for num_rows in (1, 37, 64, 100):
        total = num_rows + granted(budget, num_rows)
        assert total % LARGE_TILE_TOKENS == 0
        assert linear_device(StepShape(total)) <= OBJECTIVE_S
        assert linear_device(StepShape(total)) >= 0.93 * OBJECTIVE_S


def test_the_operator_s_limit_holds_as_well():
    assert granted(taught(1024), 24) == 1000
    assert granted(taught(1000), 24) == 896 - 24  # a whole number of tiles
    assert granted(taught(255), 24) == 192 - 24  # of smaller ones in a small step


def test_what_is_left_of_prompts_is_taken_whole_if_it_fits():
    budget = taught()
    for num_left in (1, 63, 65, 1000, 1937):
        assert granted(budget, 40, num_left=num_left) == num_left
    assert granted(budget, 40, num_left=2500) < 2500


def test_a_noisy_device_gets_a_margin_that_urgency_may_spend():
    quiet, noisy = taught(), taught(noise=0.08)
    assert granted(noisy, 40) < 0.93 * granted(quiet, 40)
    assert granted(noisy, 40) < granted(noisy, 40, is_urgent=True) <= 2250


def test_prompts_never_starve():
    budget = taught()
    assert granted(budget, 40, objective_s=1e-3) == SMALL_TILE_TOKENS
    assert granted(budget, 40, objective_s=1e-3, num_left=5) == 5
    # The decodes alone take longer than they may.
    assert granted(budget, 3000) == SMALL_TILE_TOKENS
    assert granted(budget, 8190) == 2
    assert granted(budget, 9000) == 0


TAUGHT_MODEL = taught()._step_time


@pytest.mark.parametrize("is_taught", [False, True])
@given(
    num_rows=st.integers(0, 5000),
    num_left=st.integers(0, 10_000),
    objective_s=st.none() | st.floats(1e-6, 10.0),
    limit=st.integers(1, 5000),
    is_urgent=st.booleans(),
)
def test_a_grant_is_within_the_limit_and_never_nothing_while_there_is_room(
    is_taught, num_rows, num_left, objective_s, limit, is_urgent
):
    budget = SloBudget(limit, TAUGHT_MODEL if is_taught else StepTimeModel())
    grant = granted(budget, num_rows, objective_s=objective_s, num_left=num_left, is_urgent=is_urgent)
    room = max(limit - num_rows, 0)
    assert min(num_left, room, SMALL_TILE_TOKENS) <= grant <= room


def test_rows_join_until_decodes_and_the_least_chunk_fill_the_objective():
    budget = taught()
    assert admits_more(budget, 1000, OBJECTIVE_S)
    assert not admits_more(budget, 2200, OBJECTIVE_S)
    # Alone it may always run, and nothing is refused before anything is known.
    assert admits_more(budget, 0, 1e-6)
    assert admits_more(SloBudget(8192, StepTimeModel()), 2200, 1e-6)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.inf, math.nan, 1e-300, 1e300])
def test_what_is_no_duration_changes_nothing(duration_s):
    budget = taught()
    before = granted(budget, 40)
    budget.observe(decodes(40).with_prompt(5000, 0), duration_s, OBJECTIVE_S)
    assert granted(budget, 40) == before


@pytest.mark.parametrize("deviation", [0.01, 0.03, 0.08])
def test_one_step_in_a_hundred_is_beyond_the_tail(deviation):
    rng = np.random.default_rng(2)
    tail, num_beyond = TailRatio(), 0
    ratios = np.exp(rng.normal(0.0, deviation, 6000)).tolist()
    for ratio in ratios:
        num_beyond += ratio > tail.value
        tail.observe(ratio)
    assert 0.005 < num_beyond / len(ratios) < 0.015
    assert tail.value == pytest.approx(float(np.quantile(ratios, 0.99)), abs=1.5 * deviation)


def test_the_tail_follows_a_model_that_is_wrong():
    tail = TailRatio()
    for _ in range(60):
        tail.observe(1.2)
    assert tail.value > 1.19


def test_an_outlier_moves_the_tail_by_one_correction():
    tail = TailRatio()
    for _ in range(200):
        tail.observe(1.0)
    before = tail.value
    tail.observe(100.0)
    assert tail.value < before + 0.02


def test_the_tail_forgets_a_run_that_has_another_explanation():
    tail = TailRatio()
    for _ in range(100):
        tail.observe(1.0)
    before = tail.value
    for _ in range(PERSISTENT_RUN):
        tail.observe(1.5)
    assert tail.value > before
    tail.forget_run()
    assert tail.value <= before
    tail.forget_run()
    assert tail.value <= before
