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
from headway_scheduler.core.view import RequestFigures, SchedulerFigures, SchedulerView
from headway_scheduler.placement.placement import Placement

NO_EXECUTOR = -1
"""The number for a request that waits in placement."""

_LARGEST = {"step", "num_budget_tokens", "budget_margin"}
"""Figures of which the largest counts; the others are added."""


class FleetView:
    """Reads from the cores of all cells, by number, at least one, and from placement.

    Totals are those of all cells. Figures of the moment are those of the ``connected`` cells, if there is one.
    """

    def __init__(self, views: dict[int, SchedulerView], connected: list[int], placement: Placement) -> None:
        self._by_number = views
        self._views = list(views.values())
        self._connected = {number: views[number] for number in connected} or views
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
        return max(view.max_num_batched_tokens for view in self._connected.values())

    @property
    def max_running(self) -> int:
        """The most requests at once."""
        return sum(view.max_running for view in self._connected.values())

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
        num_blocks = [view.capacity.num_blocks for view in self._connected.values()]
        used = sum(view.kv_usage * count for view, count in zip(self._connected.values(), num_blocks, strict=True))
        return used / sum(num_blocks)

    @property
    def step_times(self) -> StepTimeFigures | None:
        """The model of step times of the first cell that has learned one."""
        return next((view.step_times for view in self._views if view.step_times is not None), None)

    def figures_by_executor(self) -> dict[int, SchedulerFigures]:
        """The figures of this moment by the executor's number; O(blocks)."""
        return {number: view.figures() for number, view in self._by_number.items()}

    def figures(self, by_executor: dict[int, SchedulerFigures]) -> SchedulerFigures:
        """These figures in one, with those of placement."""
        parts = [by_executor[number] for number in self._connected]
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

    def requests(self) -> list[tuple[Request, int]]:
        """All live requests by arrival, with the executor's number or ``NO_EXECUTOR``; O(n log n)."""
        found = [(request, number) for number, view in self._by_number.items() for request in view.requests()]
        found += [(request, NO_EXECUTOR) for request in self._placement.requests()]
        return sorted(found, key=lambda entry: entry[0].arrival)

    def figures_of(self, request: Request, executor: int) -> RequestFigures:
        """The figures of a live request of this executor, or of ``NO_EXECUTOR``."""
        view = self._by_number.get(executor)
        return RequestFigures(len(request.token_ids), 0, 0) if view is None else view.figures_of(request)

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
