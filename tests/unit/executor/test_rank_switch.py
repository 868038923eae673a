"""Messages between ranks through rank 0's switch: keys, strangers, pieces, broken connections, ends."""

import socket
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import zmq

from e2e.running_server import free_port
from headway_executor.backend import BackendConfig, BackendConfigError, RankLostError
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.switch import HERE, PIECE_BYTES, SWITCH, Head
from headway_executor.ranks.switched import SwitchedMeeting

JOIN_S = 20.0


def key_pairs():
    """The ends of a link with keys: rank 0's, and the others'."""
    own, theirs = zmq.curve_keypair(), zmq.curve_keypair()
    return LinkKeys(theirs[0], *own), LinkKeys(own[0], *theirs)


def meet(keys, *, join_seconds=JOIN_S, ranks=None, before=lambda rendezvous: None):
    """Let ranks meet, each on a thread; what each got, a meeting or an error."""
    rendezvous, found = f"127.0.0.1:{free_port()}", {}
    before(rendezvous)

    def join(rank):
        place = RankPlace(rank=rank, tensor_parallel=len(keys), rendezvous=rendezvous)
        try:
            found[rank] = SwitchedMeeting(place, keys[rank], join_seconds)
        except BackendConfigError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks or range(len(keys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def part(meetings):
    """The others first, as in any order."""
    for meeting in reversed(meetings.values()):
        meeting.close()
        meeting.close()


def together(meetings, call):
    """Make a call on every rank, each on a thread; the answers by rank."""
    found = {}

    def run(rank, exchange):
        found[rank] = call(rank, exchange)

    threads = [threading.Thread(target=run, args=(rank, met.all_ranks())) for rank, met in meetings.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in sorted(meetings)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_all_ranks_get_the_same(dtype):
    zero, others = key_pairs()
    meetings = meet([zero, others, others])
    of_rank = [torch.tensor([[5, -2], [rank, 3 * rank]]).to(dtype) for rank in range(3)]
    for parts in together(meetings, lambda rank, exchange: exchange.gather(of_rank[rank])):
        assert all(torch.equal(one, other) for one, other in zip(parts, of_rank, strict=True))
    expected = (of_rank[0] + of_rank[1] + of_rank[2], of_rank[2])
    assert all(torch.equal(sums, expected[0]) for sums in together(meetings, lambda r, e: e.add_up(of_rank[r])))
    assert all(torch.equal(most, expected[1]) for most in together(meetings, lambda r, e: e.most(of_rank[r])))
    part(meetings)


def test_messages_longer_than_a_frame_arrive_whole_and_in_order_of_their_tag():
    meetings = meet(key_pairs())
    contents = torch.randint(0, 256, (2 * PIECE_BYTES + 77,), dtype=torch.uint8)
    short = torch.tensor([3.5, 4.5])
    first, second = (meetings[rank].all_ranks() for rank in (0, 1))
    sendings = [first.send(contents, 1, 1), first.send(short, 1, 2), first.send(short * 2, 1, 2)]
    assert all(sending.is_completed() for sending in sendings)
    for expected, tag in ((short, 2), (contents, 1), (short * 2, 2)):
        received = torch.zeros_like(expected)
        second.receive(received, 0, tag)
        assert torch.equal(received, expected)
    part(meetings)


@pytest.mark.parametrize("sender", [0, 1])
def test_what_a_rank_sends_last_arrives(sender):
    meetings = meet(key_pairs())
    contents = torch.randint(0, 256, (3 * PIECE_BYTES,), dtype=torch.uint8)
    meetings[sender].all_ranks().send(contents, 1 - sender, 1)
    closing = threading.Thread(target=meetings[sender].close)
    closing.start()
    received = torch.zeros_like(contents)
    meetings[1 - sender].all_ranks().receive(received, sender, 1)
    assert torch.equal(received, contents)
    closing.join(30)
    part(meetings)


def test_a_message_of_another_size_is_no_message():
    meetings = meet(key_pairs())
    meetings[1].all_ranks().send(torch.zeros(3), 0, 1)
    with pytest.raises(RankLostError, match="rank 1 sent 12 bytes where 8 were expected"):
        meetings[0].all_ranks().receive(torch.zeros(2), 1, 1)
    part(meetings)


def test_who_has_another_key_is_not_admitted():
    zero, others = key_pairs()
    found = meet([zero, others._replace(public=zero.public, secret=zero.secret)], join_seconds=1.0)
    start = r"rendezvous '127.0.0.1:\d+': rank {} did not meet the other 1 within 1 s "
    with pytest.raises(BackendConfigError, match=start.format(1) + r"\(it does not admit this rank's key\); allowed"):
        raise found[1]
    with pytest.raises(BackendConfigError, match=start.format(0) + r"\(not here: 1; turned away: \d+ \(unknown key\)"):
        raise found[0]


@pytest.mark.parametrize("theirs", [None, key_pairs()[1]], ids=["no key", "rank 0 has another"])
def test_who_expects_another_rank_0_does_not_meet_it(theirs):
    found = meet([key_pairs()[0], theirs], join_seconds=1.0)
    with pytest.raises(BackendConfigError, match=r"rank 0 did not meet the other 1 within 1 s \(not here: 1"):
        raise found[0]
    with pytest.raises(BackendConfigError, match="rank 1 did not meet the other 1 within 1 s") as raised:
        raise found[1]
    assert "\n" not in str(raised.value)


def test_who_finds_nobody_says_so():
    found = meet(key_pairs(), join_seconds=0.2, ranks=[1])
    with pytest.raises(BackendConfigError, match=r"within 0.2 s \(nobody answers there\)"):
        raise found[1]


def test_garbage_of_strangers_changes_nothing():
    """Without keys, so that it comes through."""
    frames = [
        b"",
        b"\xff" * 5,
        Head(SWITCH, 9, HERE, 2).packed,
        Head(SWITCH, 1, HERE, 3).packed,
        Head(SWITCH, 1, 77, 2).packed,
        Head(0, 1, 0, 0).packed + b"x" * 8,
        Head(700, 800, 900, 0).packed,
    ]
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0

    def disturb(rendezvous):
        stranger.connect(f"tcp://{rendezvous}")
        for frame in frames:
            stranger.send(frame)
        stranger.send_multipart([b"a", b"b"])

    meetings = meet([None, None], before=disturb)
    host, _, port = meetings[0]._place.rendezvous.rpartition(":")
    with socket.create_connection((host, int(port))) as web:
        web.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for frame in [*frames, Head(SWITCH, 1, HERE, 2).packed]:
            stranger.send(frame)
        agreed = together(meetings, lambda rank, exchange: exchange.most(torch.tensor([rank, 7 - rank])).tolist())
    assert agreed == [[1, 7]] * 2
    part(meetings)
    stranger.close()
    context.term()


def test_whoever_sends_a_frame_that_is_too_long_is_cut_off():
    meetings = meet([None, None])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    events = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(f"tcp://{meetings[0]._place.rendezvous}")
    stranger.send(b"x" * (PIECE_BYTES + 1000))
    assert events.poll(20_000)
    agreed = together(meetings, lambda rank, exchange: exchange.most(torch.tensor([rank])).tolist())
    assert agreed == [[1]] * 2
    part(meetings)
    stranger.disable_monitor()
    for one in (events, stranger):
        one.close(linger=0)
    context.term()


def test_a_stranger_without_a_key_is_no_rank():
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0

    def pretend(rendezvous):
        stranger.connect(f"tcp://{rendezvous}")
        stranger.send(Head(SWITCH, 1, HERE, 2).packed)

    found = meet(key_pairs(), join_seconds=1.0, ranks=[0], before=pretend)
    with pytest.raises(BackendConfigError, match=r"\(not here: 1"):
        raise found[0]
    stranger.close()
    context.term()


def test_a_broken_connection_ends_who_waits_and_who_sends():
    meetings = meet(key_pairs())
    lost = []

    def wait():
        try:
            meetings[1].all_ranks().receive(torch.zeros(1), 0, 1)
        except RankLostError as error:
            lost.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    meetings[0].close()
    waiting.join(30)
    assert lost == ["the connection to rank 0's switch is broken"]
    with pytest.raises(RankLostError, match="is broken"):
        meetings[1].all_ranks().send(torch.zeros(1), 0, 1)
    part(meetings)


def test_ranks_that_wait_do_not_keep_a_process_from_ending():
    program = f"""
        import threading, time, torch
        from headway_executor.rank_place import RankPlace
        from headway_executor.ranks.switched import SwitchedMeeting

        def wait(rank):
            place = RankPlace(rank=rank, tensor_parallel=2, rendezvous="127.0.0.1:{free_port()}")
            exchange, message = SwitchedMeeting(place, None, 30.0).all_ranks(), torch.zeros(1)
            met.release()
            exchange.receive(message, 1 - rank, 1)

        met = threading.Semaphore(0)
        for rank in range(2):
            threading.Thread(target=wait, args=(rank,), daemon=True).start()
        for rank in range(2):
            met.acquire()
        time.sleep(0.5)  # until both wait: a thread within torch cannot end with its process in peace
        print("ends")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_no_text_shows_keys():
    keys, _ = key_pairs()
    shown = repr(BackendConfig(model="m", rank_keys=keys)) + str(keys) + f"{keys}"
    assert not any(key.decode() in shown for key in keys)
