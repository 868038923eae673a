"""The upper lines of a picture: one line per figure of the server."""

import textwrap

from rich.text import Text

from headway.terminal.tables import printable
from headway_lab.top.figures import (
    age,
    bar,
    count,
    duration,
    numbered,
    percent,
    rate,
    short_count,
    sparkline,
)
from headway_lab.top.frame import STATE_STYLES, Frame
from headway_lab.top.history import History
from headway_proto import admin_pb2

_NO_BREAK = "\xa0"
_LABEL_CELLS = 11
_TALL_ROWS = 32
"""The height from which lines are shown that 24 rows leave out."""


def server_lines(history: History, frame: Frame) -> list[Text]:
    """Return the lines; a tall terminal has more."""
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
    parts = [(printable(state), f"bold {STATE_STYLES.get(state, 'red')}")]
    if len(status.executors) > 1:
        num_ready = sum(executor.state == "ready" for executor in status.executors)
        style = "green" if num_ready == len(status.executors) else "yellow" if num_ready else "red"
        parts = [(f"{num_ready} of {len(status.executors)} ready", f"bold {style}")]
    losses = numbered(status.num_executor_losses, "loss", "losses")
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
    in_flight = f"   {status.num_in_flight_steps} of {_num_connected(status) * status.max_steps_in_flight} in flight   epoch {status.epoch}"
    return _line("steps", speed, last, in_flight)


def _num_connected(status: admin_pb2.GetStatusResponse) -> int:
    """The executors that share the work; limits are those of one."""
    return sum(executor.HasField("details") for executor in status.executors) or 1


def _running(status: admin_pb2.GetStatusResponse, frame: Frame) -> Text:
    num_rows = _num_connected(status) * status.max_num_seqs
    share = status.num_running / max(num_rows, 1)
    waiting = f"{count(status.num_waiting)} waiting ({count(status.num_preempted)} preempted)"
    numbers = f"{status.num_running} of {num_rows}   {waiting}"
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
    shifts = f", {numbered(model.num_shifts, 'shift')} of speed" if model.num_shifts else ""
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
    if len(status.executors) > 1:
        words += f", placement {names.placement}"
    return _line("policies", printable(words))
