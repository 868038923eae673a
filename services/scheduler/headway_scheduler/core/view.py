"""What operators and tools may read from the scheduler.

Owns: questions about a ``Scheduler``. Must not know: who asks.
"""

from typing import NamedTuple

import numpy as np
from mypy_extensions import mypyc_attr

from headway_proto.columns import Int32Array
from headway_scheduler.core.memory.cache_log import CacheEntry
from headway_scheduler.core.memory.cached_prefixes import PrefixQuery
from headway_scheduler.core.memory.pinned_prefixes import PinnedPrefix
from headway_scheduler.core.memory.prefix_cache import PINNED, REUSED
from headway_scheduler.core.memory.prefix_statistics import TenantPrefixUse
from headway_scheduler.core.policies.step_time import StepTimeFigures
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.indices import RowIndices
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.step_shape import StepShape


class SchedulerFigures(NamedTuple):
    """The figures of one moment, or of no executor."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_preempted: int = 0
    num_waiting_tokens: int = 0
    num_in_flight_steps: int = 0
    num_budget_tokens: int = 0
    budget_margin: float = 1.0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_reused_blocks: int = 0
    num_pinned_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    recent_prefix_hit_rate: float = 0.0
    steps_until_shortage: int | None = None


class RequestFigures(NamedTuple):
    """A live request; without a row it has no blocks."""

    num_tokens: int
    """Prompt and received output."""
    num_computed_tokens: int
    num_blocks: int


class CachePart(NamedTuple):
    """Some of the cache's changes."""

    entries: tuple[CacheEntry, ...]
    next_index: int
    has_more: bool


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulerView:
    """Reads a ``Scheduler`` across its epochs."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core

    @property
    def limits(self) -> SchedulerLimits:
        """The operator's settings."""
        return self._core.limits

    @property
    def capacity(self) -> ExecutorCapacity:
        """What the executor holds."""
        return self._core.capacity

    @property
    def epoch(self) -> int:
        """The epoch; each begins with an empty cache."""
        return self._core.epoch

    @property
    def counters(self) -> SchedulerCounters:
        """Totals since the process started."""
        return self._core.counters

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of a step."""
        return self._core.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """The number of rows."""
        return self._core.max_running

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return self._core.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return self._core.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests without a row."""
        return self._core.num_waiting_tokens

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._core.pool.num_free

    @property
    def num_prompt_tokens_left(self) -> int:
        """Tokens of prompts, waiting or running, that no step has computed; O(prompts that run)."""
        rows = self._core.rows
        running = sum(
            rows.request_in(row).num_admitted_tokens - int(rows.num_computed_tokens[row])
            for row in self._core.prefilling
        )
        return running + self._core.num_waiting_tokens

    @property
    def num_in_flight(self) -> int:
        """Steps sent and not answered."""
        return self._core.num_in_flight

    @property
    def kv_usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        pool = self._core.pool
        return 1.0 - pool.num_free / pool.num_blocks

    @property
    def step_times(self) -> StepTimeFigures | None:
        """The model of step times; None at first."""
        return self._core.step_times.figures

    @property
    def step_time_error(self) -> float:
        """The mean error of that model, as a share of the time; large at first."""
        return self._core.step_times.relative_error

    @property
    def alone(self) -> Request | None:
        """The request that runs alone."""
        return self._core.alone

    def figures(self) -> SchedulerFigures:
        """The figures of this moment; O(blocks)."""
        core = self._core
        worth = core.cache.num_worth()
        return SchedulerFigures(
            step=core.next_step,
            num_running=core.num_running,
            num_waiting=core.num_waiting,
            num_preempted=core.num_preempted,
            num_waiting_tokens=core.num_waiting_tokens,
            num_in_flight_steps=core.num_in_flight,
            num_budget_tokens=core.budget_in_force,
            budget_margin=core.budget_margin,
            num_total_blocks=core.pool.num_blocks,
            num_free_blocks=core.pool.num_free,
            num_cached_blocks=core.cache.num_cached,
            num_reused_blocks=worth[REUSED],
            num_pinned_blocks=worth[PINNED],
            num_host_blocks=core.swapping.num_host_blocks,
            num_free_host_blocks=core.swapping.num_free_host_blocks,
            recent_prefix_hit_rate=core.prefix_statistics.recent_hit_rate,
            steps_until_shortage=core.steps_until_shortage(),
        )

    # ------------------------------------------------------------------------------------------------------ requests

    def find(self, origin: Origin) -> Request | None:
        """The live request of this origin."""
        return self._core.find(origin)

    def requests(self) -> list[Request]:
        """All live requests by arrival; O(n log n)."""
        return self._core.requests()

    def ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests before this one; O(n log n)."""
        in_order = self.waiting()
        return in_order[: in_order.index(request)]

    def waiting(self) -> list[Request]:
        """The waiting requests in service order; O(n log n)."""
        return self._core.waiting()

    def num_tokens_of(self, request: Request) -> int:
        """The tokens of a live request."""
        return self._core.num_tokens_of(request)

    def figures_of(self, request: Request) -> RequestFigures:
        """The figures of a live request."""
        rows, row = self._core.rows, request.row
        if row < 0:
            return RequestFigures(len(request.token_ids), 0, 0)
        return RequestFigures(int(rows.num_tokens[row]), int(rows.num_computed_tokens[row]), int(rows.num_blocks[row]))

    def num_cached_tokens(self, query: PrefixQuery) -> int:
        """Leading tokens of a request, known here or not, whose blocks the prefix cache holds."""
        return self._core.prefixes.num_cached_tokens(query)

    def prefill_s(self, num_tokens: int, num_computed_tokens: int) -> float | None:
        """Seconds that so many prompt tokens add to steps; None while step times are not known."""
        return self._core.step_times.prefill_s(num_tokens, num_computed_tokens)

    @property
    def gaps(self) -> "GapView":
        """The gaps between the tokens of the rows that decode."""
        return GapView(self._core)

    def lowest_running_class(self) -> int:
        """The largest priority number among running requests; 0 if none runs."""
        rows = self._core.rows
        live = rows.live_rows()
        return int(rows.priority[live].max()) if len(live) else 0

    # ---------------------------------------------------------------------------------------------------------- rows

    def request_in(self, row: int) -> Request:
        """The request of a live row."""
        return self._core.rows.request_in(row)

    def owners(self) -> dict[int, Request]:
        """Requests by row, ascending."""
        rows = self._core.rows
        found: dict[int, Request] = {}
        for row in rows.live_rows().tolist():
            found[row] = rows.request_in(row)
        return found

    def rows_of_newest_step(self) -> tuple[RowIndices, Int32Array, Int32Array]:
        """Of the step that was just sent: its rows, ascending, their tokens in it, and their tokens computed before."""
        step = self._core.in_flight[-1]
        num_tokens = dict.fromkeys(step.sampling_rows.tolist(), 1)
        num_tokens |= {chunk.row: chunk.num_computed_tokens - chunk.start for chunk in step.chunks}
        rows = np.array(sorted(num_tokens), dtype=np.intp)
        counts = np.array([num_tokens[row] for row in rows.tolist()], dtype=np.int32)
        return rows, counts, self._core.rows.num_computed_tokens[rows] - counts

    # ----------------------------------------------------------------------------------------------- cache and tenants

    def cache_changes(self, index: int | None, most_blocks: int) -> CachePart:
        """The cache's changes from ``index`` on, or the whole cache."""
        entries, next_index = self._core.cache.changes(index, most_blocks)
        return CachePart(entries, next_index, self._core.cache.has_changes_from(next_index))

    def pinned_prefixes(self) -> tuple[PinnedPrefix, ...]:
        """The pins, oldest first."""
        return self._core.pinned_prefixes.list()

    def prefix_use(self) -> dict[str, TenantPrefixUse]:
        """Each tenant's use of the prefix cache, most recent last."""
        return dict(self._core.prefix_statistics.tenants)

    def service_of(self, tenant: str) -> float | None:
        """A tenant's weighted service, if the order keeps books."""
        return self._core.service_counter_of(tenant)


