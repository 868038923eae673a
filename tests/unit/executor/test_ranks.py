"""Ranks of a group without sockets: what rank 0 relays and holds back, what the others answer, and what breaks a group."""

from collections import deque
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import structlog

from headway_executor.backend import DeviceLostError, ModelFilesError, RankLostError, StepOutOfMemoryError
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.store import NoStore
from headway_executor.links.step_link import StepLink
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes.agreed_store import AgreedStore
from headway_executor.rank_processes.followers import Followers
from headway_executor.rank_processes.following_link import FollowingLink
from headway_executor.rank_processes.leading_link import LeadingLink
from headway_executor.rank_processes.messages import SIGN_INTERVAL_S
from headway_executor.rank_processes.pools import joined, part_of, variant_of
from headway_executor.rank_processes.silence import MOST_SILENT_LOOKS
from headway_executor.rank_processes.watched_backend import WatchedBackend
from headway_executor.step.loop import StepCycle
from headway_proto.adapters import AdapterChange, AdapterChanged, LoadedAdapter, RowAdapter
from headway_proto.columns import decode_column, encode_column, encode_columns
from headway_proto.framing import HEADER_BYTES
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    BlockPull,
    NewRequest,
    ResyncRequest,
    TransferringOutput,
)
from unit.executor.test_executor_loop import (
    CONFIG,
    GREEDY,
    INCARNATION,
    FailingBackend,
    LateBackend,
    Scheduler,
    outputs,
    tokens_of,
)

HOST_BLOCKS = msgspec.structs.replace(CONFIG, swap_space_mib=64)


