"""Waiting for a shared prefix, which one request computes and the others find cached.

Owns: which requests wait. Must not know: the queue's order, or how blocks enter the cache.
"""

import numpy as np

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.cached_prefixes import CachedPrefixes
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_plan import StepPlan


class PrefixWait:
    """Compares a waiting prompt with running ones."""

    def __init__(self, state: CoreState, epoch: Epoch, prefixes: CachedPrefixes, running: RunningRequests) -> None:
        limits = state.limits
        # If a batch must end before the next starts, a request would wait for the batch, not for a prefix.
        may_join = state.batching.rules(any_decoded=True).admits
        self._is_enabled = limits.enable_prefix_caching and limits.prefix_wait_tokens > 0 and may_join
        self._least_tokens = limits.prefix_wait_tokens
        self._rows = epoch.rows
        self._prefixes = prefixes
        self._running = running

    def waits(self, plan: StepPlan, request: Request, start: int, most_blocks: int) -> bool:
        """Whether a running request computes enough tokens of this prompt from ``start`` on.

        ``most_blocks``: the most that it may find cached.
        Only prompts in this step or in flight count, so each step of waiting brings its end nearer.
        """
        if not self._is_enabled:
            return False
        newest = self._running.newest_prompts(plan)
        rows, size = self._rows, self._rows.block_size
        end = -(-(start + self._least_tokens) // size) * size
        if request.num_swapped_tokens or end > most_blocks * size:
            return False
        mark = self._mark_of(request)
        for other in newest:
            if self._mark_of(other) != mark or other is request:
                continue
            if other.num_admitted_tokens // size * size < end:
                continue
            if self._prefixes.scope_of(other) != self._prefixes.scope_of(request):
                continue
            if np.array_equal(rows.token_ids[other.row, :end], request.token_ids[:end]):
                return True
        return False

    def _mark_of(self, request: Request) -> int:
        """The last token of the least shared prefix, where most prompts differ. -1 if the request is too short."""
        place = self._least_tokens - 1
        if request.mark < 0 and place < len(request.token_ids):
            request.mark = int(request.token_ids[place])
        return request.mark
