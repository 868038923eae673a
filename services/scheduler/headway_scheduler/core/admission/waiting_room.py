"""The limits on waiting requests and tokens, in all and per tenant.

Owns: the counts. Must not know: the order of service.

Prompts take memory, so tokens count. If none waits, any length may, or it could never run.
"""

from headway_proto.wording import shown
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request


class WaitingRoom:
    """Preempted requests count as well, but are never refused."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._tenants: dict[str, list[int]] = {}
        self.num_requests = 0
        self.num_tokens = 0

    def check(self, tenant: str, num_tokens: int) -> None:
        """Check that a request of ``num_tokens`` tokens has room.

        Raises:
            RequestRejected: there is no room now.
        """
        limits = self._limits
        _check("", self.num_requests, self.num_tokens, num_tokens, limits.max_num_waiting, limits.max_waiting_tokens)
        if limits.max_tenant_waiting or limits.max_tenant_waiting_tokens:
            own_requests, own_tokens = self._tenants.get(tenant, (0, 0))
            most, most_tokens = limits.max_tenant_waiting, limits.max_tenant_waiting_tokens
            _check(f" of tenant {shown(tenant)}", own_requests, own_tokens, num_tokens, most, most_tokens)

    def enter(self, request: Request) -> None:
        """Count a request, with the tokens that it has now."""
        request.num_queued_tokens = len(request.token_ids)
        self.num_requests += 1
        self.num_tokens += request.num_queued_tokens
        counts = self._tenants.setdefault(request.new.tenant, [0, 0])
        counts[0] += 1
        counts[1] += request.num_queued_tokens

    def leave(self, request: Request) -> None:
        """Undo ``enter``."""
        self.num_requests -= 1
        self.num_tokens -= request.num_queued_tokens
        counts = self._tenants[request.new.tenant]
        counts[0] -= 1
        counts[1] -= request.num_queued_tokens
        if not counts[0]:
            del self._tenants[request.new.tenant]


def _check(whose: str, num_requests: int, num_tokens: int, num_more: int, most_requests: int, most_tokens: int) -> None:
    """A limit of 0 allows any number."""
    if most_requests and num_requests >= most_requests:
        raise RequestRejected("overloaded", "", f"{num_requests} requests{whose} are waiting; allowed: {most_requests}")
    if most_tokens and num_requests and num_tokens + num_more > most_tokens:
        message = f"{num_tokens} tokens{whose} are waiting, and these {num_more} are too many; allowed: {most_tokens}"
        raise RequestRejected("overloaded", "", message)
