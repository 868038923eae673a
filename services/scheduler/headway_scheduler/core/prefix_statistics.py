"""How much the prefix cache saves: lately, and for which tenant.

Owns: the sums. Must not know: the cache, or who reads them. Totals are counters (``counters``).
"""

from collections import OrderedDict

import msgspec

RECENT_REQUESTS = 1000
"""The recent hit rate looks back on about so many requests: each counts that much less for every later one."""

MAX_TENANTS = 64
"""How many tenants are told apart; the one not heard of for longest is forgotten for a new one."""

_DECAY = 1 - 1 / RECENT_REQUESTS


class TenantPrefixUse(msgspec.Struct):
    """Tokens that one tenant's requests brought, and those of them found in the cache."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class PrefixStatistics:
    """Takes note of every request when it is first admitted."""

    def __init__(self) -> None:
        self._recent_query_tokens = 0.0
        self._recent_hit_tokens = 0.0
        self.tenants: OrderedDict[str, TenantPrefixUse] = OrderedDict()
        """By tenant, the one heard of last at the end."""

    def note(self, tenant: str, num_query_tokens: int, num_hit_tokens: int) -> None:
        """A request of ``num_query_tokens`` tokens found ``num_hit_tokens`` of them in the cache."""
        self._recent_query_tokens = self._recent_query_tokens * _DECAY + num_query_tokens
        self._recent_hit_tokens = self._recent_hit_tokens * _DECAY + num_hit_tokens
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
        """Hit tokens per query token, 0 to 1, the last requests counting most."""
        return self._recent_hit_tokens / self._recent_query_tokens if self._recent_query_tokens else 0.0
