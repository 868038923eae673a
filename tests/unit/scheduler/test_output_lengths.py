"""Predicted output lengths: known distributions, cut requests, change, fallback, bounds."""

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from headway_scheduler.core.policies.output_lengths import ALL_REQUESTS, OutputLengths

UNLIMITED = 1 << 22


def learned(lengths: Iterable[int], *, half_life: int = 1 << 60) -> OutputLengths:
    outputs = OutputLengths(half_life=half_life)
    for length in lengths:
        outputs.observe(ALL_REQUESTS, int(length), is_censored=False)
    settle(outputs)
    return outputs


def settle(outputs: OutputLengths) -> None:
    """Let all that was observed show."""
    outputs._publish()


def num_curves(outputs: OutputLengths) -> int:
    """In use."""
    return len(outputs._slot_of_key) + 1


def remaining(outputs: OutputLengths, age: int, limit: int, *, curve: int = ALL_REQUESTS) -> int:
    """The tokens that are predicted to come after the first ``age``, of whose like something is known."""
    predicted = outputs.predicted_output(curve, age, limit)
    assert predicted is not None
    return predicted - age


def chance(outputs: OutputLengths, age: int, steps: int) -> float:
    """Of going on for so many steps."""
    columns = np.array([ALL_REQUESTS]), np.array([age]), np.array([UNLIMITED])
    return float(outputs.chances_to_go_on(*columns, np.array([steps]))[0, 0])


# Known distributions.


def test_where_nothing_is_known_nothing_is_predicted() -> None:
    outputs = OutputLengths()
    assert outputs.predicted_output(ALL_REQUESTS, 0, 4096) is None
    assert outputs.predicted_output(outputs.curve_of("a", 100), 7, 10) is None
    assert outputs.predicted_output(outputs.curve_of("b", 3), 90, 90) is None


def test_too_few_observations_are_nothing_known() -> None:
    outputs = OutputLengths()
    curve = outputs.curve_of("a", 100)
    for _ in range(7):
        outputs.observe(curve, 20, is_censored=False)
    assert outputs.predicted_output(curve, 0, 1000) is None
    for _ in range(13):
        outputs.observe(curve, 20, is_censored=False)
    assert remaining(outputs, 0, 1000, curve=curve) < 25


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_one_length_is_met_exactly_where_bins_are_single_lengths(length: int) -> None:
    outputs = learned([length] * 50)
    for age in range(length):
        assert outputs.predicted_output(ALL_REQUESTS, age, 1000) == length
    assert outputs.predicted_output(ALL_REQUESTS, length, 1000) is None


