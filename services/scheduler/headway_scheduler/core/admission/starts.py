"""What is noted when a request starts.

Owns: the events of first starts until they are delivered, and what a start adds to counters. Must not know: why it started.
"""

from headway_scheduler.core.admission.core_state import CoreState
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.prefix_statistics import RECENT_QUERIES
from headway_scheduler.core.state.events import AdmittedEvent
from headway_scheduler.core.state.indices import BlockIndices
from headway_scheduler.core.state.request import Request


class Starts:
    """Counts starts, the first of a request apart from those after a preemption or a loss."""

    def __init__(self, state: CoreState, epoch: Epoch) -> None:
        self._state = state
        self._epoch = epoch
        self._admitted: list[AdmittedEvent] = []

    def count(self, request: Request, start: int, shared: BlockIndices, now: float) -> None:
        """A request started behind its first ``start`` tokens, of which the ``shared`` blocks of the device were cached."""
        num_cached_tokens = len(shared) * self._epoch.rows.block_size
        if request.scheduled_time is None:
            request.scheduled_time = now
            self._count_first(request, shared, num_cached_tokens, now)
            return
        # It mostly finds its own blocks, which says nothing about how often others share them.
        counters = self._state.counters
        counters.num_prefix_resumed_tokens += num_cached_tokens
        num_once_computed, reason = request.lost_work
        num_lost_tokens = min(num_once_computed, len(request.token_ids)) - start
        if num_lost_tokens > 0:
            counters.wasted_tokens[reason] += num_lost_tokens

    def _count_first(self, request: Request, shared: BlockIndices, num_cached_tokens: int, now: float) -> None:
        counters, new, statistics = self._state.counters, request.new, self._state.prefix_statistics
        num_tokens = len(request.token_ids)
        request.device_us_marks = counters.device_us, counters.device_us
        counters.num_prompt_tokens += new.num_prompt_tokens
        most = request.limit - new.num_prompt_tokens
        request.num_predicted_tokens = self._state.lengths.predicted_output(
            request.curve, num_tokens - new.num_prompt_tokens, most
        )
        self._admitted.append(
            AdmittedEvent(new.origin, num_cached_tokens, new.num_prompt_tokens, new.tenant, request.arrival_time, now)
        )
        counters.num_prefix_queries += 1
        counters.num_prefix_query_tokens += num_tokens
        if num_cached_tokens:
            counters.num_prefix_hits += 1
            counters.num_prefix_hit_tokens += num_cached_tokens
            self._epoch.cache.record_reuse(shared)
        if not counters.num_prefix_queries % RECENT_QUERIES:
            statistics.mark()
        if new.tenant:
            statistics.count_tenant(new.tenant, num_tokens, num_cached_tokens)

    def take_admitted(self) -> tuple[AdmittedEvent, ...]:
        """Return the first starts since the last call."""
        admitted = tuple(self._admitted)
        self._admitted.clear()
        return admitted
