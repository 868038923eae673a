"""The scheduler's ends of both protocols: lives, order, flow control."""

import msgspec
import numpy as np
import pytest

from headway_executor.links.step_link import StepLink
from headway_proto import ingress, step
from headway_proto.columns import decode_columns
from headway_proto.framing import FrameWriter
from headway_proto.ingress import MAX_UNACKNOWLEDGED_FRAMES, GatewayHeartbeat, GatewayHello, SchedulerHello, Tokens
from headway_proto.step import BackendInfo, ExecutorHeartbeat, ExecutorHello, ExecutorOutput, NewEpoch, ResyncRequest
from headway_scheduler.links.executor_link import (
    SILENCE_TIMEOUT_S,
    TAKEOVER_SILENCE_S,
    EpochOpened,
    ExecutorLink,
    ExecutorLost,
    ExecutorRefused,
    InAnotherState,
    StepAnswered,
    StepEvent,
    StepFailed,
)
from headway_scheduler.links.executor_links import ExecutorLinks
from headway_scheduler.links.ingress_link import MAX_HELD_TOKENS, MAX_LINKS, Announcement, GatewayGone, IngressLinks


def news() -> Announcement:
    return Announcement(None, ingress.STATE_SERVING, 0, 0)


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

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.peer = b"executor-%d" % incarnation
        self.writer: FrameWriter = step.executor_frame_writer()

    def hello(self) -> bytes:
        return self.writer.encode(ExecutorHello(self.incarnation, INFO))


@pytest.fixture
def link() -> ExecutorLink:
    return ExecutorLink(incarnation=77)


def join(link: ExecutorLink, executor: Executor, now: float) -> int:
    *lost, event = link.receive(executor.peer, executor.hello(), now)
    assert isinstance(event, EpochOpened)
    assert all(isinstance(other, ExecutorLost) for other in lost)
    peer, frame = link.outgoing.pop()
    body = step.executor_frame_reader().decode(frame).body
    assert (peer, body) == (executor.peer, NewEpoch(event.epoch, executor.incarnation, 77))
    executor.writer.begin_epoch(event.epoch)
    return event.epoch


def talk(link: ExecutorLink, executor: StepLink, now: float) -> list[StepEvent]:
    """Carry frames both ways until neither side has any more; what the scheduler's side had to say."""
    events: list[StepEvent] = []
    frames = executor.tick(now).frames
    while frames:
        for frame in frames:
            events += link.receive(b"executor", frame, now)
        outgoing, link.outgoing = link.outgoing, []
        frames = [answer for _, frame in outgoing for answer in executor.receive(frame, now).frames]
    return events


@pytest.mark.parametrize("lost", ["unreachable", "silent"])
def test_an_executor_that_was_given_up_and_lives_is_taken_back(link: ExecutorLink, lost: str) -> None:
    """It noticed nothing, so that it still is in the epoch in which it was given up."""
    executor = StepLink(incarnation=1, info=INFO)
    talk(link, executor, 0.0)
    assert executor.running
    now = 1.0 if lost == "unreachable" else SILENCE_TIMEOUT_S + 1.0
    executor._last_heard = now
    events = link.unreachable(b"executor") if lost == "unreachable" else link.tick(now)
    assert isinstance(events[-1], ExecutorLost)
    link.outgoing.clear()
    events = talk(link, executor, now + 0.3)
    assert [type(event) for event in events] == [EpochOpened]
    assert link.is_open
    assert executor.running
    assert executor.epoch == link.epoch


def frames_to(links: ExecutorLinks, peer: bytes) -> list[bytes]:
    frames = [frame for name, frame in links.outgoing if name == peer]
    links.outgoing[:] = [(name, frame) for name, frame in links.outgoing if name != peer]
    return frames


def talk_to_cells(links: ExecutorLinks, executors: dict[bytes, StepLink], now: float) -> None:
    """Let these executors, and no others, hear and answer until nothing more is said."""
    waiting = {peer: executor.tick(now).frames for peer, executor in executors.items()}
    while any(waiting.values()):
        for peer, executor in executors.items():
            for frame in waiting[peer]:
                links.receive(peer, frame, now)
            waiting[peer] = [
                answer for frame in frames_to(links, peer) for answer in executor.receive(frame, now).frames
            ]


def test_an_executor_without_a_link_joins_again_and_the_others_notice_nothing() -> None:
    """It thinks that it still serves, in an epoch of the second cell; the first is open."""
    links = ExecutorLinks(77, most=2)
    executors = {peer: StepLink(incarnation=number, info=INFO) for number, peer in enumerate((b"a", b"b"), start=1)}
    talk_to_cells(links, executors, 0.0)
    first, second = executors.values()
    epoch = first.epoch
    links.unreachable(b"b")
    talk_to_cells(links, {b"a": first, b"new": second}, 0.3)
    assert [links[0].peer, links[1].peer] == [b"a", b"new"]
    assert second.running
    assert second.epoch == links[1].epoch
    assert first.running
    assert (first.epoch, first._expected_sequence) == (epoch, links[0]._writer.next_sequence)


