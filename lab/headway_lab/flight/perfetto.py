"""A flight as a Chrome trace for ui.perfetto.dev and chrome://tracing.

One process has a track per row, with a slice per chunk and one per unbroken run of decodes. Another has the steps. With
several executors, each has its own two. A hand-off is a flow from the slice that exports to the one that pulls.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headway_lab.flight.cells import Cell, Kind, TimelineStep, Transfer, hand_offs_in

_US = 1e6


def _rows(executor: int) -> int:
    """The number of the process with its rows."""
    return 2 * executor + 1


def _steps_of(executor: int) -> int:
    """The number of the process with its steps."""
    return 2 * executor + 2


def chrome_trace(steps: Sequence[TimelineStep], first_s: float, max_in_flight: int) -> bytes:
    """Return the trace; steps without an answer are left out."""
    answered = [step for step in steps if step.answered_s != float("inf")]
    events = [
        *_names(answered, max_in_flight),
        *_row_slices(answered, first_s),
        *_steps(answered, first_s, max_in_flight),
        *_flows(answered, first_s),
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _names(steps: Sequence[TimelineStep], max_in_flight: int) -> Iterator[dict[str, Any]]:
    executors = sorted({step.executor for step in steps})
    for executor in executors or [0]:
        of_executor = f"executor {executor}: " * (len(executors) > 1)
        rows, sent = _rows(executor), _steps_of(executor)
        for process, name in ((rows, "rows"), (sent, "steps")):
            yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": of_executor + name}}
        for row in sorted({cell.row for step in steps if step.executor == executor for cell in step.cells}):
            yield {"ph": "M", "name": "thread_name", "pid": rows, "tid": row + 1, "args": {"name": f"row {row}"}}
        for place in range(max_in_flight):
            name = f"in flight {place}"
            yield {"ph": "M", "name": "thread_name", "pid": sent, "tid": place + 1, "args": {"name": name}}


class _Run(msgspec.Struct):
    cell: Cell
    executor: int
    start_s: float
    end_s: float
    first_step: int
    num_steps: int = 1


def _row_slices(steps: Sequence[TimelineStep], first_s: float) -> Iterator[dict[str, Any]]:
    runs: dict[tuple[int, int], _Run] = {}
    for step in steps:
        executor = step.executor
        present = {cell.row for cell in step.cells if cell.kind in {Kind.PREFILL, Kind.DECODE}}
        for place in [place for place in runs if place[0] == executor and place[1] not in present]:
            yield _slice(runs.pop(place), first_s)
        for cell in step.cells:
            if cell.kind is Kind.PREEMPTED:
                yield {
                    "ph": "i", "s": "t", "pid": _rows(executor), "tid": cell.row + 1,
                    "name": f"{cell.request_id} preempted", "ts": (step.sent_s - first_s) * _US,
                }  # fmt: skip
            if cell.row not in present:
                continue
            run = runs.get((executor, cell.row))
            if run is not None and cell.kind is Kind.DECODE and run.cell == cell:
                run.end_s = step.answered_s
                run.num_steps += 1
                continue
            if run is not None:
                yield _slice(run, first_s)
            runs[executor, cell.row] = _Run(cell, executor, step.begin_s, step.answered_s, step.step)
    yield from (_slice(run, first_s) for run in runs.values())


def _slice(run: _Run, first_s: float) -> dict[str, Any]:
    cell = run.cell
    name = f"{cell.request_id} {cell.kind.value}" + (f" {cell.num_tokens}" if cell.kind is Kind.PREFILL else "")
    name += f", {cell.transfer.value}" if cell.transfer is not Transfer.NONE else ""
    return {
        "ph": "X", "pid": _rows(run.executor), "tid": cell.row + 1, "name": name, "cat": cell.kind.value,
        "ts": (run.start_s - first_s) * _US, "dur": (run.end_s - run.start_s) * _US,
        "args": {"request": cell.request_id, "first step": run.first_step, "steps": run.num_steps,
                 "tokens": cell.num_tokens * run.num_steps},
    }  # fmt: skip


def _steps(steps: Sequence[TimelineStep], first_s: float, max_in_flight: int) -> Iterator[dict[str, Any]]:
    for step in steps:
        sent_us = (step.sent_s - first_s) * _US
        yield {
            "ph": "X", "pid": _steps_of(step.executor), "tid": step.step % max_in_flight + 1, "name": f"step {step.step}", "cat": "step",
            "ts": sent_us, "dur": (step.answered_s - step.sent_s) * _US,
            "args": {"epoch": step.epoch, "tokens": step.num_tokens, "device ms": step.device_s * 1e3},
        }  # fmt: skip
        counts = {"running": step.num_running, "waiting": step.num_waiting}
        yield {"ph": "C", "pid": _steps_of(step.executor), "name": "requests", "ts": sent_us, "args": counts}
        yield {
            "ph": "C",
            "pid": _steps_of(step.executor),
            "name": "tokens",
            "ts": sent_us,
            "args": {"tokens": step.num_tokens},
        }


def _flows(steps: Sequence[TimelineStep], first_s: float) -> Iterator[dict[str, Any]]:
    for number, one in enumerate(hand_offs_in(steps)):
        ends = (("s", one.left, one.left_row), ("f", one.joined, one.joined_row))
        for phase, step, row in ends:
            yield {
                "ph": phase, "bp": "e", "id": number, "cat": "hand-off", "name": "hand-off",
                "pid": _rows(step.executor), "tid": row + 1, "ts": (step.begin_s - first_s) * _US,
                "args": {"request": one.request_id, "gap ms": one.gap_s * 1e3, "move ms": step.move_s * 1e3},
            }  # fmt: skip
