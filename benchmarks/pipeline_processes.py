"""Pipeline bubbles on processes: the same requests through ``headway serve --pipeline-parallel`` and in virtual time.

Owns: the load, the costs of a step, how both run it, the table, the picture and the result file. Must not know: how lanes
are filled.

Users ask one after the other, with prompts of mixed lengths, as in Sarathi's figures of bubbles (Agrawal et al., 2023,
arXiv 2308.16369, and OSDI 2024, section 3.3). The systems are those of ``pipeline_bubbles.py`` that have lanes: whole
prompts as in Orca, whole prompts first, and chunks. Scheduler, gateway, executor and its ranks are the real processes; only
the model is not: each stage sleeps for its part of a step, ``base_us + token_us * tokens`` over the number of stages, once
the stage before has sent it on (``staged_backend``). In virtual time the same costs pass the same number of stages, without
sends and without any process.

    python benchmarks/pipeline_processes.py --json benchmarks/results/pipeline_processes.json --png docs/pictures/pipeline_processes.png
"""

import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.client import AsyncClient
from headway_lab.percentiles import percentiles
from headway_lab.simulate.cases import Case
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import Roofline, StepTime
from headway_lab.simulate.world import make_world, simulate
from headway_lab.workload.requests import PlannedRequest
from headway_proto.columns import Int32Array
from headway_scheduler.core.state.limits import SchedulerLimits
from pipeline_bubbles import SYSTEMS
from program import count, counts, parser_of, provenance, write_result
from served import DEMO_MODEL, served
from staged_backend import NAME, bubble_share, read_logs, register

_TOKENS = range(3, 1000)
_CONTEXT = 4096


class ProcessLoad(NamedTuple):
    """``base_us`` and ``token_us``: a step's microseconds through all stages."""

    num_requests: int
    users: int
    seed: int
    base_us: float = 40_000.0
    token_us: float = 150.0
    prompt_tokens: str = "lognormal:1000,0.7,2800"
    output_tokens: str = "lognormal:60,0.6,200"

    @property
    def num_warm_up(self) -> int:
        """Requests that are sent before the measurement begins."""
        return min(self.users, self.num_requests // 4)


class LinearCosts(Roofline):
    """A step's time by its tokens alone, in equal parts on each stage."""

    def __init__(self, roofline: Roofline, load: ProcessLoad) -> None:
        super().__init__(roofline.accelerator, roofline.shape, roofline.tensor_parallel, roofline.pipeline_parallel)
        self._load = load

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """See ``Roofline.step_time``."""
        del num_computed_tokens, num_samples
        total_s = 1e-6 * (self._load.base_us + self._load.token_us * int(num_scheduled_tokens.sum()))
        num_stages = self.pipeline_parallel
        return StepTime(total_s, 0.0, 0.0, 0.0, 0.0, 0.0, stages_s=(total_s / num_stages,) * num_stages)


def expected(load: ProcessLoad, limits: Mapping[str, Any], num_stages: int) -> dict[str, Any]:
    """Run the load in virtual time."""
    options = SimulationOptions(
        model="llama-2-70b",
        hardware="a100-80g",
        tensor_parallel=8 // num_stages,
        pipeline_parallel=num_stages,
        users=load.users,
        num_requests=load.num_requests,
        warmup_requests=load.num_warm_up,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        seed=load.seed,
    )
    world = make_world(options)
    world = world._replace(roofline=LinearCosts(world.roofline, load))
    given = SchedulerLimits(max_num_seqs=load.users, enable_prefix_caching=False, **limits)
    totals = simulate(world, Case(label="", limits=given)).totals
    return {
        "bubble_share": round(totals.bubble_share, 4),
        "output_tokens_per_s": round(totals.output_tokens_per_s, 1),
        "gap_ms": msgspec.structs.asdict(totals.itl_ms),
        "ttft_ms": msgspec.structs.asdict(totals.ttft_ms),
    }


def requests_of(load: ProcessLoad) -> list[PlannedRequest]:
    """Return the same requests that virtual time has."""
    options = SimulationOptions(
        model="llama-2-70b",
        hardware="a100-80g",
        tensor_parallel=8,
        users=load.users,
        num_requests=load.num_requests,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        seed=load.seed,
    )
    return list(make_world(options).load.requests)


class Times(NamedTuple):
    """What one request's user saw. Seconds of ``time.perf_counter``."""

    number: int
    sent_s: float
    tokens_s: list[float]


def on_processes(load: ProcessLoad, limits: Mapping[str, Any], num_stages: int) -> dict[str, Any]:
    """Serve the load; return the same figures as ``expected``."""
    flags = [
        *("--pipeline-parallel", str(num_stages), "--backend", NAME, "--no-enable-prefix-caching"),
        *("--max-num-seqs", str(load.users), "--num-kv-blocks", str(load.users * 256)),
        *("--backend-option", f"step_base_us={load.base_us}", "--backend-option", f"per_token_us={load.token_us}"),
        *("--backend-option", "verify_kv=false"),
    ]
    for name, value in limits.items():
        flags += [f"--{name.replace('_', '-')}", str(value)]
    with tempfile.TemporaryDirectory() as directory:
        before = dict(os.environ)
        os.environ.update(register(Path(directory)))
        try:
            model = _longer_model(Path(directory))
            with served("--model", str(model), *flags) as address:
                times = asyncio.run(_run(address, load))
        finally:
            os.environ.clear()
            os.environ.update(before)
        stages = read_logs(Path(directory), num_stages)
    measured = sorted(times)[load.num_warm_up :]
    since_s = min(one.sent_s for one in measured)
    tokens_s = [moment for one in times for moment in one.tokens_s]
    window_s = max(tokens_s) - since_s
    gaps_ms = [1e3 * (b - a) for one in measured for a, b in zip(one.tokens_s, one.tokens_s[1:], strict=False)]
    return {
        "bubble_share": round(bubble_share(stages, since_s), 4),
        "output_tokens_per_s": round(sum(moment > since_s for moment in tokens_s) / window_s, 1),
        "gap_ms": msgspec.structs.asdict(percentiles(gaps_ms)),
        "ttft_ms": msgspec.structs.asdict(percentiles([1e3 * (one.tokens_s[0] - one.sent_s) for one in measured])),
    }


def _longer_model(directory: Path) -> Path:
    """Return the demo model's description with a longer context; nobody reads its weights."""
    model = directory / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}))
    return model


