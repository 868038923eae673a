"""Explanations of constructed lives: what is said is what was arranged."""

import msgspec
import pytest

from flight_logs import RecordedExactCore
from headway_lab.flight.explanation import OTHERS, OWN_BESIDE, OWN_DEVICE, explanation, time_to_first_token
from headway_lab.flight.life import NO_EXECUTOR, Follower, Life
from headway_scheduler.core.admission.refusals import Reason
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.flight.records import Refused
from headway_scheduler.flight.replay import Replay

CAPACITY = ExecutorCapacity(num_blocks=64, block_size=4, max_model_len=64, vocab_size=13, max_num_rows=8)


def recorded(capacity: ExecutorCapacity = CAPACITY, **limits) -> RecordedExactCore:
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "max_steps_in_flight": 1, **limits}
    return RecordedExactCore(SchedulerLimits(**settings), capacity)


def beat(run: RecordedExactCore, seconds: float = 0.010) -> None:
    """A step, from its sending to its answer."""
    run.schedule()
    run.now += seconds
    if run.num_in_flight:
        run.answer()


def life_of(run: RecordedExactCore, handle: int) -> Life:
    run.recorder.flush(run.now, None, is_final=True)
    follower, replay = Follower(str(handle)), Replay(run.limits)
    for event in replay.run(run.log.records):
        follower.record(event, replay)
    assert len(follower.lives) == 1
    return follower.lives[0]


def text_of(life: Life) -> str:
    return explanation(life, 0.0)


def test_a_fast_one():
    run = recorded()
    run.add([1] * 20, 3)
    for _ in range(4):
        beat(run)
    life = life_of(run, 0)
    assert not life.waits
    assert [step.num_own_tokens for step in life.own_steps] == [20, 1, 1]
    text = text_of(life)
    assert "0 requests ran, none was waiting." in text
    assert "It got a row in step 0, with all of its 20 tokens to compute." in text
    assert "step 0: 20 tokens alone" in text
    assert "Where these 10.0 ms went:" in text
    assert "It ended: length, after 3 output tokens." in text


def test_one_that_waited_for_a_row():
    run = recorded(max_num_seqs=1)
    run.add([1] * 8, 5)
    beat(run)
    run.add([2] * 8, 2)
    for _ in range(7):
        beat(run)
    life = life_of(run, 1)
    assert [wait.reason for wait in life.waits] == [Reason.ROWS.value]
    assert life.waits[0].end_s - life.waits[0].start_s == pytest.approx(0.040)
    parts = time_to_first_token(life)
    assert parts[f"waiting, because {Reason.ROWS.value}"] == pytest.approx(0.040)
    assert sum(parts.values()) == pytest.approx(life.token_times_s[0] - life.arrival_s)
    assert "1 request ran, none was waiting." in text_of(life)
    assert (
        "40.0 ms because as many requests ran as may run at once (at first: max_num_seqs = 1 requests are running)"
        in (text_of(life))
    )


def test_one_behind_others_is_told_behind_whom():
    run = recorded(max_num_seqs=1)
    for _ in range(6):
        run.add([1] * 8, 2)
    beat(run)
    run.add([1] * 8, 2)
    for _ in range(16):
        beat(run)
    text = text_of(life_of(run, 6))
    assert "5 were waiting, 5 of them before it: 1, 2, 3 and 2 more." in text
    assert "at first: behind 5 others; max_num_seqs = 1 requests are running" in text


def test_its_chunks_and_who_was_beside_them():
    run = recorded(max_num_batched_tokens=16)
    run.add([1] * 6, 12)
    beat(run)
    run.add([2] * 40, 2)
    for _ in range(6):
        beat(run)
    life = life_of(run, 1)
    assert [step.num_own_tokens for step in life.own_steps] == [15, 15, 10, 1]
    assert "ran in 3 chunks" in text_of(life)
    assert "step 1: 15 tokens beside 1 decode" in text_of(life)
    # and the other's gap says whose prompt it was
    gaps = [step for step in life_of(run, 0).steps if step.prompts]
    assert gaps[0].prompts == (("1", 15),)


TIGHT = ExecutorCapacity(num_blocks=9, block_size=4, max_model_len=36, vocab_size=13, max_num_rows=8)


