"""Two executors of a core each, three ways, with a real model: prompts and decodes apart, together, and by need. Beside
each, the simulator's figures for the same arrivals.

Owns: the load, the turns, the fit of step times, the table and the result file. Must not know: how requests are placed.

- *split*: executor 0 runs prompts and executor 1 decodes (``--roles prefill,decode --placement disaggregated``);
- *together*: both do both (``--placement aggregated``);
- *hybrid*: both may do both, and a request is handed off where that keeps its objectives (``--placement hybrid``).

The model has random weights and 28M parameters; each executor is bound to a core. Everything else shares these cores.
In each round all setups get the same requests from ``headway bench``, one setup after the other, in changing order. The
first ``--warm-up`` requests, from which the scheduler learns step times, count nowhere, nor in the simulation.

A round is simulated on a device that is learned from the other rounds of its setup, which had other requests: two
executors that share memory, caches and two cores with everything else slow each other down, and more so the more they work
at the same time; and a machine has quick and slow minutes, of which the rounds, by turns, see equally many. Step times are
the least squares of the recorded steps, each weighted by its expected time. What a client waits for beside the scheduler
and its executors (client, gateway, both ways) is the difference of its mean TTFT and the flight log's; it is added to each
simulated TTFT. ``difference`` is a simulated figure over the measured one, less 1, of all rounds together. It is judged
for tokens per second and for the means of TTFT and gaps; few requests decide about tails, and a median jumps where gaps
with and without a prompt beside them are equally many.

    python benchmarks/three_setups.py --json benchmarks/results/three_setups.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.client import Client
from headway_lab.flight.recording import Recording, RunStep, shape_of
from headway_lab.flight.source import Flight
from headway_lab.simulate.cases import Case
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.roofline import StepTime
from headway_lab.simulate.world import make_world, simulate
from headway_proto.columns import Int32Array
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.step_shape import StepShape
from program import count, parser_of, provenance, write_result
from served import served, write_random_model
from step_time_fit import RANDOM_SHAPE

SPLIT, TOGETHER, HYBRID = "split", "together", "hybrid"
SETUPS = {
    SPLIT: {"roles": "prefill,decode", "placement": "disaggregated"},
    TOGETHER: {"placement": "aggregated"},
    HYBRID: {"placement": "hybrid"},
}
JUDGED = ("output_tokens_per_s", "ttft_ms_mean", "gap_ms_mean")
MOST_DIFFERENCE = 0.10
NUM_EXECUTORS = 2
MEASURED, SIMULATED = "measured", "simulated"
_MAX_MODEL_LEN = 1024
_NUM_KV_BLOCKS = 512
_JOIN_S = 60.0
_FITTING_ROUNDS = 3
_LEAST_ROUNDS = 2


class Seen(NamedTuple):
    """The requests of one round. Times in milliseconds."""

    ttft_ms: list[float]
    gaps_ms: list[float]
    num_meeting: int
    num_output_tokens: int
    window_s: float
    num_hand_offs: int = 0


class LearnedCosts:
    """Step times of this machine, for the simulator: linear in a step's shape, none of the parts negative.

    A real step takes more or less time than that, and a scheduler that learns step times keeps more distance from an
    objective the more they vary. So each time is multiplied by what a recorded step, drawn from all, took over its own.
    """

    model_name, device_name = "random-28m", "this machine"
    accelerator = ACCELERATORS["compute-bound"]
    """The simulator asks for its bandwidth; ``swap_time`` does not need it."""

    def __init__(self, steps: Sequence[RunStep], swap_us_per_block: float) -> None:
        self._swap_s = swap_us_per_block / 1e6
        times = np.array([step.device_s for step in steps])
        features = np.array([_features(step.shape) for step in steps])
        self._parts = _mean_times(features, times)
        between = [step.record.end_s - step.record.start_s - step.device_s - step.record.swap_s for step in steps]
        self._between_s = max(0.0, float(np.mean(between)))
        self._variations = times / np.maximum(features @ self._parts, 1e-9)
        self._drawn = np.random.default_rng(0)
        self.median_error = float(np.median(np.abs(1.0 / self._variations - 1.0)))

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """See ``StepCosts``."""
        del num_samples
        mean_s = float(_features(shape_of(num_scheduled_tokens, num_computed_tokens)) @ self._parts)
        device_s = mean_s * float(self._drawn.choice(self._variations))
        return StepTime(device_s, 0.0, 0.0, 0.0, 0.0, self._between_s)

    def swap_time(self, num_blocks: int, block_size: int, host_bandwidth: float) -> float:
        """See ``StepCosts``; measured when the executor opened."""
        del block_size, host_bandwidth
        return num_blocks * self._swap_s


def _features(shape: StepShape) -> NDArray[np.float64]:
    prompt_tokens = max(0, shape.num_tokens - shape.num_rows)
    return np.array(
        [1.0, shape.num_rows, prompt_tokens, prompt_tokens > 0, shape.num_context_tokens, shape.num_prefill_pairs]
    )


def _mean_times(features: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weigh by the expected times: weights of the times themselves would favour steps that were fast by chance."""
    expected = np.full_like(times, times.mean())
    for _ in range(_FITTING_ROUNDS):
        parts = _non_negative_least_squares(features / expected[:, None], times / expected)
        expected = features @ parts
    return parts


