"""Which blocks hold the KV of which token prefixes, and the worth of each.

Owns: chains of cached blocks, matches, worth. Must not know: who holds a block, or when it is evicted.

A full block is known by the block before it and its own tokens. (vLLM's automatic prefix caching chains blocks so;
SGLang's RadixAttention keeps a tree of runs.) Blocks registered together, usually a whole prompt, are one *run*. A
*node* is a place in a run. A run branches off a node; that node and the tokens of its first block find it. So a match
compares few byte strings. It compares tokens, not digests: prompts cannot collide. Runs are never split: a prompt that
differs from some block on is a new run.

Evicting a block cuts its run: later blocks cannot be reached, and nothing is registered behind them. Nodes are never
reused.

Only prompts of one *scope* share blocks: it is part of a first block's key (compare vLLM's cache salt).

A block is worth least if no request has found it again (*once*), more if one has (*reused*), most if *pinned*. A pin
*awaits* its next branch, so other registrations do no work for it.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from headway_scheduler.core.memory.cache_log import CacheEntry, CacheLog
from headway_scheduler.core.state.indices import NO_BLOCKS, BlockIndices, joined

ROOT_NODE = 0
"""The node before every prompt."""

ONCE, REUSED, PINNED = 0, 1, 2
"""What a cached block is worth."""

NUM_WORTHS = 3

_Branch: TypeAlias = tuple[int | str, bytes]
"""The node before a run (at the root: its scope), and the tokens of the run's first block."""

_PLACE_BITS = 24
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_NO_NODE = np.array(-1, dtype=np.int64)


@mypyc_attr(allow_interpreted_subclasses=True)
class _Run:
    """``length`` blocks can still be reached, ``num_left`` are not yet evicted."""

    __slots__ = ("blocks", "branch", "length", "num_left", "number", "parent", "token_bytes")

    def __init__(self, number: int, parent: int, branch: _Branch, token_bytes: bytes, blocks: BlockIndices) -> None:
        self.number = number
        self.parent = parent
        self.branch = branch
        self.token_bytes = token_bytes
        self.blocks = blocks
        self.length = len(blocks)
        self.num_left = len(blocks)

    def node(self, place: int) -> int:
        return self.number << _PLACE_BITS | place

    def continues(self, place: int, token_bytes: bytes) -> bool:
        """Whether the block at ``place`` can be reached and holds these tokens."""
        return place < self.length and self.token_bytes.startswith(token_bytes, place * len(token_bytes))


@mypyc_attr(allow_interpreted_subclasses=True)
class _Pin:
    """A pinned prefix and the ``blocks`` that hold its beginning."""

    __slots__ = ("awaited", "blocks", "num_blocks", "scope", "token_bytes")

    def __init__(self, scope: str, token_bytes: bytes, num_blocks: int) -> None:
        self.scope = scope
        self.token_bytes = token_bytes
        self.num_blocks = num_blocks
        self.blocks = NO_BLOCKS
        self.awaited: _Branch | None = None