@pytest.mark.parametrize("length", [10, 100, 777, 30_000, 1_000_000])
def test_one_length_is_met_within_a_bin(length: int) -> None:
    outputs = learned([length] * 50)
    for age in (0, length // 3, length // 2):
        assert remaining(outputs, age, UNLIMITED) == pytest.approx(length - age, abs=0.07 * length)


def test_the_limit_caps_the_expectation() -> None:
    outputs = learned([2] * 30 + [1024] * 30)
    assert outputs.predicted_output(ALL_REQUESTS, 0, 8) == (2 + 8) / 2
    assert outputs.predicted_output(ALL_REQUESTS, 4, 8) == 8


def test_geometric_lengths_have_no_memory() -> None:
    mean = 200
    outputs = learned(np.random.default_rng(1).geometric(1 / mean, 20_000))
    for age in (0, 50, 200, 400):
        assert remaining(outputs, age, UNLIMITED) == pytest.approx(mean, rel=0.06)


def test_pareto_lengths_leave_more_the_older_they_are() -> None:
    # P(T > t) = (t0 / t)^a leaves a mean of t / (a - 1) at age t, and doubles t with probability 2^-a.
    shape, shortest = 3.0, 100
    lengths = np.ceil(shortest * (1 + np.random.default_rng(2).pareto(shape, 50_000)))
    outputs = learned(lengths.astype(int))
    answers = [remaining(outputs, age, UNLIMITED) for age in (100, 200, 400)]
    assert answers == pytest.approx([50, 100, 200], rel=0.15)
    assert chance(outputs, 200, 200) == pytest.approx(2**-shape, abs=0.02)


def test_lognormal_lengths_match_their_own_sample() -> None:
    lengths = np.ceil(np.random.default_rng(3).lognormal(5.5, 0.8, 20_000)).astype(int)
    outputs = learned(lengths)
    for age in (0, 30, 200, 800):
        for limit in (256, 1000, 16_384):
            if age < limit:
                truth = np.mean(np.minimum(lengths[lengths > age], limit) - age)
                assert remaining(outputs, age, limit) == pytest.approx(math.ceil(truth), rel=0.03)
        for steps in (32, 200, 1000):
            truth = np.mean(lengths[lengths > age] > age + steps)
            assert chance(outputs, age, steps) == pytest.approx(truth, abs=0.02)


def test_lengths_beyond_the_bins_are_only_known_to_be_long() -> None:
    outputs = learned([UNLIMITED] * 50)
    assert remaining(outputs, 0, UNLIMITED) == UNLIMITED
    assert chance(outputs, 0, UNLIMITED // 2) == 1.0
    assert outputs.predicted_output(ALL_REQUESTS, UNLIMITED - 5, UNLIMITED) is None


# Cut requests.


def test_requests_cut_at_their_limit_say_nothing_of_what_comes_after() -> None:
    outputs = OutputLengths()
    for _ in range(500):
        outputs.observe(ALL_REQUESTS, 100, is_censored=True)
    assert remaining(outputs, 0, 1000) == 1000
    assert remaining(outputs, 0, 50) == 50
    assert remaining(outputs, 100, 1000) == 900
    assert outputs.predicted_output(ALL_REQUESTS, 200, 1000) is None


def test_what_was_cut_does_not_shorten_the_rest() -> None:
    mean = 200
    rng = np.random.default_rng(5)
    outputs = OutputLengths(half_life=1 << 60)
    for length, limit in zip(rng.geometric(1 / mean, 30_000), rng.choice([64, 100, 128, 4096], 30_000), strict=True):
        outputs.observe(ALL_REQUESTS, int(min(length, limit)), is_censored=bool(length > limit))
    settle(outputs)
    for age in (0, 90, 150, 300):
        assert remaining(outputs, age, UNLIMITED) == pytest.approx(mean, rel=0.06)


def test_a_request_cut_before_its_first_token_says_nothing() -> None:
    outputs = learned([50] * 100)
    before = remaining(outputs, 0, 1000)
    for _ in range(100):
        outputs.observe(ALL_REQUESTS, 0, is_censored=True)
    settle(outputs)
    assert remaining(outputs, 0, 1000) == before


# Change.


def test_old_traffic_is_forgotten() -> None:
    outputs = OutputLengths(half_life=200)
    for _ in range(2000):
        outputs.observe(ALL_REQUESTS, 2000, is_censored=False)
    assert remaining(outputs, 0, 8192) == pytest.approx(2000, rel=0.07)
    for _ in range(200):
        outputs.observe(ALL_REQUESTS, 100, is_censored=False)
    settle(outputs)
    assert remaining(outputs, 0, 8192) == pytest.approx(1050, rel=0.1)
    for _ in range(1800):
        outputs.observe(ALL_REQUESTS, 100, is_censored=False)
    assert remaining(outputs, 0, 8192) == pytest.approx(100, rel=0.1)
    # So few have come so far lately that nothing is known of the rest.
    assert outputs.predicted_output(ALL_REQUESTS, 500, 8192) is None


def test_weights_do_not_overflow() -> None:
    outputs = OutputLengths(half_life=1)
    for turn in range(5000):
        outputs.observe(ALL_REQUESTS, 4 + turn % 2, is_censored=False)
    # The weight of all observations is 2 with this half-life: never enough to be trusted.
    assert outputs.predicted_output(ALL_REQUESTS, 0, 1000) is None
    assert np.all(np.isfinite(outputs._weights))
    assert np.all(np.isfinite(outputs._newest_weight))


def test_an_observation_shows_after_few_others() -> None:
    outputs = OutputLengths()
    for _ in range(5000):
        outputs.observe(ALL_REQUESTS, 100, is_censored=False)
    before = remaining(outputs, 0, 8192)
    for _ in range(64):
        outputs.observe(ALL_REQUESTS, 1000, is_censored=False)
    assert remaining(outputs, 0, 8192) > before


# Fallback.


def test_a_new_tenant_is_as_the_average_one() -> None:
    outputs = OutputLengths()
    known = outputs.curve_of("known", 100)
    for _ in range(100):
        outputs.observe(known, 40, is_censored=False)
    settle(outputs)
    new = outputs.curve_of("new", 5)
    assert remaining(outputs, 0, 1000, curve=new) == remaining(outputs, 0, 1000)


def test_a_new_prompt_length_is_as_its_tenant() -> None:
    outputs = OutputLengths()
    chatty, terse = outputs.curve_of("chatty", 100), outputs.curve_of("terse", 100)
    for _ in range(200):
        outputs.observe(chatty, 1000, is_censored=False)
        outputs.observe(terse, 10, is_censored=False)
    settle(outputs)
    assert remaining(outputs, 0, 8192) == pytest.approx(505, rel=0.07)
    for name, length in (("chatty", 1000), ("terse", 10)):
        unseen = outputs.curve_of(name, 4000)
        assert remaining(outputs, 0, 8192, curve=unseen) == pytest.approx(length, rel=0.1, abs=25)


def test_a_curve_becomes_itself_bit_by_bit() -> None:
    outputs = OutputLengths()
    others, own = outputs.curve_of("others", 100), outputs.curve_of("own", 100)
    for _ in range(400):
        outputs.observe(others, 1000, is_censored=False)
    settle(outputs)
    answers = [remaining(outputs, 0, 8192, curve=own)]
    for _ in range(40):
        outputs.observe(own, 10, is_censored=False)
        settle(outputs)
        answers.append(remaining(outputs, 0, 8192, curve=own))
    assert answers[0] == pytest.approx(1000, rel=0.07)
    assert all(later <= earlier for earlier, later in pairwise(answers))
    # No single request moves the answer by more than a quarter of the way.
    assert max(earlier - later for earlier, later in pairwise(answers)) < 250
    assert answers[-1] < 60


def test_prompts_of_similar_length_share_a_curve() -> None:
    outputs = OutputLengths()
    assert outputs.curve_of("a", 64) == outputs.curve_of("a", 127)
    assert outputs.curve_of("a", 64) != outputs.curve_of("a", 128)
    assert outputs.curve_of("a", 64) != outputs.curve_of("b", 64)


# Bounds.


def test_invented_tenants_do_not_grow_memory() -> None:
    outputs = OutputLengths(max_curves=16)
    for number in range(1000):
        outputs.observe(outputs.curve_of(f"tenant {number}", number), 50, is_censored=False)
        assert num_curves(outputs) <= 16
    assert num_curves(outputs) == 16


def test_tenants_in_use_survive_invented_ones() -> None:
    outputs = OutputLengths(max_curves=16)
    known = outputs.curve_of("known", 100)
    for number in range(300):
        outputs.observe(known, 10, is_censored=False)
        outputs.observe(outputs.curve_of(f"tenant {number}", 100), 1000, is_censored=False)
        assert outputs.curve_of("known", 100) == known
    assert remaining(outputs, 0, 8192, curve=known) < 40


def test_no_curve_outlives_its_tenants() -> None:
    rng = np.random.default_rng(6)
    outputs = OutputLengths(max_curves=8)
    for tenant, num_prompt_tokens in zip(rng.integers(0, 6, 500), rng.integers(1, 100, 500), strict=True):
        outputs.curve_of(str(tenant), int(num_prompt_tokens))
        slots = outputs._slot_of_key
        assert len(set(slots.values()) | {ALL_REQUESTS}) == num_curves(outputs) <= 8
        assert all(outputs._parents[slot] == slots[name, -1] for (name, bucket), slot in slots.items() if bucket >= 0)


def test_the_name_of_a_dropped_curve_stands_for_all_requests() -> None:
    outputs = OutputLengths(max_curves=8)
    dropped = outputs.curve_of("dropped", 100)
    for _ in range(100):
        outputs.observe(dropped, 10, is_censored=False)
    for number in range(20):
        curve = outputs.curve_of(f"tenant {number}", 100)
        for _ in range(10):
            outputs.observe(curve, 1000, is_censored=False)
    settle(outputs)
    assert remaining(outputs, 0, 8192, curve=dropped) == remaining(outputs, 0, 8192)
    assert chances(outputs, 0, curve=dropped) == chances(outputs, 0)
    # What its requests tell goes to the curve of all, not to the one in its place.
    living = [outputs.curve_of(f"tenant {number}", 100) for number in (17, 18, 19)]
    before = [outputs._weights[curve & 7].tolist() for curve in living]
    total = outputs._weights[ALL_REQUESTS].sum()
    outputs.observe(dropped, 10, is_censored=False)
    settle(outputs)
    assert [outputs._weights[curve & 7].tolist() for curve in living] == before
    assert outputs._weights[ALL_REQUESTS].sum() > total


def test_a_curve_in_a_reused_place_starts_anew() -> None:
    outputs = OutputLengths(max_curves=4)
    for number in range(10):
        curve = outputs.curve_of(f"tenant {number}", 100)
        for _ in range(50):
            outputs.observe(curve, 10 + 50 * number, is_censored=False)
    settle(outputs)
    assert remaining(outputs, 0, 1000, curve=outputs.curve_of("new", 7)) == remaining(outputs, 0, 1000)


# Chances to go on.

STEPS = np.array([1, 16, 64, 256, 1024, 4096], dtype=np.int64)


def chances(outputs: OutputLengths, age: int, limit: int = UNLIMITED, *, curve: int = ALL_REQUESTS) -> list[float]:
    answer = outputs.chances_to_go_on(np.array([curve]), np.array([age]), np.array([limit]), STEPS)
    assert answer.shape == (1, len(STEPS))
    return list(answer[0])


def test_int32_columns_are_taken() -> None:
    outputs = learned([100] * 50)
    columns = [np.array([value], dtype=np.int32) for value in (ALL_REQUESTS, 20, 50_000)]
    assert list(outputs.chances_to_go_on(*columns, STEPS)[0]) == chances(outputs, 20, 50_000)


def test_no_rows() -> None:
    nothing = np.empty(0, dtype=np.int64)
    assert learned([3] * 20).chances_to_go_on(nothing, nothing, nothing, STEPS).shape == (0, len(STEPS))


def test_rows_are_answered_as_if_alone() -> None:
    rng = np.random.default_rng(4)
    outputs = OutputLengths()
    curves = [outputs.curve_of(f"tenant {tenant}", 1 << bucket) for tenant in range(5) for bucket in range(4)]
    for curve in rng.choice(curves, 2000):
        outputs.observe(int(curve), int(rng.geometric(0.01)), is_censored=bool(rng.random() < 0.2))
    asked = rng.choice(curves, 300)
    generated = rng.integers(0, 500, 300)
    limits = generated + rng.integers(-3, 2000, 300)
    together = outputs.chances_to_go_on(asked, generated, limits, STEPS)
    for row in range(300):
        alone = chances(outputs, int(generated[row]), int(limits[row]), curve=int(asked[row]))
        assert alone == list(together[row])


def test_nothing_known_gives_no_chances() -> None:
    outputs = OutputLengths()
    assert chances(outputs, 0) == chances(outputs, 500) == [0.0] * len(STEPS)


def test_chances_of_a_memoryless_length_do_not_depend_on_the_age() -> None:
    outputs = learned(np.random.default_rng(3).geometric(1 / 200, size=40_000))
    for age in (0, 50, 200):
        assert chances(outputs, age) == pytest.approx(np.exp(-STEPS / 200), abs=0.02)


def test_chances_of_equal_lengths_end_with_them() -> None:
    outputs = learned([100] * 500)
    assert chances(outputs, 0)[:4] == pytest.approx([1.0, 1.0, 1.0, 0.0], abs=0.01)
    near_the_end = chances(outputs, 80)
    assert (near_the_end[0], near_the_end[2]) == (1.0, 0.0)


def test_nobody_goes_on_to_the_limit() -> None:
    outputs = learned(np.random.default_rng(3).geometric(1 / 2000, size=2000))
    assert [chance > 0 for chance in chances(outputs, 10, 26)] == [True, False, False, False, False, False]
    assert [chance > 0 for chance in chances(outputs, 10, 27)] == [True, True, False, False, False, False]


def test_who_has_outlived_all_that_is_known_becomes_twice_as_old_with_even_chances() -> None:
    outputs = learned([100] * 500)
    assert chance(outputs, 4096, 4096) == pytest.approx(0.5, abs=0.05)


def test_chances_fall_with_time_are_whole_parts_and_known_at_once_for_many() -> None:
    outputs = learned(np.random.default_rng(5).pareto(1.2, size=3000) * 50 + 1)
    ages = np.random.default_rng(6).integers(0, 20_000, size=500)
    curves, limits = np.zeros(500, dtype=np.int64), ages + 700
    together = outputs.chances_to_go_on(curves, ages, limits, STEPS)
    assert (np.diff(together, axis=1) <= 0).all()
    assert (together * 1024 == np.rint(together * 1024)).all()
    assert ((together >= 0) & (together <= 1)).all()
    for place in range(0, 500, 50):
        assert chances(outputs, int(ages[place]), int(limits[place])) == list(together[place])


def test_chances_follow_what_is_observed_and_which_steps_are_asked_for() -> None:
    outputs = learned([100] * 500)
    before = chances(outputs, 0)
    other = outputs.chances_to_go_on(np.array([ALL_REQUESTS]), np.array([0]), np.array([UNLIMITED]), STEPS[2:3])
    assert list(other[0]) == before[2:3]
    for _ in range(5000):
        outputs.observe(ALL_REQUESTS, 2000, is_censored=False)
    settle(outputs)
    assert before[3] == 0.0
    assert chances(outputs, 0)[3] == pytest.approx(0.9, abs=0.05)
