"""The histogram: what Prometheus is told is cumulative and exact, percentiles are close, and only what is recent counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_process.histogram import Histogram, fine_durations

BOUNDS = (0.01, 0.1, 1.0)


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(0, 5)), max_size=50))
def test_the_exported_buckets_count_what_is_at_most_their_bound(observations):
    histogram = Histogram(BOUNDS, fine_durations())
    for value, count in observations:
        histogram.observe(value, count)
    told = histogram.snapshot()
    assert told.bounds == BOUNDS
    for bound, cumulative in zip(told.bounds, told.cumulative, strict=True):
        assert cumulative == sum(count for value, count in observations if value <= bound)
    assert told.num_values == sum(count for _, count in observations)
    assert told.total == pytest.approx(sum(value * count for value, count in observations))


@pytest.mark.parametrize("share", [50, 90, 99])
def test_percentiles_are_within_a_bucket_of_the_true_ones(share):
    values = np.random.default_rng(0).lognormal(-4, 1, size=5000)
    histogram = Histogram(BOUNDS, fine_durations())
    for value in values:
        histogram.observe(value)
    assert getattr(histogram.recent(), f"p{share}") == pytest.approx(np.percentile(values, share), rel=0.08)


def test_what_is_older_than_the_oldest_mark_is_not_recent():
    histogram = Histogram((1.0, 2.0, 3.0), num_marks=2)
    histogram.observe(0.5, 10)
    for _ in range(2):
        histogram.mark()
    assert histogram.recent().num_values == 0
    histogram.observe(2.5)
    recent = histogram.recent()
    assert recent.num_values == 1
    assert 2.0 < recent.p50 <= 3.0
    assert histogram.snapshot().num_values == 11


def test_a_value_beyond_all_bounds_counts_and_its_percentile_is_the_last_bound():
    histogram = Histogram((1.0,))
    histogram.observe(7.0)
    assert histogram.snapshot().cumulative == (0,)
    assert histogram.snapshot().num_values == 1
    assert histogram.recent().p99 == pytest.approx(1.0)
