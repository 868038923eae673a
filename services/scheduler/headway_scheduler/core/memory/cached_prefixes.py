"""The prefix cache, and its second tier on the host, as requests see them.

Owns: which part of a prompt is cached. Must not know: what is evicted.
An adapter changes keys and values, so its identity is part of the scope of its blocks.
"""

from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.prefix_cache import ROOT_NODE
from headway_scheduler.core.state.indices import NO_BLOCKS, BlockIndices
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request

_ADAPTER_WIDTH = 129
"""Adapters stand before tenants in a scope, filled up to more characters than a tenant's name has: so the scope of an
adapter is never that of a tenant."""


def scope_of(request: Request, *, is_tenants: bool) -> str:
    """Only requests of the same scope share blocks; ``is_tenants``: and of the same tenant."""
    new = request.new
    tenant = new.tenant if is_tenants else ""
    return f"{new.adapter:\0<{_ADAPTER_WIDTH}}{tenant}" if new.adapter else tenant


def most_cached_tokens(request: Request) -> int:
    """The most cached tokens that a request without a row may use."""
    if request.runs_whole_prompt:
        return 0
    # At least one token must run, to sample from; so must each token whose logits are wanted.
    most_tokens = len(request.token_ids) - 1
    return min(most_tokens, request.num_prompt_logprobs) if request.is_owed_prompt_logprobs else most_tokens


class PrefixQuery:
    """What several caches are asked about one request that waits: what is the same for all of them is found once."""

    __slots__ = ("_branch", "_branch_bytes", "most_tokens", "request", "scope", "token_bytes")

    def __init__(self, request: Request, limits: SchedulerLimits) -> None:
        self.request = request
        self.most_tokens = most_cached_tokens(request)
        self.scope = scope_of(request, is_tenants=limits.prefix_cache_scope == "tenant")
        self.token_bytes = request.token_ids.tobytes()
        self._branch_bytes = 0
        self._branch = (self.scope, b"")

    def branch(self, block_bytes: int) -> tuple[str, bytes]:
        """By what the run of its first block is found; blocks are usually of one size."""
        if block_bytes != self._branch_bytes:
            self._branch_bytes = block_bytes
            self._branch = (self.scope, self.token_bytes[:block_bytes])
        return self._branch


class CachedPrefixes:
    """What is cached for a request."""

    def __init__(self, limits: SchedulerLimits, epoch: Epoch) -> None:
        self._is_enabled = limits.enable_prefix_caching
        self._is_tenants = limits.prefix_cache_scope == "tenant"
        self._cache = epoch.cache
        self._rows = epoch.rows
        self._swapping = epoch.swapping

    def find(self, request: Request, token_bytes: bytes, most_blocks: int) -> tuple[BlockIndices, int]:
        """The cached blocks that the request may use, and the last node. ``most_blocks``: what is said of it."""
        if not self._is_enabled:
            return NO_BLOCKS, ROOT_NODE
        return self._cache.find(token_bytes, most_blocks, self.scope_of(request))

    def num_cached_tokens(self, query: PrefixQuery) -> int:
        """Leading tokens of a request, known here or not, whose blocks are cached."""
        block_size = self._rows.block_size
        most_blocks = query.most_tokens // block_size
        if most_blocks <= 0 or not self._is_enabled or not self._cache.begins(query.branch(block_size * 4)):
            return 0
        blocks, _ = self._cache.find(query.token_bytes, most_blocks, query.scope)
        return len(blocks) * block_size

    def most_blocks(self, request: Request) -> int:
        """The most cached blocks that a request without a row may use."""
        return most_cached_tokens(request) // self._rows.block_size

    def register(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """Cache the full blocks of a row's computed tokens."""
        rows = self._rows
        first, end = request.num_cached_blocks, num_computed_tokens // rows.block_size
        if end <= first or not self._is_enabled:
            return
        token_bytes = rows.token_ids[row, first * rows.block_size : end * rows.block_size].tobytes()
        blocks = rows.block_table[row, first:end].copy()
        request.cache_node = self._cache.register(request.cache_node, token_bytes, blocks, self.scope_of(request))
        request.num_cached_blocks = end

    def find_offloaded(self, request: Request, token_bytes: bytes, num_shared: int, most_blocks: int) -> BlockIndices:
        """The host blocks that hold what follows ``num_shared`` cached blocks, if bringing them back pays."""
        if not self._is_enabled or request.num_swapped_tokens:
            return NO_BLOCKS
        return self._swapping.find_offloaded(token_bytes, num_shared, most_blocks, self.scope_of(request))

    def offload(self, request: Request, row: int) -> int:
        """Copy the cached blocks of a row that is given up to the host; return how many are copied."""
        rows, end = self._rows, request.num_cached_blocks
        if not end or not self._is_enabled:
            return 0
        token_bytes = rows.token_ids[row, : end * rows.block_size].tobytes()
        return self._swapping.offload(token_bytes, rows.block_table[row, :end].copy(), self.scope_of(request))

    def scope_of(self, request: Request) -> str:
        """See ``scope_of``."""
        return scope_of(request, is_tenants=self._is_tenants)
