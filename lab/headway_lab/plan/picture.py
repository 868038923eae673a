"""The picture of a plan."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headway_lab.pictures import BLUE, GREY, ORANGE, write_picture
from headway_lab.plan.instance import Phase
from headway_lab.plan.search import Plan

_COLORS = {Phase.PREFILL: ORANGE, Phase.DECODE: BLUE, Phase.BOTH: GREY}


def draw(path: Path, title: str, plan: Plan) -> None:
    """Write a PNG: the goodput per device of each searched executor, and how the chosen ones fare at other rates.

    Raises:
        OSError: writing failed.
    """
    figure = Figure(figsize=(11, 5), layout="constrained")
    figure.suptitle(title, fontsize=8)
    goodput, shares = figure.subplots(1, 2)
    _draw_goodput(goodput, plan)
    _draw_shares(shares, plan)
    write_picture(figure, path)


def _draw_goodput(axes: Axes, plan: Plan) -> None:
    found = [outcome for outcome in reversed(plan.outcomes) if outcome.goodput]
    for phase, color in _COLORS.items():
        own = [(place, outcome) for place, outcome in enumerate(found) if outcome.phase is phase]
        axes.barh(
            [place for place, _ in own],
            [outcome.per_device for _, outcome in own],
            color=color,
            label=phase.value,
        )
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(found)), [outcome.degrees.label for outcome in found], fontsize=8)
    axes.set_xlabel("goodput per device, requests/s")
    axes.legend(frameon=False, fontsize=8)


def _draw_shares(axes: Axes, plan: Plan) -> None:
    chosen = [
        (role.phase, role.degrees)
        for system in (plan.split, plan.together)
        if system is not None
        for role in system.roles
    ]
    for outcome in plan.outcomes:
        if (outcome.phase, outcome.degrees) in chosen and outcome.trials:
            trials = sorted(outcome.trials, key=lambda trial: trial.rate)
            axes.plot(
                [trial.rate / outcome.degrees.num_devices for trial in trials],
                [trial.share for trial in trials],
                "o-",
                markersize=4,
                color=_COLORS[outcome.phase],
                label=f"{outcome.phase.value} {outcome.degrees.label}",
            )
    axes.axhline(plan.options.attainment, color=GREY, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.05)
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second and device")
    axes.set_ylabel("share that keeps the phase's objectives")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
