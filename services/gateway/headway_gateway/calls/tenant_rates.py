"""The rate of requests per tenant, by token buckets."""

from collections import OrderedDict

MAX_TENANTS = 10_000


class TenantRates:
    """``rate`` requests per second and tenant; 0 is no limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._depth = max(1.0, rate)
        # Tokens left, and when; least recently seen tenant first.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, tenant: str, now: float) -> float:
        """Return 0, or the seconds to wait."""
        if not self._rate:
            return 0.0
        left, since = self._buckets.pop(tenant, (self._depth, now))
        left = min(self._depth, left + (now - since) * self._rate)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / self._rate
        self._buckets[tenant] = (left if wait_s else left - 1.0, now)
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        return wait_s
