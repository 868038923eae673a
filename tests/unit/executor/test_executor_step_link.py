"""The executor's side of the step protocol: each rule, then that no damage to the wire ever executes a wrong step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.backend import StepResult
from headway_executor.links import step_link
from headway_executor.links.step_link import (
    EpochBegan,
    EpochLost,
    LinkOutcome,
    LinkTiming,
    StepLink,
    StepReady,
    most_bytes_of,
)
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.step import (
    BackendInfo,
    ExecutorHeartbeat,
    ExecutorHello,
    ExecutorOutput,
    NewEpoch,
    ResyncRequest,
    RowError,
    RowLogprobs,
    RowPromptLogprobs,
    RowVector,
    SchedulerHeartbeat,
    SchedulerOutput,
    scheduler_frame_reader,
    scheduler_frame_writer,
)

INCARNATION, SCHEDULER, OTHER_SCHEDULER = 111, 7, 8
INFO = BackendInfo(
    backend="test",
    device="none",
    dtype="none",
    model_name="test",
    model_fingerprint="test",
    num_blocks=8,
    block_size=4,
    max_model_len=32,
    vocab_size=50,
    eos_token_ids=(0,),
    max_num_rows=4,
)
TIMING = LinkTiming(hello_interval=0.5, resync_interval=0.25, heartbeat_interval=0.25, silence_timeout=5.0)


class Scheduler:
    """Writes what a scheduler would."""

    def __init__(self, incarnation: int = SCHEDULER) -> None:
        self.incarnation = incarnation
        self.writer = scheduler_frame_writer()
        self.next_step = 0

    def new_epoch(self, epoch: int, *, executor: int = INCARNATION) -> bytes:
        self.writer.begin_epoch(epoch)
        self.next_step = 0
        return self.writer.encode(NewEpoch(epoch, executor, self.incarnation))

    def step(self) -> bytes:
        self.next_step += 1
        return self.writer.encode(
            SchedulerOutput(epoch=self.writer.epoch, step=self.next_step - 1, total_num_scheduled_tokens=self.next_step)
        )

    def heartbeat(self) -> bytes:
        return self.writer.encode(SchedulerHeartbeat(self.incarnation))


def make_link() -> StepLink:
    return StepLink(incarnation=INCARNATION, info=INFO, timing=TIMING)


def running_link(scheduler: Scheduler, epoch: int = 5) -> StepLink:
    link = make_link()
    link.receive(scheduler.new_epoch(epoch), 0.0)
    return link


def decoded(outcome: LinkOutcome | list[bytes]) -> list[tuple[int, int, object]]:
    frames = outcome.frames if isinstance(outcome, LinkOutcome) else outcome
    reader = scheduler_frame_reader()
    return [(frame.epoch, frame.sequence, frame.body) for frame in map(reader.decode, frames)]


def bodies(outcome: LinkOutcome) -> list[type]:
    return [type(body) for _, _, body in decoded(outcome)]


def steps(outcome: LinkOutcome) -> list[int]:
    return [event.output.step for event in outcome.events if isinstance(event, StepReady)]


def an_answer(tokens=()) -> StepResult:
    return StepResult(sampled_token_ids=np.array(tokens, dtype=np.int32))


def test_hello_is_repeated_until_an_epoch_opens():
    link = make_link()
    assert decoded(link.tick(100.0)) == [(0, 0, ExecutorHello(INCARNATION, INFO))]
    assert link.next_deadline == 100.5
    assert decoded(link.tick(100.4)) == []
    assert decoded(link.tick(100.5)) == [(0, 1, ExecutorHello(INCARNATION, INFO))]
    outcome = link.receive(Scheduler().new_epoch(5), 100.6)
    assert outcome.events == [EpochBegan(5, SCHEDULER)]
    assert decoded(outcome) == [(5, 0, ExecutorHeartbeat(INCARNATION, 0))]
    assert bodies(link.tick(101.1)) == [ExecutorHeartbeat]


def test_steps_are_taken_in_order_and_answered_under_the_epoch():
    scheduler = Scheduler()
    link = running_link(scheduler)
    assert steps(link.receive(scheduler.step(), 0.01)) == [0]
    assert link.receive(scheduler.heartbeat(), 0.02).events == []
    assert steps(link.receive(scheduler.step(), 0.03)) == [1]
    frames = link.result(epoch=5, step=0, result=an_answer([4, 9]), state_digest=77)
    ((epoch, sequence, output),) = decoded(frames)
    assert (epoch, sequence) == (5, 1)
    assert output == ExecutorOutput(
        epoch=5, step=0, sampled_token_ids=np.array([4, 9], dtype="<i4").tobytes(), state_digest=77
    )
    ((_, _, heartbeat),) = decoded(link.tick(0.25))
    assert heartbeat == ExecutorHeartbeat(INCARNATION, 2)


def test_duplicates_are_dropped():
    scheduler = Scheduler()
    link = make_link()
    opening, first, second = scheduler.new_epoch(5), scheduler.step(), scheduler.step()
    taken = [steps(link.receive(frame, 0.1)) for frame in (opening, first, first, opening, second, first, second)]
    assert taken == [[], [0], [], [], [1], [], []]
    assert link.running


@pytest.mark.parametrize("damage", ["gap", "bytes", "step", "kind"])
def test_a_lost_thread_asks_for_a_new_epoch_until_it_comes(damage):
    scheduler = Scheduler()
    link = running_link(scheduler)
    if damage == "gap":
        scheduler.step()
        frame = scheduler.step()
        reason = "frame 2 arrived where 1 was expected"
    elif damage == "bytes":
        frame = bytearray(scheduler.step())
        frame[-1] ^= 1
        reason = "damaged frame: checksum"
    elif damage == "step":
        scheduler.next_step = 3
        frame = scheduler.step()
        reason = "step 3 of epoch 5 arrived where step 0 of epoch 5 was expected"
    else:
        frame = scheduler.writer.encode(NewEpoch(5, INCARNATION, SCHEDULER))
        reason = "NewEpoch arrived where step 0 of epoch 5 was expected"
    outcome = link.receive(bytes(frame), 1.0)
    assert [type(event) for event in outcome.events] == [EpochLost]
    ((epoch, _, request),) = decoded(outcome)
    assert epoch == 5
    assert isinstance(request, ResyncRequest)
    assert reason in request.reason
    assert steps(link.receive(scheduler.step(), 1.1)) == []
    assert link.result(epoch=5, step=0, result=an_answer(), state_digest=None) == []
    assert bodies(link.tick(1.2)) == []
    assert decoded(link.tick(1.25))[0][2] == request
    assert link.receive(scheduler.new_epoch(6), 1.3).events == [EpochBegan(6, SCHEDULER)]
    assert steps(link.receive(scheduler.step(), 1.4)) == [0]


def test_damage_before_any_epoch_is_ignored():
    link = make_link()
    outcome = link.receive(b"noise", 1.0)
    assert outcome.events == []
    assert bodies(outcome) == []


def test_results_of_an_older_epoch_are_dropped():
    scheduler = Scheduler()
    link = running_link(scheduler)
    link.receive(scheduler.step(), 0.1)
    link.receive(scheduler.new_epoch(6), 0.2)
    assert link.result(epoch=5, step=0, result=an_answer([1]), state_digest=None) == []
    assert link.lose_epoch(5, "late failure", 0.3) == LinkOutcome([], [])
    assert link.running


@pytest.mark.parametrize("number", [1, 20])
def test_no_answer_takes_more_bytes_than_is_said(number, monkeypatch):
    """With the widest numbers, beside what every answer has."""
    monkeypatch.setattr(step_link, "_MOST_BYTES_OF_THE_REST", 128)
    widest = (1 << 31) - 1
    rows = [65_535 - place for place in range(number)]
    prompt = PromptLogprobColumns(widest, bytes(4 * 70_000), bytes(20 * 70_000), bytes(20 * 70_000))
    parts = {
        "logprobs": tuple(RowLogprobs(row, -1.1, (widest,) * 20, (-1.1,) * 20) for row in rows),
        "prompt_logprobs": tuple(RowPromptLogprobs(row, prompt) for row in rows),
        "vectors": tuple(RowVector(row, bytes(70_000)) for row in rows),
        "errors": tuple(RowError(row, "\N{GRINNING FACE}" * 70_000) for row in rows),
    }
    ids, accepted = np.full(number, widest, np.int32), np.ones((3, number), np.int32)
    for fields in ({}, *({name: values} for name, values in parts.items()), parts):
        result = StepResult(
            sampled_token_ids=ids, accepted_tokens=accepted, device_time_us=widest, move_time_us=widest, **fields
        )
        scheduler = Scheduler()
        link = running_link(scheduler)
        link.receive(scheduler.step(), 0.0)
        (frame,) = link.result(epoch=link.epoch, step=0, result=result, state_digest=(1 << 32) - 1)
        assert len(frame) <= most_bytes_of(result) <= 128 + 2 * len(frame), fields


def test_frames_of_an_earlier_epoch_are_ignored():
    scheduler = Scheduler()
    link = running_link(scheduler)
    old_step, old_epoch = scheduler.step(), Scheduler().new_epoch(5)
    link.receive(scheduler.new_epoch(6), 0.1)
    for frame in (old_step, old_epoch, Scheduler().new_epoch(4)):
        assert link.receive(frame, 0.2).events == []
    assert steps(link.receive(scheduler.step(), 0.3)) == [0]


def test_an_epoch_for_another_executor_is_ignored():
    link = make_link()
    assert link.receive(Scheduler().new_epoch(5, executor=222), 0.0).events == []
    assert not link.running


def test_a_failed_step_loses_the_epoch_in_one_line():
    scheduler = Scheduler()
    link = running_link(scheduler)
    outcome = link.lose_epoch(5, "step 0 failed:\n  out of memory " + "x" * 900, 0.1)
    ((_, _, request),) = decoded(outcome)
    assert request.reason.startswith("step 0 failed: out of memory x")
    assert len(request.reason) == 300
    assert link.lose_epoch(5, "again", 0.15) == LinkOutcome([], [])


def test_another_scheduler_is_greeted_and_followed():
    old, new = Scheduler(), Scheduler(OTHER_SCHEDULER)
    link = running_link(old)
    outcome = link.receive(new.heartbeat(), 0.5)
    assert [type(event) for event in outcome.events] == [EpochLost]
    assert bodies(outcome) == [ExecutorHello]
    assert bodies(link.receive(new.heartbeat(), 0.6)) == [], "hellos keep their interval"
    assert link.receive(new.new_epoch(2), 0.7).events == [EpochBegan(2, OTHER_SCHEDULER)]
    late_epoch = Scheduler().new_epoch(9)
    assert link.receive(late_epoch, 0.8).events == [], "a scheduler that was left stays left"
    assert link.receive(old.heartbeat(), 0.8).events == []
    assert steps(link.receive(new.step(), 0.9)) == [0]


def test_a_step_of_a_later_epoch_shows_that_its_opening_was_lost():
    scheduler = Scheduler()
    link = running_link(scheduler)
    scheduler.new_epoch(6)
    outcome = link.receive(scheduler.step(), 1.0)
    assert [type(event) for event in outcome.events] == [EpochLost]
    assert bodies(outcome) == [ExecutorHello]


def test_silence_leads_back_to_hello_and_no_further():
    scheduler = Scheduler()
    link = running_link(scheduler)
    link.receive(scheduler.heartbeat(), 3.0)
    link.tick(7.9)
    assert link.running
    assert link.next_deadline == 8.0
    outcome = link.tick(8.0)
    assert [type(event) for event in outcome.events] == [EpochLost]
    assert bodies(outcome) == [ExecutorHello]
    assert steps(link.receive(scheduler.step(), 8.1)) == [], "the epoch was given up"
    assert bodies(link.tick(1000.0)) == [ExecutorHello]
    assert link.receive(scheduler.new_epoch(6), 1000.1).events == [EpochBegan(6, SCHEDULER)]


def test_a_lost_link_also_notices_silence():
    scheduler = Scheduler()
    link = running_link(scheduler)
    link.lose_epoch(5, "failed", 1.0)
    assert bodies(link.tick(5.0)) == [ExecutorHello]


wire_faults = st.lists(
    st.tuples(
        st.sampled_from(["drop", "repeat", "swap", "flip", "cut", "replay"]), st.integers(0, 40), st.integers(0, 4000)
    ),
    max_size=6,
)


def with_faults(frames: list[bytes], faults) -> list[bytes]:
    """Damage a recorded stream of frames."""
    frames = list(frames)
    for kind, where, value in faults:
        place = where % len(frames)
        frame = frames[place]
        if kind == "drop" and len(frames) > 1:
            del frames[place]
        elif kind == "repeat":
            frames.insert(place, frame)
        elif kind == "swap":
            other = value % len(frames)
            frames[place], frames[other] = frames[other], frame
        elif kind == "flip" and frame:
            changed = bytearray(frame)
            changed[value % len(frame)] ^= 1 << (value % 8)
            frames[place] = bytes(changed)
        elif kind == "cut" and frame:
            frames[place] = frame[: value % len(frame)]
        elif kind == "replay":
            frames.insert(value % len(frames), frame)
    return frames


@settings(max_examples=300)
@given(faults=wire_faults, lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_no_damage_to_the_wire_executes_a_wrong_step(faults, lengths):
    """Whatever is lost, doubled, reordered or damaged: within each epoch exactly steps 0, 1, 2, ... are executed, with
    the content that was sent, and never one of an epoch that was left."""
    scheduler = Scheduler()
    sent = []
    for epoch, length in enumerate(lengths, start=1):
        sent.append(scheduler.new_epoch(epoch))
        for _ in range(length):
            sent.append(scheduler.step())
            sent.append(scheduler.heartbeat())
    link = make_link()
    executed: list[tuple[int, int]] = []
    began = [0]
    for now, frame in enumerate(with_faults(sent, faults)):
        outcome = link.receive(frame, now * 0.01)
        for event in outcome.events:
            if isinstance(event, EpochBegan):
                began.append(event.epoch)
            elif isinstance(event, StepReady):
                assert event.output.epoch == began[-1]
                assert event.output.total_num_scheduled_tokens == event.output.step + 1
                executed.append((event.output.epoch, event.output.step))
    assert began == sorted(set(began))
    for epoch in began[1:]:
        numbers = [step for of_epoch, step in executed if of_epoch == epoch]
        assert numbers == list(range(len(numbers)))
    assert len(executed) == len(set(executed))
    # And it recovers: the next epoch works.
    assert link.receive(scheduler.new_epoch(len(lengths) + 1), 1.0).events[-1] == EpochBegan(
        len(lengths) + 1, SCHEDULER
    )
    assert steps(link.receive(scheduler.step(), 1.0)) == [0]
