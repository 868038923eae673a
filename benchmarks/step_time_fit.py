"""How well the simulator's cost model describes a real device: steps of the torch backend on this CPU, measured and
fitted.

Owns: the grid of steps, their measurement, the fit, and its error on unseen steps. Must not know: anything of the
backend beyond its protocol, or of the cost model beyond its parameters.

A step is a set of rows: decodes, chunks of a prompt, or both. Each runs several times in several rounds, in a new order
each, and the lower quartile counts, because other work only makes steps longer. The parameters of the roofline are
fitted to the logarithm of most steps' times by least squares (Levenberg and Marquardt's method); some steps, drawn by
the seed, are held out. Then a whole run of the real scheduler is compared with its simulation on the fitted device.
Links, gateway and, in the simulation, the scheduler's own time are left out. Only the device as a whole is meaningful,
not each parameter.

    python benchmarks/step_time_fit.py --output benchmarks/results/step_time_fit.json
    headway simulate --hardware-file benchmarks/results/step_time_fit.json --model measured
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig, NewRow, StepBatch
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.models.config import ModelConfig
from headway_executor.models.families import read_model_config
from headway_lab.simulate.collector import RunCollector
from headway_lab.simulate.device import VirtualDevice
from headway_lab.simulate.hardware import Accelerator
from headway_lab.simulate.loop import Simulation
from headway_lab.simulate.model_shapes import ModelShape
from headway_lab.simulate.roofline import Roofline
from headway_lab.simulate.stations import InTurn, Station
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import SAMPLED_TOKENS, PlannedRequest, PromptSource, rng_of
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, parser_of, provenance
from torch_cpu import SHAPE_135M, OfflineEngine, write_checkpoint

RANDOM_SHAPE = {
    **SHAPE_135M,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
BLOCK_SIZE = 16
HELD_OUT_SHARE = 0.3
RUN_BUDGET = 512
FLOAT32_BYTES = 4


class StepShape(NamedTuple):
    """A step: ``num_decodes`` rows of one token after ``context`` others, and a chunk of a prompt after ``before``."""

    num_decodes: int
    context: int
    chunk: int
    before: int

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Return the tokens to run and the computed tokens of each row."""
        return [(1, self.context)] * self.num_decodes + [(self.chunk, self.before)] * bool(self.chunk)


class MeasuredStep(NamedTuple):
    """A step, the lower quartile of its times, and their median."""

    shape: StepShape
    seconds: float
    median_seconds: float


