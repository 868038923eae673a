"""The latest answer of a server, and the rates between answers. Must not know: layout."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from headway_proto import admin_pb2

MAX_LOOKS = 240
"""How many rates are kept; more than the widest terminal shows."""
RATE_WINDOW_S = 5.0
"""The time behind a rate that is shown as a number, so that it can be read."""


class Look(msgspec.Struct, frozen=True):
    """One answer. ``requests`` is None if they were too many; ``taken_at`` is in seconds."""

    taken_at: float
    status: admin_pb2.GetStatusResponse
    requests: tuple[admin_pb2.RequestState, ...] | None


class _Totals(msgspec.Struct, frozen=True):
    """One look's counters; ``by_tenant`` are output tokens, ``by_executor`` steps."""

    taken_at: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    by_tenant: dict[str, int]
    by_executor: dict[int, int]


class History:
    """Looks of the last seconds. A restarted server begins a new history."""

    def __init__(self, first: Look) -> None:
        self.latest = first
        self._totals: deque[_Totals] = deque([_totals_of(first)], maxlen=MAX_LOOKS)

    def add(self, look: Look) -> None:
        """Add the next look."""
        totals, before = _totals_of(look), self._totals[-1]
        if totals.num_steps < before.num_steps or totals.num_output_tokens < before.num_output_tokens:
            self._totals.clear()
        if not self._totals or totals.taken_at > before.taken_at:
            self._totals.append(totals)
        self.latest = look

    @property
    def has_rates(self) -> bool:
        """Whether there are two looks to compare."""
        return len(self._totals) > 1

    @property
    def steps_per_s(self) -> float:
        """Rate over the last seconds."""
        first, last = self._window()
        return _rate(first.num_steps, last.num_steps, last.taken_at - first.taken_at)

    @property
    def output_tokens_per_s(self) -> float:
        """Rate over the last seconds."""
        first, last = self._window()
        return _rate(first.num_output_tokens, last.num_output_tokens, last.taken_at - first.taken_at)

    def tenant_tokens_per_s(self, tenant: str) -> float:
        """Return a tenant's rate of output tokens."""
        first, last = self._window()
        now = last.by_tenant.get(tenant, 0)
        return _rate(first.by_tenant.get(tenant, now), now, last.taken_at - first.taken_at)

    def executor_steps_per_s(self, number: int) -> float:
        """Return an executor's rate of steps."""
        first, last = self._window()
        now = last.by_executor.get(number, 0)
        return _rate(first.by_executor.get(number, now), now, last.taken_at - first.taken_at)

    @property
    def output_rates(self) -> list[float]:
        """Output tokens per second between looks, the oldest first."""
        return _rates([(totals.taken_at, totals.num_output_tokens) for totals in self._totals])

    @property
    def prompt_rates(self) -> list[float]:
        """Prompt tokens per second; a prompt counts when its request starts."""
        return _rates([(totals.taken_at, totals.num_prompt_tokens) for totals in self._totals])

    def _window(self) -> tuple[_Totals, _Totals]:
        last = self._totals[-1]
        recent = (totals for totals in self._totals if totals.taken_at >= last.taken_at - RATE_WINDOW_S)
        first = next(recent)
        if first is last and self.has_rates:  # looks are further apart than the window
            first = self._totals[-2]
        return first, last


def _totals_of(look: Look) -> _Totals:
    status = look.status
    return _Totals(
        taken_at=look.taken_at,
        num_steps=status.num_steps,
        num_prompt_tokens=status.num_prompt_tokens,
        num_output_tokens=status.num_output_tokens,
        by_tenant={service.tenant: service.num_output_tokens for service in status.tenant_services},
        by_executor={executor.number: executor.num_steps for executor in status.executors},
    )


def _rates(counts: Sequence[tuple[float, int]]) -> list[float]:
    return [
        _rate(count_before, count, time - time_before)
        for (time_before, count_before), (time, count) in pairwise(counts)
    ]


def _rate(before: int, after: int, elapsed_s: float) -> float:
    return max(0, after - before) / elapsed_s if elapsed_s > 0 else 0.0
