"""The token prefixes that operators have pinned; they outlive executors.

Owns: their tokens. Must not know: which blocks hold them.

Cached blocks of a pinned prefix are evicted last. At most a quarter of the pool may be pinned, so that the cache stays
useful.
"""

import msgspec
import numpy as np

from headway_proto.columns import Int32Array
from headway_proto.wording import shown
from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.prefix_cache import PrefixCache
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

_POOL_SHARE = 4
"""At most one block in this many is pinned."""


class PinRefused(Exception):  # noqa: N818 - it is an answer, not a malfunction
    """A pin is not allowed; the message names the field."""


class PinnedPrefix(msgspec.Struct, frozen=True):
    """``num_blocks`` is 0 while the executor is too small; ``num_resident_blocks`` are cached now."""

    name: str
    tenant: str
    num_tokens: int
    num_blocks: int
    num_resident_blocks: int


class PinnedPrefixes:
    """Pins by name."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._by_tenant = limits.prefix_cache_scope == "tenant"
        self._tokens: dict[str, tuple[str, Int32Array]] = {}
        self._num_blocks: dict[str, int] = {}

    def begin(self, limits: SchedulerLimits, capacity: ExecutorCapacity, cache: PrefixCache, pool: BlockPool) -> None:
        """Apply the pins to a new executor, oldest first; ``limits`` are those that fit it."""
        self._is_caching = limits.enable_prefix_caching
        self._capacity, self._cache, self._pool = capacity, cache, pool
        self._num_blocks = {}
        for name in self._tokens:
            if self._is_caching and self._fits(name):
                self._apply(name)

    def clear(self) -> None:
        """Forget all pins, for another model."""
        self._tokens = {}

    def pin(self, name: str, tenant: str, token_ids: Int32Array) -> PinnedPrefix:
        """Pin the whole blocks of ``token_ids``, int32 ``[num_tokens]``.

        Raises:
            PinRefused: it is too short, too large, or not allowed; all pins stay.
        """
        self._check(name, tenant, token_ids)
        self._drop(name)
        self._tokens[name] = tenant, token_ids
        self._apply(name)
        return self._described(name)

    def unpin(self, name: str) -> bool:
        """Remove a pin; False if there is none."""
        is_known = name in self._tokens
        self._drop(name)
        return is_known

    def list(self) -> tuple[PinnedPrefix, ...]:
        """All pins, oldest first."""
        return tuple(map(self._described, self._tokens))

    def contents(self) -> dict[str, tuple[str, Int32Array]]:
        """Tenant and tokens of each pin, oldest first."""
        return dict(self._tokens)

    def _described(self, name: str) -> PinnedPrefix:
        tenant, token_ids = self._tokens[name]
        num_blocks = self._num_blocks.get(name, 0)
        return PinnedPrefix(
            name=name,
            tenant=tenant,
            num_tokens=len(token_ids),
            num_blocks=num_blocks,
            num_resident_blocks=self._cache.num_resident(name) if num_blocks else 0,
        )

    def _check(self, name: str, tenant: str, token_ids: Int32Array) -> None:
        if not self._is_caching:
            raise PinRefused(
                "prefix: nothing is cached; allowed: a prefix if enable_prefix_caching is on and the model keeps no states"
            )
        if tenant and not self._by_tenant:
            raise PinRefused(f"tenant: {shown(tenant)} is not allowed; allowed: none, as prefix_cache_scope is shared")
        block_size, vocab_size = self._capacity.block_size, self._capacity.vocab_size
        if len(token_ids) < block_size:
            raise PinRefused(
                f"prefix: {len(token_ids)} tokens fill no block; allowed: at least {block_size}, the block size"
            )
        # As unsigned, a negative id is larger than any vocabulary.
        largest = token_ids[token_ids.view(np.uint32).argmax()]
        if not 0 <= largest < vocab_size:
            raise PinRefused(f"token_ids: {largest} is not allowed; allowed: 0 to {vocab_size - 1}")
        free = self._num_free_to_pin(name)
        if len(token_ids) // block_size > free:
            raise PinRefused(
                f"prefix: {len(token_ids)} tokens fill {len(token_ids) // block_size} blocks; allowed: {free} more pinned "
                f"blocks, for {self._capacity.num_blocks // _POOL_SHARE} in all, a quarter of the pool"
            )

    def _fits(self, name: str) -> bool:
        return 0 < len(self._tokens[name][1]) // self._capacity.block_size <= self._num_free_to_pin(name)

    def _num_free_to_pin(self, name: str) -> int:
        others = sum(count for other, count in self._num_blocks.items() if other != name)
        return self._capacity.num_blocks // _POOL_SHARE - others

    def _apply(self, name: str) -> None:
        tenant, token_ids = self._tokens[name]
        num_blocks = len(token_ids) // self._capacity.block_size
        self._num_blocks[name] = num_blocks
        whole = token_ids[: num_blocks * self._capacity.block_size]
        self._pool.reorder(self._cache.pin(name, tenant, whole.tobytes()))

    def _drop(self, name: str) -> None:
        if self._num_blocks.pop(name, 0):
            self._pool.reorder(self._cache.unpin(name))
        self._tokens.pop(name, None)
