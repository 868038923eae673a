"""The picture: lines for a terminal of a given size.

Owns: the layout, and what a small terminal leaves out. Must not know: calls, time, or keys' bytes. No line is wider
than the terminal. Names from clients pass ``printable`` first.
"""

import textwrap
from collections.abc import Iterable, Sequence

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text

from headway_lab.top.controls import HELP, Controls
from headway_lab.top.figures import Glyphs, age, bar, count, duration, percent, printable, rate, short_count, sparkline
from headway_lab.top.history import History
from headway_proto import admin_pb2

KEY_HINTS = "p pause  r resume  d drain  c cancel  e explain  s sort  ? help  q quit"
NO_KEYS_HINT = "keys are off, since stdin is no terminal; Ctrl-C quits"
_NO_BREAK = "\xa0"
_LABEL_CELLS = 11
_TALL_ROWS = 32
"""The height from which lines are shown that 24 rows leave out."""
_CLASSES = {1: "realtime", 2: "high", 3: "normal", 4: "low"}
_STATE_STYLES = {"serving": "green", "ready": "green", "running": "green", "preempted": "yellow", "waiting": "cyan"}
_WIDE_CELLS = 110


class Column(msgspec.Struct, frozen=True):
    """A column of a table after the first; ``width`` includes the space before it."""

    name: str
    width: int
    is_number: bool = True


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


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The terminal and the server's reachability.

    ``silent_for`` and ``trouble`` are empty while the server answers. ``hints`` is the last line, if any.
    """

    width: int
    height: int
    address: str
    glyphs: Glyphs
    silent_for: str = ""
    trouble: str = ""
    hints: str = ""


def picture(history: History, controls: Controls, frame: Frame) -> Group:
    """Return at most ``frame.height`` lines, none wider than ``frame.width``."""
    lines = [_title(history, frame), *_figures(history, frame)]
    footer = _footer(controls, frame)
    lines += _lower_part(history, controls, frame, frame.height - len(lines) - len(footer))
    lines = lines[: frame.height - len(footer)]
    lines += [Text()] * (frame.height - len(footer) - len(lines) if footer else 0)
    return Group(*(_cut(line, frame) for line in (*lines, *footer)))


def _cut(line: Text, frame: Frame) -> Text:
    if line.cell_len > frame.width:
        line.truncate(max(frame.width - 1, 0), overflow="crop")
        line.append(frame.glyphs.ellipsis)
    line.no_wrap = True
    return line


def _title(history: History, frame: Frame) -> Text:
    status = history.latest.status
    title = Text.assemble(("headway top", "bold"), f"   {printable(frame.address)}   ")
    if frame.silent_for:
        return title.append(f"no answer for {frame.silent_for}", "bold red")
    state = status.scheduler_state
    title.append(printable(state), f"bold {_STATE_STYLES.get(state, 'yellow')}")
    return title.append(f"   {_number(status.num_gateways, 'gateway')}   up {age(status.uptime_s)}")


def _figures(history: History, frame: Frame) -> list[Text]:
    status = history.latest.status
    is_tall = frame.height >= _TALL_ROWS
    lines = [_executor(status), _steps(history), _running(status, frame), _blocks(status, frame)]
    if status.HasField("steps_until_shortage"):
        lines.append(_shortage(status))
    if status.num_host_blocks:
        lines.append(_host_blocks(status, frame))
    lines += [_prefix(status, frame), _budget(status, frame), *_step_time(status, frame)]
    lines += [_flow(history, frame), _percentiles("TTFT", status.ttft), _percentiles("ITL", status.itl)]
    if is_tall:
        lines += [_percentiles("queue", status.queue), _percentiles("end to end", status.e2e)]
    lines.append(_costs(status))
    if is_tall:
        lines += [_ends(status), _policies(status)]
    return lines


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{_LABEL_CELLS}}", "bold cyan"), *parts)


def _bar(share: float, frame: Frame, style: str) -> tuple[str, str]:
    return bar(share, max(frame.width // 5, 1), frame.glyphs) + "  ", style


def _executor(status: admin_pb2.GetStatusResponse) -> Text:
    state = status.executor_state
    parts = [(printable(state), f"bold {_STATE_STYLES.get(state, 'red')}")]
    losses = _number(status.num_executor_losses, "loss", "losses")
    if not status.HasField("executor"):
        return _line("executor", *parts, f"   {losses} so far")
    executor = status.executor
    kind = [name for name in (executor.backend, executor.device, executor.dtype) if name not in {"", "none"}]
    runs_on = printable(f"{executor.model_name} on {', '.join(kind)}")
    return _line("executor", *parts, f"   {runs_on}; for {age(executor.age_s)}, {losses}")


def _steps(history: History) -> Text:
    status = history.latest.status
    speed = f"{rate(history.steps_per_s)}/s" if history.has_rates else f"{count(status.num_steps)} so far"
    last = ""
    if status.HasField("executor") and status.executor.last_step_age_s >= 0:
        took, ended = status.executor.last_step_us / 1e6, status.executor.last_step_age_s
        last = f"   last {duration(took)}, {age(ended)} ago"
    in_flight = f"   {status.num_in_flight_steps} of {status.max_steps_in_flight} in flight   epoch {status.epoch}"
    return _line("steps", speed, last, in_flight)


def _running(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    share = status.num_running / max(status.max_num_seqs, 1)
    waiting = f"{count(status.num_waiting)} waiting ({count(status.num_preempted)} preempted)"
    numbers = f"{status.num_running} of {status.max_num_seqs}   {waiting}"
    return _line("running", _bar(share, frame, "green"), numbers)


def _blocks(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    used = status.num_total_blocks - status.num_free_blocks
    share = used / max(status.num_total_blocks, 1)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    counts = (
        (used, "used"),
        (status.num_free_blocks, "free"),
        (status.num_cached_blocks, "cached"),
        (status.num_pinned_blocks, "pinned"),
    )
    numbers = ", ".join(f"{short_count(number)} {of}" for number, of in counts)
    return _line("blocks", _bar(share, frame, style), numbers)


def _shortage(status: admin_pb2.GetStatusResponse) -> Text:
    steps = short_count(status.steps_until_shortage)
    return _line("shortage", f"those that run may want more blocks than there are in about {steps} steps")


def _host_blocks(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    used = status.num_host_blocks - status.num_free_host_blocks
    numbers = (
        f"{count(used)} of {count(status.num_host_blocks)}   {count(status.num_swapped_out_blocks)} swapped so far"
    )
    return _line("on host", _bar(used / status.num_host_blocks, frame, "green"), numbers)


def _prefix(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    recent = status.recent_prefix_hit_rate
    overall = status.num_prefix_hit_tokens / max(status.num_prefix_query_tokens, 1)
    numbers = f"{percent(recent)} of prompt tokens cached, {percent(overall)} ever"
    return _line("prefix", _bar(recent, frame, "green"), numbers)


def _budget(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    share = status.num_budget_tokens / max(status.max_num_batched_tokens, 1)
    numbers = f"{count(status.num_budget_tokens)} of {count(status.max_num_batched_tokens)} tokens a step"
    policy = printable(status.policies.budget)
    margin = f", margin {status.budget_margin:.2f}" if policy == "slo" else ""
    return _line("budget", _bar(share, frame, "green"), f"{numbers}   {policy}{margin}")


def _step_time(status: admin_pb2.GetStatusResponse, frame: Frame) -> list[Text]:
    if not status.HasField("step_time_model"):
        return [_line("step time", "no model yet")]
    model = status.step_time_model
    terms = [
        (model.constant_s, ""),
        (model.row_s, "/row"),
        (model.token_s, "/token"),
        (model.token_beyond_128_s, "/token over 128"),
        (model.token_beyond_256_s, "/token over 256"),
        (model.context_token_s, "/context"),
        (model.prefill_pair_s, "/pair"),
    ]
    known = [_unbroken(f"{duration(seconds)}{of}") for seconds, of in terms if seconds > 0]
    shifts = f", {_number(model.num_shifts, 'shift')} of speed" if model.num_shifts else ""
    error = _unbroken(f"(off by {percent(model.relative_error)}{shifts})")
    words = f"{' + '.join(known) or 'nothing'} {error}"
    room = max(frame.width - _LABEL_CELLS, 20)
    parts = [part.replace(_NO_BREAK, " ") for part in textwrap.wrap(words, room)]
    return [_line("step time" if not row else "", part) for row, part in enumerate(parts)]


def _unbroken(words: str) -> str:
    """Return words that stay on one line."""
    return words.replace(" ", _NO_BREAK)


def _flow(history: History, frame: Frame) -> Text:
    status = history.latest.status
    flows = (
        ("output", status.output_tokens_per_s, history.output_rates),
        ("prompt", status.prompt_tokens_per_s, history.prompt_rates),
    )
    half = (frame.width - _LABEL_CELLS) // len(flows)
    line = _line("tokens/s")
    for name, now, rates in flows:
        number = f"{name} {rate(now):>7} "
        sparks = sparkline(rates, half - len(number) - 2, frame.glyphs)
        line.append(number).append(f"{sparks:<{max(half - len(number), 0)}}", "green")
    line.rstrip()
    return line


def _percentiles(label: str, recent: admin_pb2.RecentPercentiles) -> Text:
    if not recent.count:
        return _line(label, "none in 1 min")
    parts = [
        f"{name} {duration(value_ms / 1e3):>7}  "
        for name, value_ms in (("p50", recent.p50_ms), ("p90", recent.p90_ms), ("p99", recent.p99_ms))
    ]
    return _line(label, *parts, f"of {count(recent.count)} in 1 min")


def _costs(status: admin_pb2.GetStatusResponse) -> Text:
    modes: dict[str, int] = {}
    for preemption in status.preemptions:
        modes[preemption.mode] = modes.get(preemption.mode, 0) + preemption.count
    wasted = {entry.reason: entry.count for entry in status.wasted_tokens}
    preempted = f"{count(status.num_preemptions)}{_parts(modes)}"
    return _line(
        "preempted", f"{preempted}   ", ("wasted ", "bold cyan"), f"{count(sum(wasted.values()))}{_parts(wasted)}"
    )


def _parts(counts: dict[str, int]) -> str:
    words = ", ".join(f"{printable(name)} {count(number)}" for name, number in counts.items() if number)
    return f" ({words})" if words else ""


def _ends(status: admin_pb2.GetStatusResponse) -> Text:
    return _line("ended", f"{count(status.num_finished)}{_parts({end.reason: end.count for end in status.ends})}")


def _policies(status: admin_pb2.GetStatusResponse) -> Text:
    names = status.policies
    words = f"order {names.order}, batching {names.batching}, budget {names.budget}, preemption {names.preemption}"
    return _line("policies", printable(words))


def _lower_part(history: History, controls: Controls, frame: Frame, height: int) -> list[Text]:
    if controls.shows_help:
        return _panel("keys", HELP, height)
    if controls.explanation:
        return _panel("why", textwrap.wrap(controls.explanation, max(frame.width - 2, 20)), height)
    trouble = [Text(line, "red") for line in textwrap.wrap(printable(frame.trouble), max(frame.width, 20))][:height]
    height -= len(trouble)
    tenants = _tenants(history, frame, 2 * height // 5)
    return [*trouble, *tenants, *_requests(history, controls, frame, height - len(tenants))]


def _panel(title: str, lines: Iterable[str], height: int) -> list[Text]:
    body = [Text(f"  {line}") for line in lines]
    return [Text(f"{title} (Escape closes)", "reverse"), *body][: max(height, 0)]


def _tenants(history: History, frame: Frame, height: int) -> list[Text]:
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


def _requests(history: History, controls: Controls, frame: Frame, height: int) -> list[Text]:
    if height < 2:
        return []
    requests = history.latest.requests
    columns = _WIDE_REQUEST_COLUMNS if frame.width >= _WIDE_CELLS else _REQUEST_COLUMNS
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
    )
    style = "reverse" if is_selected else _STATE_STYLES.get(request.state, "")
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


def _footer(controls: Controls, frame: Frame) -> list[Text]:
    if not frame.hints:
        return []
    if controls.question:
        return [Text(controls.question, "bold yellow")]
    return [Text(controls.message, "bold")] if controls.message else [Text(frame.hints, "dim")]


def _number(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