def test_an_executor_that_comes_to_another_cell_gets_a_later_epoch() -> None:
    links = ExecutorLinks(77, most=2)
    first, second, third = (StepLink(incarnation=number, info=INFO) for number in (1, 2, 3))
    talk_to_cells(links, {b"a": first, b"b": second}, 0.0)
    links.unreachable(b"b")
    talk_to_cells(links, {b"c": third}, 0.1)
    links.unreachable(b"a")
    talk_to_cells(links, {b"b": second}, 0.3)
    assert [links[0].peer, links[1].peer] == [b"b", b"c"]
    assert second.running
    assert second.epoch == links[0].epoch


def test_repeated_hellos_do_not_open_more_epochs(link: ExecutorLink) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    assert link.receive(executor.peer, executor.hello(), 0.1) == []
    assert len(link.receive(executor.peer, executor.hello(), 0.6)) == 1


def test_a_silent_executor_is_told_apart(link: ExecutorLink) -> None:
    assert link.executor_state(0.0) == "absent"
    executor = Executor(1)
    join(link, executor, 0.0)
    assert [link.executor_state(now) for now in (0.7, 0.9)] == ["ready", "silent"]
    link.receive(executor.peer, executor.writer.encode(ExecutorHeartbeat(1, 0)), 0.95)
    assert link.executor_state(1.0) == "ready"
    link.unreachable(executor.peer)
    assert link.executor_state(1.0) == "absent"


def test_an_answer_of_an_older_epoch_has_no_effect(link: ExecutorLink) -> None:
    executor = Executor(1)
    first = join(link, executor, 0.0)
    late = executor.writer.encode(ExecutorOutput(epoch=first, step=0))
    link.reopen("for the test", 1.0)
    assert link.receive(executor.peer, late, 1.1) == []


@pytest.mark.parametrize("damage", ["gap", "corruption"])
def test_a_broken_thread_opens_a_new_epoch(link: ExecutorLink, damage: str) -> None:
    executor = Executor(1)
    epoch = join(link, executor, 0.0)
    frame = executor.writer.encode(ExecutorOutput(epoch=epoch, step=0))
    if damage == "gap":
        frame = executor.writer.encode(ExecutorOutput(epoch=epoch, step=1))
    else:
        frame = frame[:-1] + bytes([frame[-1] ^ 1])
    (event,) = link.receive(executor.peer, frame, 1.0)
    assert isinstance(event, EpochOpened)
    assert event.epoch != epoch
    assert link.num_damaged_frames == (damage == "corruption")


def test_a_duplicate_is_answered_once(link: ExecutorLink) -> None:
    executor = Executor(1)
    epoch = join(link, executor, 0.0)
    frame = executor.writer.encode(ExecutorOutput(epoch=epoch, step=0))
    (event,) = link.receive(executor.peer, frame, 0.1)
    assert isinstance(event, StepAnswered)
    assert link.receive(executor.peer, frame, 0.2) == []


def test_a_resync_request_counts_once_however_often_it_is_repeated(link: ExecutorLink) -> None:
    executor = Executor(1)
    epoch = join(link, executor, 0.0)
    request = ResyncRequest(1, "lost the thread")
    frames = [executor.writer.encode(request) for _ in range(3)]
    assert [len(link.receive(executor.peer, frame, 1.0)) for frame in frames] == [1, 0, 0]
    assert link.epoch == epoch + 1


@pytest.mark.parametrize("is_leaving", [False, True])
def test_an_executor_in_another_state_is_told_of_before_its_epoch_ends(link: ExecutorLink, *, is_leaving: bool) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    request = ResyncRequest(1, "row 2 is not live", is_leaving=is_leaving, is_in_another_state=True)
    found, end = link.receive(executor.peer, executor.writer.encode(request), 1.0)
    assert found == InAnotherState()
    assert isinstance(end, ExecutorLost if is_leaving else EpochOpened)


def test_smaller_steps_are_asked_for_until_another_executor_joins(link: ExecutorLink) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    (event,) = link.receive(executor.peer, executor.writer.encode(ResyncRequest(1, "out of memory", 40)), 1.0)
    assert isinstance(event, EpochOpened)
    assert event.info.max_num_batched_tokens == 40
    (event,) = link.reopen("a gap", 1.1)
    assert event.info.max_num_batched_tokens == 40
    another = Executor(2)
    lost, event = link.receive(another.peer, another.hello(), 1.1 + TAKEOVER_SILENCE_S + 0.1)
    assert lost == ExecutorLost("another executor took over")
    assert event.info.max_num_batched_tokens == 0


