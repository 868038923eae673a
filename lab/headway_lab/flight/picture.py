"""The picture of a flight: rows against steps. Several executors stand below each other, each with its own rows.

A hand-off is an arrow between two framed cells: the step that brought a token and exported the request's blocks, and
the step that pulled them and brought the next token.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from headway_lab.flight.cells import Kind, TimelineStep, Transfer, hand_offs_in

_EMPTY = "#f4f4f2"
_COLORS = {Kind.PREFILL: "#d9730d", Kind.DECODE: "#7fa8d1", Kind.IDLE: "#d5d5d0", Kind.PREEMPTED: "#b3261e"}
_KINDS = tuple(Kind)
_HANDED_OFF = "#1b6e3c"
_MOST_TOLD_GAPS = 24
_MOST_NAMED_CELLS = 2400
_MOST_COUNTED_CELLS = 700
_INCHES_PER_STEP, _INCHES_PER_ROW, _INCHES_PER_CURVE = 0.30, 0.22, 0.8
_NAME_POINTS = 6.0
_INCHES_PER_CHARACTER = 0.72 * _NAME_POINTS / 72  # for the bold digits and letters of most ids
_LEAST_NAME, _MOST_NAME = 3, 16


def draw(path: Path, title: str, steps: Sequence[TimelineStep]) -> None:
    """Write a PNG of at least one step.

    Raises:
        OSError: writing failed.
    """
    figure_of(title, steps).savefig(path, format="png")


def figure_of(title: str, steps: Sequence[TimelineStep]) -> Figure:
    """Draw rows, tokens and waiting requests against steps."""
    lanes = _lanes(steps)
    num_rows = sum(lane.num_rows for lane in lanes.values())
    width = min(max(7.0, _INCHES_PER_STEP * len(steps)), 24.0)
    height = min(max(2.5, _INCHES_PER_ROW * num_rows), 14.0)
    figure = Figure(figsize=(width, height + 2 * _INCHES_PER_CURVE + 0.9), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize=9)
    ratios = [height, _INCHES_PER_CURVE, _INCHES_PER_CURVE]
    rows, tokens, waiting = figure.subplots(3, 1, sharex=True, height_ratios=ratios)
    _draw_cells(rows, steps, lanes, characters_per_step=width / len(steps) / _INCHES_PER_CHARACTER)
    first = steps[0].number
    _draw_curve(tokens, "tokens", first, [step.num_tokens for step in steps], "#555555")
    _draw_curve(waiting, "requests\nwaiting", first, [step.num_waiting for step in steps], "#b3261e")
    waiting.set_xlabel("step of the recording")
    waiting.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    return figure


class _Lane(NamedTuple):
    """The rows of one executor in the picture, from ``first`` on."""

    first: int
    num_rows: int


def _lanes(steps: Sequence[TimelineStep]) -> dict[int, _Lane]:
    """By executor."""
    lanes: dict[int, _Lane] = {}
    first = 0
    for executor in sorted({step.executor for step in steps}):
        cells = [cell for step in steps if step.executor == executor for cell in step.cells]
        lanes[executor] = _Lane(first, 1 + max((cell.row for cell in cells), default=0))
        first += lanes[executor].num_rows
    return lanes


def _grid(steps: Sequence[TimelineStep], lanes: dict[int, _Lane]) -> NDArray[np.int8]:
    """What each row does, ``[rows, steps]``. While a step is under way, its rows stay in the steps of other executors."""
    grid = np.zeros((sum(lane.num_rows for lane in lanes.values()), len(steps)), dtype=np.int8)
    preempted = 1 + _KINDS.index(Kind.PREEMPTED)
    newest: dict[int, TimelineStep] = {}
    for column, step in enumerate(steps):
        for executor, before in newest.items():
            if step.sent_s <= before.answered_s < float("inf"):
                rows = slice(lanes[executor].first, lanes[executor].first + lanes[executor].num_rows)
                held = grid[rows, column - 1]
                grid[rows, column] = np.where(held == preempted, 0, held)
        newest[step.executor] = step
        lane = lanes[step.executor]
        grid[lane.first : lane.first + lane.num_rows, column] = 0
        for cell in step.cells:
            grid[lane.first + cell.row, column] = 1 + _KINDS.index(cell.kind)
    return grid


def _draw_cells(
    axes: Axes, steps: Sequence[TimelineStep], lanes: dict[int, _Lane], *, characters_per_step: float
) -> None:
    grid = _grid(steps, lanes)
    num_rows = len(grid)
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
        _name_cells(axes, steps, lanes, characters_per_step, counts=num_cells <= _MOST_COUNTED_CELLS)
    if len(lanes) == 1:
        axes.set_ylabel("row")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        middles = [lane.first + (lane.num_rows - 1) / 2 for lane in lanes.values()]
        axes.set_yticks(middles, [f"executor {executor}" for executor in lanes], rotation=90, va="center")
        for lane in lanes.values():
            axes.axhline(lane.first - 0.5, color="#333333", linewidth=0.8)
    handles: list[Artist] = [Patch(color=_COLORS[kind], label=kind.value) for kind in _KINDS]
    handles.append(Patch(facecolor=_EMPTY, edgecolor="#bbbbbb", label="free"))
    if any(cell.transfer is not Transfer.NONE for step in steps for cell in step.cells):
        _draw_hand_offs(axes, steps, lanes)
        handles.append(
            Line2D(
                [], [], color=_HANDED_OFF, marker=">", markersize=4, label="handed off, and the gap between its tokens"
            )
        )
    axes.legend(
        handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1)
    )


def _draw_hand_offs(axes: Axes, steps: Sequence[TimelineStep], lanes: dict[int, _Lane]) -> None:
    """Frame the cells whose blocks go or come, with an arrow from the one to the other, and the gap between tokens."""
    for step in steps:
        for cell in step.cells:
            if cell.transfer is not Transfer.NONE:
                corner = step.number - 0.5, lanes[step.executor].first + cell.row - 0.5
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_HANDED_OFF, linewidth=1.4, zorder=3))
    found = hand_offs_in(steps)
    for one in found:
        left = one.left.number, lanes[one.left.executor].first + one.left_row
        joined = one.joined.number, lanes[one.joined.executor].first + one.joined_row
        arrow = {"arrowstyle": "-|>", "color": _HANDED_OFF, "linewidth": 1.2, "shrinkA": 4, "shrinkB": 4}
        axes.annotate("", xy=joined, xytext=left, arrowprops=arrow, zorder=4)
        if len(found) <= _MOST_TOLD_GAPS and one.gap_s < math.inf:
            middle = (left[0] + joined[0]) / 2 + 0.3, (left[1] + joined[1]) / 2
            gap = axes.text(*middle, f"{one.gap_s * 1e3:.1f} ms", fontsize=5.5, color=_HANDED_OFF, va="center")
            gap.set_bbox({"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.5})


def _name_cells(
    axes: Axes, steps: Sequence[TimelineStep], lanes: dict[int, _Lane], characters_per_step: float, *, counts: bool
) -> None:
    """Write the id where a request begins, and chunks' sizes, if there is room."""
    names = short_names({cell.request_id for step in steps for cell in step.cells})
    named: set[tuple[int, int]] = set()
    for row, stays in _stays(steps, lanes).items():
        ends = [number for number, _ in stays[1:]] + [steps[-1].number + 1]
        for (number, request_id), end in zip(stays, ends, strict=True):
            name = fitting(names[request_id], int((end - number) * characters_per_step))
            if name:
                axes.text(number - 0.45, row, name, fontsize=_NAME_POINTS, va="center", ha="left", weight="bold")
                named.update((row, number + column) for column in range(math.ceil(len(name) / characters_per_step)))
    if counts:
        for step in steps:
            for cell in step.cells:
                row = lanes[step.executor].first + cell.row
                if cell.kind is Kind.PREFILL and (row, step.number) not in named:
                    axes.text(step.number, row, str(cell.num_tokens), fontsize=5.5, va="center", ha="center")


