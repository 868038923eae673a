"""For whom speculation pays: tries are bounded, success goes on, and a batch that gains nothing ends it."""

import itertools

import pytest

from headway_scheduler.core.policies.step_time import StepTimeModel
from headway_scheduler.core.state.speculation_record import LONGEST_SEARCH_PAUSE, SpeculationRecord
from headway_scheduler.core.state.step_shape import StepShape
from headway_scheduler.core.step.speculation import (
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    STEPS_BETWEEN_TRIES,
    SpeculationPolicy,
)

ONE_ROW = StepShape(1, 1, 100, 0)


def run(
    policy: SpeculationPolicy,
    record: SpeculationRecord,
    num_tokens: int,
    *,
    proposes: bool,
    right: int = 0,
    first: int = 0,
) -> int:
    """Steps that speculate among those that bring a request of ``first`` tokens ``num_tokens`` more."""
    position, num_speculating = first, 0
    for step in itertools.count():
        if position >= first + num_tokens:
            return num_speculating
        allowed = 0
        if position >= record.resumes_at:
            (allowed,) = policy.choose([(record, position)], ONE_ROW, step, None)
        accepted = min(right, allowed)
        if allowed:
            num_speculating += 1
            position += accepted
            proposed = allowed if proposes else 0
            policy.learn(
                record, position + 1, num_allowed=allowed, num_proposed=proposed, num_accepted=min(accepted, proposed)
            )
        position += 1
    raise AssertionError


def test_where_nothing_is_proposed_one_token_in_thirty_is_tried() -> None:
    record = SpeculationRecord()
    num_tries = run(SpeculationPolicy(8, StepTimeModel()), record, 1000, proposes=False)
    assert num_tries <= 1000 // LONGEST_SEARCH_PAUSE + 4
    assert not record.is_proven


def test_where_proposals_are_wrong_tries_become_rare() -> None:
    record = SpeculationRecord()
    assert run(SpeculationPolicy(8, StepTimeModel()), record, 4000, proposes=True) <= 2 * 12
    assert record.pause == LONGEST_PAUSE
    assert record.num_accepted_tokens == 0


def test_those_that_come_after_requests_without_success_try_less() -> None:
    policy = SpeculationPolicy(8, StepTimeModel())
    tries = [run(policy, SpeculationRecord(), 600, proposes=True) for _ in range(8)]
    assert tries[0] > tries[-1]
    assert tries[-1] <= 4
    run(policy, SpeculationRecord(), 50, proposes=True, right=8)
    assert run(policy, SpeculationRecord(), 600, proposes=True) == tries[0]


def test_what_is_right_goes_on_and_grows() -> None:
    record = SpeculationRecord()
    num_steps = run(SpeculationPolicy(8, StepTimeModel()), record, 900, proposes=True, right=8)
    assert num_steps <= 900 // 9 + 2
    assert record.num_wanted == 8
    assert record.is_proven


def test_what_is_partly_right_asks_for_one_token_more_than_that() -> None:
    record = SpeculationRecord()
    run(SpeculationPolicy(8, StepTimeModel()), record, 100, proposes=True, right=2)
    assert record.num_wanted == 3


def test_success_that_ends_ends_speculation_after_some_steps() -> None:
    policy, record = SpeculationPolicy(4, StepTimeModel()), SpeculationRecord()
    run(policy, record, 200, proposes=True, right=4)
    assert record.is_proven
    assert run(policy, record, 200, proposes=True, first=200) <= 16
    assert not record.is_proven


def test_many_rows_try_together_and_seldom() -> None:
    policy = SpeculationPolicy(4, StepTimeModel())
    shape = StepShape(20, 20, 2000, 0)
    candidates = [(SpeculationRecord(), 100) for _ in range(20)]
    speculating = [step for step in range(64) if any(policy.choose(candidates, shape, step, None))]
    assert speculating == list(range(0, 64, STEPS_BETWEEN_TRIES))
    candidates[3][0].is_proven = True
    assert all(policy.choose(candidates, shape, 5, None))


def learned(constant_s: float, token_s: float) -> StepTimeModel:
    """A device that takes ``constant_s`` for any step and ``token_s`` for each token."""
    model = StepTimeModel()
    for round_number in range(60):
        for num_rows, num_tokens in ((1, 1), (1, 5), (16, 16), (16, 40), (4, 4), (8, 30)):
            model.observe(
                StepShape(num_tokens, num_rows, 100 * num_rows + round_number, 0), constant_s + token_s * num_tokens
            )
    return model


def proven(mean_accepted: float, mean_proposed: float) -> SpeculationRecord:
    record = SpeculationRecord()
    record.is_proven = True
    record.mean_accepted, record.mean_proposed = mean_accepted, mean_proposed
    return record


@pytest.mark.parametrize(
    ("constant_s", "token_s", "num_rows", "num_proven", "accepted", "pays"),
    [
        (10e-3, 0.1e-3, 1, 1, 1.0, True),  # weights are read once for all tokens
        (0.1e-3, 1e-3, 1, 1, 2.0, False),  # a proposal costs as much as a token
        (0.1e-3, 1e-3, 1, 1, 3.9, False),
        (10e-3, 0.1e-3, 16, 16, 1.0, True),
        (10e-3, 1e-3, 16, 1, 2.0, False),  # the others keep the step as long as it is
    ],
)
def test_it_pays_where_steps_saved_are_more_than_time_spent(
    constant_s: float, token_s: float, num_rows: int, num_proven: int, accepted: float, pays: bool
) -> None:
    policy = SpeculationPolicy(4, learned(constant_s, token_s))
    shape = StepShape(num_rows, num_rows, 100 * num_rows, 0)
    records = [proven(accepted, 4.0) for _ in range(num_proven)]
    counts = policy.choose([(record, 100) for record in records], shape, 1, None)
    if pays:
        assert all(counts)
    else:
        assert not any(counts)
        assert records[0].resumes_at == 100 + SHORTEST_PAUSE


def test_a_step_stays_within_its_objective() -> None:
    policy = SpeculationPolicy(4, learned(10e-3, 1e-3))
    assert not any(policy.choose([(proven(4.0, 4.0), 100)], ONE_ROW, 1, 12e-3))
    assert all(policy.choose([(proven(4.0, 4.0), 100)], ONE_ROW, 1, 20e-3))


def test_what_proposals_cost_is_learned_apart_from_prompts() -> None:
    """As where a draft model takes its time: prompt tokens are cheap, proposals are not."""
    policy = SpeculationPolicy(4, learned(10e-3, 0.01e-3))
    assert all(policy.choose([(proven(1.0, 4.0), 100)], ONE_ROW, 1, None))
    for _ in range(20):
        policy.record_step(ONE_ROW, 30e-3, 4)
    assert not any(policy.choose([(proven(1.0, 4.0), 100)], ONE_ROW, 1, None))
    assert all(policy.choose([(proven(4.0, 4.0), 100)], ONE_ROW, 1, None))
    for _ in range(20):
        policy.record_step(ONE_ROW, 11e-3, 4)
        policy.record_step(ONE_ROW, 0.0, 4)
        policy.record_step(ONE_ROW, 11e-3, 0)
    assert all(policy.choose([(proven(1.0, 4.0), 100)], ONE_ROW, 1, None))
