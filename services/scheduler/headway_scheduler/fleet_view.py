"""The figures of all cells in one.

Owns: how figures of several cores add up. Must not know: who reads them, or how a core comes to them.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from headway_scheduler.core.memory.prefix_statistics import TenantPrefixUse
from headway_scheduler.core.policies.step_time import StepTimeFigures
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import SchedulerFigures, SchedulerView
from headway_scheduler.placement.placement import Placement

_LARGEST = {"step", "budget_margin"}
"""Figures of which the largest counts; the others are added."""


class FleetView:
    """Reads from the cores of all cells, at least one, and from placement."""

    def __init__(self, views: list[SchedulerView], placement: Placement) -> None:
        self._views = views
        self._placement = placement

    @property
    def capacity(self) -> ExecutorCapacity:
        """What the executor with room for the longest requests holds."""
        return max((view.capacity for view in self._views), key=lambda capacity: capacity.max_request_tokens)

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since the process started."""
        return self._views[0].counters if len(self._views) == 1 else sum_of(view.counters for view in self._views)

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of a step of any cell."""
        return max(view.max_num_batched_tokens for view in self._views)

    @property
    def max_running(self) -> int:
        """The most requests at once."""
        return sum(view.max_running for view in self._views)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return sum(view.num_running for view in self._views)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._placement) + sum(view.num_waiting for view in self._views)

    @property
    def kv_usage(self) -> float:
        """Share of all blocks that are in use, 0 to 1."""
        num_blocks = [view.capacity.num_blocks for view in self._views]
        used = sum(view.kv_usage * count for view, count in zip(self._views, num_blocks, strict=True))
        return used / sum(num_blocks)

    @property
    def step_times(self) -> StepTimeFigures | None:
        """The model of step times of the first cell that has learned one."""
        return next((view.step_times for view in self._views if view.step_times is not None), None)

    def figures(self) -> SchedulerFigures:
        """The figures of this moment; O(blocks)."""
        parts = [view.figures() for view in self._views]
        if len(parts) == 1 and not len(self._placement):
            return parts[0]
        columns = {name: [getattr(part, name) for part in parts] for name in SchedulerFigures._fields}
        shortages = [steps for steps in columns.pop("steps_until_shortage") if steps is not None]
        rates = columns.pop("recent_prefix_hit_rate")
        totals = {name: max(values) if name in _LARGEST else sum(values) for name, values in columns.items()}
        totals["num_waiting"] += len(self._placement)
        totals["num_waiting_tokens"] += self._placement.num_waiting_tokens
        return SchedulerFigures(
            **totals, recent_prefix_hit_rate=sum(rates) / len(rates), steps_until_shortage=min(shortages, default=None)
        )

    def requests(self) -> list[Request]:
        """All live requests by arrival; O(n log n)."""
        if len(self._views) == 1 and not len(self._placement):
            return self._views[0].requests()
        found = [request for view in self._views for request in view.requests()]
        return sorted([*found, *self._placement.requests()], key=lambda request: request.arrival)

    def view_of(self, request: Request) -> SchedulerView:
        """The view of the core that has this request; any, if it waits in placement."""
        origin = request.new.origin
        return next((view for view in self._views if view.find(origin) is request), self._views[0])

    def num_tokens_of(self, request: Request) -> int:
        """The tokens of a live request, prompt and received output."""
        return len(request.token_ids) if request.row < 0 else self.view_of(request).num_tokens_of(request)

    def prefix_use(self) -> dict[str, TenantPrefixUse]:
        """The prefix cache's use by tenant, the most recent last."""
        if len(self._views) == 1:
            return self._views[0].prefix_use()
        queries: Counter[str] = Counter()
        hits: Counter[str] = Counter()
        for view in self._views:
            for tenant, use in view.prefix_use().items():
                queries[tenant] += use.num_query_tokens
                hits[tenant] += use.num_hit_tokens
        return {tenant: TenantPrefixUse(count, hits[tenant]) for tenant, count in queries.items()}

    def service_of(self, tenant: str) -> float | None:
        """A tenant's weighted service; None under an order without books."""
        services = [view.service_of(tenant) for view in self._views]
        known = [service for service in services if service is not None]
        return sum(known) if known else None


def sum_of(parts: Iterable[SchedulerCounters]) -> SchedulerCounters:
    """The totals of several cores."""
    totals = SchedulerCounters()
    for part in parts:
        for name, value in msgspec.structs.asdict(part).items():
            setattr(totals, name, getattr(totals, name) + value)
    return totals
