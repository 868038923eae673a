"""The scheduler's books on host blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.memory.host_pool import HostPool


def test_blocks_are_handed_out_once_low_numbers_first() -> None:
    pool = HostPool(5)
    assert pool.allocate(2).tolist() == [0, 1]
    assert pool.allocate(3).tolist() == [2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(0).tolist() == []


def test_what_is_released_is_free_only_behind_the_step() -> None:
    pool = HostPool(3)
    blocks = pool.allocate(3)
    assert pool.num_released == 0
    pool.release(blocks)
    assert pool.num_released > 0
    assert pool.num_free == 0
    pool.complete_plan()
    assert pool.num_released == 0
    assert pool.num_free == 3


def test_a_block_that_was_handed_out_is_a_copy() -> None:
    pool = HostPool(4)
    blocks = pool.allocate(2)
    blocks[:] = 99
    assert pool.allocate(2).tolist() == [2, 3]


def test_more_than_is_free_is_never_asked_for() -> None:
    with pytest.raises(AssertionError):
        HostPool(2).allocate(3)


def test_without_host_blocks_there_is_nothing_to_have() -> None:
    pool = HostPool(0)
    pool.complete_plan()
    assert pool.num_free == 0


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "complete"]), st.integers(0, 6)), max_size=60))
def test_every_block_is_free_held_or_released(history: list[tuple[str, int]]) -> None:
    pool = HostPool(12)
    held: list[np.ndarray] = []
    released: list[np.ndarray] = []
    for action, size in history:
        if action == "allocate" and size <= pool.num_free:
            held.append(pool.allocate(size))
        elif action == "release" and held:
            blocks = held.pop(size % len(held))
            pool.release(blocks)
            released.append(blocks)
        elif action == "complete":
            pool.complete_plan()
            released.clear()
        taken = np.concatenate([*held, *released, np.zeros(0, dtype=np.intp)])
        assert len(np.unique(taken)) == len(taken)
        assert pool.num_free + len(taken) == 12
