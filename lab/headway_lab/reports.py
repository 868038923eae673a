"""The cells and lines of reports."""

from collections.abc import Mapping
from typing import TypeVar

from headway_lab.percentiles import Percentiles

GroupT = TypeVar("GroupT")


def latency_cells(values: Percentiles, digits: int = 1) -> list[str]:
    """Return p50, p90 and p99 in milliseconds."""
    return ["-" if value is None else f"{value:.{digits}f}" for value in (values.p50, values.p90, values.p99)]


def latency_cell(values: Percentiles, digits: int = 1) -> str:
    """Return p50, p90 and p99 in one cell."""
    return "/".join(latency_cells(values, digits))


def rate_cell(value: float | None) -> str:
    """Return a rate per second."""
    return "-" if value is None else f"{value:.2f}"


def shown_groups(tenants: Mapping[str, GroupT], priorities: Mapping[str, GroupT]) -> list[tuple[str, GroupT]]:
    """Return a table's groups by name, without priorities that would repeat the tenants."""
    if len(priorities) in {1, len(tenants)}:
        return list(tenants.items())
    return [*tenants.items(), *((f"priority {name}", group) for name, group in priorities.items())]