class PrefixCache:
    """Prompts are given as the bytes of int32 token ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * 4
        self._runs: dict[int, _Run] = {}
        self._branches: dict[_Branch, _Run] = {}
        self._last_number = 0
        self._node_of_block = np.full(num_blocks, _NO_NODE, dtype=np.int64)
        # Both are 0 for blocks that are not cached. A pinned block keeps its reuse for the time after the pin.
        self._is_reused = np.zeros(num_blocks, dtype=np.int8)
        self._num_pins_of_block = np.zeros(num_blocks, dtype=np.int32)
        self._pins: dict[str, _Pin] = {}
        self._awaited: dict[_Branch, list[_Pin]] = {}
        self.num_cached = 0
        # The whole cache weighs at most 2 * num_blocks: one entry per run, of weight 1 plus its blocks.
        self._log = CacheLog(most_blocks=4 * num_blocks)

    def changes(self, index: int | None, most_blocks: int) -> tuple[tuple[CacheEntry, ...], int]:
        """Changes from ``index`` on, about ``most_blocks`` blocks, and the next index.

        If ``index`` is None or too old: a clearing, then the whole cache.
        """
        if index is None or not self._log.covers(index):
            index = self._log.restart(self._cached_entries())
        return self._log.read(index, most_blocks)

    def has_changes_from(self, index: int) -> bool:
        """Whether there are entries from ``index`` on."""
        return index < self._log.end_index

    def _cached_entries(self) -> Iterator[CacheEntry]:
        # Parents come first, because a run is made after its parent.
        reached: set[int] = set()
        for run in self._runs.values():
            parent, place = run.parent >> _PLACE_BITS, run.parent & _PLACE_MASK
            follows = run.parent == ROOT_NODE or (parent in reached and place < self._runs[parent].length)
            if run.length and follows:
                reached.add(run.number)
                yield self._entry(run)

    def _entry(self, run: _Run) -> CacheEntry:
        scope = str(run.branch[0]) if run.parent == ROOT_NODE else ""
        tokens = run.token_bytes[: run.length * self._block_bytes]
        return CacheEntry(run.node(0), run.length, run.parent, tokens, scope)

    def holds(self, blocks: BlockIndices) -> NDArray[np.bool_]:
        """Which of ``blocks`` are cached, shape ``[len(blocks)]``."""
        held: NDArray[np.bool_] = self._node_of_block[blocks] != _NO_NODE
        return held

    def worth_of(self, blocks: BlockIndices) -> NDArray[np.int8]:
        """ONCE, REUSED or PINNED, shape ``[len(blocks)]``."""
        worth = self._is_reused[blocks]
        if self._pins:
            worth[self._num_pins_of_block[blocks] > 0] = PINNED
        return worth

    def num_worth(self) -> list[int]:
        """How many are ONCE, REUSED, PINNED; O(blocks)."""
        cached = (self._node_of_block != _NO_NODE).nonzero()[0]
        counts: list[int] = np.bincount(self.worth_of(cached), minlength=NUM_WORTHS).tolist()
        return counts

    def begins(self, branch: tuple[str, bytes]) -> bool:
        """Whether a prompt of this scope that begins with the tokens of this block is cached."""
        return branch in self._branches

    def find(self, token_bytes: bytes, max_blocks: int, scope: str = "") -> tuple[BlockIndices, int]:
        """The longest cached prefix, and its last node."""
        parts, node = self._walk(ROOT_NODE, scope, token_bytes, max_blocks)
        return joined(parts), node

    def register(self, parent_node: int, token_bytes: bytes, blocks: BlockIndices, scope: str = "") -> int:
        """Record that ``blocks`` hold ``token_bytes`` behind ``parent_node``; return the last node.

        Blocks that already hold these tokens stay the cached ones: block tables are append-only.
        """
        if parent_node != ROOT_NODE and not self._is_reachable(parent_node):
            return parent_node
        known, node = self._walk(parent_node, scope, token_bytes, len(blocks))
        if known:
            num_known = sum(map(len, known))
            if num_known == len(blocks):
                return node
            token_bytes, blocks = token_bytes[num_known * self._block_bytes :], blocks[num_known:]
        branch = (scope if node == ROOT_NODE else node, token_bytes[: self._block_bytes])
        self._last_number += 1
        run = _Run(self._last_number, node, branch, token_bytes, blocks)
        self._runs[run.number] = self._branches[branch] = run
        first_node = run.node(0)
        end_node = first_node + run.length
        self._node_of_block[blocks] = np.arange(first_node, end_node)
        self.num_cached += run.length
        if self._log.is_on:
            self._log.record(self._entry(run))
        if self._awaited:
            for pin in self._awaited.pop(branch, ()):
                self._extend(pin)
        return end_node - 1

    def record_reuse(self, blocks: BlockIndices) -> None:
        """Make these cached blocks REUSED."""
        self._is_reused[blocks] = 1

    def forget_reuse(self, blocks: BlockIndices) -> None:
        """Make these cached blocks ONCE again."""
        self._is_reused[blocks] = 0

    def forget(self, blocks: BlockIndices) -> BlockIndices:
        """Cut the runs of these blocks, which will be overwritten.

        Returns cached blocks that this unpins.
        """
        nodes = self._node_of_block[blocks]
        self._node_of_block[blocks] = _NO_NODE
        self._is_reused[blocks] = 0
        self.num_cached -= len(blocks)
        numbers, places = nodes >> _PLACE_BITS, nodes & _PLACE_MASK
        # Blocks of one run usually come together, last first.
        bounds = np.concatenate(([0], (numbers[1:] != numbers[:-1]).nonzero()[0] + 1, [len(blocks)]))
        starts = bounds[:-1]
        firsts = np.minimum.reduceat(places, starts).tolist()
        counts = (bounds[1:] - starts).tolist()
        for number, first, count in zip(numbers[starts].tolist(), firsts, counts, strict=True):
            self._cut(self._runs[number], first, count)
        if self._pins and np.count_nonzero(self._num_pins_of_block[blocks]):
            return self._shorten_pins()
        return NO_BLOCKS

    # ---------------------------------------------------------------------------------------------------------- pins

    def pin(self, name: str, scope: str, token_bytes: bytes) -> BlockIndices:
        """Pin whole blocks; return cached ones now worth more."""
        pin = self._pins[name] = _Pin(scope, token_bytes, len(token_bytes) // self._block_bytes)
        self._extend(pin)
        changed: BlockIndices = pin.blocks[self._num_pins_of_block[pin.blocks] == 1][::-1]
        return changed

    def unpin(self, name: str) -> BlockIndices:
        """Remove a pin; return cached blocks now worth less."""
        pin = self._pins[name]
        changed = self._shorten(pin, 0)
        self._stop_awaiting(pin)
        del self._pins[name]
        return changed

    def num_resident(self, name: str) -> int:
        """How many blocks of a pinned prefix are cached."""
        return len(self._pins[name].blocks)

    def _extend(self, pin: _Pin) -> None:
        num_known = len(pin.blocks)
        node = int(self._node_of_block[pin.blocks[-1]]) if num_known else ROOT_NODE
        rest = pin.token_bytes[num_known * self._block_bytes :]
        parts, node = self._walk(node, pin.scope, rest, pin.num_blocks - num_known)
        for blocks in parts:
            self._num_pins_of_block[blocks] += 1
        pin.blocks = np.concatenate((pin.blocks, *parts))
        self._await_next(pin, node)

    def _await_next(self, pin: _Pin, node: int) -> None:
        num_known = len(pin.blocks)
        if num_known == pin.num_blocks:
            pin.awaited = None
            return
        next_block = pin.token_bytes[num_known * self._block_bytes : (num_known + 1) * self._block_bytes]
        pin.awaited = (pin.scope if node == ROOT_NODE else node, next_block)
        self._awaited.setdefault(pin.awaited, []).append(pin)

    def _stop_awaiting(self, pin: _Pin) -> None:
        if pin.awaited is None:
            return
        pins = self._awaited[pin.awaited]
        pins.remove(pin)
        if not pins:
            del self._awaited[pin.awaited]
        pin.awaited = None

    def _shorten(self, pin: _Pin, length: int) -> BlockIndices:
        """Keep ``length`` blocks; return cached ones no longer pinned."""
        lost, pin.blocks = pin.blocks[length:], pin.blocks[:length]
        self._num_pins_of_block[lost] -= 1
        changed: BlockIndices = lost[self.holds(lost) & (self._num_pins_of_block[lost] == 0)][::-1]
        return changed

    def _shorten_pins(self) -> BlockIndices:
        changed = []
        for pin in self._pins.values():
            forgotten = (~self.holds(pin.blocks)).nonzero()[0]
            if len(forgotten):
                length = int(forgotten[0])
                self._stop_awaiting(pin)
                changed.append(self._shorten(pin, length))
                self._await_next(pin, int(self._node_of_block[pin.blocks[-1]]) if length else ROOT_NODE)
        return np.concatenate(changed)

    # --------------------------------------------------------------------------------------------------------- chains

    def _is_reachable(self, node: int) -> bool:
        while node != ROOT_NODE:
            run = self._runs.get(node >> _PLACE_BITS)
            if run is None or node & _PLACE_MASK >= run.length:
                return False
            node = run.parent
        return True

    def _cut(self, run: _Run, first: int, count: int) -> None:
        run.num_left -= count
        if first < run.length:
            if self._log.is_on:
                self._log.record(CacheEntry(run.node(first), run.length - first))
            run.length = first
            if first == 0:
                del self._branches[run.branch]
        if run.num_left == 0:
            del self._runs[run.number]

    def _walk(self, node: int, scope: str, token_bytes: bytes, max_blocks: int) -> tuple[list[BlockIndices], int]:
        """Follow ``token_bytes``: the blocks passed, in parts, and the node reached."""
        size = self._block_bytes
        parts: list[BlockIndices] = []
        done = 0
        while done < max_blocks:
            first_block = token_bytes[done * size : (done + 1) * size]
            run, place = self._runs.get(node >> _PLACE_BITS), (node & _PLACE_MASK) + 1
            if run is None or not run.continues(place, first_block):
                # The node's run does not continue so; perhaps a run that branches off there does.
                run, place = self._branches.get((scope if node == ROOT_NODE else node, first_block)), 0
                if run is None:
                    break
            count = self._num_equal(run, place, token_bytes, done, min(run.length - place, max_blocks - done))
            parts.append(run.blocks[place : place + count])
            node = run.node(place + count - 1)
            done += count
        return parts, node

    def _num_equal(self, run: _Run, place: int, token_bytes: bytes, done: int, most: int) -> int:
        """How many blocks agree; at least one does."""
        size = self._block_bytes
        theirs, ours = place * size, done * size
        if run.token_bytes[theirs : theirs + most * size] == token_bytes[ours : ours + most * size]:
            return most
        count = 1
        while (
            run.token_bytes[theirs + count * size : theirs + (count + 1) * size]
            == token_bytes[ours + count * size : ours + (count + 1) * size]
        ):
            count += 1
        return count
