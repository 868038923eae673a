"""How much the prefix cache saves: recently, and per tenant.

Owns: these figures. Must not know: the cache, or who reads.
"""

from collections import OrderedDict

import msgspec

from headway_scheduler.core.state.counters import SchedulerCounters

RECENT_QUERIES = 1000
"""The recent hit rate covers at least this many requests, and less than twice as many."""

MAX_TENANTS = 64
"""A new tenant beyond this number replaces the least recent one."""


class TenantPrefixUse(msgspec.Struct):
    """A tenant's prompt tokens, and those found cached."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class PrefixStatistics:
    """Call ``mark`` every ``RECENT_QUERIES`` queries."""

    def __init__(self, counters: SchedulerCounters) -> None:
        self._counters = counters
        self._before_last_mark = 0, 0
        self._last_mark = 0, 0
        self.tenants: OrderedDict[str, TenantPrefixUse] = OrderedDict()
        """By name, the most recent last."""

    def mark(self) -> None:
        """Remember the counters of now."""
        self._before_last_mark = self._last_mark
        self._last_mark = self._counters.num_prefix_query_tokens, self._counters.num_prefix_hit_tokens

    def count_tenant(self, tenant: str, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Count one request of this tenant."""
        use = self.tenants.get(tenant)
        if use is None:
            if len(self.tenants) == MAX_TENANTS:
                self.tenants.popitem(last=False)
            use = self.tenants[tenant] = TenantPrefixUse()
        use.num_query_tokens += num_query_tokens
        use.num_hit_tokens += num_hit_tokens
        self.tenants.move_to_end(tenant)

    @property
    def recent_hit_rate(self) -> float:
        """Recent hit tokens per prompt token, 0 to 1."""
        num_query_tokens = self._counters.num_prefix_query_tokens - self._before_last_mark[0]
        num_hit_tokens = self._counters.num_prefix_hit_tokens - self._before_last_mark[1]
        return num_hit_tokens / num_query_tokens if num_query_tokens else 0.0