class StepRunner:
    """Runs steps of any shape on an open backend. The cache has any content, because only time matters."""

    def __init__(self, config: BackendConfig, vocab_size: int, seed: int) -> None:
        self._backend = TorchBackend()
        self._info = self._backend.open(config)
        self._rng = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        width = -(-self._info.max_model_len // BLOCK_SIZE) + 1
        self._table = np.zeros((config.max_num_seqs, width), dtype=np.int32)
        self._finished = EMPTY_COLUMN
        self._step = 0

    def seconds(self, shape: StepShape, repetitions: int) -> list[float]:
        """Return the times of ``repetitions`` runs of the same step, after one that does not count."""
        rows = shape.rows
        numbers = np.arange(len(rows), dtype=np.int32)
        scheduled, computed = np.array(rows, dtype=np.int32).T
        new_rows = tuple(
            NewRow(
                row=number,
                token_ids=self._rng.integers(3, self._vocab_size, size=tokens + before, dtype=np.int32),
                num_prompt_tokens=tokens + before,
                num_computed_tokens=before,
                sampling=SamplingParams(temperature=0.0),
            )
            for number, (tokens, before) in enumerate(rows)
        )
        new_blocks = self._give_blocks(rows)
        none = np.empty(0, dtype=np.int32)
        self._execute(none, none, none, new_rows=new_rows, new_blocks=new_blocks)
        self._finished = numbers
        return [self._execute(numbers, scheduled, computed) for _ in range(repetitions + 1)][1:]

    def _give_blocks(self, rows: Sequence[tuple[int, int]]) -> Int32Array:
        """Give blocks from all over the pool, as after a while of serving; columns (row, block)."""
        free = iter(self._rng.permutation(self._info.num_blocks).tolist())
        pairs = []
        for number, (tokens, before) in enumerate(rows):
            for place in range(-(-(tokens + before) // BLOCK_SIZE)):
                self._table[number, place] = next(free)
                pairs.append((number, self._table[number, place]))
        return np.array(pairs, dtype=np.int32).T

    def _execute(
        self,
        numbers: Int32Array,
        scheduled: Int32Array,
        computed: Int32Array,
        *,
        new_rows: tuple[NewRow, ...] = (),
        new_blocks: Int32Array | None = None,
    ) -> float:
        finished = self._finished if new_rows else EMPTY_COLUMN
        batch = StepBatch(
            step=self._step,
            finished_rows=finished,
            new_rows=new_rows,
            new_blocks=np.empty((2, 0), dtype=np.int32) if new_blocks is None else new_blocks,
            rows=numbers,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=computed,
            samples=np.ones_like(numbers),
            block_table=self._table,
        )
        self._step += 1
        started = time.perf_counter()
        self._backend.execute(batch)
        return time.perf_counter() - started


def step_shapes(decodes: Sequence[int], contexts: Sequence[int], chunks: Sequence[int]) -> list[StepShape]:
    """Return decodes by context, chunks by the tokens before them, and a few decodes beside chunks."""
    alone = [StepShape(count, context, 0, 0) for count, context in itertools.product(decodes, contexts)]
    befores = (0, *contexts[1:])
    prompts = [StepShape(0, 0, chunk, before) for chunk, before in itertools.product(chunks, befores)]
    mixed = itertools.product(decodes[1::2], contexts[1::2] or contexts, chunks[::2], befores[:2])
    return [*alone, *prompts, *(StepShape(*shape) for shape in mixed)]


def measure(runner: StepRunner, shapes: Sequence[StepShape], arguments: argparse.Namespace) -> list[MeasuredStep]:
    """Run every step in every round, in a new order each."""
    order = random.Random(arguments.seed)
    times: dict[StepShape, list[float]] = {shape: [] for shape in shapes}
    for _ in range(arguments.rounds):
        for shape in order.sample(shapes, len(shapes)):
            times[shape] += runner.seconds(shape, arguments.repetitions)
    return [MeasuredStep(shape, *np.percentile(times[shape], (25, 50)).tolist()) for shape in shapes]


def shape_of(name: str, model: ModelConfig) -> ModelShape:
    """Return the model as the simulator describes one."""
    return ModelShape(
        name=name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        context_length=model.context,
        bytes_per_value=FLOAT32_BYTES,
    )


def accelerator_of(parameters: NDArray[np.float64]) -> Accelerator:
    """The device with these parameters, all of them logarithms: rates of products, of reading weights, of attention's
    arithmetic and of everything else in memory, the exponent less 1, and the time between steps.

    What a fit to one device cannot tell is neutral: tiles of one token, one processor, no launches, links as fast as
    memory.
    """
    products, weights, attention, memory, exponent, overhead = np.exp(parameters).tolist()
    peak_flops, bandwidth = max(products, attention), max(weights, memory)
    return Accelerator(
        name="this-machine",
        peak_flops=peak_flops,
        memory_bandwidth=bandwidth,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        link_bandwidth=bandwidth,
        host_bandwidth=bandwidth,
        num_processors=1,
        attention_share=attention / peak_flops,
        gemm_tile_tokens=1,
        attention_tile_queries=1,
        gemm_share=products / peak_flops,
        weights_share=weights / bandwidth,
        memory_share=memory / bandwidth,
        overlap_exponent=1.0 + exponent,
        all_reduce_latency_s=0.0,
        kernel_launch_s=0.0,
        step_overhead_s=overhead,
    )


# Tens of gigaflops and gigabytes a second, an exponent of 2, a tenth of a millisecond.
START = np.log([1e11, 2e10, 5e10, 1e10, 1.0, 1e-4])
# An exponent beyond about 50 is the maximum already, and times below a nanosecond are none.
BOUNDS = np.log([[1e6, 1e6, 1e6, 1e6, 1e-3, 1e-9], [1e16, 1e14, 1e16, 1e14, 50.0, 1.0]])


def predicted_s(accelerator: Accelerator, model: ModelShape, shape: StepShape) -> float:
    scheduled, computed = np.array(shape.rows, dtype=np.int32).T
    return Roofline(accelerator, model, 1).step_time(scheduled, computed, len(scheduled)).total_s


def log_errors(
    parameters: NDArray[np.float64], model: ModelShape, steps: Sequence[MeasuredStep]
) -> NDArray[np.float64]:
    """Return the logarithm of predicted over measured time, shape ``[steps]``."""
    accelerator = accelerator_of(parameters)
    return np.array([math.log(predicted_s(accelerator, model, step.shape) / step.seconds) for step in steps])


def least_squares(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], rounds: int = 200
) -> NDArray[np.float64]:
    """Return the parameters with the least sum of squared errors inside ``BOUNDS``, from ``start``.

    Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", 1963; numerical derivatives.
    """
    parameters, damping = start, 1e-2
    current = errors(parameters)
    for _ in range(rounds):
        slopes = np.stack(
            [(errors(parameters + step) - current) / 1e-4 for step in 1e-4 * np.eye(len(parameters))], axis=1
        )
        normal = slopes.T @ slopes
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slopes.T @ current)
        candidate = np.clip(parameters + np.clip(change, -1.0, 1.0), *BOUNDS)
        tried = errors(candidate)
        gain = current @ current - tried @ tried
        if gain > 0:
            is_done = gain < 1e-10 * (current @ current)
            parameters, current, damping = candidate, tried, damping / 3
            if is_done:
                break
        else:
            damping *= 4
            if damping > 1e9:
                break
    return parameters


def run_ratio(
    directory: Path, model: ModelShape, accelerator: Accelerator, arguments: argparse.Namespace
) -> dict[str, object]:
    """Return a whole run, measured (the lower quartile of several) and simulated, in seconds."""
    num_requests, num_prompt, num_output = (int(part) for part in arguments.run.split(","))
    config = BackendConfig(
        model=str(directory),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=num_requests,
        max_model_len=num_prompt + num_output,
        num_kv_blocks=num_requests * -(-(num_prompt + num_output) // BLOCK_SIZE),
        max_num_batched_tokens=RUN_BUDGET,
        num_threads=arguments.threads,
    )
    engine = OfflineEngine(config)
    draw = np.random.default_rng(arguments.seed)
    prompts = draw.integers(3, model.vocab_size, size=(num_requests, num_prompt)).tolist()
    times = [engine.seconds(prompts, num_output) for _ in range(arguments.rounds + 1)][1:]
    planned = [
        PlannedRequest(number=number, num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        for number in range(num_requests)
    ]
    capacity = ExecutorCapacity(
        num_blocks=config.num_kv_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=config.max_model_len,
        vocab_size=model.vocab_size,
        max_num_rows=num_requests,
    )
    limits = SchedulerLimits(
        max_num_batched_tokens=RUN_BUDGET, max_num_seqs=num_requests, max_steps_in_flight=1, enable_prefix_caching=False
    )
    measurement = RunCollector(num_requests)
    device = VirtualDevice(
        Roofline(accelerator, model, 1), capacity, rng_of(arguments.seed, SAMPLED_TOKENS), host_bandwidth=1.0
    )
    source = PromptSource(arguments.seed, model.vocab_size)
    arrivals = OpenArrivals(planned, [0.0] * num_requests)
    Simulation(InTurn([Station(Scheduler(limits, capacity), device)]), arrivals, source, measurement).run()
    measured_s, simulated_s = float(np.percentile(times, 25)), measurement.steps[-1].end_s
    return {
        "requests": num_requests,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "measured_s": round(measured_s, 4),
        "simulated_s": round(simulated_s, 4),
        "simulated_over_measured": round(simulated_s / measured_s, 4),
    }


def error_summary(errors: NDArray[np.float64]) -> dict[str, float]:
    """Return median, 90th percentile and largest of the relative errors, without sign."""
    relative = np.abs(np.expm1(errors))
    median, p90 = np.percentile(relative, (50, 90)).tolist()
    return {"median": round(median, 4), "p90": round(p90, 4), "max": round(float(relative.max()), 4)}


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint directory; without it a random one of 28M parameters")
    parser.add_argument("--decodes", default="1,2,4,8,16,32", help="decoding rows")
    parser.add_argument("--contexts", default="32,256,1024", help="tokens before a decode or a chunk")
    parser.add_argument("--chunks", default="16,64,128,256,512", help="prompt tokens of a step")
    parser.add_argument("--rounds", type=count, default=6)
    parser.add_argument("--repetitions", type=count, default=4, help="runs of a step per round, after one to warm up")
    parser.add_argument("--run", default="16,256,64", help="the whole run: requests, prompt tokens, output tokens")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the model is large enough for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the result here")
    return parser.parse_args()


def run(directory: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure, fit, and return the record, which is also a device for ``--hardware-file``."""
    decodes, contexts, chunks = (
        [int(part) for part in text.split(",")] for text in (arguments.decodes, arguments.contexts, arguments.chunks)
    )
    config = read_model_config(directory)
    longest = max(contexts) + max(chunks) + 1
    runner = StepRunner(
        BackendConfig(
            model=str(directory),
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=max(decodes) + 1,
            max_model_len=min(longest + BLOCK_SIZE, config.context),
            num_kv_blocks=(max(decodes) + 2) * -(-longest // BLOCK_SIZE),
            num_threads=arguments.threads,
        ),
        config.vocab_size,
        arguments.seed,
    )
    steps = measure(runner, step_shapes(decodes, contexts, chunks), arguments)
    model = shape_of("random-28m" if arguments.model is None else arguments.model.name, config)
    shuffled = random.Random(arguments.seed).sample(steps, len(steps))
    num_held_out = round(HELD_OUT_SHARE * len(steps))
    held_out, fitted = shuffled[:num_held_out], shuffled[num_held_out:]
    parameters = least_squares(lambda tried: log_errors(tried, model, fitted), START)
    accelerator = accelerator_of(parameters)
    return {
        "what": "the simulator's cost model, fitted to steps of the torch backend in float32",
        **provenance(arguments.seed),
        "torch": torch.__version__,
        "median_above_quartile": round(
            statistics.median(step.median_seconds / step.seconds - 1.0 for step in steps), 4
        ),
        "accelerator": msgspec.to_builtins(accelerator),
        "model": msgspec.to_builtins(model),
        "fitted": {"num_steps": len(fitted), "relative_error": error_summary(log_errors(parameters, model, fitted))},
        "held_out": {
            "num_steps": len(held_out),
            "relative_error": error_summary(log_errors(parameters, model, held_out)),
        },
        "whole_run": run_ratio(directory, model, accelerator, arguments),
        "steps": [
            {
                **step.shape._asdict(),
                "measured_ms": round(step.seconds * 1e3, 3),
                "predicted_ms": round(predicted_s(accelerator, model, step.shape) * 1e3, 3),
                "held_out": step in held_out,
            }
            for step in steps
        ],
    }


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model
        if directory is None:
            directory = Path(scratch)
            write_checkpoint(directory, arguments.seed, RANDOM_SHAPE)
        record = run(directory, arguments)
    print("medians above lower quartiles by", record["median_above_quartile"])
    for part in ("fitted", "held_out", "whole_run"):
        print(part.replace("_", " "), record[part])
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
