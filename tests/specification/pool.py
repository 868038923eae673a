"""The blocks of the device: references, fences, cached prefixes and pins."""

from specification.requests import DEAD, SpecRequest


class SpecPool:
    """Blocks as lists: ``plain`` is a stack, ``evictable`` a queue per level of worth (found once, reused, pinned);
    ``cache`` maps (version of the block before, or the scope; own tokens) to (block, version); every registration is a
    new version."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.plain = list(reversed(range(num_blocks)))
        self.evictable: list[list[int]] = [[], [], []]
        self.fenced: dict[int, int] = {}  # block -> step
        self.cache: dict[tuple[int | str, tuple[int, ...]], tuple[int, int]] = {}
        self.chain_of: dict[int, tuple[int | str, tuple[int, ...]]] = {}
        self.parent_of: dict[int, int | str] = {}
        self.versions = 0
        self.reused: set[int] = set()
        self.pins: dict[str, tuple[str, list[int]]] = {}
        self.resident: dict[str, list[int]] = {}
        """The blocks that hold the beginning of each pinned prefix."""
        self.num_evicted = 0

    @property
    def num_free(self) -> int:
        return len(self.plain) + sum(map(len, self.evictable))

    def is_evictable(self, block: int) -> bool:
        return any(block in queue for queue in self.evictable)

    def worth(self, block: int) -> int:
        if any(block in blocks for blocks in self.resident.values()):
            return 2
        return 1 if block in self.reused else 0

    def allocate(self, count: int) -> list[int]:
        self.make_room(count)
        blocks = [self.plain.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def make_room(self, count: int) -> None:
        """Evict once for all of the next ``count`` blocks."""
        missing = count - len(self.plain)
        if missing > 0:
            self.plain = self._evict(missing)[::-1] + self.plain

    def _evict(self, needed: int) -> list[int]:
        """Evict whole batches, pinned blocks only if nothing else is left and no more of them than it takes."""
        once, reused, pinned = self.evictable
        while len(reused) > (len(once) + len(reused)) * 3 // 4:
            block = reused.pop(0)
            self.reused.remove(block)
            once.append(block)
        batch = max(1, len(self.references) // 64)
        evicted = (once + reused)[: -(-needed // batch) * batch]
        evicted += pinned[: max(0, needed - len(evicted))]
        for block in evicted:
            self.evictable[self.worth(block)].remove(block)
        for block in evicted:
            _, version = self.cache.pop(self.chain_of.pop(block))
            del self.parent_of[version]
            self.reused.discard(block)
        self.num_evicted += len(evicted)
        for name, (scope, tokens) in self.pins.items():
            before = self.resident[name]
            self.resident[name] = self.find(tokens, len(tokens), scope)[0]
            self._reorder([block for block in before[len(self.resident[name]) :] if block in self.chain_of])
        return evicted

    def pin(self, name: str, scope: str, tokens: list[int]) -> bool:
        """A pin keeps whole blocks; False if there is none, or if more than a quarter of the pool would be pinned."""
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        others = sum(len(kept) // self.block_size for other, (_, kept) in self.pins.items() if other != name)
        if not whole or len(whole) // self.block_size + others > len(self.references) // 4:
            return False
        self.unpin(name)
        self.pins[name] = scope, whole
        blocks = self.find(whole, len(whole), scope)[0]
        rising = [block for block in blocks if self.worth(block) < 2]
        self.resident[name] = blocks
        self._reorder(rising)
        return True

    def unpin(self, name: str) -> bool:
        if name not in self.pins:
            return False
        del self.pins[name]
        self._reorder(self.resident.pop(name))
        return True

    def _reorder(self, chain: list[int]) -> None:
        """The worth of some of these may have changed: those that did become the most recently used of their kind."""
        for block in reversed(chain):
            for level, queue in enumerate(self.evictable):
                if block in queue and level != self.worth(block):
                    queue.remove(block)
                    self.evictable[self.worth(block)].append(block)
                    break

    def release(self, blocks: list[int], fence: int | None) -> None:
        unused = []
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                unused.append(block)
        for block in reversed(unused):
            self.fenced[block] = -1 if fence is None else fence
        if fence is None:
            self.complete(-1)

    def complete(self, step: int) -> None:
        back = [block for block, fence in self.fenced.items() if fence <= step]
        for block in sorted(back, key=lambda block: self.fenced[block]):  # stable: release order within a fence
            del self.fenced[block]
            (self.evictable[self.worth(block)] if block in self.chain_of else self.plain).append(block)

    def share(self, blocks: list[int], *, is_reuse: bool) -> None:
        """Take cached blocks; a request that finds again what it had computed itself does not reuse them."""
        for block in blocks:
            self.references[block] += 1
            self.fenced.pop(block, None)
            if self.is_evictable(block):
                self.evictable[self.worth(block)].remove(block)
            if is_reuse:
                self.reused.add(block)

    def find(self, tokens: list[int], most: int, scope: str) -> tuple[list[int], list[int]]:
        """The blocks that hold the first ``most`` tokens at most, and their versions."""
        blocks: list[int] = []
        versions: list[int] = []
        for end in range(self.block_size, most + 1, self.block_size):
            own = tuple(tokens[end - self.block_size : end])
            entry = self.cache.get((versions[-1] if versions else scope, own))
            if entry is None:
                break
            blocks.append(entry[0])
            versions.append(entry[1])
        return blocks, versions

    def register(self, request: SpecRequest, computed: int) -> None:
        size = self.block_size
        for index in range(len(request.chain), computed // size):
            parent = request.chain[-1] if request.chain else request.scope
            if not self._is_reachable(parent):
                request.chain.append(DEAD)
                continue
            chain = (parent, tuple(request.tokens[index * size : (index + 1) * size]))
            if chain not in self.cache:
                self.versions += 1
                self.cache[chain] = (request.blocks[index], self.versions)
                self.chain_of[request.blocks[index]] = chain
                self.parent_of[self.versions] = parent
            request.chain.append(self.cache[chain][1])
        for name, (scope, tokens) in self.pins.items():
            self.resident[name] = self.find(tokens, len(tokens), scope)[0]

    def _is_reachable(self, version: int | str) -> bool:
        while not isinstance(version, str):
            if version not in self.parent_of:
                return False
            version = self.parent_of[version]
        return True