@pytest.mark.parametrize("noticed", ["unreachable", "silent"])
def test_an_executor_that_connects_again_is_the_same_one_and_takes_no_larger_steps(
    link: ExecutorLink, noticed: str
) -> None:
    executor = Executor(1)
    first = join(link, executor, 0.0)
    link.receive(executor.peer, executor.writer.encode(ResyncRequest(1, "out of memory", 40)), 1.0)
    now, before = 1.1, executor.peer
    executor.peer = b"another connection"
    assert link.receive(executor.peer, executor.hello(), now) == []
    if noticed == "unreachable":
        link.unreachable(before)
    else:
        now += TAKEOVER_SILENCE_S
    (event,) = link.receive(executor.peer, executor.hello(), now)
    assert isinstance(event, EpochOpened)
    assert event.info.max_num_batched_tokens == 40
    assert event.epoch > first
    assert {peer for peer, _ in link.outgoing[-1:]} == {executor.peer}
    late = executor.writer.encode(ExecutorOutput(epoch=first, step=0, sampled_token_ids=b""))
    assert link.receive(before, late, now) == []
    (event,) = link.lift_limit(now)
    assert event.info.max_num_batched_tokens == 0


def test_a_wish_for_smaller_steps_that_comes_late_holds_for_the_next_epoch(link: ExecutorLink) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    late = executor.writer.encode(ResyncRequest(1, "out of memory", 40))
    (event,) = link.receive(executor.peer, executor.hello(), 1.0)
    assert isinstance(event, EpochOpened)
    assert event.info.max_num_batched_tokens == 0
    assert link.receive(executor.peer, late, 1.1) == []
    (event,) = link.receive(executor.peer, executor.hello(), 2.0)
    assert event.info.max_num_batched_tokens == 40


def test_a_step_that_failed_is_told_with_the_epoch_and_a_limit_can_be_lifted(link: ExecutorLink) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    (event,) = link.receive(executor.peer, executor.writer.encode(ResyncRequest(1, "broken", 40, 7)), 1.0)
    assert isinstance(event, EpochOpened)
    assert event.failure == StepFailed(7, 40)
    (event,) = link.lift_limit(1.1)
    assert (event.info.max_num_batched_tokens, event.failure) == (0, None)


def test_an_executor_that_leaves_is_not_waited_for(link: ExecutorLink) -> None:
    first, second = Executor(1), Executor(2)
    join(link, first, 0.0)
    leaving = ResyncRequest(1, "no device", is_leaving=True)
    assert link.receive(first.peer, first.writer.encode(leaving), 0.1) == [ExecutorLost("it left: no device")]
    join(link, second, 0.2)


def test_a_second_executor_takes_over_only_from_a_silent_one(link: ExecutorLink) -> None:
    first, second = Executor(1), Executor(2)
    join(link, first, 0.0)
    assert link.receive(second.peer, second.hello(), TAKEOVER_SILENCE_S - 0.1) == []
    join(link, second, TAKEOVER_SILENCE_S + 0.1)
    # The one that was replaced is fenced: whatever it still says has no effect.
    assert link.receive(first.peer, first.writer.encode(ExecutorHeartbeat(1, 0)), 1.3) == []


def test_an_unreachable_executor_is_replaced_at_once(link: ExecutorLink) -> None:
    first, second = Executor(1), Executor(2)
    join(link, first, 0.0)
    assert link.unreachable(first.peer) == [ExecutorLost("unreachable")]
    assert not link.is_open
    join(link, second, 0.1)


@pytest.mark.parametrize(
    "field",
    [{"num_blocks": 1 << 40}, {"block_size": 0}, {"max_model_len": -1}, {"vocab_size": 1 << 31}, {"max_num_rows": 1 << 20},
     {"num_host_blocks": -1}, {"swap_us_per_block": float("nan")}, {"eos_token_ids": (10,)}, {"model_name": "x" * 5000}],
)  # fmt: skip
def test_an_executor_that_announces_what_cannot_be_is_refused_and_told_of_once(
    link: ExecutorLink, field: dict[str, object]
) -> None:
    impossible = ExecutorHello(1, msgspec.structs.replace(INFO, **field))
    writer = step.executor_frame_writer()
    (event,) = link.receive(b"e", writer.encode(impossible), 0.0)
    assert isinstance(event, ExecutorRefused)
    assert event.reason.startswith(next(iter(field)))
    assert link.receive(b"e", writer.encode(impossible), 0.1) == []
    assert not link.is_open
    join(link, Executor(2), 0.2)


