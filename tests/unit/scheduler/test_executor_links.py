"""Which cell an executor gets, and which frames are whose."""

import msgspec

from headway_proto import step
from headway_proto.framing import FrameWriter
from headway_proto.step import BackendInfo, ExecutorHeartbeat, ExecutorHello, SchedulerHeartbeat
from headway_scheduler.links.executor_link import (
    TAKEOVER_SILENCE_S,
    EpochOpened,
    ExecutorLost,
    ExecutorRefused,
    StepEvent,
)
from headway_scheduler.links.executor_links import ExecutorLinks

INFO = BackendInfo(
    backend="simulated",
    device="none",
    dtype="none",
    model_name="m",
    model_fingerprint="f",
    num_blocks=8,
    block_size=4,
    max_model_len=32,
    vocab_size=10,
    eos_token_ids=(),
    max_num_rows=4,
)


class Executor:
    """Frames as an executor would send them."""

    def __init__(self, incarnation: int, info: BackendInfo = INFO, number: int = -1) -> None:
        self.number = number
        self.incarnation = incarnation
        self.peer = b"executor-%d" % incarnation
        self.writer: FrameWriter = step.executor_frame_writer()
        self.info = info

    def hello(self) -> bytes:
        return self.writer.encode(ExecutorHello(self.incarnation, self.info, self.number))

    def heartbeat(self) -> bytes:
        return self.writer.encode(ExecutorHeartbeat(self.incarnation, 0))


def join(links: ExecutorLinks, executor: Executor, now: float) -> tuple[int, list[StepEvent]]:
    number, events = links.receive(executor.peer, executor.hello(), now)
    for event in events:
        if isinstance(event, EpochOpened):
            executor.writer.begin_epoch(event.epoch)
            links.executors_run(event.info)
    return number, events


def test_each_executor_gets_a_cell_of_its_own() -> None:
    links = ExecutorLinks(incarnation=5, most=3)
    executors = [Executor(number) for number in (11, 12, 13)]
    opened = [join(links, executor, 0.0) for executor in executors]
    assert [number for number, _ in opened] == [0, 1, 2]
    epochs = [event.epoch for _, (event,) in opened if isinstance(event, EpochOpened)]
    assert len(set(epochs)) == 3
    for number, executor in enumerate(executors):
        assert links.receive(executor.peer, executor.heartbeat(), 0.1)[0] == number


def test_one_more_than_may_work_is_a_spare() -> None:
    links = ExecutorLinks(incarnation=5, most=2)
    executors = [Executor(number) for number in (11, 12, 13)]
    for executor in executors[:2]:
        join(links, executor, 0.0)
    assert join(links, executors[2], 0.1)[1] == []
    number, (lost,) = links.unreachable(executors[1].peer)
    assert (number, isinstance(lost, ExecutorLost)) == (1, True)
    number, (opened,) = join(links, executors[2], 0.2)
    assert (number, isinstance(opened, EpochOpened)) == (1, True)


def test_an_executor_that_returns_gets_its_cell_again() -> None:
    links = ExecutorLinks(incarnation=5, most=3)
    first, second = Executor(11), Executor(12)
    join(links, first, 0.0)
    join(links, second, 0.0)
    second.peer = b"another connection"
    assert join(links, second, 5.0)[0] == 1


def test_a_new_executor_gets_a_free_cell_then_a_new_one_then_that_of_a_silent_one() -> None:
    links = ExecutorLinks(incarnation=5, most=3)
    first, second, third, fourth, fifth = (Executor(number) for number in range(11, 16))
    join(links, first, 0.0)
    join(links, second, 0.0)
    links.unreachable(first.peer)
    assert join(links, third, 0.1)[0] == 0
    late = TAKEOVER_SILENCE_S + 0.2
    links.receive(third.peer, third.heartbeat(), late)
    assert join(links, fourth, late)[0] == 2
    links.receive(fourth.peer, fourth.heartbeat(), late)
    number, events = join(links, fifth, late)
    assert number == 1
    assert [type(event) for event in events] == [ExecutorLost, EpochOpened]


def test_an_executor_with_another_model_is_refused_once_while_another_works() -> None:
    links = ExecutorLinks(incarnation=5, most=2)
    join(links, Executor(11), 0.0)
    stranger = Executor(12, msgspec.structs.replace(INFO, model_fingerprint="other", model_name="n"))
    _, (refused,) = join(links, stranger, 0.1)
    assert isinstance(refused, ExecutorRefused)
    assert "'n'" in refused.reason
    assert join(links, stranger, 0.6)[1] == []
    links.unreachable(b"executor-11")
    assert isinstance(join(links, stranger, 0.7)[1][-1], EpochOpened)


def test_an_executor_of_an_earlier_scheduler_life_is_made_to_say_hello() -> None:
    links = ExecutorLinks(incarnation=5, most=2)
    join(links, Executor(11), 0.0)
    links.outgoing.clear()
    old = Executor(12)
    old.writer.begin_epoch(77)
    links.receive(old.peer, old.heartbeat(), 0.1)
    (peer, frame), *others = links.outgoing
    assert not others
    assert peer == old.peer
    assert step.executor_frame_reader().decode(frame).body == SchedulerHeartbeat(5)


def test_damaged_frames_are_counted_and_open_only_the_epoch_of_their_cell() -> None:
    links = ExecutorLinks(incarnation=5, most=2)
    first, second = Executor(11), Executor(12)
    join(links, first, 0.0)
    join(links, second, 0.0)
    before = [links[number].epoch for number in (0, 1)]
    number, (opened,) = links.receive(second.peer, b"?" * 40, 0.1)
    assert (number, isinstance(opened, EpochOpened)) == (1, True)
    assert links.receive(b"nobody", b"?" * 40, 0.1) == (0, [])
    assert links.num_damaged_frames == 2
    assert links[0].epoch == before[0]
    assert links[1].epoch > before[1]


def test_an_executor_gets_the_number_that_it_asks_for() -> None:
    links = ExecutorLinks(incarnation=5, most=3)
    assert join(links, Executor(11, number=2), 0.0)[0] == 2
    assert join(links, Executor(12, number=0), 0.0)[0] == 0
    assert join(links, Executor(13, number=2), 0.0)[0] == 1, "another has it"
    for number in (3, -7, 1 << 40):
        assert join(ExecutorLinks(incarnation=5, most=3), Executor(14, number=number), 0.0)[0] == 0
