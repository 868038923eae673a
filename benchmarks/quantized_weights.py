"""What int8 and int4 weights cost in quality and bring in speed, beside float32 and bfloat16.

Owns: scoring a text with the executor's own model code, decode steps in turns. Must not know: serving.

    python benchmarks/quantized_weights.py --json result.json
    python benchmarks/quantized_weights.py --model DIR --text held_out.txt --rounds 0
    python benchmarks/quantized_weights.py --threads 1 --clock processor
    python benchmarks/quantized_weights.py --variant avx2 --rows 1,8,16,24,32,64

With the processor's clock, a second is one of this process's own, so other programs disturb less.

The loss is the mean negative log-likelihood per token, in nats, over consecutive windows of the text. The embedded demo
model is the default; its relative difference has to stay below 1%. The speeds are of a random model of 135M parameters,
whose weights come from memory.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

import headway
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.compiled_loading import load_compiled
from headway_executor.models.families import read_model_config
from headway_kernels.cpu.library import CpuLibrary, installed_variants, runs_here, variant_of
from program import count, count_or_none, counts, parser_of, provenance, write_result
from torch_cpu import write_checkpoint

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
CONTEXT = 256


class Precision(NamedTuple):
    """What the kernels are asked for; see ``load_compiled``."""

    quantization: str = "none"
    activations: str = "auto"
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Form:
    """A precision, and the dtype of the checkpoint."""

    name: str
    precision: Precision
    checkpoint: str = "float32"


FORMS = (
    Form("float32", Precision()),
    Form("bfloat16 weights", Precision(), "bfloat16"),
    Form("bfloat16", Precision(dtype=torch.bfloat16), "bfloat16"),
    Form("int8", Precision("int8")),
    Form("int8, else bfloat16", Precision("int8", dtype=torch.bfloat16)),
    Form("int4", Precision("int4")),
    Form("int4, else bfloat16", Precision("int4", dtype=torch.bfloat16)),
    Form("int4, exact activations", Precision("int4", "exact")),
    Form("int4, activations in bfloat16", Precision("int4", "bfloat16", torch.bfloat16)),
)
CLOCKS = {"wall": time.perf_counter, "processor": time.thread_time}


def held_out_loss(library: CpuLibrary, model: Path, token_ids: list[int], window: int, precision: Precision) -> float:
    """Return the mean loss per token in nats; every window of ``window`` tokens is scored alone."""
    config = read_model_config(model)
    num_threads = len(os.sched_getaffinity(0))
    with torch.inference_mode(), Checkpoint(model) as checkpoint:
        decoder = load_compiled(
            config,
            checkpoint,
            library,
            max_model_len=window,
            block_size=window,
            num_threads=num_threads,
            **precision._asdict(),
        )
        pool = torch.zeros(config.num_layers, 1, decoder.block_floats, dtype=decoder.kv_dtype)
        total, count = 0.0, 0
        for start in range(0, len(token_ids) - 1, window):
            part = np.array(token_ids[start : start + window + 1], dtype=np.int32)
            places = np.arange(len(part) - 1)
            logits = decoder.forward(
                token_ids=part[:-1],
                num_tokens=np.array([len(places)]),
                first_positions=np.zeros(1, np.int64),
                tables=np.zeros((1, 1), np.int32),
                sampled=places,
                pool=pool,
            )
            total += float(functional.cross_entropy(logits, torch.from_numpy(part[1:]).long(), reduction="sum"))
            count += len(places)
    return total / count


def decode_rates(
    library: CpuLibrary, form: Form, directory: Path, sizes: list[int], arguments: argparse.Namespace
) -> Callable[[], dict[int, float]]:
    """Load a model in a form; return what measures its output tokens per second, by rows, over some decode steps."""
    config = read_model_config(directory)
    with torch.inference_mode(), Checkpoint(directory) as checkpoint:
        decoder = load_compiled(
            config,
            checkpoint,
            library,
            max_model_len=CONTEXT,
            block_size=CONTEXT,
            num_threads=arguments.threads,
            **form.precision._asdict(),
        )
    pool = torch.zeros(config.num_layers, max(sizes), decoder.block_floats, dtype=decoder.kv_dtype)

    def step(rows: int, position: int) -> None:
        decoder.forward(
            token_ids=np.full(rows, 7, dtype=np.int32),
            num_tokens=np.ones(rows, np.int64),
            first_positions=np.full(rows, position),
            tables=np.arange(rows, dtype=np.int32).reshape(-1, 1),
            sampled=np.arange(rows),
            pool=pool,
        )

    def measure() -> dict[int, float]:
        rates = {}
        clock = CLOCKS[arguments.clock]
        for rows in sizes:
            step(rows, 0)
            started = clock()
            for position in range(1, 1 + arguments.steps):
                step(rows, position)
            rates[rows] = rows * arguments.steps / (clock() - started)
        return rates

    return measure


def speeds(library: CpuLibrary, arguments: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Return the output tokens per second of each form, by rows: the median over the rounds, in which they take turns."""
    with tempfile.TemporaryDirectory(prefix="headway-quantized-") as name:
        directories = {dtype: Path(name) / dtype for dtype in ("float32", "bfloat16")}
        for dtype, directory in directories.items():
            write_checkpoint(directory, arguments.seed, dtype=getattr(torch, dtype))
        runs = {
            form.name: decode_rates(library, form, directories[form.checkpoint], arguments.rows, arguments)
            for form in FORMS
        }
    rounds = [{name: measure() for name, measure in runs.items()} for _ in range(arguments.rounds)]
    return {
        name: {rows: round(statistics.median(each[name][rows] for each in rounds), 1) for rows in arguments.rows}
        for name in runs
    }


