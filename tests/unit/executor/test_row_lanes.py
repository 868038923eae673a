"""The mirrored rows of an executor with several lanes: which rows a step runs, and what is refused."""

import msgspec
import numpy as np
import pytest

from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import LaneOutput, NewRequest, SchedulerOutput, info_problem, state_digest
from step_columns import backend_info, encoded_pairs

INFO = backend_info(num_blocks=16, max_model_len=14, num_lanes=2)


def pairs(*entries: tuple[int, int]) -> bytes:
    return encoded_pairs(entries)


def request(row: int, num_tokens: int, blocks: list[int]) -> NewRequest:
    return NewRequest(
        row=row,
        token_ids=encode_column(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=encode_column(blocks),
        num_computed_tokens=0,
        sampling=SamplingParams(),
    )


def step(number: int, lane: int, total: int, *listed: tuple[int, int], **fields: object) -> LaneOutput:
    return LaneOutput(
        epoch=1,
        step=number,
        lane=lane,
        total_num_scheduled_tokens=total,
        num_scheduled_tokens=pairs(*listed) if listed else b"",
        **fields,
    )


def one_row_in_each_lane() -> BatchState:
    """Row 0 of three tokens in lane 0, row 1 of five in lane 1; a chunk of the latter ran in lane 0."""
    state = BatchState(INFO)
    new = request(0, 3, [0, 1]), request(1, 5, [2, 3, 4])
    state.apply(step(0, 0, 5, (0, 3), (1, 2), scheduled_new_reqs=new))
    state.apply(step(1, 1, 3, (1, 3)))
    return state


def test_a_step_runs_the_rows_of_its_lane() -> None:
    state = one_row_in_each_lane()
    for number, (lane, row) in enumerate([(0, 0), (1, 1), (1, 1), (0, 0)], start=2):
        batch, moves = state.apply(step(number, lane, 1))
        assert moves is None
        assert (batch.lane, batch.rows.tolist(), batch.num_scheduled_tokens.tolist()) == (lane, [row], [1])
        assert batch.samples.tolist() == [1]


def test_a_decode_step_is_as_small_as_without_lanes() -> None:
    plain = SchedulerOutput(epoch=1, step=2, total_num_scheduled_tokens=1)
    assert len(msgspec.msgpack.encode(step(2, 1, 1))) - len(msgspec.msgpack.encode(plain)) <= 4


def test_a_row_in_its_prompt_runs_only_where_it_is_listed() -> None:
    state = one_row_in_each_lane()
    batch, _ = state.apply(step(2, 0, 4, (2, 3), scheduled_new_reqs=(request(2, 5, [8, 9, 10]),)))
    assert (batch.rows.tolist(), batch.samples.tolist()) == ([0, 2], [1, 0])
    batch, _ = state.apply(step(3, 0, 1))
    assert batch.rows.tolist() == [0]
    batch, _ = state.apply(step(4, 1, 3, (2, 2)))
    assert (batch.rows.tolist(), batch.samples.tolist()) == ([1, 2], [1, 1])
    batch, _ = state.apply(step(5, 1, 2))
    assert batch.rows.tolist() == [1, 2]


def test_a_row_may_sit_out_a_step_of_its_lane() -> None:
    state = one_row_in_each_lane()
    batch, _ = state.apply(step(2, 0, 4, (0, 0), (2, 4), scheduled_new_reqs=(request(2, 5, [8, 9, 10]),)))
    assert batch.rows.tolist() == [2]


def test_who_takes_a_finished_row_is_in_no_lane() -> None:
    state = one_row_in_each_lane()
    new = (request(0, 4, [0, 1]),)
    batch, _ = state.apply(step(2, 1, 3, (0, 2), finished_rows=encode_column([0]), scheduled_new_reqs=new))
    assert batch.rows.tolist() == [0, 1]
    batch, _ = state.apply(step(3, 1, 3, (0, 2)))
    assert (batch.rows.tolist(), batch.samples.tolist()) == ([0, 1], [1, 1])
    batch, _ = state.apply(step(4, 1, 2))
    assert batch.rows.tolist() == [0, 1]


def test_the_digest_covers_the_lanes() -> None:
    state = one_row_in_each_lane()
    rows, table = np.array([0, 1]), np.array([[0, 1, 0], [2, 3, 4]])
    counts = np.array([3, 5], dtype=np.int32), np.array([2, 3], dtype=np.int32)
    assert state.digest() == state_digest(rows, *counts, table, np.array([0, 1]))
    assert state.digest() != state_digest(rows, *counts, table, np.array([1, 0]))
    assert state.digest() != state_digest(rows, *counts, table)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (step(2, 0, 2, (1, 1)), "row 1 is in lane 1; the step is of lane 0"),
        (step(2, 2, 1), "lane: 2 is outside 0 to 1"),
        (step(2, -1, 1), "lane: -1 is outside 0 to 1"),
        (SchedulerOutput(epoch=1, step=2, total_num_scheduled_tokens=2), "lane: the step names none of 2"),
        (step(2, 0, 2), "the rows add up to 1"),
        (step(2, 0, 2, (3, 1)), "row 3 is not live"),
        (step(2, 0, 1, num_speculative_tokens=pairs((0, 1))), "does not speculate"),
    ],
)
def test_an_impossible_step_is_refused(wrong: SchedulerOutput, message: str) -> None:
    state = one_row_in_each_lane()
    with pytest.raises(ImpossibleDiff, match=message):
        state.apply(wrong)


def test_an_executor_with_one_lane_takes_no_step_of_a_lane() -> None:
    state = BatchState(backend_info(num_blocks=16, max_model_len=14))
    with pytest.raises(ImpossibleDiff, match="this executor has one"):
        state.apply(step(0, 0, 0))


def test_after_a_new_epoch_no_row_is_in_a_lane() -> None:
    state = one_row_in_each_lane()
    state.begin_epoch()
    state.apply(step(0, 1, 3, (0, 3), scheduled_new_reqs=(request(0, 3, [0, 1]),)))
    batch, _ = state.apply(step(1, 1, 1))
    assert batch.rows.tolist() == [0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_lanes": 0}, "num_lanes: 0 is not allowed; allowed: 1 to 64"),
        ({"max_speculative_tokens": 3}, "max_speculative_tokens: 3 is not allowed with several lanes; allowed: 0"),
    ],
)
def test_such_an_executor_is_refused(fields: dict[str, int], message: str) -> None:
    assert info_problem(INFO) is None
    assert info_problem(msgspec.structs.replace(INFO, **fields)) == message