_ONE_ROW = StepShape(1, 1, 0, 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class GapView:
    """Reads what the gaps between tokens follow from."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core

    @property
    def tightest_s(self) -> float | None:
        """The tightest objective of running requests, in seconds."""
        return self._core.tightest.tightest_s

    @property
    def are_kept(self) -> bool:
        """Whether prompts get only what objectives leave of a step."""
        return self._core.limits.budget != "fixed"

    def decode_s(self, *, more_rows: int = 0, more_context: int = 0) -> float:
        """Seconds of a step of the rows that decode now, and of more; 0 without rows or known step times.

        With several lanes, a step has its share of them.
        """
        shapes = [lane.shape() for lane in self._core.lanes]
        num_rows = -(-(sum(shape.num_rows for shape in shapes) + more_rows) // len(shapes))
        num_context_tokens = sum(shape.num_context_tokens for shape in shapes) + more_context
        shape = StepShape(num_rows, num_rows, num_context_tokens // len(shapes), 0)
        return (self._core.step_times.predict_s(shape) or 0.0) if num_rows else 0.0

    def step_of_one_s(self) -> float:
        """Seconds of a step of one row without context, the least that a step takes; 0 without known step times."""
        return self._core.step_times.predict_s(_ONE_ROW) or 0.0

    def newest_decoding(self, least_tokens: int) -> Request | None:
        """The decoding request that started last, does not leave, and may have so many tokens more."""
        rows, leaving = self._core.rows, self._core.leaving_rows
        num_left = rows.last_position - rows.num_computed_tokens
        in_lanes = [row for lane in self._core.lanes for row in lane.indices().tolist()]
        decoding = [row for row in in_lanes if row not in leaving and num_left[row] >= least_tokens]
        return rows.request_in(max(decoding, key=rows.order_key.__getitem__)) if decoding else None
