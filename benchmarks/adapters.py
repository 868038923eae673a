"""The cost of a decode step whose rows run with adapters (LoRA): none, one for all rows, and one for each row; and what
rows without one notice when an adapter is loaded.

Owns: random adapters, one real scheduler, batch state and torch backend, the cases, the table and the result file. Must
not know: how adapters are computed.

The cases take turns, ``--rounds`` times, on one open backend. Each runs ``--requests`` requests to ``--output`` tokens, and
the steps in which all of them decode count: the median of a round, of the best round. Adapters add to every projection, of
a mixture to every expert and router too. The ratio that matters is of "one each" to "one for all": what it costs that the rows do not share their adapter.

    python benchmarks/adapters.py --rank 16 --quantization none --json result.json

With ``--loading``, the rows decode without an adapter, two steps in flight, while an adapter is loaded, ``--rounds`` times
in each of two ways, by turns: between two steps, all of it, as it once was; and read beside them, as executors do. A gap is
the time between the answers of two steps.

    python benchmarks/adapters.py --loading --shape experts --rank 8 --json result.json
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from headway_executor.adapter_changes import AdapterChanges
from headway_executor.backend import BackendConfig, ReadAdapter, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch_state import BatchState
from headway_executor.beside import Nicer
from headway_executor.process import READING_NICENESS, SWITCH_INTERVAL_S
from headway_executor.threaded_backend import ThreadedBackend
from headway_proto.adapters import AdapterChange, LoadedAdapter
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, parser_of, provenance, rest_collector, write_result
from random_adapters import write_adapter
from torch_cpu import SHAPE_135M, write_checkpoint

NUM_PROMPT_TOKENS = 16
NUM_QUIET_GAPS = 100
SHAPES: dict[str, dict[str, object]] = {
    "1100M": SHAPE_135M
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "135M": SHAPE_135M,
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 768,
        "intermediate_size": 384,
        "moe_intermediate_size": 384,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
    },
}
SHAPES["experts"] = SHAPES["mixture"] | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 128,
    "num_hidden_layers": 16,
}
"""The first has four of the 22 layers of a Llama with 1.1 billion parameters; "mixture" is that of ``experts.py``; "experts" has
as many as large mixtures have, all small.
"""


def config_of(model: Path, load: argparse.Namespace, adapters: Mapping[str, Path]) -> BackendConfig:
    """The same for all cases."""
    return BackendConfig(
        model=str(model),
        quantization=load.quantization,
        max_model_len=NUM_PROMPT_TOKENS + load.output + 1,
        max_num_seqs=load.requests,
        num_threads=load.threads,
        swap_space_mib=0,
        options={"kernels": load.kernels},
        adapters={name: str(directory) for name, directory in adapters.items()},
    )


class Bench:
    """An open backend with as many adapters as requests, and a fresh scheduler for each run."""

    def __init__(self, model: Path, directories: Sequence[Path], load: argparse.Namespace) -> None:
        self._backend = TorchBackend()
        self._info = self._backend.open(config_of(model, load, {path.name: path for path in directories}))
        self._state = BatchState(self._info)
        self._load = load

    def step_times(self, adapters: list[str]) -> list[float]:
        """The seconds of each step in which all rows decode, one row for each of ``adapters``."""
        self._state.begin_epoch()
        limits = SchedulerLimits(max_steps_in_flight=1, enable_prefix_caching=False, max_adapters=len(adapters))
        scheduler = Scheduler(limits, ExecutorCapacity.of(self._info))
        for handle, adapter in enumerate(adapters):
            scheduler.add_request(_request(handle, adapter, self._load), 0.0)
        found = []
        while scheduler.num_unfinished:
            started = time.perf_counter()
            diff = scheduler.schedule(0.0)
            assert diff is not None
            result = self._backend.execute(self._state.apply(diff).batch)
            assert isinstance(result, StepResult)
            digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
            scheduler.update(answer_of(diff, result, digest), 0.0)
            if not diff.scheduled_new_reqs and diff.total_num_scheduled_tokens == len(adapters):
                found.append(time.perf_counter() - started)
        return found

    def cases(self) -> dict[str, list[str]]:
        """The adapter of each row, by the name of the case."""
        identities = [adapter.identity for adapter in self._info.adapters]
        return {
            "none": [""] * len(identities),
            "one for all": identities[:1] * len(identities),
            "one each": identities,
        }


class ReadsBetweenSteps(TorchBackend):
    """Loads an adapter whole where it is to take it into use."""

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``: nothing yet."""
        return ReadAdapter(LoadedAdapter(name, directory, ""))

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``."""
        return super().load_adapter(super().read_adapter(read.adapter.name, read.adapter.directory))


class Loading:
    """A backend on its thread, as in an executor, whose rows decode without adapters while one is loaded."""

    def __init__(self, backend: TorchBackend, model: Path, adapter: Path, load: argparse.Namespace) -> None:
        self._backend = ThreadedBackend(backend)
        self._info = self._backend.open(config_of(model, load, {}))
        self._state = BatchState(self._info)
        self._adapter = adapter
        self._load = load

    def gaps(self, *, loads: bool) -> tuple[list[float], float]:
        """The gaps, in seconds, in which the rows decode and, with ``loads``, an adapter is loaded; how long that took."""
        changes = AdapterChanges(self._backend, lambda: None, Nicer("adapters", READING_NICENESS))
        found: list[float] = []
        began = 0.0
        for is_settled, gap in self._decoded():
            changed = changes.take_answers()
            assert not any(answer.error for _, answer in changed)
            if is_settled:
                found.append(gap)
            if loads and is_settled and not began:
                found, began = [], time.perf_counter()
                changes.begin(AdapterChange(1, "adapter", str(self._adapter)))
            elif changed or (not loads and len(found) == NUM_QUIET_GAPS):
                break
        self._backend.unload_adapter("adapter").result()
        return found, time.perf_counter() - began

    def _decoded(self) -> Iterator[tuple[bool, float]]:
        """For each step: whether all rows decode in it and in the one before; the gap before its answer. Rows begin anew."""
        while True:
            self._state.begin_epoch()
            limits = SchedulerLimits(max_steps_in_flight=2, enable_prefix_caching=False)
            scheduler = Scheduler(limits, ExecutorCapacity.of(self._info))
            for handle in range(self._load.requests):
                scheduler.add_request(_request(handle, "", self._load), 0.0)
            flying: deque[tuple[SchedulerOutput, Future[StepResult], int | None]] = deque()
            answered_at, decodes = 0.0, 0
            while scheduler.num_unfinished:
                while (diff := scheduler.schedule(0.0)) is not None:
                    batch = self._state.apply(diff).batch
                    digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
                    flying.append((diff, self._backend.execute(batch), digest))
                diff, future, digest = flying.popleft()
                output = answer_of(diff, future.result(), digest)
                now = time.perf_counter()
                is_decode = not diff.scheduled_new_reqs and diff.total_num_scheduled_tokens == self._load.requests
                decodes = decodes + 1 if is_decode else 0
                yield decodes > 1, now - answered_at
                answered_at = now
                scheduler.update(output, 0.0)

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()


def answer_of(diff: SchedulerOutput, result: StepResult, digest: int | None) -> ExecutorOutput:
    """What an executor reports of a step."""
    assert not result.errors
    return ExecutorOutput(
        epoch=diff.epoch,
        step=diff.step,
        sampled_token_ids=encode_column(result.sampled_token_ids),
        state_digest=digest,
    )


def _request(handle: int, adapter: str, load: argparse.Namespace) -> NewRequestEvent:
    prompt = np.random.default_rng(load.seed + handle).integers(3, 1000, size=NUM_PROMPT_TOKENS)
    return NewRequestEvent(
        origin=Origin(0, handle),
        request_id=str(handle),
        token_ids=prompt.astype(np.int32),
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        max_tokens=load.output,
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=frozenset(),
        adapter=adapter,
    )


def measure(bench: Bench, rounds: int) -> dict[str, dict[str, float]]:
    """Return every case by name; a round before the first warms up."""
    cases = bench.cases()
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, adapters in cases.items():
            found = bench.step_times(adapters)
            if number:
                medians[name].append(statistics.median(found))
    best = {name: min(found) for name, found in medians.items()}
    return {
        name: {
            "step_ms": round(seconds * 1e3, 2),
            "to_none": round(seconds / best["none"], 3),
            "to_one_for_all": round(seconds / best["one for all"], 3),
        }
        for name, seconds in best.items()
    }


def measure_loading(model: Path, adapter: Path, load: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return both ways of loading, and no loading, by name; a round before the first warms up."""
    backends = {"between steps": ReadsBetweenSteps(), "beside them": TorchBackend()}
    ways = {name: Loading(backend, model, adapter, load) for name, backend in backends.items()}
    rest_collector()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    quiet: list[float] = []
    gaps: dict[str, list[list[float]]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(load.rounds + 1):
        for name, way in ways.items():
            idle, (found, took) = way.gaps(loads=False)[0], way.gaps(loads=True)
            if number:
                quiet += idle
                gaps[name].append(found)
                seconds[name].append(took)
    for way in ways.values():
        way.close()
    usual = statistics.median(quiet)
    rows = {"no loading": {"gap_ms": usual * 1e3, "longest_gap_ms": max(quiet) * 1e3}}
    for name, found in gaps.items():
        rows[name] = {
            "gap_ms": statistics.median(itertools.chain(*found)) * 1e3,
            "longest_gap_ms": statistics.median(map(max, found)) * 1e3,
            "seconds": statistics.median(seconds[name]),
        }
    return {name: {field: round(value, 2) for field, value in row.items()} for name, row in rows.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--requests", type=count, default=8, help="rows, and adapters (default: 8)")
    parser.add_argument("--output", type=count, default=24, help="tokens of each request (default: 24)")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--adapter-dtype", choices=("float32", "bfloat16"), default="float32", help="of the files")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--kernels", choices=("auto", "compiled", "eager"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="of the backend; 0: all that pay")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1100M", help="of the random checkpoint")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the random one")
    parser.add_argument("--loading", action="store_true", help="measure what rows notice when an adapter is loaded")
    load = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        model = load.model or Path(scratch) / "model"
        if load.model is None:
            write_checkpoint(model, load.seed, SHAPES[load.shape])
        directories = [Path(scratch) / f"adapter-{number}" for number in range(1 if load.loading else load.requests)]
        for number, directory in enumerate(directories):
            write_adapter(directory, model, load.rank, load.seed + number, getattr(torch, load.adapter_dtype))
        if load.loading:
            rows = measure_loading(model, directories[0], load)
        else:
            rows = measure(Bench(model, directories, load), load.rounds)
    for name, row in rows.items():
        print(f"{name:14}", *(f"{field} {value:>9.2f}" for field, value in row.items()), sep="  ")
    settings = {name: value for name, value in vars(load).items() if name not in {"json", "model", "seed"}}
    record = {
        "benchmark": "adapters",
        **provenance(load.seed),
        "model": "given" if load.model else SHAPES[load.shape],
        "load": settings,
        "results": rows,
    }
    write_result(load.json, record)


if __name__ == "__main__":
    main()
