"""What many turns add up to, and how it is shown.

Owns: medians, spreads, ratios, the table. Must not know: how anything was measured.

A line is one row of turns: every contender on the same work, one after the other. A ratio is made within a line, so a
machine whose speed drifts from line to line does not move it. Of the lines of one round, the one counts beside which
other programs took least of the machine.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
RATE = "output_tokens_per_s"


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(lines: Iterable[Line], most_foreign: float, rival_of: Callable[[str, str], str]) -> list[dict[str, Any]]:
    """Return a cell for each load, precision, number of requests and contender, in the order of their first lines.

    ``headway_is``: the rate of the rival, by precision and name, as a multiple of this one's, from the same lines; None if
    it is its own. Rounds beside which other programs took more than ``most_foreign`` of the machine do not count.
    """
    rows: dict[tuple[str, str, int], dict[int, Line]] = {}
    for line in lines:
        if line["kind"] in {"offline", "online"} and line["foreign_share"] <= most_foreign:
            rounds = rows.setdefault((line["kind"], line["precision"], line["requests"]), {})
            before = rounds.get(line["round"])
            if before is None or line["foreign_share"] < before["foreign_share"]:
                rounds[line["round"]] = line
    return [
        {
            "load": load,
            "precision": precision,
            "requests": requests,
            "contender": name,
            "rounds": len(measured),
            "most_foreign_share": max(line["foreign_share"] for line in kept.values()),
            "figures": {figure: spread([cells[name][figure] for cells in measured]) for figure in measured[0][name]},
            "headway_is": None
            if name == rival
            else spread([cells[rival][RATE] / cells[name][RATE] for cells in measured]),
        }
        for (load, precision, requests), kept in rows.items()
        for measured in [[line["cells"] for line in kept.values()]]
        for name in measured[0]
        for rival in [rival_of(precision, name)]
        if all({name, rival} <= cells.keys() for cells in measured)
    ]


def engines(lines: Iterable[Line], most_foreign: float) -> list[dict[str, Any]]:
    """Return the peak memory of each contender's processes, and its times to ready: the first, which may compile, and the
    median of the later ones, None where other programs took more than ``most_foreign`` of the machine.
    """
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        if line["kind"] == "engine":
            found.setdefault((line["load"], line["precision"], line["contender"]), []).append(line)
    return [
        {
            "load": load,
            "precision": precision,
            "contender": name,
            "version": starts[-1]["version"],
            "first_ready_s": _median_ready(starts[:1], most_foreign),
            "later_ready_s": _median_ready(starts[1:], most_foreign),
            "peak_memory_mib": max(one["peak_memory_mib"] for one in starts),
        }
        for (load, precision, name), starts in found.items()
    ]


def _median_ready(starts: Sequence[Line], most_foreign: float) -> float | None:
    quiet = [one["ready_s"] for one in starts if one["foreign_share"] <= most_foreign]
    return statistics.median(quiet) if quiet else None


def table(cells: Sequence[Line], starts: Sequence[Line], losses: Sequence[Line]) -> str:
    """Return the matrix as markdown: a table for each load, a row for each contender of each precision."""
    parts = []
    for load in dict.fromkeys(cell["load"] for cell in cells):
        here = [cell for cell in cells if cell["load"] == load]
        sizes = sorted({cell["requests"] for cell in here})
        extra = _EXTRA[load]
        heads = [
            "precision",
            "engine",
            *(f"tokens/s of {size}" for size in sizes),
            *extra,
            "rounds",
            "ready s",
            "peak GiB",
        ]
        heads += ["loss"] if load == "offline" else []
        rows = [heads, ["---", "---", *("---:" for _ in heads[2:])]]
        for precision, name in dict.fromkeys((cell["precision"], cell["contender"]) for cell in here):
            mine = {c["requests"]: c for c in here if c["precision"] == precision and c["contender"] == name}
            start = next(
                (one for one in starts if (one["load"], one["precision"], one["contender"]) == (load, precision, name)),
                None,
            )
            rows.append(
                [
                    precision,
                    name,
                    *(_rate(mine.get(size)) for size in sizes),
                    *(_extra(mine, figures) for figures in extra.values()),
                    _rounds(mine.values()),
                    _ready(start) if start else "",
                    f"{start['peak_memory_mib'] / 1024:.1f}" if start else "",
                    *([_loss(losses, precision, name)] if load == "offline" else []),
                ]
            )
        parts.append(_markdown(rows))
    alone = [one for one in starts if one["load"].endswith("start")]
    if alone:
        heads = ["precision", "engine", "", "s, the first time and later", "GiB"]
        rows = [
            [one["precision"], one["contender"], one["load"], _ready(one), f"{one['peak_memory_mib'] / 1024:.1f}"]
            for one in alone
        ]
        parts.append(_markdown([heads, ["---", "---", "---", "---:", "---:"], *rows]))
    return "\n\n".join(parts)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


_EXTRA: Mapping[str, Mapping[str, tuple[int, tuple[str, ...]]]] = {
    "offline": {"prefill tokens/s of 8": (8, ("prefill_tokens_per_s",)), "step ms of 8": (8, ("decode_step_ms",))},
    "online": {
        "TTFT ms p50 / p99 of 8": (8, ("ttft_ms_p50", "ttft_ms_p99")),
        "gap ms p50 / p99 of 8": (8, ("itl_ms_p50", "itl_ms_p99")),
    },
}
"""Further columns of a load: of which number of requests, which figures."""


def _rate(cell: Line | None) -> str:
    """The median rate with its spread, and what Headway's is of it."""
    if cell is None:
        return ""
    rate, ratio = cell["figures"][RATE], cell["headway_is"]
    text = f"{rate['median']:.0f} ({rate['least']:.0f} to {rate['most']:.0f})"
    return text if ratio is None else f"{text}, {ratio['median']:.2f}x"


def _extra(mine: Mapping[int, Line], wanted: tuple[int, tuple[str, ...]]) -> str:
    size, names = wanted
    cell = mine.get(size)
    return "" if cell is None else " / ".join(f"{cell['figures'][name]['median']:.0f}" for name in names)


def _rounds(cells: Iterable[Line]) -> str:
    numbers = sorted({cell["rounds"] for cell in cells})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _ready(start: Line) -> str:
    first, later = start["first_ready_s"], start["later_ready_s"]
    parts = [f"{first:.1f}"] if first is not None else []
    return ", ".join(parts + ([f"later {later:.1f}"] if later is not None else []))


def _loss(losses: Sequence[Line], precision: str, name: str) -> str:
    found = [one for one in losses if (one["precision"], one["contender"]) == (precision, name)]
    return f"{found[-1]['nats_per_token']:.4f}" if found else ""
