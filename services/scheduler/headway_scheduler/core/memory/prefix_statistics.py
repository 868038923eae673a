"""How much the prefix cache saves: lately, and for which tenant.

Owns: the figures. Must not know: the cache, or who reads them. Totals are counters (``counters``).
"""

from collections import OrderedDict

import msgspec

from headway_scheduler.core.state.counters import SchedulerCounters

RECENT_QUERIES = 1000
"""The recent hit rate looks back on at least so many requests, and on less than twice as many."""

MAX_TENANTS = 64
"""How many tenants are told apart; the one not heard of for longest is forgotten for a new one."""


class TenantPrefixUse(msgspec.Struct):
    """Tokens that one tenant's requests brought, and those of them found in the cache."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class PrefixStatistics:
    """Looks at ``counters``, which go on counting.

    A rate that is kept up to date with every request costs every request. This one is worked out when somebody asks,
    from what the counters were some time ago: call ``mark`` at every multiple of ``RECENT_QUERIES`` queries.
    """

    def __init__(self, counters: SchedulerCounters) -> None:
        self._counters = counters
        self._before_last_mark = 0, 0
        self._last_mark = 0, 0
        self.tenants: OrderedDict[str, TenantPrefixUse] = OrderedDict()
        """By name, the one heard of last at the end."""

    def mark(self) -> None:
        """Remember where the counters are."""
        self._before_last_mark = self._last_mark
        self._last_mark = self._counters.num_prefix_query_tokens, self._counters.num_prefix_hit_tokens

    def count_tenant(self, tenant: str, num_query_tokens: int, num_hit_tokens: int) -> None:
        """A request of this tenant with ``num_query_tokens`` tokens found ``num_hit_tokens`` of them in the cache."""
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
        """Hit tokens per query token, 0 to 1, of the last requests."""
        num_query_tokens = self._counters.num_prefix_query_tokens - self._before_last_mark[0]
        num_hit_tokens = self._counters.num_prefix_hit_tokens - self._before_last_mark[1]
        return num_hit_tokens / num_query_tokens if num_query_tokens else 0.0
