"""The order of those that wait, fair shares and promotions."""

from specification.requests import SpecRequest
from specification.state import SpecState


class Queue:
    def __init__(self, state: SpecState) -> None:
        self._state = state
        self.starts_since_promotion = 0
        self.highest_starts = 0
        """Since one of another class."""
        self.served: dict[str, float] = {}
        """fair: what each tenant has had, lifts included."""
        self.last_to_leave: str | None = None
        self.tenants_seen: list[str] = []

    def in_order(self) -> list[SpecRequest]:
        """All that wait, in service order."""
        return sorted(self._state.waiting, key=self._queue_key)

    def _queue_key(self, request: SpecRequest) -> tuple[float, ...]:
        if self._state.limits.order == "fair":
            return (*self.tenant_place(request.tenant), request.lane, request.arrival)
        latest = 1 << 62 if request.latest_start is None else int(request.latest_start * 1e6)
        value = {"shortest": request.work, "deadline": latest, "class_deadline": latest}.get(
            self._state.limits.order, 0
        )
        return (request.rank, request.lane, value, request.arrival)

    def tenant_place(self, tenant: str) -> tuple[float, int, int]:
        num_running = sum(r.tenant == tenant for r in self._state.running)
        return (self.served[tenant], num_running, self.tenants_seen.index(tenant))

    def goes_before(self, request: SpecRequest, running: SpecRequest | None) -> bool:
        if running is None:
            return True
        if self._state.limits.order == "fair":
            return self.tenant_place(request.tenant)[:2] < running.place
        return request.rank < running.rank

    def first(self, now: float) -> SpecRequest | None:
        queue = self.in_order()
        if not queue or self._state.limits.order == "fair" or self.starts_since_promotion < 8 or queue[0].rank % 2 == 0:
            return queue[0] if queue else None
        if queue[0].rank == 1 and self.highest_starts < 8:
            return queue[0]
        oldest = min(queue, key=lambda r: r.arrival)
        if oldest is queue[0] or now - oldest.arrival_time < self._state.limits.aging_s:
            return queue[0]
        oldest.rank = 0 if queue[0].rank == 1 else 2
        self.starts_since_promotion = 0
        return oldest

    def lift(self, tenant: str) -> None:
        """fair: who had nothing waiting begins no lower than those that had, but for a burst."""
        state = self._state
        if state.limits.order == "fair" and not any(r.tenant == tenant for r in state.waiting):
            rivals = [self.served.get(r.tenant, 0.0) for r in state.waiting]
            left = self.last_to_leave
            floor = min(rivals) if rivals else self.served.get(left, 0.0) if left is not None else 0.0
            credit = min(
                4 * state.capacity.max_request_tokens, state.capacity.num_blocks * state.capacity.block_size // 2
            )
            self.served[tenant] = max(self.served.get(tenant, 0.0), floor - credit)

    def leave_queue(self, request: SpecRequest) -> None:
        self._state.waiting.remove(request)
        if not any(r.tenant == request.tenant for r in self._state.waiting):
            self.last_to_leave = request.tenant

    def lane(self, lane: int) -> int:
        return 2 if self._state.limits.order == "fair" else lane  # an objective gives no tenant more than its share
