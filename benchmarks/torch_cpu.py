"""Offline speed of the torch backend on a CPU, against the machine's limits and, on request, against a peer.

Owns: the random checkpoint, the closed loop of real scheduler, batch state and backend, the table and the result file.
Must not know: anything of the backend beyond its protocol.

"Concurrency c" is c prompts of ``--prompt`` tokens at once, with ``--output`` greedy tokens each; the time covers
prefill and decode. The prefill share is measured with one output token. Medians count; compare only figures of one run
(``--peer`` alternates).

    python benchmarks/torch_cpu.py --quantization none,int8 --concurrency 1,8,32
    python benchmarks/torch_cpu.py --model DIR --peer "python vllm_offline.py DIR float32" --json result.json

A peer is any command that prints ``RESULT {"conc": {"8": {"out_tok_s": ...}}}`` as its last such line.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.compiled_weights import is_exact_in_bfloat16
from headway_executor.models.config import ModelConfig
from headway_executor.models.families import read_model_config
from headway_executor.models.tensor_shapes import expected_tensors
from headway_kernels.cpu.library import PackedLinear, Team, WeightForm, load_library
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, counts, parser_of, provenance

SHAPE_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
MAX_MODEL_LEN = 1024
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Speed:
    """The rates of one concurrency in tokens per second."""

    concurrency: int
    output_rate: float
    best_output_rate: float
    prefill_rate: float
    decode_step_ms: float
    floor_step_ms: float
    repetitions: int


@dataclass(frozen=True)
class Limits:
    """The machine: bytes per second read, float32 and int8 operations per second of large products."""

    read_bandwidth: float
    float32_rate: float
    int8_rate: float


class OfflineEngine:
    """Scheduler, batch state and backend in one process, one step at a time."""

    def __init__(self, config: BackendConfig) -> None:
        self._backend = TorchBackend()
        self._info = self._backend.open(config)
        self._state = BatchState(self._info)
        info = self._info
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_steps_in_flight=1,
                enable_prefix_caching=False,
            ),
            ExecutorCapacity.of(info),
        )
        self._num_requests = 0

    def seconds(self, prompts: list[list[int]], num_output: int) -> float:
        """Return the wall time to run all ``prompts``, admitted together, to ``num_output`` greedy tokens each."""
        started = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            self._scheduler.add_request(self._request(prompt, num_output), now=0.0)
        num_tokens = 0
        while self._scheduler.num_unfinished:
            diff = self._scheduler.schedule(now=0.0)
            assert diff is not None
            result = self._backend.execute(self._state.apply(diff).batch)
            assert isinstance(result, StepResult)
            output = ExecutorOutput(
                epoch=diff.epoch,
                step=diff.step,
                sampled_token_ids=encode_column(result.sampled_token_ids),
                errors=result.errors,
                state_digest=self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None,
            )
            num_tokens += len(self._scheduler.update(output, now=0.0).token_ids)
        assert num_tokens == len(prompts) * num_output
        return time.perf_counter() - started

    def _request(self, prompt: list[int], num_output: int) -> NewRequestEvent:
        return NewRequestEvent(
            origin=Origin(0, self._num_requests),
            request_id=f"request-{self._num_requests}",
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            max_tokens=num_output,
            sampling=GREEDY,
            stop_token_ids=frozenset(),
        )


def write_checkpoint(
    directory: Path, seed: int, shape: dict[str, object] | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write a random checkpoint, of the 135M shape by default."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape or SHAPE_135M, indent=1))
    torch.manual_seed(seed)
    shapes = expected_tensors(read_model_config(directory))
    tensors = {
        name: (torch.ones(s) if "norm" in name else torch.randn(s) * 0.02).to(dtype) for name, s in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def measure(
    engine: OfflineEngine, model: ModelConfig, concurrency: int, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return the seconds of ``--repetitions`` full runs and of as many prefill-only runs."""
    draw = random.Random(arguments.seed)

    def prompts() -> list[list[int]]:
        return [[draw.randrange(3, model.vocab_size) for _ in range(arguments.prompt)] for _ in range(concurrency)]

    engine.seconds(prompts(), 4)
    full, prefill = [], []
    for _ in range(arguments.repetitions):
        full.append(engine.seconds(prompts(), arguments.output))
        prefill.append(engine.seconds(prompts(), 1))
    return full, prefill


def speed_of(
    concurrency: int, full: list[float], prefill: list[float], floor_ms: float, arguments: argparse.Namespace
) -> Speed:
    seconds, prefill_seconds = statistics.median(full), statistics.median(prefill)
    return Speed(
        concurrency=concurrency,
        output_rate=round(concurrency * arguments.output / seconds, 1),
        best_output_rate=round(concurrency * arguments.output / min(full), 1),
        prefill_rate=round(concurrency * arguments.prompt / prefill_seconds, 1),
        decode_step_ms=round((seconds - prefill_seconds) / (arguments.output - 1) * 1e3, 2),
        floor_step_ms=round(floor_ms, 2),
        repetitions=len(full),
    )


