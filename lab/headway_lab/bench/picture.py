"""The picture of a bench."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_lab.bench.capacity import Trial
from headway_lab.bench.figures import BenchedRequest
from headway_lab.bench.records import OK
from headway_lab.pictures import BLUE, GREY, ORANGE, write_picture

_LONG_TAIL = 20


def draw(path: Path, title: str, requests: Sequence[BenchedRequest]) -> None:
    """Write a PNG: TTFT by time, open requests, and the distributions of TTFT and ITL.

    Raises:
        OSError: writing failed.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(title, fontsize=9)
    (by_time, ttft), (open_requests, itl) = figure.subplots(2, 2, width_ratios=(3, 2))
    answered = [request for request in requests if request.status == OK]
    _draw_ttft_by_time(by_time, requests)
    open_requests.sharex(by_time)
    _draw_open(open_requests, requests)
    _draw_distribution(ttft, [1e3 * request.ttft_s for request in answered if request.ttft_s is not None], "TTFT, ms")
    _draw_distribution(itl, [gap for request in answered for gap in request.itl_ms], "ITL, ms")
    write_picture(figure, path)


def draw_capacity(path: Path, title: str, trials: Sequence[Trial], attainment: float) -> None:
    """Write a PNG: the share that kept its objectives, with its interval, over the rate.

    Raises:
        OSError: writing failed.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots()
    for meets, color, label in ((True, BLUE, "meets"), (False, ORANGE, "misses")):
        chosen = [trial for trial in trials if trial.meets is meets]
        shares = np.array([trial.share for trial in chosen])
        bounds = [shares - [trial.low for trial in chosen], [trial.high for trial in chosen] - shares]
        axes.errorbar(
            [trial.rate for trial in chosen], shares, yerr=np.maximum(bounds, 0), fmt="o", color=color, label=label
        )
    axes.axhline(attainment, color=GREY, linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("share that kept its objectives")
    axes.legend(frameon=False, loc="lower left")
    write_picture(figure, path)


def _draw_ttft_by_time(axes: Axes, requests: Sequence[BenchedRequest]) -> None:
    answered = [request for request in requests if request.status == OK and request.ttft_s is not None]
    axes.plot(
        [request.intended_s for request in answered],
        [1e3 * (request.ttft_s or 0.0) for request in answered],
        ".",
        markersize=4,
        color=BLUE,
    )
    failed = [request for request in requests if request.status != OK]
    if failed:
        axes.plot(
            [request.intended_s for request in failed],
            [0.0] * len(failed),
            "x",
            color=ORANGE,
            label=f"not answered ({len(failed)})",
        )
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel("TTFT, ms")
    axes.set_ylim(bottom=0)


def _draw_open(axes: Axes, requests: Sequence[BenchedRequest]) -> None:
    starts = [request.intended_s for request in requests]
    ends = [request.intended_s + request.end_to_end_s for request in requests]
    # Ends come first: a user's next request starts at the moment of the last one's end.
    times = np.array(ends + starts).round(6)
    changes = np.repeat([-1, 1], len(requests))
    order = np.argsort(times, kind="stable")
    axes.step(times[order], np.cumsum(changes[order]), where="post", color=BLUE)
    axes.set_xlabel("time, s")
    axes.set_ylabel("requests sent and not ended")
    axes.set_ylim(bottom=0)
    axes.set_xlim(min(starts, default=0.0), max(ends, default=1.0))


def _draw_distribution(axes: Axes, values: Sequence[float], name: str) -> None:
    ordered = np.sort(np.array(values))
    positive = ordered[ordered > 0]
    axes.set_xlabel(name)
    axes.set_ylabel("share up to")
    axes.set_ylim(0, 1.02)
    if not len(positive):
        return
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    axes.plot(ordered, shares, color=BLUE)
    if ordered[-1] > _LONG_TAIL * positive[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)
    for share in (50, 90, 99):
        value = float(np.percentile(ordered, share))
        axes.axhline(share / 100, color=GREY, linewidth=0.5, linestyle=":")
        if value > 0:
            axes.annotate(
                f"p{share} {value:.3g}",
                (value, share / 100),
                xytext=(4, -10),
                textcoords="offset points",
                fontsize=8,
                color=ORANGE,
            )