def _non_negative_least_squares(features: NDArray[np.float64], targets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Leave out the most negative part until none is; there are few."""
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept], targets, rcond=None)
        if (found >= 0).all():
            parts = np.zeros(features.shape[1])
            parts[kept] = found
            return parts
        del kept[int(found.argmin())]


class Recorded(NamedTuple):
    """What one round tells of its device: its steps, and a client's mean wait beside scheduler and executors."""

    steps: list[RunStep]
    swap_us_per_block: float
    door_ms: float


class Fitted(NamedTuple):
    """What the simulation of a round is given."""

    costs: LearnedCosts
    door_ms: float

    @classmethod
    def to(cls, rounds: Sequence[Recorded]) -> "Fitted":
        """Fit the device of these rounds."""
        steps = [step for one in rounds for step in one.steps]
        swap_us = float(np.mean([one.swap_us_per_block for one in rounds]))
        return cls(LearnedCosts(steps, swap_us), max(0.0, float(np.mean([one.door_ms for one in rounds]))))


class Bench:
    """The servers and loads of one run. ``model``: a directory."""

    def __init__(self, arguments: argparse.Namespace, model: Path) -> None:
        self._arguments = arguments
        self._model = model

    def measure(self, setup: str, seed: int) -> tuple[Seen, Recorded]:
        """Start a setup, warm it up, send it a round's requests, and read what the scheduler recorded."""
        with tempfile.TemporaryDirectory(prefix="hw") as directory:
            flags = [f"--{name}={value}" for name, value in SETUPS[setup].items()]
            flags += ["--executors", str(NUM_EXECUTORS), "--model", str(self._model), "--device", "cpu"]
            flags += ["--max-model-len", str(_MAX_MODEL_LEN), "--num-kv-blocks", str(_NUM_KV_BLOCKS)]
            flags += ["--no-enable-prefix-caching", "--flight-log", directory]
            with served(*flags) as address:
                _wait_for_executors(address)
                sent = self._send(address, self._load(seed))
                num_hand_offs = _num_hand_offs(address)
            seen = self._seen(sent["requests"], "intended_s")._replace(num_hand_offs=num_hand_offs)
            return seen, self._recorded(directory, seen)

    def _recorded(self, directory: str, seen: Seen) -> Recorded:
        flight, recording = Flight(directory), Recording()
        for event in flight.events("step times"):
            recording.record(event, flight.replay)
        assert recording.capacity is not None
        times = recording.measurement().measurement().times
        inside_ms = (times.first_token_s - times.arrival_s)[self._arguments.warm_up :] * 1e3
        door_ms = float(np.mean(seen.ttft_ms) - inside_ms.mean())
        return Recorded(recording.steps, recording.capacity.swap_us_per_block, door_ms)

    def simulate(self, setup: str, seed: int, fitted: Fitted) -> Seen:
        """Run the same requests in virtual time."""
        load = {name.replace("-", "_"): value for name, value in self._load(seed).items()}
        options = SimulationOptions(
            executors=NUM_EXECUTORS,
            num_kv_blocks=_NUM_KV_BLOCKS,
            max_model_len=_MAX_MODEL_LEN,
            host_blocks=_NUM_KV_BLOCKS,
            roles=SETUPS[setup].get("roles", ""),
            **load,
        )
        world = make_world(options)._replace(roofline=fitted.costs)
        limits = SchedulerLimits(enable_prefix_caching=False)
        result = simulate(world, Case(label="", limits=limits, placement=SETUPS[setup]["placement"]))
        seen = self._seen(msgspec.to_builtins(result.requests), "arrival_s")
        return seen._replace(ttft_ms=[ttft_ms + fitted.door_ms for ttft_ms in seen.ttft_ms])

    def _load(self, seed: int) -> dict[str, Any]:
        """Return the options of a load, the same for bench and simulation."""
        arguments = self._arguments
        return {
            "arrivals": "poisson",
            "rate": arguments.rate,
            "num-requests": arguments.warm_up + arguments.requests,
            "warmup-requests": arguments.warm_up,
            "prompt-tokens": arguments.prompt_tokens,
            "output-tokens": arguments.output_tokens,
            "ttft-slo-ms": arguments.ttft_slo_ms,
            "itl-slo-ms": arguments.itl_slo_ms,
            "seed": seed,
        }

    def _send(self, address: str, load: dict[str, Any]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = [f"--{name}={value}" for name, value in load.items()]
            command = [sys.executable, "-m", "headway", "bench", "--address", address, *words, "--json", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"headway bench: {done.stderr or done.stdout}")
            sent: dict[str, Any] = json.loads(Path(file.name).read_text())
            return sent

    def _seen(self, requests: Sequence[dict[str, Any]], arrival_s: str) -> Seen:
        """Take what bench and simulation report alike; ``arrival_s``: what they call a request's time."""
        counted = [one for one in requests if one["number"] >= self._arguments.warm_up]
        ends_s = [one[arrival_s] + one["end_to_end_s"] for one in counted]
        return Seen(
            ttft_ms=[one["ttft_s"] * 1e3 for one in counted],
            gaps_ms=[gap for one in counted for gap in one["itl_ms"]],
            num_meeting=sum(one["meets_objectives"] for one in counted),
            num_output_tokens=sum(one["num_output_tokens"] for one in counted),
            window_s=max(ends_s) - min(one[arrival_s] for one in counted),
        )


def _wait_for_executors(address: str) -> None:
    deadline = time.monotonic() + _JOIN_S
    with Client(address) as client:
        while client.status().num_epochs < NUM_EXECUTORS:
            assert time.monotonic() < deadline, "not all executors have joined"
            time.sleep(0.1)


def _num_hand_offs(address: str) -> int:
    with Client(address) as client:
        return client.status().num_moved


def figures(rounds: Sequence[Seen]) -> dict[str, float]:
    """Return the figures of all rounds together."""
    ttft = np.concatenate([one.ttft_ms for one in rounds])
    gaps = np.concatenate([one.gaps_ms for one in rounds])
    return {
        "requests": len(ttft),
        "hand_offs": sum(one.num_hand_offs for one in rounds),
        "output_tokens_per_s": round(
            sum(one.num_output_tokens for one in rounds) / sum(one.window_s for one in rounds), 2
        ),
        "attainment": round(sum(one.num_meeting for one in rounds) / len(ttft), 3),
        **_spread("ttft_ms", ttft),
        **_spread("gap_ms", gaps),
    }


def _spread(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    named = {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}
    return {f"{name}_{key}": round(value, 2) for key, value in named.items()}


def compared(measured: Sequence[Seen], simulated: Sequence[Seen]) -> dict[str, Any]:
    """Return a setup's figures, measured and simulated, and their differences."""
    real, virtual = figures(measured), figures(simulated)
    differences = {
        name: round(virtual[name] / real[name] - 1.0, 4) for name in real if name.endswith(("_s", "mean", "p50", "p99"))
    }
    agrees = all(abs(differences[name]) <= MOST_DIFFERENCE for name in JUDGED)
    return {MEASURED: real, SIMULATED: virtual, "difference": differences, "agrees": agrees}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure and simulate every setup."""
    setups = arguments.setups.split(",")
    measured: dict[str, list[Seen]] = {setup: [] for setup in setups}
    recorded: dict[str, list[Recorded]] = {setup: [] for setup in setups}
    with tempfile.TemporaryDirectory() as parent:
        model = Path(parent) / LearnedCosts.model_name
        model.mkdir()
        write_random_model(model, arguments.seed, RANDOM_SHAPE)
        bench = Bench(arguments, model)
        for number in range(arguments.rounds):
            first = number % len(setups)
            for setup in setups[first:] + setups[:first]:
                seen, steps = bench.measure(setup, arguments.seed + number)
                measured[setup].append(seen)
                recorded[setup].append(steps)
                print(f"  {setup}: {figures([seen])}", file=sys.stderr)
        fitted = {
            setup: [Fitted.to(rounds[:number] + rounds[number + 1 :]) for number in range(arguments.rounds)]
            for setup, rounds in recorded.items()
        }
        simulated = {
            setup: [bench.simulate(setup, arguments.seed + number, fit) for number, fit in enumerate(fits)]
            for setup, fits in fitted.items()
        }
    return {
        "fitted": {
            setup: {
                "step_times_median_error": [round(fit.costs.median_error, 4) for fit in fits],
                "door_ms": [round(fit.door_ms, 2) for fit in fits],
            }
            for setup, fits in fitted.items()
        },
        "setups": {setup: compared(measured[setup], simulated[setup]) for setup in setups},
    }


def table(setups: dict[str, dict[str, Any]]) -> str:
    """Return the figures as text, measured over simulated."""
    names = ("output_tokens_per_s", "attainment", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p99")
    names += ("gap_ms_mean", "gap_ms_p50", "gap_ms_p99")
    lines = ["".join([f"{'':<20}", *(f"{name:>21}" for name in names)])]
    for setup, row in setups.items():
        lines += [
            "".join([f"{setup + ', ' + kind:<20}", *(f"{row[kind][name]:>21}" for name in names)])
            for kind in (MEASURED, SIMULATED)
        ]
        worst = max(abs(row["difference"][name]) for name in JUDGED)
        lines.append(f"  {row[MEASURED]['hand_offs']} hand-offs; off by {worst:.1%} at most in {', '.join(JUDGED)}")
    return "\n".join(lines)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--setups", default=",".join(SETUPS), help="in this order (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=3, help="of each setup (default: 3)")
    parser.add_argument("--requests", type=count, default=80, help="of each round (default: 80)")
    parser.add_argument("--warm-up", type=count, default=12, help="before each round (default: 12)")
    parser.add_argument("--rate", type=float, default=2.5, help="requests per second (default: 2.5)")
    parser.add_argument("--prompt-tokens", default="lognormal:200,0.5,512", help="(default: %(default)s)")
    parser.add_argument("--output-tokens", default="lognormal:40,0.5,100", help="(default: %(default)s)")
    parser.add_argument("--ttft-slo-ms", type=count, default=600, help="objective (default: 600)")
    parser.add_argument("--itl-slo-ms", type=count, default=100, help="objective of each gap (default: 100)")
    arguments = parser.parse_args(words)
    if arguments.rounds < _LEAST_ROUNDS:
        parser.error(f"--rounds {arguments.rounds} is not allowed; allowed: {_LEAST_ROUNDS} and more")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    began = time.monotonic()
    result = run(arguments)
    print(table(result["setups"]))
    settings = {name: value for name, value in vars(arguments).items() if name not in {"json", "seed"}}
    about = {"seconds": round(time.monotonic() - began, 1), "load_average": os.getloadavg()[0]}
    write_result(arguments.json, {**provenance(arguments.seed), "settings": settings, **about, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
