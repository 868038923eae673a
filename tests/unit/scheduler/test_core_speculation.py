"""Steps that speculate in the scheduler's core: who may, what an answer may say, and what an end within it means."""

import msgspec
import numpy as np
import pytest

from headway_proto.columns import decode_columns, encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput, RowError, RowLogprobs, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason

CAPACITY = ExecutorCapacity(
    num_blocks=40, block_size=4, max_model_len=64, vocab_size=100, max_num_rows=8, max_speculative_tokens=4
)


def started(num_requests: int = 1, *, capacity: ExecutorCapacity = CAPACITY, **limits: int) -> Scheduler:
    """Requests of five tokens that stop at token 9 or after 30 tokens; all of them decode, and may try now."""
    core = Scheduler(msgspec.structs.replace(SchedulerLimits(max_steps_in_flight=2), **limits), capacity)
    for handle in range(num_requests):
        core.add_request(
            NewRequestEvent(
                origin=Origin(0, handle),
                request_id=str(handle),
                token_ids=np.arange(10 * handle, 10 * handle + 5, dtype=np.int32),
                num_prompt_tokens=5,
                max_tokens=30,
                sampling=SamplingParams(min_tokens=3, stop_token_ids=(9,), logprobs=0),
                stop_token_ids=frozenset({9}),
            ),
            now=0.0,
        )
    while len(core._epoch.decoding.indices()) < num_requests or core.next_step % num_requests:
        step = scheduled(core)
        answer(core, step, [1] * len(core._epoch.in_flight[0].sampling_rows))
    return core


def speculative(output: SchedulerOutput) -> list[list[int]]:
    rows: list[list[int]] = decode_columns(output.num_speculative_tokens, 2).T.tolist()
    return rows


def answer(
    core: Scheduler, output: SchedulerOutput, tokens: list[int], *accepted: tuple[int, int, int], **fields: object
) -> StepEvents:
    columns = np.array(accepted, dtype=np.int32).reshape(-1, 3).T
    return core.update(
        ExecutorOutput(
            epoch=0,
            step=output.step,
            sampled_token_ids=encode_column(tokens),
            state_digest=core._epoch.in_flight[0].digest,
            accepted_tokens=encode_columns(columns),
            **fields,  # type: ignore[arg-type]
        ),
        1.0,
    )


def scheduled(core: Scheduler) -> SchedulerOutput:
    output = core.schedule(0.5)
    assert output is not None
    return output


def test_no_step_is_sent_before_the_answer_to_one_that_speculates() -> None:
    core = started()
    step = scheduled(core)
    assert speculative(step) == [[0, 4]]
    assert core.awaits_answer
    assert core.schedule(0.5) is None
    events = answer(core, step, [2, 3, 4], (0, 4, 2))
    assert events.token_ids.tolist() == [2, 3, 4]
    assert events.indices.tolist() == [1, 2, 3]
    assert core.rows.num_tokens[0] == 9
    assert core.rows.num_computed_tokens[0] == 8
    assert (core.counters.num_drafts, core.counters.num_draft_tokens, core.counters.num_accepted_tokens) == (1, 4, 2)
    assert speculative(scheduled(core)) == [[0, 3]]


def test_what_follows_a_stop_is_dropped_with_its_log_probabilities() -> None:
    core = started()
    step = scheduled(core)
    logprobs = tuple(RowLogprobs(0, -float(place), (), ()) for place in range(5))
    events = answer(core, step, [9, 3, 9, 4, 5], (0, 4, 4), logprobs=logprobs)
    assert events.token_ids.tolist() == [9, 3, 9]  # the first comes before the least number of tokens
    assert [(told.index, told.values.logprob) for told in events.logprobs] == [(1, 0.0), (2, -1.0), (3, -2.0)]
    (end,) = events.finished
    assert (end.reason, end.num_output_tokens, end.stop_token_id) == (FinishReason.STOP, 4, 9)
    assert core.counters.wasted_tokens[WasteReason.SURPLUS] == 2
    assert core.pool.num_free == 40


def test_nobody_goes_beyond_the_limit() -> None:
    core = started()
    num_tokens = 1
    while num_tokens < 30:
        step = scheduled(core)
        asked = speculative(step)
        count = asked[0][1] if asked else 0
        assert num_tokens + 1 + count <= 30
        events = answer(core, step, [2] * (1 + count), *([(0, count, count)] if asked else []))
        num_tokens += len(events.token_ids)
    assert core.num_unfinished == 0


def test_a_request_that_is_aborted_meanwhile_gets_nothing() -> None:
    core = started(2)
    step = scheduled(core)
    assert [row for row, _ in speculative(step)] == [0, 1]
    core.abort(Origin(0, 0))
    events = answer(core, step, [2, 3, 4, 5], (0, 4, 1), (1, 4, 1))
    assert events.handles.tolist() == [1, 1]
    assert events.token_ids.tolist() == [4, 5]
    assert core.counters.wasted_tokens[WasteReason.SURPLUS] == 2


def test_a_row_that_fails_accepts_nothing() -> None:
    core = started(2)
    step = scheduled(core)
    events = answer(core, step, [-1, 4, 5], (0, 0, 0), (1, 4, 1), errors=(RowError(0, "NaN"),))
    assert events.token_ids.tolist() == [4, 5]
    assert [end.reason for end in events.finished] == [FinishReason.ERROR]


@pytest.mark.parametrize(
    ("tokens", "accepted", "errors"),
    [
        ([2], (), ()),
        ([2, 3], ((0, 4, 0),), ()),
        ([2], ((0, 4, 1),), ()),
        ([2], ((1, 4, 0),), ()),
        ([2, 3], ((0, 0, 1),), ()),
        ([2], ((0, 5, 0),), ()),
        ([2], ((0, 4, -1),), ()),
        ([-1, 2], ((0, 4, 1),), (RowError(0, "NaN"),)),
        ([2, 100], ((0, 4, 1),), ()),
        ([2, -5], ((0, 4, 1),), ()),
    ],
)
def test_answers_that_cannot_be_are_refused(
    tokens: list[int], accepted: tuple[tuple[int, int, int], ...], errors: tuple[RowError, ...]
) -> None:
    core = started()
    step = scheduled(core)
    with pytest.raises(StateMismatch):
        answer(core, step, tokens, *accepted, errors=errors)


def test_only_as_many_as_may_speculate_do_and_nobody_beside_a_suspect() -> None:
    assert not speculative(scheduled(started(3, max_speculating_seqs=2)))
    assert speculative(scheduled(started(3, max_speculating_seqs=3, max_num_batched_tokens=64)))
    core = started()
    core.run_alone(Origin(0, 0))
    assert not speculative(scheduled(core))
    assert not speculative(scheduled(started(capacity=msgspec.structs.replace(CAPACITY, max_speculative_tokens=0))))


def test_proposals_take_what_is_left_of_the_budget() -> None:
    core = started(2)
    core._epoch.max_num_batched_tokens = 8
    assert [count for _, count in speculative(scheduled(core))] == [4, 2]


def test_a_block_is_taken_ahead_only_while_many_are_free() -> None:
    core = started()
    assert speculative(scheduled(core)) == [[0, 4]]  # positions 5 to 9, in a third block
    assert core.rows.num_blocks[0] == 3
    scarce = started(capacity=msgspec.structs.replace(CAPACITY, num_blocks=3, max_model_len=12))
    assert speculative(scheduled(scarce)) == [[0, 2]]
    assert scarce.rows.num_blocks[0] == 2
