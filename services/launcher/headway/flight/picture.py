"""The picture of a flight: rows against steps, as the articles on iteration-level batching draw it.

Owns: its layout. Must not know: where steps come from. Needs matplotlib; nothing else of the package imports this.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from headway.flight.cells import Kind, TimelineStep

_EMPTY = "#f4f4f2"
_COLORS = {Kind.PREFILL: "#d9730d", Kind.DECODE: "#7fa8d1", Kind.IDLE: "#d5d5d0", Kind.PREEMPTED: "#b3261e"}
_KINDS = tuple(Kind)
_MOST_NAMED_CELLS = 2400
_MOST_COUNTED_CELLS = 700
_INCHES_PER_STEP, _INCHES_PER_ROW = 0.30, 0.22


def draw(path: Path, title: str, steps: Sequence[TimelineStep]) -> None:
    """Write a PNG of ``steps``, at least one.

    Raises:
        OSError: the file cannot be written.
    """
    num_rows = 1 + max((cell.row for step in steps for cell in step.cells), default=0)
    width = min(max(7.0, _INCHES_PER_STEP * len(steps)), 24.0)
    height = min(max(2.5, _INCHES_PER_ROW * num_rows), 14.0)
    figure = Figure(figsize=(width, height + 1.6), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize=9)
    rows, queue = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.0])
    _draw_cells(rows, steps, num_rows)
    _draw_queue(queue, steps)
    figure.savefig(path, format="png")


def _draw_cells(axes: Axes, steps: Sequence[TimelineStep], num_rows: int) -> None:
    grid = np.zeros((num_rows, len(steps)), dtype=np.int8)
    for column, step in enumerate(steps):
        for cell in step.cells:
            grid[cell.row, column] = 1 + _KINDS.index(cell.kind)
    colors = ListedColormap([_EMPTY, *(_COLORS[kind] for kind in _KINDS)])
    first = steps[0].number
    extent = (first - 0.5, first + len(steps) - 0.5, num_rows - 0.5, -0.5)
    axes.imshow(grid, cmap=colors, vmin=0, vmax=len(_KINDS), aspect="auto", interpolation="nearest", extent=extent)
    num_cells = num_rows * len(steps)
    if num_cells <= _MOST_NAMED_CELLS:
        axes.set_xticks(np.arange(first, first + len(steps)) - 0.5, minor=True)
        axes.set_yticks(np.arange(num_rows) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
        _name_cells(axes, steps, counts=num_cells <= _MOST_COUNTED_CELLS)
    axes.set_ylabel("row")
    handles = [Patch(color=_COLORS[kind], label=kind.value) for kind in _KINDS]
    handles.append(Patch(facecolor=_EMPTY, edgecolor="#bbbbbb", label="free"))
    axes.legend(
        handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1)
    )


def _name_cells(axes: Axes, steps: Sequence[TimelineStep], *, counts: bool) -> None:
    """The request's id where it begins in a row, and the size of each chunk of a prompt where there is room."""
    before: dict[int, str] = {}
    for step in steps:
        now = {cell.row: cell.request_id for cell in step.cells if cell.kind is not Kind.PREEMPTED}
        for cell in step.cells:
            if cell.kind is not Kind.PREEMPTED and before.get(cell.row) != cell.request_id:
                axes.text(
                    step.number - 0.45, cell.row, cell.request_id, fontsize=6, va="center", ha="left", weight="bold"
                )
            elif counts and cell.kind is Kind.PREFILL:
                axes.text(step.number, cell.row, str(cell.num_tokens), fontsize=5.5, va="center", ha="center")
        before = now


def _draw_queue(axes: Axes, steps: Sequence[TimelineStep]) -> None:
    numbers = [step.number for step in steps]
    axes.step(numbers, [step.num_tokens for step in steps], where="mid", color="#555555", linewidth=1, label="tokens")
    axes.set_ylabel("tokens", fontsize=8)
    axes.set_ylim(bottom=0)
    waiting = axes.twinx()
    waiting.step(numbers, [step.num_waiting for step in steps], where="mid", color="#b3261e", linewidth=1)
    waiting.set_ylabel("waiting", fontsize=8, color="#b3261e")
    waiting.set_ylim(bottom=0)
    axes.set_xlabel("step of the recording")
