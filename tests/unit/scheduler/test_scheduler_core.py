"""What the specification does not state of the core: rows that could not be run, and what steps tell of prompts."""

import gc
from typing import Any

import msgspec
import numpy as np
import pytest

from headway_proto.columns import decode_column, encode_column, encode_floats
from headway_proto.framing import MAX_FRAME_BYTES
from headway_proto.ingress import MAX_REQUEST_TOKENS
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput, RowError, RowPromptLogprobs
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state import step_plan
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_plan import StepPlan

CAPACITY = ExecutorCapacity(num_blocks=16, block_size=4, max_model_len=32, vocab_size=64, max_num_rows=1)


def request(handle: int) -> NewRequestEvent:
    return NewRequestEvent(
        origin=Origin(0, handle),
        request_id=str(handle),
        token_ids=np.arange(20, dtype=np.int32),
        num_prompt_tokens=20,
        max_tokens=4,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )


def test_an_error_in_a_chunk_of_a_request_that_left_does_not_end_the_next_one_in_its_row() -> None:
    core = Scheduler(SchedulerLimits(max_num_batched_tokens=8), CAPACITY)
    core.add_request(request(0), now=0.0)
    core.schedule(now=0.0)
    core.abort(Origin(0, 0))
    core.add_request(request(1), now=0.0)
    core.schedule(now=0.0)
    digest = core._epoch.in_flight[0].digest
    answer = ExecutorOutput(epoch=0, step=0, errors=(RowError(0, "cannot be run"),), state_digest=digest)
    assert core.update(answer, now=0.0).finished == ()
    assert core.num_running == 1


