"""The tables of a picture: executors, tenants and requests."""

from collections.abc import Sequence

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from headway.terminal.tables import printable
from headway_lab.top.controls import Controls
from headway_lab.top.figures import age, count, duration, percent, rate
from headway_lab.top.frame import STATE_STYLES, Frame
from headway_lab.top.history import History
from headway_proto import admin_pb2

_CLASSES = {1: "realtime", 2: "high", 3: "normal", 4: "low"}
_WIDE_CELLS = 110


class Column(msgspec.Struct, frozen=True):
    """A further column; ``width`` includes the space before it."""

    name: str
    width: int
    is_number: bool = True


_EXECUTOR_COLUMNS = (
    Column("running", 9),
    Column("waiting", 9),
    Column("blocks in use", 15),
    Column("cached", 9),
    Column("steps/s", 9),
    Column("last", 9),
)
_ROLE_OF_EXECUTOR = Column("role", 9)
_TENANT_COLUMNS = (
    Column("running", 9),
    Column("waiting", 9),
    Column("output tokens", 15),
    Column("tok/s", 9),
    Column("share", 8),
)
_REQUEST_COLUMNS = (
    Column("state", 10, is_number=False),
    Column("class", 9, is_number=False),
    Column("tenant", 12, is_number=False),
    Column("prompt+output", 14),
    Column("blocks", 7),
    Column("age", 7),
)
_WIDE_REQUEST_COLUMNS = (*_REQUEST_COLUMNS, Column("computed", 9), Column("preempted", 10))
_EXECUTOR_OF_REQUEST = Column("executor", 9)


def executor_table(history: History, frame: Frame, height: int) -> list[Text]:
    """Return the executors by number, at most ``height`` lines, those that do not work rather than others; none if there is one."""
    executors = history.latest.status.executors
    if len(executors) < 2 or height < 2:
        return []
    by_need = sorted(executors, key=lambda executor: (_works(executor), executor.number))
    shown = sorted(by_need[: height - 1], key=lambda executor: executor.number)
    title = f"executor ({len(shown)} of {len(executors)})" if len(shown) < len(executors) else "executor"
    columns: Sequence[Column] = _EXECUTOR_COLUMNS
    if history.latest.status.policies.placement not in {"", "aggregated"}:
        columns = (*columns, _ROLE_OF_EXECUTOR)  # elsewhere roles mean nothing
    rows = [
        _row(_executor(executor, history)[: 1 + len(columns)], columns, frame, _style_of(executor))
        for executor in shown
    ]
    return [_header(title, columns, frame), *rows]


def _executor(executor: admin_pb2.ExecutorStatus, history: History) -> Sequence[str]:
    is_connected = executor.HasField("details")
    state = "draining" if executor.is_draining and is_connected else executor.state
    used = executor.num_total_blocks - executor.num_free_blocks
    return (
        f"{executor.number} {state}",
        str(executor.num_running),
        str(executor.num_waiting),
        f"{count(used)} {percent(executor.kv_usage)}",
        count(executor.num_cached_blocks),
        rate(history.executor_steps_per_s(executor.number)),
        duration(executor.details.last_step_us / 1e6) if is_connected else "-",
        executor.role,
    )


def _works(executor: admin_pb2.ExecutorStatus) -> bool:
    return executor.state == "ready" and not executor.is_draining


def _style_of(executor: admin_pb2.ExecutorStatus) -> str:
    return "yellow" if executor.is_draining else STATE_STYLES.get(executor.state, "red")


def tenant_table(history: History, frame: Frame, height: int) -> list[Text]:
    """Return the busiest tenants, at most ``height`` lines."""
    services = history.latest.status.tenant_services
    if not services or height < 2:
        return []
    rates = {service.tenant: history.tenant_tokens_per_s(service.tenant) for service in services}
    total = history.output_tokens_per_s or 1.0
    ranked = sorted(services, key=lambda service: (-rates[service.tenant], -service.num_output_tokens, service.tenant))
    shown = ranked[: height - 1]
    rows = [
        (
            service.tenant,
            str(service.num_running),
            str(service.num_waiting),
            count(service.num_output_tokens),
            rate(rates[service.tenant]),
            percent(rates[service.tenant] / total),
        )
        for service in shown
    ]
    title = f"tenant ({len(shown)} of {len(services)})" if len(shown) < len(services) else "tenant"
    return [_header(title, _TENANT_COLUMNS, frame), *(_row(row, _TENANT_COLUMNS, frame) for row in rows)]


def request_table(history: History, controls: Controls, frame: Frame, height: int) -> list[Text]:
    """Return the requests around the selected one, at most ``height`` lines."""
    if height < 2:
        return []
    requests = history.latest.requests
    columns = _WIDE_REQUEST_COLUMNS if frame.width >= _WIDE_CELLS else _REQUEST_COLUMNS
    if frame.width >= _WIDE_CELLS and len(history.latest.status.executors) > 1:
        columns = (*columns, _EXECUTOR_OF_REQUEST)
    header = _header(f"  request, by {controls.sort_order}", columns, frame)
    if requests is None:
        return [
            header,
            Text("  too many are live to list them without slowing the scheduler; see --max-listed", "yellow"),
        ]
    ordered = controls.sorted(requests)
    first = _first_shown(ordered, controls.selected, height - 1)
    shown = ordered[first : first + height - 1]
    return [header, *(_request(request, controls, columns, frame) for request in shown)]


def _first_shown(requests: Sequence[admin_pb2.RequestState], selected: str, height: int) -> int:
    place = next((place for place, request in enumerate(requests) if request.request_id == selected), 0)
    return max(0, place - height + 1)


def _request(request: admin_pb2.RequestState, controls: Controls, columns: Sequence[Column], frame: Frame) -> Text:
    is_selected = request.request_id == controls.selected
    cells = (
        f"{'>' if is_selected else ' '} {request.request_id}",
        request.state,
        _CLASSES.get(request.priority, str(request.priority)),
        request.tenant or "-",
        f"{request.num_prompt_tokens}+{request.num_output_tokens}",
        count(request.num_blocks),
        age(request.age_ms / 1e3),
        count(request.num_computed_tokens),
        count(request.num_preemptions),
        str(request.executor) if request.HasField("executor") else "-",
    )
    style = "reverse" if is_selected else STATE_STYLES.get(request.state, "")
    return _row(cells[: 1 + len(columns)], columns, frame, style)


def _header(title: str, columns: Sequence[Column], frame: Frame) -> Text:
    return _row((title, *(column.name for column in columns)), columns, frame, "reverse")


def _row(cells: Sequence[str], columns: Sequence[Column], frame: Frame, style: str = "") -> Text:
    first, *others = (printable(cell) for cell in cells)
    text = _fitted(first, max(frame.width - sum(column.width for column in columns), 8), frame)
    for cell, column in zip(others, columns, strict=True):
        fitted = _fitted(cell, column.width - 1, frame)
        padding = " " * (column.width - 1 - cell_len(fitted.rstrip()))
        text += f" {padding}{fitted.rstrip()}" if column.is_number else f" {fitted}"
    return Text(text, style)


def _fitted(cell: str, width: int, frame: Frame) -> str:
    if cell_len(cell) <= width:
        return set_cell_size(cell, width)
    return set_cell_size(cell, max(width - 1, 0)) + frame.glyphs.ellipsis
