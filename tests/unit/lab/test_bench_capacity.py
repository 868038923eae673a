"""The search for a capacity finds it, says when it is not sure, and ends."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_lab.bench.capacity import Look, Search, find_capacity, wilson_interval
from headway_lab.bench.picture import draw_capacity
from headway_lab.bench.report import capacity_text, trial_text


def find(share_at, *, first=1.0, most=1e4, tolerance=0.05, attainment=0.9, requests=200, keeps_up=lambda rate: True):
    """Search against a server of which ``share_at(rate)`` is the share of requests that keep their objectives."""

    async def look(rate):
        met = round(requests * share_at(rate))
        return Look(num_requests=requests, num_meeting=met, keeps_up=keeps_up(rate), trustworthy=True)

    search, seen = Search(first, most, tolerance), []
    trials = asyncio.run(find_capacity(search, attainment, look, seen.append))
    assert trials == seen
    return search, trials


@given(st.floats(0.01, 5000), st.floats(0.02, 0.5))
@settings(max_examples=50)
def test_it_is_found_to_the_tolerance_from_wherever_it_starts(knee, tolerance):
    search, _ = find(lambda rate: 1.0 if rate <= knee else 0.1, first=5.0, tolerance=tolerance)
    assert search.met <= knee < search.missed <= search.met * (1 + tolerance) * (1 + 1e-9)


def test_a_queue_that_grows_is_no_capacity_though_objectives_are_kept_for_now():
    search, trials = find(lambda rate: 1.0, keeps_up=lambda rate: rate <= 30)
    assert search.met <= 30 < search.missed
    assert any(not trial.meets and trial.share == 1.0 for trial in trials)
    assert any("arrive faster than they are answered" in trial_text(trial) for trial in trials)


def test_where_it_cannot_be_told_whether_a_queue_grows_nothing_is_met():
    search, trials = find(lambda rate: 1.0, keeps_up=lambda rate: True if rate <= 30 else None)
    assert search.met <= 30 < search.missed
    assert any(
        "too short to tell whether they are answered as fast as they arrive" in trial_text(trial) for trial in trials
    )


def test_nothing_found_ends_and_is_said():
    search, trials = find(lambda rate: 0.2)
    assert search.met is None
    assert len(trials) < 20
    assert capacity_text(search, 0.9).startswith("capacity: none")


def test_it_looks_no_higher_than_told():
    search, trials = find(lambda rate: 1.0, most=50.0)
    assert search.met == 50.0
    assert max(trial.rate for trial in trials) == 50.0
    assert "no higher rate was tried" in capacity_text(search, 0.9)


def test_what_may_be_chance_is_looked_at_again_and_marked():
    search, trials = find(lambda rate: 0.905 if rate > 3 else 1.0, most=4.0)
    close = trials[-1]
    assert close.num_looks == 4
    assert close.num_requests == 800
    assert close.close
    assert "chance may have decided" in trial_text(close)
    assert trials[0].num_looks == 1
    assert search.met is not None


@pytest.mark.parametrize(
    ("good", "total", "low", "high"), [(90, 100, 0.826, 0.945), (50, 50, 0.929, 1.0), (0, 50, 0.0, 0.071)]
)
def test_wilsons_interval(good, total, low, high):
    assert wilson_interval(good, total) == pytest.approx((low, high), abs=1e-3)


def test_it_can_be_looked_at(tmp_path):
    _, trials = find(lambda rate: 1.0 if rate <= 20 else 0.3)
    draw_capacity(tmp_path / "capacity.png", "a capacity", trials, 0.9)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