async def _run(address: str, load: ProcessLoad) -> list[Times]:
    waiting = iter(requests_of(load))
    async with AsyncClient(address) as client:
        users = [_ask(client, waiting, load.seed) for _ in range(load.users)]
        return [one for times in await asyncio.gather(*users) for one in times]


async def _ask(client: AsyncClient, waiting: Iterator[PlannedRequest], seed: int) -> list[Times]:
    found = []
    for request in waiting:
        prompt = random.Random(f"{seed}, {request.number}").choices(_TOKENS, k=request.num_prompt_tokens)
        times = Times(request.number, time.perf_counter(), [])
        answer = client.generate(prompt, max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True)
        async for delta in answer:
            times.tokens_s.extend([time.perf_counter()] * len(delta.token_ids))
        found.append(times)
    return found


def measured(load: ProcessLoad, stages: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Run each system on each pipeline, on processes and in virtual time."""
    results: dict[int, dict[str, Any]] = {}
    for num_stages in stages:
        results[num_stages] = {}
        for name, system in SYSTEMS.items():
            if not system.has_lanes:
                continue
            both = {
                "processes": on_processes(load, system.limits, num_stages),
                "virtual": expected(load, system.limits, num_stages),
            }
            results[num_stages][name] = both
            for way, figures in both.items():
                print(
                    f"{num_stages} stages {name:>14}, {way:>9}: bubbles {100 * figures['bubble_share']:5.1f}%, "
                    f"{figures['output_tokens_per_s']:6.1f} tokens/s, gap p50 {figures['gap_ms']['p50']:6.1f} p99 "
                    f"{figures['gap_ms']['p99']:7.1f} ms",
                    flush=True,
                )
    return results


def draw(path: Path, results: Mapping[int, Mapping[str, Any]], load: ProcessLoad) -> None:
    """Draw bubbles and throughput by stages: bars for processes, lines for virtual time."""
    from matplotlib.figure import Figure

    from headway_lab.pictures import BLUE, GREY, ORANGE, write_picture

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(
        f"headway serve --pipeline-parallel, {load.users} users, stages that sleep; seed {load.seed}", fontsize=9
    )
    names = list(next(iter(results.values())))
    width = 0.8 / len(names)
    panels = (
        ("bubble_share", 100, "bubbles, % of the stages' time"),
        ("output_tokens_per_s", 1, "output tokens per second"),
    )
    for axes, (field, scale, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for place, (name, color) in enumerate(zip(names, (GREY, ORANGE, BLUE), strict=True)):
            at = [group + (place - (len(names) - 1) / 2) * width for group in range(len(results))]
            axes.bar(
                at, [scale * of[name]["processes"][field] for of in results.values()], width, label=name, color=color
            )
            virtual = [scale * of[name]["virtual"][field] for of in results.values()]
            axes.plot(at, virtual, "_", color="black", markersize=20, label="virtual time" if not place else None)
        axes.set_xticks(range(len(results)), [f"pp {stages}" for stages in results])
        axes.set_ylabel(label)
    figure.axes[0].legend(frameon=False, fontsize=8)
    write_picture(figure, path)


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--png", type=Path, help="draw the result to this file; needs matplotlib")
    parser.add_argument("--stages", type=counts, default=[2, 4], help="of the pipelines (default: 2,4)")
    parser.add_argument("--requests", type=count, default=64, help="of a run (default: 64)")
    parser.add_argument("--users", type=count, default=16, help="who ask at once (default: 16)")
    arguments = parser.parse_args()
    load = ProcessLoad(arguments.requests, arguments.users, arguments.seed)
    results = measured(load, arguments.stages)
    write_result(arguments.json, {**provenance(arguments.seed), "load": load._asdict(), "results": results})
    if arguments.png is not None:
        draw(arguments.png, results, load)


if __name__ == "__main__":
    main()
