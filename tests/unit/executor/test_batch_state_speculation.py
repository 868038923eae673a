"""The mirrored rows of a step that speculates: what is refused, and how the counters follow the answer."""

import msgspec
import numpy as np
import pytest

from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import NewRequest, SchedulerOutput, state_digest
from step_columns import backend_info, encoded_pairs

INFO = backend_info(num_blocks=16, max_model_len=14, max_speculative_tokens=3)


def pairs(*entries: tuple[int, int]) -> bytes:
    return encoded_pairs(entries)


def two_rows() -> BatchState:
    """Rows 1 and 2, of five and nine tokens with two and four blocks, both computed and sampled."""
    state = BatchState(INFO)
    requests = tuple(
        NewRequest(
            row=row,
            token_ids=encode_column(range(count)),
            num_prompt_tokens=count,
            block_ids=encode_column(blocks),
            num_computed_tokens=0,
            sampling=SamplingParams(),
        )
        for row, count, blocks in ((1, 5, [1, 2]), (2, 9, [3, 4, 5, 6]))
    )
    state.apply(
        SchedulerOutput(
            epoch=1,
            step=0,
            total_num_scheduled_tokens=14,
            scheduled_new_reqs=requests,
            num_scheduled_tokens=pairs((1, 5), (2, 9)),
        )
    )
    return state


def step(number: int, total: int = 2, *speculative: tuple[int, int], **fields: bytes) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=number,
        total_num_scheduled_tokens=total,
        num_speculative_tokens=pairs(*speculative) if speculative else b"",
        **fields,
    )


def test_counters_follow_the_answer_and_the_digest_leaves_it_out() -> None:
    state = two_rows()
    batch, _ = state.apply(step(1, 2, (1, 2)))
    assert batch.num_speculative_tokens is not None
    assert batch.num_speculative_tokens.tolist() == [2, 0]
    table = np.array([[0] * 4, [1, 2, 0, 0], [3, 4, 5, 6]])
    counters = [np.array(values, dtype=np.int32) for values in ([1, 2], [6, 10], [2, 4])]
    assert state.digest() == state_digest(*counters, table)
    state.accept(np.array([[1], [2], [1]], dtype=np.int32))
    counters[1][0] = 7
    assert state.digest() == state_digest(*counters, table)
    following = state.apply(step(2)).batch
    assert following.num_computed_tokens.tolist() == [7, 10]
    assert following.samples.tolist() == [1, 1]
    assert following.num_speculative_tokens is None


def test_no_step_follows_before_the_answer() -> None:
    state = two_rows()
    state.apply(step(1, 2, (1, 1)))
    with pytest.raises(ImpossibleDiff, match="before the answer"):
        state.apply(step(2))
    state.begin_epoch()
    assert not len(state.apply(SchedulerOutput(epoch=2, step=0)).batch.rows)


@pytest.mark.parametrize(
    ("speculative", "fields", "complaint"),
    [
        (((4, 1),), {}, "row 4 is outside 0 to 3"),
        (((0, 1),), {}, "row 0 does not decode"),
        (((1, 1),), {"num_scheduled_tokens": pairs((1, 0))}, "row 1 does not decode"),
        (((1, 0),), {}, "count less one -1"),
        (((1, 4),), {}, "count less one 3"),
        (((2, 1), (1, 1)), {}, "do not ascend"),
        (((1, 1), (1, 1)), {}, "do not ascend"),
        (((1, 3),), {}, "row 1 may reach 9 tokens"),
    ],
)
def test_impossible_speculation_is_refused(
    speculative: tuple[tuple[int, int], ...], fields: dict[str, bytes], complaint: str
) -> None:
    state = two_rows()
    total = 1 if fields else 2
    with pytest.raises(ImpossibleDiff, match=complaint):
        state.apply(step(1, total, *speculative, **fields))


def test_nobody_speculates_past_the_longest_sequence() -> None:
    state = two_rows()
    for number in (1, 2):
        state.apply(step(number, 1, num_scheduled_tokens=pairs((1, 0))))
    state.apply(step(3, 1, (2, 2), num_scheduled_tokens=pairs((1, 0))))  # positions 11, 12 and 13, of 14
    other = two_rows()
    for number in (1, 2):
        other.apply(step(number, 1, num_scheduled_tokens=pairs((1, 0))))
    with pytest.raises(ImpossibleDiff, match="row 2 may reach 15 tokens"):
        other.apply(step(3, 1, (2, 3), num_scheduled_tokens=pairs((1, 0))))


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([[1], [2], [3]], "more tokens were accepted"),
        ([[1], [3], [0]], "more proposed"),
        ([[1], [1], [-1]], "more tokens were accepted"),
        ([[2], [1], [1]], "rows"),
        ([[], [], []], "rows"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(answer: list[list[int]], complaint: str) -> None:
    state = two_rows()
    state.apply(step(1, 2, (1, 2)))
    with pytest.raises(ValueError, match=complaint):
        state.accept(np.array(answer, dtype=np.int32).reshape(3, -1))


def test_an_executor_that_never_proposes_is_not_asked_to() -> None:
    state = BatchState(msgspec.structs.replace(INFO, max_speculative_tokens=0))
    with pytest.raises(ImpossibleDiff):
        state.apply(step(0, 0, (1, 1)))
