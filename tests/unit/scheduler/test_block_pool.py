"""Blocks: conservation, fences, eviction order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway_proto.columns import Int32Array
from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.eviction_queues import EvictionQueues
from headway_scheduler.core.memory.prefix_cache import ROOT_NODE, PrefixCache
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import BlockIndices


def column(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def indices(*values: int) -> BlockIndices:
    return np.array(values, dtype=np.intp)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(6, block_size=1)


@pytest.fixture
def pool(cache: PrefixCache) -> BlockPool:
    return BlockPool(6, cache, SchedulerCounters())


def register(cache: PrefixCache, tokens: Int32Array, blocks: BlockIndices) -> None:
    cache.register(ROOT_NODE, tokens.tobytes(), blocks)


def test_low_numbers_are_handed_out_first(pool: BlockPool) -> None:
    assert pool.allocate(2).tolist() == [0, 1]
    assert pool.allocate(3).tolist() == [2, 3, 4]
    assert pool.num_free == 1


def test_a_fenced_block_is_not_handed_out_before_its_step_has_returned(pool: BlockPool) -> None:
    blocks = pool.allocate(4)
    pool.release(blocks, fence_step=7)
    assert (pool.num_free, pool.num_fenced) == (2, 4)
    pool.complete_step(6)
    assert (pool.num_free, pool.num_fenced) == (2, 4)
    pool.complete_step(7)
    assert (pool.num_free, pool.num_fenced) == (6, 0)
    pool.check(indices())


def test_a_shared_block_outlives_its_first_holder(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = pool.allocate(1)
    register(cache, column(9), blocks)
    pool.share(blocks)
    pool.release(blocks, None)
    assert pool.num_free == 5
    pool.release(blocks, None)
    assert pool.num_free == 6


def test_the_last_holder_decides_when_a_shared_block_is_free(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = pool.allocate(1)
    register(cache, column(9), blocks)
    pool.share(blocks)
    pool.release(blocks, fence_step=7)
    pool.release(blocks, None)
    assert (pool.num_free, pool.num_fenced) == (6, 0)


def test_blocks_without_content_go_before_cached_ones_and_tails_before_heads(
    pool: BlockPool, cache: PrefixCache
) -> None:
    blocks = pool.allocate(4)
    register(cache, column(5, 6, 7), blocks[:3])
    pool.release(blocks, None)
    assert pool.allocate(3).tolist() == [3, 4, 5]
    assert pool.allocate(1).tolist() == [2]  # the last block of the cached chain
    assert cache.find(column(5, 6, 7).tobytes(), 3)[0].tolist() == [0, 1]
    assert cache.num_cached == 2


def test_a_prefix_hit_takes_blocks_back_from_the_free_list_and_from_behind_a_fence(
    pool: BlockPool, cache: PrefixCache
) -> None:
    blocks = pool.allocate(3)
    register(cache, column(5, 6, 7), blocks)
    pool.release(blocks, fence_step=1)
    pool.share(blocks[:1])
    pool.complete_step(1)
    assert pool.num_free == 5
    assert pool.num_free_among(blocks) == 2
    pool.share(blocks[1:])
    assert pool.num_free == 3
    pool.check(blocks)


def test_a_block_released_again_stays_behind_the_later_fence(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = pool.allocate(1)
    register(cache, column(5), blocks)
    pool.release(blocks, fence_step=1)
    pool.share(blocks)
    pool.release(blocks, fence_step=2)
    pool.complete_step(1)
    assert (pool.num_free, pool.num_fenced) == (5, 1)
    pool.complete_step(2)
    assert (pool.num_free, pool.num_fenced) == (6, 0)


def test_the_eviction_queue_survives_many_turns(pool: BlockPool, cache: PrefixCache) -> None:
    for turn in range(100):
        blocks = pool.allocate(5)
        register(cache, np.arange(5, dtype=np.int32) + 10 * turn, blocks)
        pool.release(blocks, None)
        pool.check(indices())
        found, _ = cache.find((np.arange(5, dtype=np.int32) + 10 * turn).tobytes(), 5)
        assert found.tolist() == blocks.tolist()
        pool.share(found)
        pool.release(found, None)
    assert pool.num_free == 6


def cached(pool: BlockPool, cache: PrefixCache, *tokens: int) -> BlockIndices:
    """A chain of these tokens, one per block, that nobody holds."""
    blocks = pool.allocate(len(tokens))
    register(cache, column(*tokens), blocks)
    pool.release(blocks, None)
    return blocks


def find_again(pool: BlockPool, cache: PrefixCache, *tokens: int) -> None:
    """A request that finds all of this prefix and ends at once."""
    blocks, _ = cache.find(column(*tokens).tobytes(), len(tokens))
    assert len(blocks) == len(tokens)
    pool.share(blocks)
    cache.record_reuse(blocks)
    pool.release(blocks, None)


def resident(cache: PrefixCache, *tokens: int) -> int:
    return len(cache.find(column(*tokens).tobytes(), len(tokens))[0])


def test_a_prefix_that_was_found_again_outlives_newer_ones_that_were_not(pool: BlockPool, cache: PrefixCache) -> None:
    cached(pool, cache, 1, 2)
    find_again(pool, cache, 1, 2)
    cached(pool, cache, 3, 4)
    for once in range(10, 30):
        cached(pool, cache, once, once)
        pool.check(indices())
    assert (resident(cache, 1, 2), resident(cache, 3, 4)) == (2, 0)


def test_a_prefix_that_is_not_found_any_more_makes_room_for_those_that_are(pool: BlockPool, cache: PrefixCache) -> None:
    cached(pool, cache, 1, 2, 3)
    find_again(pool, cache, 1, 2, 3)
    for hot in range(10, 14):
        cached(pool, cache, hot)
        find_again(pool, cache, hot)
        pool.check(indices())
    # Of 6 blocks that can be evicted, 4 may count as reused.
    assert resident(cache, 1, 2, 3) < 3
    assert [resident(cache, hot) for hot in range(10, 14)] == [1, 1, 1, 1]


def test_reuse_is_forgotten_with_the_content(pool: BlockPool, cache: PrefixCache) -> None:
    cached(pool, cache, 1)
    find_again(pool, cache, 1)
    pool.release(pool.allocate(6), None)
    cached(pool, cache, 1)
    assert cache.num_worth() == [1, 0, 0]


def test_pinned_blocks_go_last_and_no_more_of_them_than_are_needed(cache: PrefixCache) -> None:
    cache = PrefixCache(256, block_size=1)
    pool = BlockPool(256, cache, SchedulerCounters())  # evicts in batches of 4
    tokens = np.arange(100, dtype=np.int32)
    pool.reorder(cache.pin("system", "", tokens.tobytes()))
    cached(pool, cache, *range(100))
    cached(pool, cache, *range(1000, 1156))
    find_again(pool, cache, 1000, 1001)
    held = pool.allocate(155)
    assert resident(cache, *range(100)) == 100
    # One block is left beside the pinned ones; the second that is needed is a pinned one, and a third is not taken.
    held = np.concatenate((held, pool.allocate(2)))
    assert resident(cache, *range(100)) == 99
    assert pool.num_free == 99
    pool.release(held, None)
    pool.allocate(256)
    assert resident(cache, *range(100)) == 0
    assert cache.num_cached == 0


def test_pinning_raises_what_is_cached_already_and_unpinning_lowers_it(pool: BlockPool, cache: PrefixCache) -> None:
    cached(pool, cache, 1, 2)
    cached(pool, cache, 3, 4)
    pool.reorder(cache.pin("a", "", column(1, 2).tobytes()))
    pool.check(indices())
    pool.release(pool.allocate(4), None)
    assert (resident(cache, 1, 2), resident(cache, 3, 4)) == (2, 0)
    pool.reorder(cache.unpin("a"))
    pool.check(indices())
    assert cache.num_worth() == [2, 0, 0]
    cached(pool, cache, *range(10, 15))
    assert resident(cache, 1, 2) == 1  # the tail went first


def test_what_cannot_be_reached_behind_an_evicted_block_is_not_pinned_any_more() -> None:
    cache = PrefixCache(4, block_size=1)
    pool = BlockPool(4, cache, SchedulerCounters())
    pool.reorder(cache.pin("a", "", column(1, 2).tobytes()))
    first, second = pool.allocate(1), pool.allocate(2)
    register(cache, column(1), first)
    register(cache, column(1, 2), second)  # its first block repeats what the other's holds
    pool.release(first, None)
    pool.release(pool.allocate(2), None)  # takes the last plain block and the first of the prefix
    assert cache.num_resident("a") == 0
    assert cache.num_worth() == [1, 0, 0]
    pool.release(second, None)
    pool.check(indices())
    cached(pool, cache, 1, 2)
    assert cache.num_resident("a") == 2


def test_dropping_what_is_cached_leaves_what_somebody_holds(pool: BlockPool, cache: PrefixCache) -> None:
    cached(pool, cache, 1)
    find_again(pool, cache, 1)
    cached(pool, cache, 2)
    pool.reorder(cache.pin("a", "", column(3).tobytes()))
    cached(pool, cache, 3)
    held = pool.allocate(1)
    register(cache, column(4), held)
    fenced = pool.allocate(1)
    register(cache, column(5), fenced)
    pool.release(fenced, fence_step=7)
    assert pool.drop_cached() == 3
    pool.check(held)
    assert cache.num_cached == 2
    assert resident(cache, 4) == 1
    assert (pool.num_free, cache.num_resident("a")) == (4, 0)
    pool.complete_step(7)
    assert pool.drop_cached() == 1
    assert pool.drop_cached() == 0
    pool.release(held, None)
    assert pool.drop_cached() == 1
    pool.check(indices())
    assert sorted(pool.allocate(6).tolist()) == list(range(6))


def test_evicted_blocks_are_counted(cache: PrefixCache) -> None:
    counters = SchedulerCounters()
    pool = BlockPool(6, cache, counters)
    cached(pool, cache, 1, 2, 3)
    pool.allocate(5)
    assert counters.num_evicted_blocks == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 7)), max_size=200))
def test_queues_equal_lists(story: list[tuple[int, int, int]]) -> None:
    queues, lists = EvictionQueues(8, 3), [[], [], []]  # type: ignore[var-annotated]
    for action, level, number in story:
        if action <= 1:
            free = [block for block in range(number + 1) if not any(block in queue for queue in lists)][::-1]
            queues.append(level, indices(*free))
            lists[level] += free
        elif action == 2:
            blocks = indices(*range(level, number))
            among = [block for block in blocks.tolist() if any(block in queue for queue in lists)]
            assert queues.among(blocks).tolist() == among
            assert queues.num_among(blocks) == len(among)
            assert queues.take_out(blocks) == len(among)
            lists = [[block for block in queue if block not in among] for queue in lists]
        else:
            count = min(number, len(lists[level]))
            assert queues.take_oldest(level, count).tolist() == lists[level][:count]
            del lists[level][:count]
        assert queues.lengths == list(map(len, lists))
        assert queues.num_queued == sum(map(len, lists))
