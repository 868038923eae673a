"""The style of all pictures."""

from pathlib import Path

from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2563a8", "#d9730d", "#8a8a8a"


def write_picture(figure: Figure, path: Path) -> None:
    """Style a figure and write it as PNG.

    Raises:
        OSError: writing failed.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, format="png")
