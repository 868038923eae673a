"""What a tensor-parallel step would cost over another link, from measured parts; and the same of a 70B model by its costs.

Owns: which parts come from where, the tables. Must not know: how long a meeting takes: that is ``simulate.meetings``.

- *Measured*, by ``ranks.py``: a decode step of the group, what of it rank 0 waited in meetings, and their number. The rest
  is arithmetic. What the ranks sent follows from the model. Over the link: the arithmetic, and the meetings at its latency
  and bandwidth. On busy cores a rank also waits for its turn, so arithmetic is not free of the host's load.
- *Expected*: a decode step of the 70B shape by ``headway simulate``'s costs (``roofline``), with its meetings in both forms.
  The time of one device is what it would need if the model fitted.

The link's figures are those of the simulator (``hardware``): of NVLink the data sheet's bandwidth in one direction, 0.80 of
it assumed to be reached, and 10 us assumed for a small message among all.

    python benchmarks/rank_costs.py --measured benchmarks/results/rank_transports.json --json benchmarks/results/rank_costs.json
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.meetings import all_reduces, gathers
from headway_lab.simulate.model_shapes import MODEL_SHAPES, ModelShape
from headway_lab.simulate.roofline import Roofline
from program import counts, parser_of, provenance, write_result

ALONE, GROUP = "one rank", "TP over shared memory"
DEGREES = (1, 2, 4, 8)
HEAD_DIM = 64


class Link(NamedTuple):
    """``latency_s`` of a meeting, ``bandwidth`` in bytes per second and device."""

    latency_s: float
    bandwidth: float


def measured_shape(load: Mapping[str, int]) -> ModelShape:
    """Return the model that ``ranks.py`` writes, which computes in float32."""
    return ModelShape(
        name="measured",
        num_layers=load["layers"],
        hidden_size=load["hidden"],
        intermediate_size=3 * load["hidden"],
        num_heads=max(load["hidden"] // HEAD_DIM or 1, load["degree"]),
        num_kv_heads=load["degree"],
        head_dim=HEAD_DIM,
        vocab_size=load["vocab"],
        context_length=1024,
        bytes_per_value=4,
    )


def over_link(record: Mapping[str, Any], link: Link) -> list[dict[str, Any]]:
    """Return a row for each number of rows that ``ranks.py`` measured in both ways."""
    shape, degree = measured_shape(record["load"]), record["load"]["degree"]
    ways = {(one["way"], one["rows"]): one for one in record["results"]}
    found = []
    for (way, num_rows), group in ways.items():
        if way != GROUP or (ALONE, num_rows) not in ways:
            continue
        sent = gathers(shape, degree, shape.num_layers)
        if sent.number != group["meetings"]:
            raise SystemExit(f"{group['meetings']} meetings were measured, and {sent.number} are expected")
        meetings_s = sent.seconds(num_rows, num_rows, latency_s=link.latency_s, bandwidth=link.bandwidth)
        arithmetic_ms = group["decode_ms"] - group["waiting_ms"]
        found.append(
            {
                "rows": num_rows,
                "one_rank_ms": ways[ALONE, num_rows]["decode_ms"],
                "group_ms": group["decode_ms"],
                "waiting_ms": group["waiting_ms"],
                "meetings": sent.number,
                "received_kib": round(num_rows * (sent.token_bytes + sent.sample_bytes) / 1024, 1),
                "meetings_over_link_ms": round(meetings_s * 1e3, 3),
                "step_over_link_ms": round(arithmetic_ms + meetings_s * 1e3, 2),
            }
        )
    return found


def expected(model: str, hardware: str, link: Link, rows: list[int], context: int) -> list[dict[str, Any]]:
    """Return a decode step of a published shape by degree and rows."""
    shape, found = MODEL_SHAPES[model], []
    for num_rows in rows:
        for degree in DEGREES:
            ones, held = np.ones(num_rows, dtype=np.int32), np.full(num_rows, context, dtype=np.int32)
            time = Roofline(ACCELERATORS[hardware], shape, degree).step_time(ones, held, num_rows)
            forms = {
                name: of(shape, degree, shape.num_layers).seconds(
                    num_rows, num_rows, latency_s=link.latency_s, bandwidth=link.bandwidth
                )
                for name, of in (("fast", all_reduces), ("exact", gathers))
            }
            alone_s = time.total_s - time.all_reduce_s
            found.append(
                {
                    "rows": num_rows,
                    "tensor_parallel": degree,
                    "rest_ms": round(alone_s * 1e3, 2),
                    **{f"{name}_meetings_ms": round(seconds * 1e3, 2) for name, seconds in forms.items()},
                    **{f"{name}_step_ms": round((alone_s + seconds) * 1e3, 2) for name, seconds in forms.items()},
                }
            )
    return found


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--measured", type=Path, help="a result of ranks.py")
    parser.add_argument("--hardware", choices=ACCELERATORS, default="h100", help="its link and devices (default: h100)")
    parser.add_argument("--model", choices=MODEL_SHAPES, default="llama-3-70b")
    parser.add_argument("--rows", type=counts, default=[1, 64], help="of the expected step (default: 1,64)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row (default: 1024)")
    arguments = parser.parse_args()
    accelerator = ACCELERATORS[arguments.hardware]
    link = Link(accelerator.all_reduce_latency_s, accelerator.link_bandwidth * accelerator.link_share)
    result: dict[str, Any] = {"link": link._asdict(), "hardware_simulated": arguments.hardware}
    if arguments.measured is not None:
        record = json.loads(arguments.measured.read_text())
        result["measured"] = {"hardware": record["hardware"], "load": record["load"], "rows": over_link(record, link)}
        print_rows(result["measured"]["rows"])
    result["expected"] = expected(arguments.model, arguments.hardware, link, arguments.rows, arguments.context)
    result["context"], result["model"] = arguments.context, arguments.model
    print_rows(result["expected"])
    write_result(arguments.json, {**provenance(arguments.seed), **result})


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    if rows:
        print("  ".join(rows[0]))
    for row in rows:
        print("  ".join(f"{value:>{len(name)}}" for name, value in row.items()))


if __name__ == "__main__":
    main()
