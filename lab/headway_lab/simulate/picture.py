"""The picture of a simulation."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_lab.pictures import BLUE, GREY, ORANGE, write_picture
from headway_lab.simulate.cases import SWEPT_LIMIT
from headway_lab.simulate.report import CaseResult


def draw(path: Path, title: str, results: Sequence[CaseResult], knee: CaseResult | None) -> None:
    """Write a PNG: one case's steps and queue over time, or several cases' throughput against P99 ITL.

    Raises:
        OSError: writing failed.
    """
    figure = Figure(figsize=(9, 7), layout="constrained")
    figure.suptitle(title, fontsize=10)
    upper, lower = figure.subplots(2, 1)
    if len(results) == 1:
        _draw_steps(upper, results[0])
        _draw_queue(lower, results[0])
        lower.sharex(upper)
    else:
        _draw_capacity(upper, results, knee)
        _draw_step_times(lower, results)
    write_picture(figure, path)


def _draw_steps(axes: Axes, result: CaseResult) -> None:
    steps = result.steps
    decodes_only = [tokens == decodes for tokens, decodes in zip(steps.num_tokens, steps.num_decodes, strict=True)]
    for is_decode, color, label in ((False, ORANGE, "with prompt tokens"), (True, BLUE, "decodes only")):
        places = [place for place, decode in enumerate(decodes_only) if decode is is_decode]
        axes.plot(
            [steps.start_s[place] for place in places],
            [steps.step_ms[place] for place in places],
            ".",
            markersize=3,
            color=color,
            label=f"{label} ({len(places)} steps)",
        )
    axes.set_ylabel("step time, ms")
    axes.set_ylim(bottom=0)
    _put_legend_above(axes)


def _draw_queue(axes: Axes, result: CaseResult) -> None:
    queue = result.queue
    axes.step(queue.time_s, queue.num_running, where="post", color=BLUE, label="running")
    axes.step(queue.time_s, queue.num_waiting, where="post", color=ORANGE, label="waiting")
    axes.set_xlabel("virtual time, s")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    _put_legend_above(axes)


def _put_legend_above(axes: Axes) -> None:
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, markerscale=3, borderaxespad=0)


def _draw_capacity(axes: Axes, results: Sequence[CaseResult], knee: CaseResult | None) -> None:
    points = [
        (result.totals.itl_ms.p99, result.totals.output_tokens_per_s, result)
        for result in results
        if result.totals.itl_ms.p99 is not None
    ]
    field = _only_field(results)
    if field == SWEPT_LIMIT:
        axes.plot([point[0] for point in points], [point[1] for point in points], "o-", color=BLUE)
        _name_points(axes, points, f"{field}=", knee)
    elif points:
        # They have the colors of the panel below, since names beside the points may cover each other.
        places = {id(result): place for place, result in enumerate(results)}
        for itl_ms, throughput, result in points:
            label, color = result.case.label.removeprefix(f"{field}="), f"C{places[id(result)] % 10}"
            axes.plot([itl_ms], [throughput], "o", color=color, label=label)
        axes.legend(frameon=False, fontsize=8, title=field or None, title_fontsize=8)
    axes.margins(x=0.12, y=0.15)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_title(f"by {field}" * bool(field), fontsize=9, color=GREY)
    axes.set_xlabel("P99 ITL, ms")
    axes.set_ylabel("output tokens/s")


def _name_points(
    axes: Axes, points: Sequence[tuple[float, float, CaseResult]], prefix: str, knee: CaseResult | None
) -> None:
    for itl_ms, throughput, result in points:
        is_knee = result is knee
        if is_knee:
            axes.plot([itl_ms], [throughput], "o", markersize=14, fillstyle="none", markeredgewidth=2, color=ORANGE)
        axes.annotate(
            result.case.label.removeprefix(prefix) + " (knee)" * is_knee,
            (itl_ms, throughput),
            xytext=(8, -12),
            textcoords="offset points",
            fontsize=8,
            color=ORANGE if is_knee else GREY,
        )


def _only_field(results: Sequence[CaseResult]) -> str:
    fields = {result.case.label.partition("=")[0] for result in results}
    is_one = len(fields) == 1 and not any("," in result.case.label for result in results)
    return fields.pop() if is_one else ""


def _draw_step_times(axes: Axes, results: Sequence[CaseResult]) -> None:
    field = _only_field(results)
    for result in results:
        times = sorted(result.steps.step_ms)
        shares = [(place + 1) / len(times) for place in range(len(times))]
        axes.plot(times, shares, label=result.case.label.removeprefix(f"{field}="))
    axes.set_xlabel("step time, ms")
    axes.set_ylabel("share of steps up to")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, loc="lower right", title=field or None, title_fontsize=8)
