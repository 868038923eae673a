"""Which prefix is where: matching, branching, cutting, scopes, pins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway_proto.columns import Int32Array
from headway_scheduler.core.memory.prefix_cache import ONCE, PINNED, REUSED, ROOT_NODE, PrefixCache
from headway_scheduler.core.state.indices import BlockIndices


def column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def indices(values: list[int]) -> BlockIndices:
    return np.array(values, dtype=np.intp)


def find(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return cache.find(column(tokens).tobytes(), len(tokens) // 2)[0].tolist()


def test_a_prompt_that_differs_branches_off() -> None:
    cache = PrefixCache(10, block_size=2)
    cache.register(ROOT_NODE, column([1, 1, 2, 2, 3, 3]).tobytes(), indices([0, 1, 2]))
    cache.register(ROOT_NODE, column([1, 1, 2, 2, 9, 9]).tobytes(), indices([3, 4, 5]))
    assert find(cache, [1, 1, 2, 2, 3, 3]) == [0, 1, 2]
    assert find(cache, [1, 1, 2, 2, 9, 9]) == [0, 1, 5]
    assert find(cache, [1, 1, 2, 0]) == [0]
    assert find(cache, [0, 1]) == []
    assert cache.num_cached == 4  # blocks 3 and 4 repeat what 0 and 1 hold


def test_what_follows_an_evicted_block_cannot_be_reached() -> None:
    cache = PrefixCache(10, block_size=2)
    cache.register(ROOT_NODE, column([1, 1, 2, 2, 3, 3]).tobytes(), indices([0, 1, 2]))
    cache.forget(indices([1]))
    assert find(cache, [1, 1, 2, 2, 3, 3]) == [0]
    cache.forget(indices([0]))
    assert find(cache, [1, 1, 2, 2, 3, 3]) == []
    assert cache.num_cached == 1
    cache.forget(indices([2]))
    assert cache.num_cached == 0


def test_a_continuation_is_found_behind_its_node() -> None:
    cache = PrefixCache(10, block_size=2)
    node = cache.register(ROOT_NODE, column([1, 1]).tobytes(), indices([7]))
    cache.register(node, column([2, 2, 3, 3]).tobytes(), indices([8, 9]))
    assert find(cache, [1, 1, 2, 2, 3, 3]) == [7, 8, 9]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 9)), min_size=1, max_size=40)
)
def test_equals_a_dictionary_of_whole_prefixes(story: list[tuple[list[int], int]]) -> None:
    """One token per block. Evictions take the block registered last, so that no prefix loses its middle."""
    cache = PrefixCache(400, block_size=1)
    known: dict[tuple[int, ...], int] = {}
    order: list[tuple[int, ...]] = []
    next_block = 0
    for tokens, evict in story:
        blocks = list(range(next_block, next_block + len(tokens)))
        next_block += len(tokens)
        cache.register(ROOT_NODE, column(tokens).tobytes(), indices(blocks))
        for end, block in enumerate(blocks, start=1):
            prefix = tuple(tokens[:end])
            if prefix not in known:
                known[prefix] = block
                order.append(prefix)
        if evict == 0:
            cache.forget(indices([known.pop(order.pop())]))
        for probe in (tokens, tokens[::-1], [*tokens, 1]):
            expected = []
            for end in range(1, len(probe) + 1):
                if tuple(probe[:end]) not in known:
                    break
                expected.append(known[tuple(probe[:end])])
            assert cache.find(column(probe).tobytes(), len(probe))[0].tolist() == expected
    assert cache.num_cached == len(known)


def test_scopes_share_nothing_and_leave_nothing_behind() -> None:
    cache = PrefixCache(10, block_size=2)
    for number, scope in enumerate(("", "a", "b")):
        node = cache.register(ROOT_NODE, column([1, 1]).tobytes(), indices([2 * number]), scope)
        cache.register(node, column([2, 2]).tobytes(), indices([2 * number + 1]), scope)
    prompt = column([1, 1, 2, 2]).tobytes()
    assert [cache.find(prompt, 2, scope)[0].tolist() for scope in ("", "a", "b", "c")] == [[0, 1], [2, 3], [4, 5], []]
    cache.forget(indices([3, 2]))
    assert [cache.find(prompt, 2, scope)[0].tolist() for scope in ("", "a", "b")] == [[0, 1], [], [4, 5]]
    cache.forget(indices([1, 0, 5, 4]))
    assert not cache._branches
    assert not cache._runs


def test_a_pin_is_for_one_scope() -> None:
    cache = PrefixCache(10, block_size=2)
    cache.pin("p", "a", column([1, 1]).tobytes())
    cache.register(ROOT_NODE, column([1, 1]).tobytes(), indices([0]), "b")
    assert cache.num_resident("p") == 0
    cache.register(ROOT_NODE, column([1, 1]).tobytes(), indices([1]), "a")
    assert cache.num_resident("p") == 1
    assert cache.worth_of(indices([0, 1])).tolist() == [ONCE, PINNED]


def test_a_block_of_two_pins_stays_pinned_until_both_are_gone() -> None:
    cache = PrefixCache(10, block_size=1)
    cache.register(ROOT_NODE, column([1, 2, 3]).tobytes(), indices([0, 1, 2]))
    cache.record_reuse(indices([0]))
    assert cache.pin("short", "", column([1]).tobytes()).tolist() == [0]
    assert cache.pin("long", "", column([1, 2, 9]).tobytes()).tolist() == [1]
    assert cache.unpin("short").tolist() == []
    assert cache.worth_of(indices([0, 1, 2])).tolist() == [PINNED, PINNED, ONCE]
    assert cache.unpin("long").tolist() == [1, 0]
    assert cache.worth_of(indices([0, 1, 2])).tolist() == [REUSED, ONCE, ONCE]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 9)),
        min_size=1,
        max_size=40,
    )
)
def test_a_pin_holds_what_a_search_finds(story: list[tuple[int, list[int], int]]) -> None:
    """One token per block. Any block may be forgotten, also from the middle of a prefix."""
    cache = PrefixCache(400, block_size=1)
    pins: dict[str, list[int]] = {}
    next_block = 0
    for action, tokens, number in story:
        name = str(number % 3)
        if action <= 1:
            blocks = range(next_block, next_block + len(tokens))
            next_block += len(tokens)
            cache.register(ROOT_NODE, column(tokens).tobytes(), indices(list(blocks)))
        elif action == 2:
            known = cache.holds(np.arange(next_block)).nonzero()[0].tolist()
            if known:
                cache.forget(indices([known[number % len(known)]]))
        elif name in pins:
            cache.unpin(name)
            del pins[name]
        else:
            cache.pin(name, "", column(tokens).tobytes())
            pins[name] = tokens
        pinned = set()
        for name, prefix in pins.items():
            found = cache.find(column(prefix).tobytes(), len(prefix))[0].tolist()
            assert cache.num_resident(name) == len(found)
            pinned.update(found)
        everything = np.arange(400)
        assert set(everything[cache.worth_of(everything) == PINNED].tolist()) == pinned
        assert sum(cache.num_worth()) == cache.num_cached
    for name in pins:
        cache.unpin(name)
    assert not cache._awaited
    assert not cache._num_pins_of_block.any()