def _stays(steps: Sequence[TimelineStep], lanes: dict[int, _Lane]) -> dict[int, list[tuple[int, str]]]:
    begun: dict[int, list[tuple[int, str]]] = {}
    for step in steps:
        for cell in step.cells:
            if cell.kind is Kind.PREEMPTED:
                continue
            stays = begun.setdefault(lanes[step.executor].first + cell.row, [])
            if not stays or stays[-1][1] != cell.request_id:
                stays.append((step.number, cell.request_id))
    return begun


def short_names(request_ids: Collection[str]) -> dict[str, str]:
    """Shorten long ids to a distinct beginning."""
    length = _LEAST_NAME
    while length < max(map(len, request_ids), default=0) and len({one[:length] for one in request_ids}) < len(
        request_ids
    ):
        length += 1
    return {one: one if len(one) <= length else one[:length] for one in request_ids}


def fitting(name: str, num_characters: int) -> str:
    """Cut a name."""
    room = min(num_characters, _MOST_NAME)
    if len(name) <= room:
        return name
    return name[: room - 1] + "…" if room > _LEAST_NAME else ""


def _draw_curve(axes: Axes, name: str, first: int, values: Sequence[int], color: str) -> None:
    edges = np.arange(first, first + len(values) + 1) - 0.5
    axes.stairs(values, edges, fill=True, color=color, alpha=0.25)
    axes.stairs(values, edges, baseline=None, color=color, linewidth=1)
    axes.set_ylabel(name, fontsize=8, color=color)
    axes.set_ylim(0, 1.08 * max(1, *values))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", alpha=0.25)