class HeldStore(NoStore):
    """Its fetches end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[Pull, ...], Future[FetchedBlocks]]] = []
        self.has_forgotten = False

    def forget(self) -> None:
        self.has_forgotten = True

    def fetch(self, pulls):
        future: Future[FetchedBlocks] = Future()
        self.asked.append((pulls, future))
        return future

    def end(self, there: list[int], missing: list[int]) -> None:
        _, future = self.asked[-1]
        contents = np.zeros((len(there), SIMULATED_BLOCK_BYTES), dtype=np.uint8)
        contents[:, 0] = there
        future.set_result(FetchedBlocks(contents, np.array(there, np.int32), np.array(missing, np.int32), (), 0.0))


SIMULATED_BLOCK_BYTES = 8 * CONFIG.block_size


class Calls(SimulatedBackend):
    """Notes the calls that the other ranks must make too."""

    def __init__(self, inner: SimulatedBackend | None = None) -> None:
        super().__init__()
        self.inner = inner or SimulatedBackend()
        self.calls: list[tuple] = []
        self.loaded: dict[str, LoadedAdapter] = {}

    def open(self, config):
        return self.inner.open(config)

    def execute(self, batch):
        self.calls.append(("execute", batch.step, batch.rows.tolist(), batch.stale_rows.tolist()))
        return self.inner.execute(batch)

    def move_blocks(self, *, copies, swap_out, swap_in):
        self.calls.append(("move", copies.tolist(), swap_out.tolist(), swap_in.tolist()))
        return self.inner.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)

    def load_blocks(self, contents, blocks):
        self.calls.append(("load", contents[:, 0].tolist(), blocks.tolist()))

    def read_adapter(self, name, directory):
        return self.inner.read_adapter(name, directory)

    def load_adapter(self, read):
        self.loaded[read.adapter.name] = self.inner.load_adapter(read)
        return read.adapter

    def unload_adapter(self, name):
        self.loaded.pop(name, None)


class Group:
    """Ranks that hear each other at once, unless ``deaf`` has them."""

    def __init__(self, size: int = 2, backends: dict[int, SimulatedBackend] | None = None) -> None:
        self.place = RankPlace(tensor_parallel=size)
        self.sent: list[bytes] = []
        self.inboxes: dict[bytes, deque[bytes]] = {b"%d" % rank: deque() for rank in range(1, size)}
        self.deaf: set[bytes] = set()
        self.followers = Followers(self.place, self._send)
        self.stores = {rank: HeldStore() for rank in range(size)}
        self.backends = {rank: Calls((backends or {}).get(rank)) for rank in range(size)}
        self.now = 0.0
        infos = {rank: backend.open(HOST_BLOCKS) for rank, backend in self.backends.items()}
        watched = {rank: WatchedBackend(backend, lambda: None) for rank, backend in self.backends.items()}
        places = {rank: msgspec.structs.replace(self.place, rank=rank) for rank in range(size)}
        stores = {rank: AgreedStore(self.stores[rank], places[rank], lambda: None) for rank in range(size)}
        alone = StepLink(incarnation=INCARNATION, info=infos[0])
        self.leading = LeadingLink(alone, self.followers, stores[0], watched[0])
        self.links = {rank: FollowingLink(places[rank]) for rank in range(1, size)}
        self.cycles = {
            rank: StepCycle(
                link=self.links[rank] if rank else self.leading,
                state=BatchState(infos[rank]),
                backend=watched[rank],
                log=structlog.get_logger(),
                wake=lambda: None,
                store=stores[rank],
                ranks=self.links[rank] if rank else self.leading,
            )
            for rank in range(size)
        }
        self.answers: list[bytes] = []
        self.turn()
        for rank, link in self.links.items():
            self._hear(rank, link.attach(stores[rank], watched[rank], infos[rank]))
        self.infos = infos

    def _send(self, peer: bytes, frame: bytes) -> None:
        self.sent.append(frame)
        self.inboxes[peer].append(frame)

    def _hear(self, rank: int, frames: list[bytes]) -> None:
        for frame in frames:
            self.followers.hear(b"%d" % rank, frame, self.now)

    def receive(self, *frames: bytes) -> None:
        for frame in frames:
            self.answers += self.cycles[0].receive(frame, self.now)
            self.pump()

    def pump(self) -> None:
        """Let the others hear what was sent."""
        for rank in self.links:
            inbox = self.inboxes[b"%d" % rank]
            while inbox and b"%d" % rank not in self.deaf:
                self._hear(rank, self.cycles[rank].receive(inbox.popleft(), self.now))

    def turn(self, seconds: float = SIGN_INTERVAL_S, without: tuple[int, ...] = ()) -> None:
        """One turn of each loop, twice, so that an answer to a question comes too."""
        for _ in range(2):
            self.now += seconds / 2
            for rank in self.links:
                if rank not in without:
                    self._hear(rank, self.cycles[rank].tick(self.now))
            self.answers += self.cycles[0].tick(self.now)
            self.pump()

    def read(self, scheduler: Scheduler) -> list:
        frames, self.answers = self.answers, []
        return scheduler.read(frames)

    @property
    def lost(self) -> str:
        return str(self.cycles[0].device_lost or "")


def begun(size: int = 2, **backends) -> tuple[Group, Scheduler]:
    group, scheduler = Group(size, **backends), Scheduler()
    group.receive(scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(64)))
    return group, scheduler


def test_all_ranks_make_the_same_calls_and_answers_wait_for_digests_only():
    group, scheduler = begun(3)
    group.deaf = set(group.inboxes)
    group.receive(*(scheduler.step() for _ in range(DIGEST_INTERVAL_STEPS)))
    assert outputs(group.read(scheduler))[-1].step == DIGEST_INTERVAL_STEPS - 1, "the last one waits"
    group.receive(scheduler.step())
    assert outputs(group.read(scheduler)) == [], "and those behind it"
    group.deaf = {b"2"}
    group.turn()
    assert outputs(group.read(scheduler)) == [], "one of two is not enough"
    group.deaf = set()
    group.turn()
    held = outputs(group.read(scheduler))
    assert [output.step for output in held] == [DIGEST_INTERVAL_STEPS, DIGEST_INTERVAL_STEPS + 1]
    assert held[0].state_digest is not None
    calls = [backend.calls for backend in group.backends.values()]
    assert len(calls[0]) == DIGEST_INTERVAL_STEPS + 2
    assert calls[0] == calls[1] == calls[2]


class NoFiles(SimulatedBackend):
    """Of a host that has no files of adapters."""

    def read_adapter(self, name, directory):
        raise ModelFilesError(f"{directory}: no such directory")


def asked(group: Group, scheduler: Scheduler, **change) -> list[AdapterChanged]:
    group.receive(scheduler.writer.encode(AdapterChange(**change)))
    group.turn()
    return [body for body in group.read(scheduler) if isinstance(body, AdapterChanged)]


def test_all_ranks_change_adapters_and_answer_once():
    group, scheduler = begun(3)
    group.receive(scheduler.step())
    group.deaf = {b"2"}
    assert asked(group, scheduler, number=1, name="a", directory="d") == [], "one has not answered"
    identity = group.backends[0].loaded["a"].identity
    runs_with_it = {"adapters": (RowAdapter(1, identity),), "finished_rows": encode_column([0])}
    group.receive(scheduler.admit(1, [8, 9], range(4), **runs_with_it))
    assert [len(group.backends[rank].calls) for rank in (0, 1)] == [2, 2], "so no rank begins a step that needs it"
    group.deaf = set()
    group.turn()
    group.turn()
    assert [len(backend.calls) for backend in group.backends.values()] == [3, 3, 3]
    (answer,) = [body for body in group.read(scheduler) if isinstance(body, AdapterChanged)]
    assert (answer.number, answer.error) == (1, "")
    assert answer.adapter == group.backends[2].loaded["a"]
    assert asked(group, scheduler, number=2, name="a") == [AdapterChanged(2)]
    assert [backend.loaded for backend in group.backends.values()] == [{}, {}, {}]


def test_no_rank_keeps_an_adapter_that_one_cannot_load():
    group, scheduler = begun(3, backends={1: NoFiles()})
    answers = asked(group, scheduler, number=1, name="a", directory="d")
    assert answers == [AdapterChanged(1, error="rank 1: d: no such directory")]
    group.turn()
    assert [backend.loaded for backend in group.backends.values()] == [{}, {}, {}]
    group.receive(*(scheduler.step() for _ in range(70)))
    group.turn()
    assert not group.lost
    assert outputs(group.read(scheduler))[-1].step == 70


def test_tokens_are_those_of_one_rank():
    group, scheduler = begun()
    group.receive(*(scheduler.step() for _ in range(70)))
    group.turn()
    hashed = SimulatedBackend()
    hashed.open(CONFIG)
    assert tokens_of(group.read(scheduler)) == hashed.token_hash.continuation([5, 6, 7], 71, GREEDY)


def test_a_decode_step_costs_the_same_few_bytes_whatever_the_batch():
    group, scheduler = begun()
    sizes = []
    for row in (1, 2):
        group.sent.clear()
        group.receive(*(scheduler.step(total_num_scheduled_tokens=row) for _ in range(3)))
        assert len(group.sent) == 3
        sizes += [len(frame) for frame in group.sent]
        group.receive(scheduler.step(**admission(row, row)))
    assert len(set(sizes)) == 1
    assert sizes[0] <= 3 * HEADER_BYTES


def admission(row: int, others: int) -> dict:
    """Another row of one token, beside others that decode."""
    request = NewRequest(
        row=row,
        token_ids=encode_column([9]),
        num_prompt_tokens=1,
        block_ids=encode_column([40 + row]),
        num_computed_tokens=0,
        sampling=GREEDY,
    )
    return {"scheduled_new_reqs": (request,), "total_num_scheduled_tokens": others + 1}


class Forgetful(SimulatedBackend):
    """Draws another token at one step."""

    def execute(self, batch):
        result = super().execute(batch)
        if batch.step == 10:
            return msgspec.structs.replace(result, sampled_token_ids=result.sampled_token_ids ^ 1)
        return result


def test_a_rank_that_draws_another_token_is_found_at_the_next_digest():
    group, scheduler = begun(3, backends={2: Forgetful()})
    group.receive(*(scheduler.step() for _ in range(DIGEST_INTERVAL_STEPS)))
    group.turn()
    assert group.lost == "rank 2 has other tokens than rank 0 after step 64 of epoch 3"
    bodies = group.read(scheduler)
    assert outputs(bodies)[-1].step == DIGEST_INTERVAL_STEPS - 1
    (leaving,) = [body for body in bodies if isinstance(body, ResyncRequest)]
    assert leaving.is_leaving
    assert leaving.is_in_another_state
    assert leaving.reason == group.lost
    assert group.stores[0].has_forgotten, "the next executor takes nothing over that another token's rank has written"


def test_a_rank_with_another_table_is_found():
    group, scheduler = begun()
    group.cycles[1]._state._tables.num_blocks[0] -= 1
    group.receive(*(scheduler.step() for _ in range(DIGEST_INTERVAL_STEPS)))
    group.turn()
    assert group.lost == "rank 1 has other tables and counters than rank 0 after step 64 of epoch 3"
    assert group.stores[0].has_forgotten


def test_a_step_that_is_impossible_for_one_rank_ends_the_group():
    group, scheduler = begun()
    group.cycles[1]._state._live[1] = True
    group.receive(scheduler.step(**admission(1, 1)))
    group.turn()
    assert isinstance(group.cycles[1].device_lost, RankLostError)
    assert group.lost == "rank 1 leaves: step 1: new row 1 is already live"


def test_a_step_that_fails_on_all_ranks_costs_an_epoch_only():
    group, scheduler = begun(backends={rank: FailingBackend(2) for rank in range(2)})
    group.receive(*(scheduler.step() for _ in range(4)))
    (lost,) = [body for body in group.read(scheduler) if isinstance(body, ResyncRequest)]
    assert (lost.failed_step, lost.is_leaving) == (2, False)
    for _ in range(40):
        group.turn()
    group.receive(scheduler.new_epoch(4), scheduler.admit(0, [5, 6, 7], range(64)))
    group.receive(*(scheduler.step() for _ in range(70)))
    group.turn()
    assert group.lost == ""
    assert outputs(group.read(scheduler))[-1].step == 70
    assert group.backends[0].calls == group.backends[1].calls


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_the_group(rank):
    group, scheduler = begun(backends={rank: FailingBackend(2)})
    group.receive(*(scheduler.step() for _ in range(4)))
    for _ in range(20):
        group.turn()
    assert group.lost == f"a step failed on rank {rank} alone"


def test_a_smaller_step_is_asked_for_when_all_ranks_are_out_of_memory():
    class Small(SimulatedBackend):
        def execute(self, batch):
            raise StepOutOfMemoryError(8, "small")

    group, scheduler = begun(backends={rank: Small() for rank in range(2)})
    (lost,) = [body for body in group.read(scheduler) if isinstance(body, ResyncRequest)]
    assert lost.max_num_batched_tokens == 4
    for _ in range(20):
        group.turn()
    assert group.lost == ""


def test_a_rank_whose_device_is_lost_says_so():
    class Lost(SimulatedBackend):
        def execute(self, batch):
            raise DeviceLostError("gone")

    group, _ = begun(backends={1: Lost()})
    group.turn()
    assert group.lost == "rank 1 leaves: step 0 failed: DeviceLostError: gone"


def test_a_silent_rank_ends_the_group_and_a_silent_rank_0_its_followers():
    group, _ = begun(3)
    for _ in range(MOST_SILENT_LOOKS + 1):
        group.turn(without=(2,))
    assert group.lost == "rank 2 gives no sign of life"
    assert group.cycles[1].device_lost is None
    for _ in range(MOST_SILENT_LOOKS + 2):
        group.now += SIGN_INTERVAL_S
        group.cycles[1].tick(group.now)
    assert str(group.cycles[1].device_lost) == "rank 0 gives no sign of life"


def test_a_rank_0_that_stood_still_does_not_take_the_others_for_dead():
    group, _ = begun()
    group.now += 3600.0
    group.cycles[0].tick(group.now)
    group.turn()
    assert group.lost == ""


def test_a_lost_frame_ends_the_group():
    group, scheduler = begun()
    group.deaf = {b"1"}
    group.receive(scheduler.step())
    group.inboxes[b"1"].clear()
    group.deaf = set()
    group.receive(scheduler.step())
    group.turn()
    assert "frame" in str(group.cycles[1].device_lost)
    assert group.lost.startswith("rank 1 leaves: a damaged frame of rank 0: frame ")


def test_a_rank_that_begins_anew_ends_the_group_and_one_of_another_group_is_not_heard():
    group, _ = begun()
    for frame in FollowingLink(msgspec.structs.replace(group.place, rank=1)).leave("a former group"):
        group.followers.hear(b"stranger", frame, group.now)
    group.followers.hear(b"stranger", b"GET / HTTP/1.1", group.now)
    group.turn()
    assert group.lost == ""
    for frame in FollowingLink(msgspec.structs.replace(group.place, rank=1)).tick(0.0).frames:
        group.followers.hear(b"another", frame, group.now)
    group.turn()
    assert group.lost == "rank 1 has begun anew"


def test_a_damaged_frame_of_a_rank_ends_the_group():
    group, _ = begun()
    group.followers.hear(b"1", b"HW and nothing else", group.now)
    group.turn()
    assert group.lost.startswith("rank 1: a damaged frame: frame ")


def test_ranks_must_have_the_same_degrees_and_announce_the_same():
    group = Group()
    assert group.followers.opened is not None
    group.followers.check(group.infos[0])
    assert group.followers.refusal is None
    group.followers.check(msgspec.structs.replace(group.infos[0], num_blocks=32))
    assert group.followers.refusal.line.startswith("rank 1: num_blocks 64 is not allowed; allowed: 32, as on rank 0")
    other = Group()
    hello = FollowingLink(RankPlace(rank=1, tensor_parallel=4)).tick(0.0).frames
    for frame in hello:
        other.followers.hear(b"9", frame, 0.0)
    assert "tensor_parallel 4" in other.followers.refusal.line


def pulling(scheduler: Scheduler, *, computed: int, pull: BlockPull) -> bytes:
    request = admission(1, 1)["scheduled_new_reqs"][0]
    request = msgspec.structs.replace(
        request,
        token_ids=np.arange(5, 14, dtype="<i4").tobytes(),
        num_prompt_tokens=9,
        num_computed_tokens=computed,
        block_ids=np.array([50, 51, 52], dtype="<i4").tobytes(),
    )
    output = TransferringOutput(
        epoch=scheduler.writer.epoch,
        step=scheduler.next_step,
        scheduled_new_reqs=(request,),
        num_scheduled_tokens=encode_columns([np.array([1]), np.array([9 - computed])]),
        total_num_scheduled_tokens=1 + 9 - computed,
        pulls=(pull,),
    )
    scheduler.next_step += 1
    return scheduler.writer.encode(output)


PULL = BlockPull("a-x|b-y", ("shm:f|g",), 1, encode_columns([np.array([0, 1]), np.array([1, 1]), np.array([50, 51])]))


def admitted_with_pull(size: int = 2) -> tuple[Group, Scheduler]:
    group, scheduler = Group(size), Scheduler()
    group.receive(scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)))
    group.receive(pulling(scheduler, computed=8, pull=PULL))
    return group, scheduler


def test_a_block_counts_only_if_every_rank_has_its_part():
    group, scheduler = admitted_with_pull()
    assert [group.stores[rank].asked[0][0][0].pool for rank in range(2)] == ["a-x", "b-y"]
    assert [group.stores[rank].asked[0][0][0].addresses for rank in range(2)] == [("shm:f",), ("shm:g",)]
    group.receive(scheduler.step(total_num_scheduled_tokens=2))
    group.stores[0].end([50], [51])
    group.turn()
    assert len(group.backends[0].calls) == 1, "the step waits for all ranks"
    group.stores[1].end([50, 51], [])
    for _ in range(3):
        group.turn()
    assert group.backends[0].calls == group.backends[1].calls
    assert group.backends[0].calls[1:3] == [("load", [50], [50]), ("execute", 1, [0, 1], [1])]
    answers = {output.step: output for output in outputs(group.read(scheduler))}
    assert decode_column(answers[1].stale_rows).tolist() == [1]
    assert decode_column(answers[2].stale_rows).tolist() == []


def test_a_new_epoch_ends_a_step_that_waits_for_blocks_on_all_ranks():
    group, scheduler = admitted_with_pull()
    group.receive(scheduler.step(total_num_scheduled_tokens=2))
    group.stores[0].end([50, 51], [])
    group.receive(scheduler.new_epoch(4), scheduler.admit(0, [5, 6, 7], range(10)))
    group.stores[1].end([50, 51], [])
    group.turn()
    group.receive(pulling(scheduler, computed=8, pull=PULL))
    for rank in range(2):
        group.stores[rank].end([50, 51], [])
    for _ in range(3):
        group.turn()
    assert group.backends[0].calls == group.backends[1].calls
    assert [call[:2] for call in group.backends[0].calls] == [
        ("execute", 0),
        ("execute", 0),
        ("load", [50, 51]),
        ("execute", 1),
    ]
    assert group.lost == ""


def test_steps_of_a_late_backend_are_relayed_when_they_begin():
    group, scheduler = begun(backends={rank: LateBackend() for rank in range(2)})
    group.receive(scheduler.step(), scheduler.step())
    assert group.backends[0].calls == group.backends[1].calls
    assert len(group.backends[0].calls) == 3


def test_pools_of_all_ranks_are_announced_as_one():
    group = Group()
    infos = {
        rank: msgspec.structs.replace(info, host_pool=f"p{rank}", block_addresses=(f"shm:f{rank}", f"tcp:h:{rank}"))
        for rank, info in group.infos.items()
    }
    whole = joined(infos)
    assert whole.host_pool == "p0|p1"
    assert whole.block_addresses == ("shm:f0|f1", "tcp:h:0|h:1")
    columns = np.zeros((3, 0), dtype=np.int32)
    pull = Pull(whole.host_pool, whole.block_addresses, 1, columns)
    second = msgspec.structs.replace(group.place, rank=1)
    assert part_of(pull, second)[:2] == ("p1", ("shm:f1", "tcp:h:1"))
    assert part_of(pull, RankPlace(tensor_parallel=4)) == pull, "a group of another size reads nothing"
    assert part_of(pull, RankPlace()) == pull
    infos[1] = msgspec.structs.replace(infos[1], block_addresses=("tcp:h:1",))
    assert joined(infos).block_addresses == ("tcp:h:0|h:1",)
    infos[1] = msgspec.structs.replace(infos[1], host_pool="")
    assert (joined(infos).host_pool, joined(infos).block_addresses) == ("", ())


def test_contents_of_ranks_are_told_apart():
    places = [
        RankPlace(),
        *(RankPlace(rank=rank, tensor_parallel=2) for rank in (0, 1)),
        RankPlace(pipeline_parallel=2),
    ]
    assert len({variant_of(place, "int8") for place in places}) == 4
    assert variant_of(RankPlace(), "int8") == "int8"
