"""Blocks: conservation, fences, eviction order."""

import numpy as np
import pytest

from headway_proto.columns import Int32Array
from headway_scheduler.core.block_pool import BlockPool
from headway_scheduler.core.counters import SchedulerCounters
from headway_scheduler.core.indices import BlockIndices
from headway_scheduler.core.prefix_cache import ROOT_NODE, PrefixCache


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
