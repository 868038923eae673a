"""Which queue waits for what: what must be ordered is, and what need not be is not."""

import numpy as np
import pytest

from headway_executor.memory.move_fences import NOTHING, MoveFences, RowBlocks


def column(*values):
    return np.array(values, dtype=np.int32)


def run_step(fences, *new_blocks, continued=()):
    waited = fences.step(column(*new_blocks), column(*continued))
    fences.step_given()
    return waited


@pytest.fixture
def fences():
    return MoveFences(16)


def test_a_swap_out_waits_for_the_last_step_once(fences):
    run_step(fences, 0, 1)
    run_step(fences)
    assert fences.swap_out(column(0)) == 2
    assert fences.swap_out(column(1)) == NOTHING
    run_step(fences)
    assert fences.swap_out(column(2)) == 3


def test_nothing_is_waited_for_before_the_first_step(fences):
    assert fences.swap_out(column(3)) == NOTHING
    assert fences.swap_in(column(4)) == NOTHING


def test_a_step_waits_for_the_newest_swap_out_of_its_new_blocks_and_for_no_other(fences):
    run_step(fences, 0, 1, 2)
    fences.swap_out(column(0))
    fences.swap_out(column(1))
    fences.swap_out(column(2))
    assert run_step(fences, 5) == NOTHING
    assert run_step(fences) == NOTHING
    assert run_step(fences, 1, 0) == 2
    assert run_step(fences, 0) == NOTHING
    assert run_step(fences, 2) == 3


def test_a_swap_in_into_blocks_that_nobody_has_used_waits_for_no_step(fences):
    run_step(fences, 0, 1)
    assert fences.swap_in(column(7, 8)) == NOTHING


def test_a_swap_in_waits_for_the_last_step_of_the_rows_that_ended(fences):
    run_step(fences, 0, 1)
    run_step(fences)
    fences.rows_ended(column(0, 1))
    run_step(fences, 2)
    run_step(fences)
    assert fences.swap_in(column(1, 9)) == 2


def test_a_swap_in_waits_for_the_newest_step_while_a_row_holds_the_block(fences):
    """It may end with the step whose moves these are."""
    run_step(fences, 0)
    run_step(fences)
    assert fences.swap_in(column(0)) == 2


def test_a_shared_block_is_in_use_until_its_last_row_has_ended(fences):
    run_step(fences, 0)
    run_step(fences, 0)
    fences.rows_ended(column(0))
    run_step(fences)
    assert fences.swap_in(column(0)) == 3
    fences.rows_ended(column(0))
    run_step(fences)
    run_step(fences)
    assert fences.swap_in(column(0)) == NOTHING, "the queue is past step 3"


def test_the_step_after_a_swap_in_waits_for_it_once(fences):
    fences.swap_in(column(3))
    assert run_step(fences) == 1
    assert run_step(fences, 3) == NOTHING


def test_copies_follow_what_came_in_and_what_still_reads_their_destination(fences):
    run_step(fences, 0)
    fences.swap_out(column(5))
    assert fences.copy(column(0), column(6)) == NOTHING
    assert fences.copy(column(0), column(5)) == 1
    fences.swap_in(column(9))
    assert fences.copy(column(9), column(7)) == 2


@pytest.mark.parametrize("block", [3, 4])
def test_a_swap_in_waits_for_the_copy_that_uses_its_block(fences, block):
    run_step(fences, 0)
    fences.copy(column(3), column(4))
    run_step(fences)
    run_step(fences)
    assert fences.swap_in(column(block)) == 2


def test_what_was_seen_to_end_is_not_waited_for(fences):
    run_step(fences, 0)
    fences.work_ended(1)
    assert fences.swap_out(column(0)) == NOTHING
    fences.swap_ended(1)
    assert run_step(fences, 0) == NOTHING


def test_blocks_of_rows_come_back_as_often_as_they_were_given():
    rows = RowBlocks()
    rows.append(np.array([[1, 1, 2, 1], [4, 5, 4, 6]], dtype=np.int32))
    rows.append(np.array([[2], [7]], dtype=np.int32))
    assert sorted(rows.release([1]).tolist()) == [4, 5, 6]
    assert rows.release([1, 3]).tolist() == []
    rows.append(np.array([[1], [9]], dtype=np.int32))
    assert sorted(rows.release([2, 1]).tolist()) == [4, 7, 9]
    assert rows.release([]).dtype == np.int32


def test_a_step_waits_for_the_copy_of_a_block_that_its_row_goes_on_writing(fences):
    run_step(fences, 4, 5)
    fences.swap_out(column(4, 5))
    assert run_step(fences, continued=(5,)) == 1
    assert run_step(fences, continued=(5,)) == NOTHING
    rows = RowBlocks()
    rows.append(np.array([[3, 3, 7], [4, 5, 6]], dtype=np.int32))
    assert rows.newest([3, 7, 8]) == [5, 6]