def test_silence_ends_the_link_and_a_revived_executor_is_told_to_say_hello(link: ExecutorLink) -> None:
    executor = Executor(1)
    join(link, executor, 0.0)
    (event,) = link.tick(SILENCE_TIMEOUT_S + 0.1)
    assert isinstance(event, ExecutorLost)
    link.outgoing.clear()
    assert link.receive(executor.peer, executor.writer.encode(ExecutorHeartbeat(1, 0)), 20.0) == []
    assert link.outgoing[0][0] == executor.peer


class Gateway:
    """Frames as a gateway would send them."""

    def __init__(self, links: IngressLinks) -> None:
        self.links = links
        self.writer: FrameWriter = ingress.gateway_frame_writer()
        self.reader = ingress.gateway_frame_reader()

    def open(self, number: int, now: float) -> tuple[int, list[object]]:
        self.writer.begin_epoch(0)
        events = self.links.receive(b"g", self.writer.encode(GatewayHello(5, number)), now, news)
        frame = self.reader.decode(self.links.outgoing[-1][1])
        assert isinstance(frame.body, SchedulerHello)
        self.links.outgoing.clear()
        self.writer.begin_epoch(frame.epoch)
        return self.links.links()[-1].owner, list(events)


def test_a_new_link_is_a_new_owner_and_the_old_one_is_gone() -> None:
    links = IngressLinks(77, submit_credits=10)
    gateway = Gateway(links)
    first, events = gateway.open(0, 0.0)
    assert events == []
    second, events = gateway.open(1, 0.1)
    assert events == [GatewayGone(first, "the gateway opened another link")]
    assert second != first
    assert len(links) == 1


def test_a_gateway_that_reconnected_under_another_peer_name_replaces_its_old_link() -> None:
    links = IngressLinks(77, submit_credits=10)
    first, _ = Gateway(links).open(0, 0.0)
    hello = ingress.gateway_frame_writer().encode(GatewayHello(5, 0))
    events = links.receive(b"g again", hello, 0.1, news)
    assert events == [GatewayGone(first, "the gateway opened another link")]
    assert [link.peer for link in links.links()] == [b"g again"]


def test_a_gateway_that_does_not_acknowledge_is_sent_no_more_and_catches_up_later() -> None:
    links = IngressLinks(77, submit_credits=10)
    gateway = Gateway(links)
    owner, _ = gateway.open(0, 0.0)
    link = links.get(owner)
    assert link is not None
    one = np.ones(1, dtype=np.int32)
    for index in range(MAX_UNACKNOWLEDGED_FRAMES + 50):
        link.hold_tokens(one, one * index, one)
        links.flush()
    # The hello was the first frame of the link.
    assert len(links.outgoing) == MAX_UNACKNOWLEDGED_FRAMES - 1
    links.outgoing.clear()
    links.receive(b"g", gateway.writer.encode(GatewayHeartbeat(MAX_UNACKNOWLEDGED_FRAMES)), 1.0, news)
    links.flush()
    (message,) = [gateway.reader.decode(frame).body for _, frame in links.outgoing]
    assert isinstance(message, Tokens)
    _, indices, _ = decode_columns(message.columns, 3)
    assert indices.tolist() == list(range(MAX_UNACKNOWLEDGED_FRAMES - 1, MAX_UNACKNOWLEDGED_FRAMES + 50))


def test_a_silent_gateway_is_given_up() -> None:
    links = IngressLinks(77, submit_credits=10)
    owner, _ = Gateway(links).open(0, 0.0)
    assert links.tick(5.0, news) == []
    (event,) = links.tick(11.0, news)
    assert isinstance(event, GatewayGone)
    assert event.owner == owner
    assert len(links) == 0


def test_a_gateway_that_heartbeats_and_takes_nothing_in_is_dropped_before_memory_is_full() -> None:
    links = IngressLinks(77, submit_credits=10)
    gateway = Gateway(links)
    owner, _ = gateway.open(0, 0.0)
    one = np.ones(1, dtype=np.int32)
    num_steps, now = 0, 0.0
    while links.get(owner) is not None:
        for _ in range(1000):
            link = links.get(owner)
            assert link is not None
            link.hold_tokens(one, one, one)
            links.flush()
            links.outgoing.clear()
            num_steps += 1
        now += 1.0
        links.receive(b"g", gateway.writer.encode(GatewayHeartbeat(0)), now, news)
        events = links.tick(now, news)
    assert events == [GatewayGone(owner, f"{MAX_HELD_TOKENS} tokens unread")]
    assert num_steps < 200_000, "small steps take more memory than their tokens"


def test_links_are_bounded() -> None:
    links = IngressLinks(77, submit_credits=10)
    for number in range(MAX_LINKS + 5):
        writer = ingress.gateway_frame_writer()
        links.receive(b"g%d" % number, writer.encode(GatewayHello(number, 0)), 0.0, news)
    assert len(links) == MAX_LINKS
