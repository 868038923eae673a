"""Pipeline bubbles in virtual time: Llama-2-70B's shape on 8 devices with 2, 4 and 8 stages, with and without lanes and chunks.

Owns: the workload, the systems, the table, the picture and the result file. Must not know: how lanes are filled, or how a
step passes the stages.

A *bubble* is time in which a stage stands idle while a step is in another. Sarathi (Agrawal et al., Sarathi-Serve, OSDI
2024, section 3.3 and figure 12) attributes bubbles to steps of unequal length, whole prompts between decodes, and fills
them with chunks of equal work. Users ask one after the other, so every system has the same requests, in the same order.

- *orca*: iteration-level scheduling with whole prompts; each lane is a batch, as Orca's workers are.
- *prefill first*: whole prompts in their own steps, before any decode, as in vLLM's first engine.
- *chunked, one lane*: chunks of prompts beside decodes, and as many steps in flight, but every row that decodes is in
  every step: chunks fill the stages, and decodes do not. This is what Headway did before it had lanes.
- *chunked*: the same, with a lane for each stage.

All systems may run as many requests at once. Prompts that are not cut need a larger budget of tokens.

    python benchmarks/pipeline_bubbles.py --json benchmarks/results/pipeline_bubbles.json --png docs/pictures/pipeline_bubbles.png
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway_lab.simulate.cases import Case
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.state.limits import SchedulerLimits
from program import count, parser_of, provenance, write_result

DEVICES = 8
STAGES = (2, 4, 8)
ROWS = 128
CHUNK_BUDGET, WHOLE_BUDGET = 512, 4096
WORKLOAD: dict[str, Any] = {
    "model": "llama-2-70b",
    "hardware": "a100-80g",
    "prompt_tokens": "lognormal:1000,0.7,2800",
    "output_tokens": "lognormal:300,0.6,1000",
}


class System(NamedTuple):
    """Its limits, and whether each stage has a lane."""

    limits: dict[str, Any]
    has_lanes: bool = True


SYSTEMS = {
    "orca": System({"batching": "orca", "reserve": "prompt", "max_num_batched_tokens": WHOLE_BUDGET}),
    "prefill first": System({"batching": "prefill_first", "max_num_batched_tokens": WHOLE_BUDGET}),
    "chunked, one lane": System({"max_num_batched_tokens": CHUNK_BUDGET}, has_lanes=False),
    "chunked": System({"max_num_batched_tokens": CHUNK_BUDGET}),
}


def measured(name: str, num_stages: int, num_requests: int, seed: int) -> dict[str, Any]:
    """Run one system on one pipeline."""
    system = SYSTEMS[name]
    options = SimulationOptions(
        **WORKLOAD,
        tensor_parallel=DEVICES // num_stages,
        pipeline_parallel=num_stages,
        users=ROWS,
        num_requests=num_requests,
        warmup_requests=min(ROWS, num_requests // 4),
        seed=seed,
    )
    world = make_world(options)
    limits = SchedulerLimits(
        max_num_seqs=ROWS,
        max_steps_in_flight=0 if system.has_lanes else num_stages + 1,
        enable_prefix_caching=False,
        **system.limits,
    )
    if not system.has_lanes:
        world = world._replace(capacity=msgspec.structs.replace(world.capacity, num_lanes=1))
    totals = simulate(world, Case(label=name, limits=limits)).totals
    return {
        "bubble_share": round(totals.bubble_share, 4),
        "output_tokens_per_s": round(totals.output_tokens_per_s, 1),
        "gap_ms": msgspec.structs.asdict(totals.itl_ms),
        "ttft_ms": msgspec.structs.asdict(totals.ttft_ms),
        "mean_batch_size": round(totals.mean_batch_size, 2),
        "num_preemptions": totals.num_preemptions,
    }


def line(num_stages: int, name: str, figures: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    return (
        f"{num_stages} stages of {DEVICES // num_stages} {name:>18}: bubbles {100 * figures['bubble_share']:5.1f}%, "
        f"{figures['output_tokens_per_s']:7.1f} tokens/s, gap p50 {figures['gap_ms']['p50']:6.1f} p99 "
        f"{figures['gap_ms']['p99']:7.1f} ms, first token p50 {figures['ttft_ms']['p50']:7.0f} ms"
    )


def draw(path: Path, results: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw bubbles, throughput and the 99th percentile of gaps, by stages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colors = dict(zip(SYSTEMS, ("tab:gray", "tab:olive", "tab:blue", "tab:green"), strict=True))
    panels = (
        ("bubbles, % of the stages' time", lambda figures: 100 * figures["bubble_share"]),
        ("output tokens per second", lambda figures: figures["output_tokens_per_s"]),
        ("99th percentile of gaps, ms", lambda figures: figures["gap_ms"]["p99"]),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4))
    width = 0.8 / len(SYSTEMS)
    for axis, (label, value) in zip(axes, panels, strict=True):
        for place, name in enumerate(SYSTEMS):
            positions = [group + (place - (len(SYSTEMS) - 1) / 2) * width for group in range(len(results))]
            axis.bar(positions, [value(of[name]) for of in results.values()], width, label=name, color=colors[name])
        axis.set_xticks(range(len(results)), [f"tp {DEVICES // stages} pp {stages}" for stages in results])
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{WORKLOAD['model']} on {DEVICES} x {WORKLOAD['hardware']}, {ROWS} requests at once")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--png", type=Path, help="draw the result to this file; needs matplotlib")
    parser.add_argument("--requests", type=count, default=512, help="of a run (default: 512)")
    arguments = parser.parse_args()
    results: dict[int, dict[str, Any]] = {}
    for num_stages in STAGES:
        results[num_stages] = {}
        for name in SYSTEMS:
            results[num_stages][name] = measured(name, num_stages, arguments.requests, arguments.seed)
            print(line(num_stages, name, results[num_stages][name]), flush=True)
    write_result(
        arguments.json,
        {
            **provenance(arguments.seed),
            "devices": DEVICES,
            "rows": ROWS,
            "requests": arguments.requests,
            "workload": WORKLOAD,
            "systems": {name: system._asdict() for name, system in SYSTEMS.items()},
            "results": results,
        },
    )
    if arguments.png is not None:
        draw(arguments.png, results)


if __name__ == "__main__":
    main()