@pytest.mark.parametrize(
    ("num_blocks", "why"),
    [
        (9, "it needed a KV block, none was free, and those that hold them are served before it"),
        (8, "no KV block was free, 0 needed one, and it was the one to give up the least"),
    ],
)
def test_one_that_was_preempted_why_and_what_it_cost(num_blocks: int, why: str):
    capacity = msgspec.structs.replace(TIGHT, num_blocks=num_blocks, max_model_len=4 * num_blocks)
    run = recorded(capacity, reserve="none", enable_prefix_caching=False)
    run.add([1] * 14, 14)
    beat(run)
    run.add([2] * 13, 10)
    for _ in range(60):
        beat(run)
    life = life_of(run, 1)
    assert len(life.admissions) == 2
    assert life.num_output_tokens == 10
    assert [setback.why for setback in life.setbacks] == [why]
    text = text_of(life)
    assert f"It was preempted: {why}. That cost it " in text
    assert f" and {life.setbacks[0].num_computed_tokens} tokens were computed again." in text
    assert "because too few KV blocks were free (at first: its" in text
    assert ": it was preempted" in text


def test_one_that_made_way_for_a_higher_class():
    run = recorded(TIGHT, order="priority", reserve="prompt", enable_prefix_caching=False)
    run.add([1] * 24, 8, priority=4)
    beat(run)
    beat(run)
    run.add([2] * 20, 3, priority=1)
    for _ in range(30):
        beat(run)
    life = life_of(run, 0)
    assert [setback.why for setback in life.setbacks] == ["it made way for 1 of a higher class"]


def test_pauses_losses_and_cancellations():
    run = recorded()
    run.core.paused = True
    run.add([1] * 8, 30)
    beat(run, 0.5)
    run.core.paused = False
    beat(run)
    run.begin_epoch()
    beat(run)
    beat(run)
    run.abort(0)
    life = life_of(run, 0)
    assert life.waits[0].reason == Reason.PAUSED.value
    assert life.waits[0].end_s - life.waits[0].start_s == pytest.approx(0.5)
    assert [setback.why for setback in life.setbacks] == ["the executor had to begin anew: test"]
    assert life.end == "abort (test)"
    assert "It was preempted: the executor had to begin anew: test." in text_of(life)


def test_time_without_an_executor_is_told():
    run = recorded()
    run.add([1] * 8, 4)
    beat(run)
    run.recorder.executor_gone(run.now, "unreachable")
    run.now += 2.0
    run.add([2] * 8, 2)
    run.now += 1.0
    run.begin_epoch()
    for _ in range(3):
        beat(run)
    for handle, waited_s in ((0, 3.0), (1, 1.0)):
        life = life_of(run, handle)
        assert [wait.reason for wait in life.waits] == [NO_EXECUTOR]
        assert life.waits[0].end_s - life.waits[0].start_s == pytest.approx(waited_s)
        assert life.end.startswith("length")
    assert [setback.why for setback in life_of(run, 0).setbacks] == ["the executor was lost: unreachable"]


def test_steps_under_way_at_arrival_are_not_its_own():
    run = recorded(max_steps_in_flight=2)
    run.add([1] * 8, 20)
    beat(run)
    run.schedule()
    run.now += 0.004
    run.add([2] * 8, 2)
    for _ in range(4):
        run.now += 0.006
        run.answer()
        run.schedule()
    parts = time_to_first_token(life_of(run, 1))
    assert parts[OTHERS] > 0
    assert sum(parts.values()) == pytest.approx(life_of(run, 1).token_times_s[0] - life_of(run, 1).arrival_s)
    assert OWN_DEVICE not in parts  # the simulated backend tells no device time here
    assert parts[OWN_BESIDE] > 0


def test_a_refused_request_is_told_why():
    follower = Follower("7")
    run = recorded()
    refused = Refused(1.5, "7", 0, "a", 9, "overloaded", "4 requests are waiting; allowed: 4")
    run.recorder.flush(run.now, None, is_final=True)
    replay = Replay(run.limits)
    for event in replay.run([*run.log.records, refused]):
        follower.record(event, replay)
    assert explanation(follower.lives[0], 1.0) == (
        "Request 7 (tenant a, 9 tokens) was refused (overloaded): 4 requests are waiting; allowed: 4, 0.500 s into it.\n"
    )