def machine_limits() -> Limits:
    """Return the best of several: reading 1 GB, and large float32 and int8 products (torch's or the CPU kernels')."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    big = torch.ones(1 << 28)
    square = torch.randn(2048, 2048)
    operations = 2 * 2048**3
    float32_seconds, int8_seconds = best_seconds(lambda: square @ square), math.inf
    library = load_library()
    if library is not None:
        team = Team(library, torch.get_num_threads())
        dense = PackedLinear(library, square, None, WeightForm.FLOAT32)
        narrow = PackedLinear(library, square, None, WeightForm.INT8)
        float32_seconds = min(float32_seconds, best_seconds(lambda: dense(team, square)))
        int8_seconds = best_seconds(lambda: narrow(team, square))
    return Limits(
        read_bandwidth=big.nbytes / best_seconds(big.sum),
        float32_rate=operations / float32_seconds,
        int8_rate=operations / int8_seconds,
    )


def best_seconds(work: object, repetitions: int = 8) -> float:
    assert callable(work)
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def floor_ms(model: ModelConfig, width: int, concurrency: int, limits: Limits) -> float:
    """Return a decode step's least time: weights of ``width`` bytes read once, or the products, if longer."""
    weights = sum(
        int(np.prod(shape))
        for name, shape in expected_tensors(model).items()
        if len(shape) == 2 and "embed" not in name
    )
    weights += model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    rate = limits.int8_rate if width == 1 else limits.float32_rate
    return max(weights * width / limits.read_bandwidth, 2 * weights * concurrency / rate) * 1e3


def weight_bytes(directory: Path, quantization: str) -> int:
    """Return the bytes of one weight in the CPU kernels."""
    if quantization == "int8":
        return 1
    with Checkpoint(directory) as checkpoint:
        return 2 if all(is_exact_in_bfloat16(checkpoint.read(name)) for name in checkpoint.headers) else 4


def startup_seconds(model: Path, quantization: str) -> float:
    """Return the time from starting Python to a backend that has run a step."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--model", str(model), "--quantization", quantization, "--only-open"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def run_peer(command: str) -> dict[str, dict[str, float]]:
    """Run a peer and return its results by concurrency."""
    finished = subprocess.run(shlex.split(command), check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    conc: dict[str, dict[str, float]] = json.loads(lines[-1].removeprefix("RESULT "))["conc"]
    return conc


def backend_config(model: Path, quantization: str, arguments: argparse.Namespace) -> BackendConfig:
    return BackendConfig(
        model=str(model),
        dtype=arguments.dtype,
        quantization=quantization,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        num_kv_blocks=arguments.num_kv_blocks,
        num_threads=arguments.threads,
    )


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--model", type=Path, help="checkpoint directory; without it a random one of 135M parameters")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none", help="none, int8 or both, with a comma between")
    parser.add_argument("--concurrency", type=counts, default="1,8,32")
    parser.add_argument("--prompt", type=count, default=128, help="tokens per prompt")
    parser.add_argument("--output", type=count, default=64, help="output tokens per request")
    parser.add_argument("--repetitions", type=count, default=3)
    parser.add_argument("--rounds", type=count, default=2, help="how often ours and the peer alternate")
    parser.add_argument("--num-kv-blocks", type=count, default=1024)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the model is large enough for")
    parser.add_argument("--peer", default="", help="command that measures a peer on the same model and load")
    parser.add_argument("--only-open", action="store_true", help="open the backend and exit")
    return parser.parse_args()


def run(model_directory: Path, arguments: argparse.Namespace) -> dict[str, object]:
    model = read_model_config(model_directory)
    quantizations = arguments.quantization.split(",")
    sizes = arguments.concurrency
    startup = {name: round(startup_seconds(model_directory, name), 1) for name in quantizations}
    widths = {name: weight_bytes(model_directory, name) for name in quantizations}
    limits = machine_limits()
    times: dict[tuple[str, int], tuple[list[float], list[float]]] = {
        (name, size): ([], []) for name in quantizations for size in sizes
    }
    peer: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(arguments.rounds if arguments.peer else 1):
        for name in quantizations:
            engine = OfflineEngine(backend_config(model_directory, name, arguments))
            for size in sizes:
                for kept, new in zip(times[name, size], measure(engine, model, size, arguments), strict=True):
                    kept.extend(new)
        if arguments.peer:
            for size, result in run_peer(arguments.peer).items():
                peer[int(size)].append(result["out_tok_s"])
    record: dict[str, object] = {
        "benchmark": "torch_cpu",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **provenance(arguments.seed),
        "torch": torch.__version__,
        "load": {"prompt_tokens": arguments.prompt, "output_tokens": arguments.output, "dtype": arguments.dtype},
        "limits": {name: f"{value / 1e9:.1f}e9" for name, value in asdict(limits).items()},
        "startup_s": startup,
        "peer_output_rates": peer if arguments.peer else None,
    }
    record["results"] = [
        report(
            name, speed_of(size, *times[name, size], floor_ms(model, widths[name], size, limits), arguments), peer[size]
        )
        for name in quantizations
        for size in sizes
    ]
    return record


def report(quantization: str, speed: Speed, peer_rates: list[float]) -> dict[str, object]:
    """Return one row of the result, and print it."""
    ratio = round(speed.output_rate / statistics.median(peer_rates), 2) if peer_rates else None
    print(
        f"{quantization:>5} {speed.concurrency:>4} {speed.output_rate:>9} {speed.best_output_rate:>9} "
        f"{speed.prefill_rate:>9} {speed.decode_step_ms:>9} {speed.floor_step_ms:>9} {f'{ratio}x' if ratio else '-':>7}"
    )
    return {"quantization": quantization, **asdict(speed), "ratio_to_peer": ratio}


def main() -> None:
    arguments = parse_arguments()
    if arguments.only_open:
        TorchBackend().open(backend_config(arguments.model, arguments.quantization, arguments))
        return
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            write_checkpoint(Path(scratch), arguments.seed)
        print("quant conc  tokens/s      best   prefill   step ms  floor ms    peer")
        record = run(arguments.model or Path(scratch), arguments)
    print(f"startup s {record['startup_s']}, limits {record['limits']}")
    text = json.dumps(record, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