def test_a_step_begins_no_more_rows_than_its_message_can_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of which most is cached cost little of the budget, and all of their tokens are told."""
    most_tokens = step_plan.MOST_NEW_BYTES // 4 + MAX_REQUEST_TOKENS
    assert most_tokens * (4 + 4) < MAX_FRAME_BYTES, "with blocks of one token"
    monkeypatch.setattr(step_plan, "MOST_NEW_BYTES", 100)
    core = Scheduler(SchedulerLimits(max_steps_in_flight=8), ROOMY)
    for handle in range(4):
        core.add_request(request(handle), now=0.0)
    steps = [core.schedule(now=0.0), core.schedule(now=0.0)]
    assert [step and [new.row for new in step.scheduled_new_reqs] for step in steps] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"order": "fair", "batching": "orca"},
        {"order": "priority", "budget": "slo", "protect_itl": True, "default_itl_slo_ms": 50},
        {"order": "shortest", "reserve": "predicted", "prefix_aware": True},
    ],
)
def test_an_epoch_that_ends_leaves_nothing_for_the_collector_of_cycles(limits: dict[str, Any]) -> None:
    """The collector comes rarely, and an epoch has tables of many megabytes."""
    core = Scheduler(SchedulerLimits(**limits), ROOMY)
    for handle in range(4):
        core.add_request(msgspec.structs.replace(request(handle), priority=3), now=0.0)
    core.schedule(now=0.0)
    gc.collect()
    gc.disable()
    try:
        core.begin_epoch(ROOMY, 1)
        core.schedule(now=0.1)
        assert len(core.release_all()) == 4
        assert gc.collect() == 0
    finally:
        gc.enable()


ROOMY = ExecutorCapacity(
    num_blocks=256, block_size=4, max_model_len=64, vocab_size=64, max_num_rows=16, supports_prompt_logprobs=True
)


def reporting(handle: int, **changes: object) -> NewRequestEvent:
    return msgspec.structs.replace(request(handle), sampling=SamplingParams(prompt_logprobs=1), **changes)


def reported(first: int, count: int, row: int = 0, alternatives: int = 1) -> RowPromptLogprobs:
    ids = encode_column([5] * (count * alternatives))
    tops = encode_floats([-1.0] * (count * alternatives))
    return RowPromptLogprobs(row, PromptLogprobColumns(first, encode_floats([-1.0] * count), ids, tops))


def answer(core: Scheduler, *prompts: RowPromptLogprobs) -> ExecutorOutput:
    step = core._epoch.in_flight[0]
    sampled = encode_column([9] * len(step.sampling_rows))
    return ExecutorOutput(
        epoch=core.epoch, step=step.step, sampled_token_ids=sampled, state_digest=step.digest, prompt_logprobs=prompts
    )


def test_each_position_of_a_prompt_is_reported_once_over_preemption_and_epochs() -> None:
    core = Scheduler(SchedulerLimits(max_num_batched_tokens=8, preemption="recompute"), ROOMY)
    core.add_request(reporting(0), now=0.0)
    core.schedule(now=0.0)
    events = core.update(answer(core, reported(1, 8)), now=0.0)
    assert [(event.values.first_position, event.values.end) for event in events.prompt_logprobs] == [(1, 9)]
    core.run_alone(Origin(0, 1))  # nobody: everybody may run
    core.add_request(reporting(1), now=0.0)
    core.run_alone(Origin(0, 1))
    core.schedule(now=0.0)  # preempts the first and starts the second
    assert core.find(Origin(0, 0)).num_preemptions == 1
    core.abort(Origin(0, 1))
    core.update(answer(core), now=0.0)
    output = core.schedule(now=0.0)
    # 8 positions have been reported: token 8 is the first that has to run, and its block begins there.
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    core.begin_epoch(ROOMY, 1)
    output = core.schedule(now=0.0)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 0
    assert core.update(answer(core, reported(1, 8)), now=0.0).prompt_logprobs == ()
    core.schedule(now=0.0)
    events = core.update(answer(core, reported(9, 8)), now=0.0)
    assert [(event.values.first_position, event.values.end) for event in events.prompt_logprobs] == [(9, 17)]
    core.schedule(now=0.0)
    events = core.update(answer(core, reported(17, 3)), now=0.0)
    assert [event.values.num_positions for event in events.prompt_logprobs] == [3]


def test_what_a_gateway_holds_is_not_reported_again_and_nothing_more_is_asked_for() -> None:
    core = Scheduler(SchedulerLimits(), ROOMY)
    core.add_request(reporting(0, num_prompt_logprobs=12), now=0.0)
    core.add_request(reporting(1, num_prompt_logprobs=19), now=0.0)
    output = core.schedule(now=0.0)
    assert [new.sampling.prompt_logprobs for new in output.scheduled_new_reqs] == [1, -1]
    events = core.update(answer(core, reported(1, 19)), now=0.0)
    assert [(event.values.first_position, event.values.end) for event in events.prompt_logprobs] == [(13, 20)]


def test_a_replay_without_the_values_is_as_far() -> None:
    core = Scheduler(SchedulerLimits(), ROOMY)
    core.add_request(reporting(0), now=0.0)
    core.schedule(now=0.0)
    assert core.update(answer(core), now=0.0).prompt_logprobs == ()
    assert not core.find(Origin(0, 0)).is_owed_prompt_logprobs


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (reported(2, 18), "positions 2 to 19 follow from no tokens of it"),
        (reported(1, 20), "positions 1 to 20 follow from no tokens of it"),
        (reported(1, 19, row=3), "row 3's prompt in step 0, which ran none of it"),
        (RowPromptLogprobs(0, PromptLogprobColumns(1, b"123")), "bytes are not the columns"),
    ],
)
def test_what_no_step_can_tell_of_a_prompt_is_a_mismatch(wrong: RowPromptLogprobs, words: str) -> None:
    core = Scheduler(SchedulerLimits(), ROOMY)
    core.add_request(reporting(0), now=0.0)
    core.schedule(now=0.0)
    with pytest.raises(StateMismatch, match=words):
        core.update(answer(core, wrong), now=0.0)


def test_an_executor_that_reports_no_prompts_is_not_asked_and_cannot_take_over() -> None:
    without = msgspec.structs.replace(ROOMY, supports_prompt_logprobs=False)
    core = Scheduler(SchedulerLimits(), without)
    with pytest.raises(RequestRejected, match="the executor's backend does not report them"):
        core.add_request(reporting(0), now=0.0)
    core = Scheduler(SchedulerLimits(), ROOMY)
    core.add_request(reporting(0), now=0.0)
    core.add_request(request(1), now=0.0)
    (end,) = core.begin_epoch(without, 1).finished
    assert end.origin == Origin(0, 0)
    assert "reports no log probabilities" in end.error


@pytest.mark.parametrize(("wait", "num_computed"), [(0, 8 * 20), (8, 20 + 7 * 4), (17, 8 * 20)])
def test_one_of_many_computes_what_they_share_if_that_is_enough(wait: int, num_computed: int) -> None:
    """Eight requests of the same 20 tokens at once: the others find the 16 in whole blocks, one step later."""
    limits = SchedulerLimits(prefix_wait_tokens=wait, max_num_batched_tokens=200, max_num_seqs=8)
    core = Scheduler(limits, ROOMY)
    for handle in range(8):
        core.add_request(request(handle), now=0.0)
    num_prompt_tokens = 0
    for _ in range(3):
        while (output := core.schedule(now=0.0)) is not None:
            for new in output.scheduled_new_reqs:
                num_prompt_tokens += len(new.token_ids) // 4 - new.num_computed_tokens
        if core.num_in_flight:
            core.update(answer(core), now=0.0)
    assert num_prompt_tokens == num_computed
    assert core.num_running == 8


def waits_for_prefix(core: Scheduler, waiting: Request | None) -> bool:
    assert waiting is not None
    most_blocks = core.prefixes.most_blocks(waiting)
    shared, _ = core.prefixes.find(waiting, waiting.token_ids.tobytes(), most_blocks)
    plan = StepPlan(core.max_num_batched_tokens, 0.0)
    return core.admission._prefix_wait.waits(plan, waiting, len(shared) * core.rows.block_size, most_blocks)


def test_nobody_waits_for_who_makes_no_progress() -> None:
    """A prompt that has nothing in flight and no part in the step holds nobody back."""
    limits = SchedulerLimits(prefix_wait_tokens=8, max_num_batched_tokens=8, max_steps_in_flight=1, max_num_seqs=4)
    core = Scheduler(limits, ROOMY)
    core.add_request(request(0), now=0.0)
    core.schedule(now=0.0)
    core.add_request(request(1), now=0.0)
    assert waits_for_prefix(core, core.find(Origin(0, 1)))
    core.update(answer(core), now=0.0)
    assert not waits_for_prefix(core, core.find(Origin(0, 1)))


def test_somebody_waits_for_who_has_become_longer_since_it_was_first_compared() -> None:
    """A prompt too short to be waited for comes back with its output, which is the beginning of another's prompt."""
    core = Scheduler(SchedulerLimits(prefix_wait_tokens=4, max_num_seqs=1), ROOMY)
    core.add_request(
        msgspec.structs.replace(request(0), token_ids=np.arange(2, dtype=np.int32), num_prompt_tokens=2), now=0.0
    )
    prompt = np.array([0, 1, *[9] * 18], dtype=np.int32)  # 9 is what every step samples
    core.add_request(msgspec.structs.replace(request(1), token_ids=prompt), now=0.0)
    core.schedule(now=0.0)
    assert not waits_for_prefix(core, core.find(Origin(0, 1)))
    core.update(answer(core), now=0.0)
    for _ in range(2):
        core.schedule(now=0.0)
        core.update(answer(core), now=0.0)
    core.begin_epoch(ROOMY, 1)
    (new,) = core.schedule(now=0.0).scheduled_new_reqs
    assert decode_column(new.token_ids).tolist() == [0, 1, 9, 9, 9]
    assert waits_for_prefix(core, core.find(Origin(0, 1)))