def held_out_tokens(model: Path, text: Path, most: int) -> list[int]:
    """Return the first ``most`` tokens of a text, or all for 0, by a model's tokenizer."""
    token_ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text.read_text()).ids
    return token_ids[: most or None]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=DEMO_MODEL / "held_out.txt")
    parser.add_argument("--window", type=count, default=256, help="tokens per window")
    parser.add_argument("--tokens", type=int, default=0, help="score only the first so many tokens; 0: all")
    parser.add_argument("--rows", type=counts, default="1,8,32", help="rows of a decode step")
    parser.add_argument("--steps", type=count, default=16, help="decode steps of a round")
    parser.add_argument("--rounds", type=count_or_none, default=7, help="0: only the losses")
    parser.add_argument("--threads", type=count, default=2)
    variants = {variant_of(path): path for path in installed_variants() if runs_here(path)}
    if not variants:
        parser.error("the CPU kernels are not installed, or do not run on this processor")
    best = next(iter(variants))
    parser.add_argument("--variant", choices=variants, default=best, help="of the instruction sets (default: the best)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: only with --threads 1")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and arguments.threads > 1:
        parser.error(f"--clock processor measures one thread; --threads is {arguments.threads}; allowed: 1")
    arguments.library = CpuLibrary(variants[arguments.variant])
    return arguments


def main() -> None:
    arguments = parse_arguments()
    token_ids = held_out_tokens(arguments.model, arguments.text, arguments.tokens)
    library: CpuLibrary = arguments.library
    losses = {
        precision: held_out_loss(library, arguments.model, token_ids, arguments.window, precision)
        for precision in dict.fromkeys(form.precision for form in FORMS)
    }
    exact = losses[Precision()]
    rates = speeds(library, arguments) if arguments.rounds else {}
    result: dict[str, object] = {
        "benchmark": "quantized_weights",
        "variant": library.variant,
        "tokens": len(token_ids),
        "threads": arguments.threads,
        "clock": arguments.clock,
        **provenance(arguments.seed),
        "results": [
            {
                "form": form.name,
                "nats_per_token": round(losses[form.precision], 5),
                "relative_difference": round(losses[form.precision] / exact - 1, 5),
                "decode_tokens_per_s": rates.get(form.name),
            }
            for form in FORMS
        ],
    }
    print(json.dumps(result, indent=1))
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
