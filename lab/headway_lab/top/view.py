"""The picture: lines for a terminal of a given size. Names from clients pass ``printable`` first."""

import textwrap
from collections.abc import Iterable

from rich.console import Group
from rich.text import Text

from headway.terminal.tables import printable
from headway_lab.top.controls import HELP, Controls
from headway_lab.top.figures import age, numbered
from headway_lab.top.frame import STATE_STYLES, Frame
from headway_lab.top.history import History
from headway_lab.top.server_lines import server_lines
from headway_lab.top.tables import executor_table, request_table, tenant_table

KEY_HINTS = "p pause  r resume  d drain  c cancel  e explain  s sort  ? help  q quit"
NO_KEYS_HINT = "keys are off, since stdin is no terminal; Ctrl-C quits"


def picture(history: History, controls: Controls, frame: Frame) -> Group:
    """Return at most ``frame.height`` lines, none wider than ``frame.width``."""
    lines = [_title(history, frame), *server_lines(history, frame)]
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
    title.append(printable(state), f"bold {STATE_STYLES.get(state, 'yellow')}")
    return title.append(f"   {numbered(status.num_gateways, 'gateway')}   up {age(status.uptime_s)}")


def _lower_part(history: History, controls: Controls, frame: Frame, height: int) -> list[Text]:
    if controls.shows_help:
        return _panel("keys", HELP, height)
    if controls.explanation:
        return _panel("why", textwrap.wrap(controls.explanation, max(frame.width - 2, 20)), height)
    trouble = [Text(line, "red") for line in textwrap.wrap(printable(frame.trouble), max(frame.width, 20))][:height]
    height -= len(trouble)
    executors = executor_table(history, frame, 2 * height // 5)
    height -= len(executors)
    tenants = tenant_table(history, frame, 2 * height // 5)
    return [*trouble, *executors, *tenants, *request_table(history, controls, frame, height - len(tenants))]


def _panel(title: str, lines: Iterable[str], height: int) -> list[Text]:
    body = [Text(f"  {line}") for line in lines]
    return [Text(f"{title} (Escape closes)", "reverse"), *body][: max(height, 0)]


def _footer(controls: Controls, frame: Frame) -> list[Text]:
    if not frame.hints:
        return []
    if controls.question:
        return [Text(controls.question, "bold yellow")]
    return [Text(controls.message, "bold")] if controls.message else [Text(frame.hints, "dim")]
