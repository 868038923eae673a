"""The host's tier of the prefix cache: what is kept, what is given up, and what a step may not write."""

import numpy as np
import pytest

from headway_proto.columns import decode_columns
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.memory.host_books import HostBooks
from headway_scheduler.core.memory.host_prefixes import HostPrefixes
from headway_scheduler.core.memory.preemption import OFFLOADS, PREEMPTIONS, PreemptionCosts
from headway_scheduler.core.memory.swapping import NO_MOVES, Swapping
from headway_scheduler.core.memory.transfers import Transfers
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import Request

SIZE = 4


def prompt(*blocks: int) -> bytes:
    return np.repeat(np.array(blocks, dtype=np.int32), SIZE).tobytes()


def kept(prefixes: HostPrefixes, *blocks: int) -> list[int]:
    """Keep a prefix and send the step that copies it; the host blocks that it writes."""
    _, written = prefixes.keep(prompt(*blocks), len(blocks), "")
    prefixes.complete_step()
    return written.tolist()


def found(prefixes: HostPrefixes, *blocks: int) -> int:
    return len(prefixes.find(prompt(*blocks), len(blocks), ""))


def a_request() -> Request:
    new = NewRequestEvent(
        origin=Origin(0, 0),
        request_id="a",
        token_ids=np.zeros(4, dtype=np.int32),
        num_prompt_tokens=4,
        max_tokens=1,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        priority=3,
        tenant="",
        ttft_slo_ms=0,
        itl_slo_ms=0,
    )
    return Request(new, arrival=0, rank=0, limit=5, now=0.0)


def test_only_what_is_not_kept_yet_is_copied() -> None:
    prefixes = HostPrefixes(8, SIZE)
    assert kept(prefixes, 1, 2, 3) == [0, 1, 2]
    assert kept(prefixes, 1, 2, 5) == [3]
    assert kept(prefixes, 1, 2) == []
    assert [found(prefixes, 1, 2, 3), found(prefixes, 1, 2, 5), found(prefixes, 2)] == [3, 3, 0]


def test_the_longest_unused_prefix_makes_room_from_its_end() -> None:
    prefixes = HostPrefixes(6, SIZE)
    kept(prefixes, 1, 2, 3)
    kept(prefixes, 4, 5)
    kept(prefixes, 1, 2, 3)
    kept(prefixes, 6, 7, 8)
    assert [found(prefixes, 4, 5), found(prefixes, 1, 2, 3), found(prefixes, 6, 7, 8)] == [0, 3, 3]


def test_a_prefix_that_does_not_fit_is_kept_as_far_as_it_does() -> None:
    prefixes = HostPrefixes(2, SIZE)
    assert len(kept(prefixes, 1, 2, 3)) == 2
    assert found(prefixes, 1, 2, 3) == 2
    assert kept(HostPrefixes(0, SIZE), 1) == []


def test_nothing_is_given_up_that_the_next_step_reads_or_writes() -> None:
    prefixes = HostPrefixes(4, SIZE)
    kept(prefixes, 1, 2)
    read = prefixes.find(prompt(1, 2), 2, "")
    prefixes.hold(read)
    _, written = prefixes.keep(prompt(3, 4, 5), 3, "")
    assert len(written) == 2
    assert not set(written.tolist()) & set(read.tolist())
    assert len(prefixes.keep(prompt(6), 1, "")[1]) == 0
    assert (prefixes.num_free, prefixes.num_released) == (0, 4)
    prefixes.complete_step()
    assert (prefixes.num_free, prefixes.num_released) == (4, 0)


def test_requests_take_the_place_of_prefixes() -> None:
    prefixes = HostPrefixes(4, SIZE)
    kept(prefixes, 1, 2, 3)
    blocks = prefixes.allocate(4)
    assert sorted(blocks.tolist()) == [0, 1, 2, 3]
    assert found(prefixes, 1) == 0
    prefixes.release(blocks)
    assert prefixes.num_free == 0, "the step that is made now may read them"
    prefixes.complete_step()
    assert prefixes.num_free == 4


def test_tenants_may_be_kept_apart() -> None:
    prefixes = HostPrefixes(4, SIZE)
    prefixes.keep(prompt(1, 2), 2, "a")
    assert len(prefixes.find(prompt(1, 2), 2, "b")) == 0
    assert len(prefixes.find(prompt(1, 2), 2, "a")) == 2


def test_all_may_be_dropped() -> None:
    prefixes = HostPrefixes(4, SIZE)
    kept(prefixes, 1, 2)
    prefixes.drop()
    assert found(prefixes, 1, 2) == 0
    assert prefixes.num_free == 4


def swapping(offload: str, prefill_us: float | None = 100.0, swap_us: float = 10.0) -> Swapping:
    costs = PreemptionCosts(
        lambda num_tokens, _: None if prefill_us is None else num_tokens * prefill_us * 1e-6, swap_us
    )
    capacity = ExecutorCapacity(
        num_blocks=8, block_size=SIZE, max_model_len=64, vocab_size=256, max_num_rows=4, num_host_blocks=8
    )
    policy = OFFLOADS[offload]
    books = HostBooks(capacity, keeps_prefixes=policy is not None)
    transfers = Transfers(books, 1, [])
    return Swapping(books, PREEMPTIONS["swap"], costs, transfers, epoch=1, block_size=SIZE, offload=policy)


@pytest.mark.parametrize(
    ("offload", "prefill_us", "swap_us", "is_kept"),
    [
        ("off", 100.0, 10.0, False),
        ("always", None, 0.0, True),
        ("auto", 100.0, 10.0, True),
        ("auto", 1.0, 10.0, False),
        ("auto", None, 10.0, False),
    ],
)
def test_a_prefix_is_copied_where_that_is_known_to_pay(
    offload: str, prefill_us: float | None, swap_us: float, is_kept: bool
) -> None:
    moves = swapping(offload, prefill_us, swap_us)
    assert moves.offloads == (offload != "off")
    assert moves.offload(prompt(1, 2), np.array([5, 6]), "") == (2 if is_kept else 0)
    assert (moves.take_moves(0) != NO_MOVES) == is_kept


def test_what_was_copied_comes_back_behind_the_cached_blocks() -> None:
    moves = swapping("always")
    moves.offload(prompt(1, 2, 3), np.array([5, 6, 7]), "")
    swap_out, _, num_moved = moves.take_moves(0)
    assert num_moved == 3
    device, host = decode_columns(swap_out, 2).tolist()
    assert device == [5, 6, 7]
    back = moves.find_offloaded(prompt(1, 2, 3, 4), 1, 4, "")
    assert back.tolist() == host[1:]
    moves.restore(a_request(), back, np.array([1, 2]))
    _, swap_in, _ = moves.take_moves(0)
    assert decode_columns(swap_in, 2).tolist() == [host[1:], [1, 2]]
    assert not len(moves.find_offloaded(prompt(1, 2, 3, 4), 3, 4, ""))
    moves.drop_offloaded()
    assert not len(moves.find_offloaded(prompt(1, 2, 3, 4), 0, 4, ""))
