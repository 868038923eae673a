"""The log of the prefix cache: whoever reads it knows what is cached, whenever they began and however rarely they look."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.cache_log import CLEARING, CacheEntry, CacheLog
from headway_scheduler.core.memory.prefix_cache import ROOT_NODE, PrefixCache
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import BlockIndices

BLOCK_BYTES = 4
NOBODY = np.array([], dtype=np.intp)


class Reader:
    """Believes what the log says."""

    def __init__(self) -> None:
        self.index: int | None = None
        self.num_clearings = 0
        self._nodes: dict[int, tuple[int | str, bytes]] = {}

    def read(self, cache: PrefixCache, most_blocks: int = 3) -> None:
        """Read to the end, a few blocks at a time."""
        while True:
            entries, self.index = cache.changes(self.index, most_blocks)
            for entry in entries:
                self._believe(entry)
            if not cache.has_changes_from(self.index):
                return

    def _believe(self, entry: CacheEntry) -> None:
        nodes = range(entry.first_node, entry.first_node + entry.num_blocks)
        if not entry.num_blocks:
            self._nodes.clear()
            self.num_clearings += 1
        elif not entry.token_bytes:
            for node in nodes:
                del self._nodes[node]  # Nothing is removed that was not stored, and nothing twice.
        else:
            assert entry.parent_node == ROOT_NODE or entry.parent_node in self._nodes
            behind: int | str = entry.parent_node if entry.parent_node != ROOT_NODE else entry.scope
            for place, node in enumerate(nodes):
                tokens = entry.token_bytes[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
                self._nodes[node] = (behind, tokens)
                behind = node

    def num_resident(self, tokens: list[int], scope: str) -> int:
        """How much of a prompt is cached, as far as this reader knows."""
        by_place = {place: node for node, place in self._nodes.items()}
        behind: int | str = scope
        for number, token in enumerate(tokens):
            node = by_place.get((behind, np.int32(token).tobytes()))
            if node is None:
                return number
            behind = node
        return len(tokens)


def prompt(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def run_prompt(pool: BlockPool, cache: PrefixCache, tokens: list[int], scope: str) -> BlockIndices:
    """A request that finds what it can, computes the rest and still holds its blocks."""
    found, node = cache.find(prompt(tokens), len(tokens), scope)
    pool.share(found)
    new = pool.allocate(len(tokens) - len(found))
    if len(new):
        cache.register(node, prompt(tokens[len(found) :]), new, scope)
    return np.concatenate((found, new))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["run", "end", "flush", "read", "read late"]),
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.sampled_from(["", "t"]),
        ),
        max_size=60,
    )
)
def test_a_reader_knows_what_is_cached(story: list[tuple[str, list[int], str]]) -> None:
    cache = PrefixCache(16, block_size=1)
    pool = BlockPool(16, cache, SchedulerCounters())
    early, late = Reader(), Reader()
    early.read(cache)
    held: list[BlockIndices] = []
    for action, tokens, scope in story:
        if action == "run" and pool.num_free >= len(tokens):
            held.append(run_prompt(pool, cache, tokens, scope))
        elif action == "end" and held:
            pool.release(held.pop(0), None)
        elif action == "flush":
            pool.drop_cached()
        elif action.startswith("read"):
            (late if action == "read late" else early).read(cache)
    for reader in (early, late):
        reader.read(cache)
        for _, tokens, scope in story:
            assert reader.num_resident(tokens, scope) == len(cache.find(prompt(tokens), len(tokens), scope)[0])
    pool.check(np.concatenate([NOBODY, *held]))


def test_one_who_reads_in_time_is_not_told_everything_again() -> None:
    cache = PrefixCache(8, block_size=1)
    pool = BlockPool(8, cache, SchedulerCounters())
    reader = Reader()
    for token in range(50):
        reader.read(cache)
        pool.release(run_prompt(pool, cache, [token, token], ""), None)
    reader.read(cache)
    assert reader.num_clearings == 1
    assert reader.num_resident([49, 49], "") == 2


def test_one_who_comes_too_late_begins_again() -> None:
    cache = PrefixCache(8, block_size=1)
    pool = BlockPool(8, cache, SchedulerCounters())
    reader = Reader()
    reader.read(cache)
    for token in range(50):
        pool.release(run_prompt(pool, cache, [token, token], ""), None)
    reader.read(cache)
    assert reader.num_clearings == 2
    assert reader.num_resident([49, 49], "") == 2


def test_a_log_that_nobody_reads_keeps_little_and_is_given_up() -> None:
    log = CacheLog(most_blocks=10)
    assert not log.is_on
    log.restart([CacheEntry(1, 2, 0, b"12345678")])
    assert log.read(0, 100) == ((CLEARING, CacheEntry(1, 2, 0, b"12345678")), 2)
    for number in range(10):
        if log.is_on:
            log.record(CacheEntry(number, 1))
    assert not log.is_on
    assert not log.covers(2)
    index = log.restart([])
    assert log.read(index, 100) == ((CLEARING,), index + 1)
