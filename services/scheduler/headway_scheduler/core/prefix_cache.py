"""Which blocks hold the KV of which token prefixes.

Owns: the chains of cached blocks and how a prompt is matched against them.
Must not know: who holds a block, which blocks are free, or when one is evicted.

A full block is known by the block before it and its own token ids (the idea of chaining blocks by their prefix is
vLLM's automatic prefix caching, the tree of runs SGLang's RadixAttention). What is registered at once, usually a whole
prompt, is kept as one *run*: the bytes of its tokens and the numbers of its blocks. A *node* is a place in a run; a run
branches off a node and is found by that node and the tokens of its first block. So matching a prompt compares a few
byte strings, however many blocks they cover, tokens themselves are compared, not digests (no two prompts can collide),
and a run is never split: a prompt that differs from some block on is a new run behind the node before it.

Evicting a block cuts its run: what followed cannot be reached any more, and nothing is registered behind it. Nodes are
never reused.
"""

import numpy as np
from numpy.typing import NDArray

from headway_scheduler.core.indices import NO_BLOCKS, BlockIndices

ROOT_NODE = 0
"""The node before the first block of every prompt."""

_PLACE_BITS = 24
_PLACE_MASK = (1 << _PLACE_BITS) - 1
_NO_NODE = -1


class _Run:
    """Blocks registered at once. ``length`` of them can still be reached, ``num_left`` are not yet evicted."""

    __slots__ = ("blocks", "branch", "length", "num_left", "number", "token_bytes")

    def __init__(self, number: int, branch: tuple[int, bytes], token_bytes: bytes, blocks: BlockIndices) -> None:
        self.number = number
        self.branch = branch
        self.token_bytes = token_bytes
        self.blocks = blocks
        self.length = len(blocks)
        self.num_left = len(blocks)

    def node(self, place: int) -> int:
        return self.number << _PLACE_BITS | place

    def continues(self, place: int, token_bytes: bytes) -> bool:
        """Whether there is a block at ``place`` that can be reached and holds these tokens."""
        return place < self.length and self.token_bytes.startswith(token_bytes, place * len(token_bytes))


class PrefixCache:
    """``num_blocks`` blocks of ``block_size`` tokens; prompts are given as the bytes of int32 token ids."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * 4
        self._runs: dict[int, _Run] = {}
        self._branches: dict[tuple[int, bytes], _Run] = {}
        self._last_number = 0
        self._node_of_block = np.full(num_blocks, _NO_NODE, dtype=np.int64)
        self.num_cached = 0

    def holds(self, blocks: BlockIndices) -> NDArray[np.bool_]:
        """Which of ``blocks`` are in the cache, shape ``[len(blocks)]``."""
        held: NDArray[np.bool_] = self._node_of_block[blocks] != _NO_NODE
        return held

    def find(self, token_bytes: bytes, max_blocks: int) -> tuple[BlockIndices, int]:
        """The longest cached prefix, at most ``max_blocks`` blocks: their numbers, and the node of the last."""
        parts, node = self._walk(ROOT_NODE, token_bytes, max_blocks)
        if not parts:
            return NO_BLOCKS, node
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)), node

    def register(self, parent_node: int, token_bytes: bytes, blocks: BlockIndices) -> int:
        """Remember that ``blocks`` hold the KV of ``token_bytes`` behind ``parent_node``; return the last one's node.

        Where other blocks already hold the same, those stay the cached ones: block tables are append-only, so nobody's
        blocks are exchanged after the fact. Behind a node that can no longer be reached nothing is kept.
        """
        if not self._is_reachable(parent_node):
            return parent_node
        known, node = self._walk(parent_node, token_bytes, len(blocks))
        if known:
            num_known = sum(map(len, known))
            if num_known == len(blocks):
                return node
            token_bytes, blocks = token_bytes[num_known * self._block_bytes :], blocks[num_known:]
        branch = (node, token_bytes[: self._block_bytes])
        self._last_number += 1
        run = _Run(self._last_number, branch, token_bytes, blocks)
        self._runs[run.number] = self._branches[branch] = run
        first_node = run.node(0)
        end_node = first_node + run.length
        self._node_of_block[blocks] = np.arange(first_node, end_node)
        self.num_cached += run.length
        return end_node - 1

    def forget(self, blocks: BlockIndices) -> None:
        """Cached ``blocks`` will be overwritten: cut their runs."""
        nodes = self._node_of_block[blocks]
        self._node_of_block[blocks] = _NO_NODE
        self.num_cached -= len(blocks)
        numbers, places = nodes >> _PLACE_BITS, nodes & _PLACE_MASK
        # Blocks of one run usually come together, last first.
        bounds = np.concatenate(([0], (numbers[1:] != numbers[:-1]).nonzero()[0] + 1, [len(blocks)]))
        starts = bounds[:-1]
        firsts = np.minimum.reduceat(places, starts).tolist()
        counts = (bounds[1:] - starts).tolist()
        for number, first, count in zip(numbers[starts].tolist(), firsts, counts, strict=True):
            self._cut(self._runs[number], first, count)

    def _is_reachable(self, node: int) -> bool:
        while node != ROOT_NODE:
            run = self._runs.get(node >> _PLACE_BITS)
            if run is None or node & _PLACE_MASK >= run.length:
                return False
            node = run.branch[0]
        return True

    def _cut(self, run: _Run, first: int, count: int) -> None:
        run.num_left -= count
        if first < run.length:
            run.length = first
            if first == 0:
                del self._branches[run.branch]
        if run.num_left == 0:
            del self._runs[run.number]

    def _walk(self, node: int, token_bytes: bytes, max_blocks: int) -> tuple[list[BlockIndices], int]:
        """Follow ``token_bytes`` from ``node``: the blocks passed, in parts, and the node reached."""
        size = self._block_bytes
        parts: list[BlockIndices] = []
        done = 0
        while done < max_blocks:
            first_block = token_bytes[done * size : (done + 1) * size]
            run, place = self._runs.get(node >> _PLACE_BITS), (node & _PLACE_MASK) + 1
            if run is None or not run.continues(place, first_block):
                # Not the next block of the run that the node is in; then of a run that branches off there.
                run, place = self._branches.get((node, first_block)), 0
                if run is None:
                    break
            count = self._num_equal(run, place, token_bytes, done, min(run.length - place, max_blocks - done))
            parts.append(run.blocks[place : place + count])
            node = run.node(place + count - 1)
            done += count
        return parts, node

    def _num_equal(self, run: _Run, place: int, token_bytes: bytes, done: int, most: int) -> int:
        """How many blocks agree from here on; the first is known to, ``most`` could."""
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
