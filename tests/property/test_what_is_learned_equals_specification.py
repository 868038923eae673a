"""What the core learns and foresees is what the readable definitions say, over random pasts.

Owns: the comparison. Must not know: either side's arithmetic. (Where it decides something, ``test_core_equals_specification``
compares what is decided.)
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_examples import FACTOR
from headway_scheduler.core.memory.memory_forecast import MemoryForecast, horizons
from headway_scheduler.core.policies.output_lengths import OutputLengths
from headway_scheduler.core.policies.step_time import StepTimeModel
from headway_scheduler.core.state.speculation_record import SpeculationRecord
from headway_scheduler.core.state.step_shape import StepShape
from headway_scheduler.core.step.speculation import SpeculationPolicy
from specification_of_learning import (
    SpecifiedForecast,
    SpecifiedLengths,
    SpecifiedRecord,
    SpecifiedSpeculation,
    SpecifiedStepTimes,
    Step,
    specified_horizons,
)

SEEDS = st.integers(0, 2**32 - 1)
FURTHER = [1, 2, 5, 16, 64, 300]


@settings(max_examples=60 * FACTOR)
@given(SEEDS, st.sampled_from([4, 512]))
def test_output_lengths(seed: int, half_life: int) -> None:
    rng = np.random.default_rng(seed)
    core, specified = OutputLengths(half_life=half_life), SpecifiedLengths(half_life)
    steps = np.array(FURTHER)
    longest = int(rng.choice([4, 30, 300]))
    for _ in range(int(rng.integers(1, 60))):
        tenant, num_prompt_tokens = str(rng.integers(0, 3)), int(rng.integers(1, 40))
        curves = core.curve_of(tenant, num_prompt_tokens), specified.curve_of(tenant, num_prompt_tokens)
        length, is_censored = int(rng.integers(0, longest)), bool(rng.random() < 0.4)
        core.observe(curves[0], length, is_censored=is_censored)
        specified.observe(curves[1], length, is_censored=is_censored)
        if rng.random() < 0.2:
            age, limit = int(rng.integers(0, 2 * longest)), int(rng.integers(1, 3 * longest))
            told = core.predicted_output(curves[0], age, limit)
            assert told == specified.predicted_output(curves[1], age, limit)
            chances = core.chances_to_go_on(np.array([curves[0]]), np.array([age]), np.array([limit]), steps)
            assert chances[0].tolist() == specified.chances_to_go_on(curves[1], age, limit, FURTHER)


@settings(max_examples=60 * FACTOR)
@given(SEEDS, st.sampled_from([1, 2, 4, 16, 64]), st.integers(1, 4000))
def test_memory_forecast(seed: int, block_size: int, max_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    ahead = horizons(block_size, max_tokens)
    assert ahead.tolist() == specified_horizons(block_size, max_tokens)
    core, specified = MemoryForecast(block_size, ahead), SpecifiedForecast(block_size, ahead.tolist())
    for place in range(8):
        num_tokens = int(rng.integers(1, max_tokens + 1))
        chances = np.sort(rng.integers(0, 1025, len(ahead)) * (rng.random() < 0.8))[::-1] / 1024
        assert core.peak_with(num_tokens, chances) == specified.peak_with(num_tokens, chances.tolist())
        if place % 2:
            core.add(num_tokens, chances)
        else:
            core.add_all(np.array([num_tokens]), chances[None, :])
        specified.add(num_tokens, chances.tolist())


def shapes(rng: np.random.Generator) -> tuple[StepShape, Step]:
    """Decodes, and prompts beside some."""
    num_rows, context = int(rng.integers(1, 200)), int(rng.integers(0, 100_000))
    chunk = int(rng.choice([0, 0, 30, 300, 900]))
    start = int(rng.integers(0, 3000)) if chunk else 0
    decoding = StepShape(num_rows, num_rows, context, 0)
    shape = decoding.with_prompt(chunk, start) if chunk else decoding
    pairs = chunk * start + chunk * (chunk + 1) // 2
    rows = num_rows + (chunk > 0)
    return shape, Step(num_rows + chunk, rows, context + start, pairs)


def true_s(step: Step, rng: np.random.Generator) -> float:
    """Of some device, sometimes held up by something else."""
    beyond = max(step.tokens - 200, 0)
    exact_s = 0.004 + 1e-6 * step.rows + 3e-5 * beyond + 2e-8 * step.context + 1e-9 * step.pairs
    return exact_s * float(rng.normal(1.0, 0.02)) * (10.0 if rng.random() < 0.05 else 1.0)


def learned_steps(
    seed: int,
) -> tuple[np.random.Generator, StepTimeModel, SpecifiedStepTimes]:
    rng = np.random.default_rng(seed)
    core, specified = StepTimeModel(), SpecifiedStepTimes()
    slower_from, factor = int(rng.integers(5, 80)), float(rng.choice([0.3, 1.0, 3.0]))
    for number in range(int(rng.integers(1, 100))):
        shape, step = shapes(rng)
        duration_s = true_s(step, rng) * (factor if number >= slower_from else 1.0)
        predicted = core.predict_s(shape), specified.predict_s(step)
        assert (predicted[0] is None) == (predicted[1] is None)
        if predicted[0] is not None:
            assert predicted[0] == pytest.approx(predicted[1], rel=1e-5)
        core.observe(shape, duration_s)
        specified.observe(step, duration_s)
    return rng, core, specified


@settings(max_examples=60 * FACTOR)
@given(SEEDS)
def test_step_times(seed: int) -> None:
    rng, core, specified = learned_steps(seed)
    assert core.num_shifts == specified.num_shifts
    num_tokens, num_computed = int(rng.integers(1, 2000)), int(rng.integers(0, 2000))
    told = core.prefill_s(num_tokens, num_computed), specified.prefill_s(num_tokens, num_computed)
    assert (told[0] is None) == (told[1] is None)
    if told[0] is not None:
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-9)


@settings(max_examples=60 * FACTOR)
@given(SEEDS, st.sampled_from([1, 3, 8]))
def test_speculation(seed: int, most: int) -> None:
    rng, step_times, specified_times = learned_steps(seed)
    core, specified = SpeculationPolicy(most, step_times), SpecifiedSpeculation(most, specified_times)
    num_rows = int(rng.integers(1, 40))
    records = [(SpeculationRecord(), SpecifiedRecord()) for _ in range(min(num_rows, 4))]
    computed = [int(rng.integers(0, 50)) for _ in records]
    luck = float(rng.choice([0.1, 0.5, 0.9]))
    objective_s = None if rng.random() < 0.7 else 0.006
    for number in range(int(rng.integers(1, 150))):
        context = sum(computed)
        decoding = StepShape(num_rows, num_rows, context, 0), Step(num_rows, num_rows, context)
        ready = [place for place, (record, _) in enumerate(records) if record.resumes_at <= computed[place]]
        assert ready == [place for place, (_, record) in enumerate(records) if record.resumes_at <= computed[place]]
        counts = core.choose([(records[p][0], computed[p]) for p in ready], decoding[0], number, objective_s)
        told = specified.choose([(records[p][1], computed[p]) for p in ready], decoding[1], number, objective_s)
        assert counts == told
        num_proposed = 0
        for place in range(len(records)):
            computed[place] += 1
        for place, allowed in zip(ready, counts, strict=True):
            if allowed:
                proposed = int(rng.integers(0, allowed + 1)) if rng.random() < 0.5 else allowed
                accepted = int((rng.random(proposed) < luck).cumprod().sum())
                num_proposed += proposed
                computed[place] += accepted
                at = computed[place]
                core.learn(records[place][0], at, num_allowed=allowed, num_proposed=proposed, num_accepted=accepted)
                specified.learn(records[place][1], at, allowed=allowed, proposed=proposed, accepted=accepted)
        duration_s = true_s(decoding[1], rng) * (1.0 + 0.02 * num_proposed)
        core.record_step(decoding[0], duration_s, num_proposed)
        specified.record_step(decoding[1], duration_s, num_proposed)
