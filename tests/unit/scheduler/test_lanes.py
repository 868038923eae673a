"""The scheduler's core with an executor that works on several steps at once: what each step runs, by request."""

from collections import Counter

import pytest

from core_driver import CoreDriver
from headway_proto.step import LaneOutput
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits


def driver(num_lanes: int = 3, **limits: object) -> CoreDriver:
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 12, "enable_prefix_caching": False, **limits}
    capacity = ExecutorCapacity(
        num_blocks=200, block_size=4, max_model_len=64, vocab_size=8, max_num_rows=12, num_lanes=num_lanes
    )
    return CoreDriver(SchedulerLimits(**settings), capacity)


def lane_of_last(run: CoreDriver) -> int:
    assert isinstance(run.sent, LaneOutput)
    return run.sent.lane


def test_one_step_more_is_in_flight_than_there_are_lanes() -> None:
    run = driver()
    for handle in range(6):
        run.add(handle, 2, 20)
    num_steps = 0
    while run.schedule() is not None:
        num_steps += 1
    assert num_steps == run.core.max_in_flight == 4
    assert driver(num_lanes=1).core.max_in_flight == 2
    assert driver(max_steps_in_flight=2).core.max_in_flight == 2


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    run = driver()
    run.add(0, 50, 2)
    steps = []
    for lane in range(3):
        steps.append(run.schedule())
        assert lane_of_last(run) == lane
    assert steps == [{0: 16}, {0: 16}, {0: 16}]  # none was answered
    assert run.schedule() == {0: 2}
    assert lane_of_last(run) == 0


def test_who_decodes_alone_has_only_its_lanes_share_in_flight() -> None:
    run = driver()
    run.add(0, 2, 20)
    assert [run.schedule(), run.schedule()] == [{0: 2}, {0: 1}]
    assert run.schedule() is None  # a third step could only wait for its tokens
    run.update()
    assert run.schedule() == {0: 1}
    assert lane_of_last(run) == 0


def test_requests_that_come_at_once_are_divided_among_the_lanes() -> None:
    run = driver()
    for handle in range(6):
        run.add(handle, 2, 20)
    run.next_steps(4)  # all prompts have ended
    lanes: dict[int, int] = {}
    for _ in range(9):
        for handle in run.next_steps(1)[0]:
            assert lanes.setdefault(handle, lane_of_last(run)) == lane_of_last(run)
    assert Counter(lanes.values()) == {0: 2, 1: 2, 2: 2}


def test_a_prompt_ends_in_a_lane_with_room_and_runs_all_but_its_end_before() -> None:
    run = driver(num_lanes=2)
    run.add(0, 2, 30)
    run.next_steps(1)  # lane 0 has its share of one
    run.add(1, 20, 30)
    assert run.next_steps(1) == [{1: 16}]
    assert lane_of_last(run) == 1
    assert run.next_steps(1) == [{0: 1, 1: 3}]
    assert lane_of_last(run) == 0
    assert run.next_steps(1) == [{1: 1}]
    assert lane_of_last(run) == 1


@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "split_fuse", "orca", "static"])
def test_everybody_ends_under_every_policy(batching: str) -> None:
    run = driver(batching=batching)
    for handle in range(9):
        run.add(handle, 1 + 5 * handle, 3 + handle)
    for _ in range(1000):
        while run.schedule() is not None:
            pass
        if not run.num_in_flight:
            break
        run.update()
    assert sorted(run.finished) == list(range(9))


def test_lanes_are_orcas_batches() -> None:
    """No step lists rows that sit out, and none has more requests than a batch."""
    run = driver(batching="orca", max_num_seqs=2, num_lanes=3)
    assert run.core.max_running == 6
    for handle in range(8):
        run.add(handle, 3, 20)
    for _ in range(30):
        step = run.schedule()
        if step is None:
            run.update()
            continue
        assert len(step) <= 2
        assert run.sent is not None
        assert run.sent.scheduled_new_reqs or run.sent.num_scheduled_tokens == b""


def test_blocks_of_who_is_in_no_step_in_flight_are_free_at_once() -> None:
    run = driver(num_lanes=2)
    run.add(0, 2, 30)
    run.add(1, 2, 30)
    run.next_steps(2)
    assert run.schedule() == {0: 1}
    num_free = run.core.pool.num_free
    run.abort(1)
    assert run.core.pool.num_free == num_free + 1
    run.abort(0)
    assert run.core.pool.num_free == num_free + 1
    run.update()
    assert run.core.pool.num_free == num_free + 2
