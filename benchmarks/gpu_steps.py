"""Steps of the triton backend on one device, each beside its floor: the time of reading and computing alone.

Owns: the shapes, the scripted steps, the floors, the table and the result file. Must not know: anything of the backend
beyond its protocol, except attention and swapping, whose kernels are timed alone.

A floor is the larger of bytes over bandwidth and operations over the rate of large products, measured in the same run.
Weights and each row's keys and values are read once, of experts as many as tokens reach that choose at random; operations are two per weight and token, and four per head
component and visible position. Weights and prompts are random, because zeros run faster. Two steps are in flight, timed
by the device's clock.

    python benchmarks/gpu_steps.py                                   # Llama-3-8B in bfloat16 on the CUDA device
    python benchmarks/gpu_steps.py --sections decode,swap --json result.json
    TRITON_INTERPRET=1 python benchmarks/gpu_steps.py --shape tiny --device cpu     # tries the benchmark, not the speed
"""

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn import functional

from headway_executor.backend import BackendConfig, NewRow, StepBatch, StepResult
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.host_speed import measure_device, measure_host
from headway_executor.models.config import ModelConfig
from headway_executor.models.families import read_model_config
from headway_executor.models.loading import expected_tensors
from headway_kernels.gpu.attention import AttentionRows, AttentionWorkspace, paged_attention, plan_attention
from headway_kernels.gpu.attention_tuning import tokens_per_tile
from headway_proto.sampling import SamplingParams
from program import parser_of, provenance, write_result

SECTIONS = ("decode", "prefill", "mixed", "attention", "swap")
GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16
NO_ROWS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Shape:
    """A model's config.json, and the sizes that are tried with it."""

    config: dict[str, object]
    max_model_len: int
    decode_batches: tuple[int, ...]
    decode_context: int
    chunk: int
    mixed: tuple[int, int]
    attention_decode: tuple[int, int]
    attention_prefill: int
    swapped_tokens: int
    repetitions: int


LLAMA3_8B = Shape(
    config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
    max_model_len=8192,
    decode_batches=(1, 64, 256),
    decode_context=1024,
    chunk=2048,
    mixed=(64, 1024),
    attention_decode=(64, 8192),
    attention_prefill=4096,
    swapped_tokens=4096,
    repetitions=40,
)
TINY = Shape(
    config={
        **LLAMA3_8B.config,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    },
    max_model_len=128,
    decode_batches=(1, 4),
    decode_context=32,
    chunk=32,
    mixed=(3, 16),
    attention_decode=(2, 64),
    attention_prefill=32,
    swapped_tokens=32,
    repetitions=3,
)
QWEN3_30B = replace(
    LLAMA3_8B,
    config={
        **LLAMA3_8B.config,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
)
TINY_MIXTURE = replace(
    TINY,
    config={
        **TINY.config,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
)
SHAPES = {"llama3-8b": LLAMA3_8B, "qwen3-30b-a3b": QWEN3_30B, "tiny": TINY, "tiny-mixture": TINY_MIXTURE}
BYTES_OF_CODES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 32}
"""Of a weight; codes of 4 bits have a scale for 32."""


@dataclass(frozen=True)
class Limits:
    """The device's limits: bytes per second of a copy (read and written), operations per second of a large product in
    bfloat16 (on a CPU in float32), and bytes per second between pinned memory and the device, out and in.
    """

    bandwidth: float
    product_rate: float
    out_bandwidth: float
    in_bandwidth: float


@dataclass(frozen=True)
class Line:
    """One line of the table: times in milliseconds; ``share`` is floor over measured, to be at least ``asked``."""

    name: str
    measured_ms: float
    floor_ms: float
    asked: float

    @property
    def share(self) -> float:
        """Floor over measured time."""
        return self.floor_ms / self.measured_ms if self.measured_ms else 0.0


class Device:
    """Times work on a device by its own clock; on a CPU, by the host's."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repetitions: int, warm_ups: int = 3) -> float:
        """The median time of ``work``, seconds."""
        for _ in range(warm_ups):
            work()
        self.synchronize()
        return median(list(self._times(work, repetitions)))

    def _times(self, work: Callable[[], object], repetitions: int) -> Iterator[float]:
        for _ in range(repetitions):
            if not self.is_cuda:
                started = time.perf_counter()
                work()
                yield time.perf_counter() - started
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            yield start.elapsed_time(end) / 1e3


def measure_limits(device: Device) -> Limits:
    """Measure as ``headway doctor`` does; a CPU has only the copy, no link."""
    if device.is_cuda:
        speed = measure_device(device.device.index or 0, say)
        return Limits(
            bandwidth=speed.copy_bytes_per_s,
            product_rate=speed.bfloat16_flops,
            out_bandwidth=speed.to_host_bytes_per_s,
            in_bandwidth=speed.from_host_bytes_per_s,
        )
    host = measure_host(say)
    return Limits(host.copy_bytes_per_s, host.float32_flops, host.copy_bytes_per_s, host.copy_bytes_per_s)


class Floors:
    """Bytes and operations of a model's steps over the limits of a device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, quantization: str, limits: Limits) -> None:
        self._config = config
        self._element = dtype.itemsize
        self._limits = limits
        # The embedding is looked up, not multiplied with; where it is the head too, it is read as that.
        self._num_head = config.vocab_size * config.hidden_size
        num_embeddings = 1 if config.tie_word_embeddings else 2
        sizes = {name: int(np.prod(shape)) for name, shape in expected_tensors(config).items()}
        self._num_in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
        self._num_in_layers = sum(sizes.values()) - num_embeddings * self._num_head - self._num_in_experts
        routings = [layer.feed_forward.experts.routing for layer in config.layers if layer.feed_forward.experts]
        self._chosen = routings[0].num_chosen / routings[0].num_experts if routings else 1.0
        self._bytes_of_weight = BYTES_OF_CODES.get(quantization, self._element)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position, all layers."""
        config = self._config
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * self._element

    def step_s(self, contexts: list[int], chunk: int = 0) -> float:
        """Return the floor of a step of decodes after ``contexts`` positions each, and one chunk of a new prompt."""
        config, limits = self._config, self._limits
        num_rows, num_tokens = len(contexts) + bool(chunk), len(contexts) + chunk
        weights = self._num_in_layers + self._num_in_experts * (1 - (1 - self._chosen) ** num_tokens)
        num_bytes = weights * self._bytes_of_weight + self._num_head * self._element
        num_bytes += self.kv_bytes_per_token * (sum(contexts) + num_tokens)
        per_pair = 4 * config.num_heads * config.head_dim * config.num_layers
        pairs = sum(contexts) + chunk * (chunk + 1) // 2
        multiplied = self._num_in_layers + self._num_in_experts * self._chosen
        operations = 2 * multiplied * num_tokens + 2 * self._num_head * num_rows + per_pair * pairs
        return max(num_bytes / limits.bandwidth, operations / limits.product_rate)


class SteppedBackend:
    """The backend with rows that get blocks as from the executor."""

    def __init__(
        self, backend: TritonBackend, num_blocks: int, vocab_size: int, max_num_rows: int, max_num_tokens: int
    ) -> None:
        self._backend = backend
        self._max_num_tokens = max_num_tokens
        self._random = np.random.default_rng(0)
        self._free = self._random.permutation(num_blocks).astype(np.int32).tolist()
        self._vocab_size = vocab_size
        self._computed = np.zeros(max_num_rows, dtype=np.int32)
        self._held: dict[int, int] = {}
        self._gone: list[int] = []
        self._step = 0

    def start(self, row: int, num_tokens: int) -> NewRow:
        """Start a row of random tokens; ``run`` gives it blocks."""
        self._computed[row] = 0
        self._held[row] = 0
        token_ids = self._random.integers(0, self._vocab_size, num_tokens).astype(np.int32)
        return NewRow(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            sampling=GREEDY,
        )

    def forget(self, row: int) -> None:
        """End a row. Its blocks are not reused; a run of this length has enough."""
        self._held.pop(row)
        self._gone.append(row)

    def fill(self, num_rows: int, context: int) -> None:
        """Start rows ``0 .. num_rows - 1`` and compute ``context`` tokens of each, so that they decode."""
        for row in range(num_rows):
            new = (self.start(row, context),)
            for first in range(0, context, self._max_num_tokens):
                count = min(self._max_num_tokens, context - first)
                device_ms(iter([self.run({row: count}, new, samples=first + count == context)]))
                new = ()

    def run(
        self, counts: dict[int, int], new: tuple[NewRow, ...] = (), *, samples: bool = True
    ) -> StepResult | Future[StepResult]:
        """One step of ``counts`` tokens by row."""
        rows = np.array(sorted(counts), dtype=np.int32)
        scheduled = np.array([counts[row] for row in rows.tolist()], dtype=np.int32)
        added = [(row, self._free.pop()) for row in rows.tolist() for _ in range(self._missing(row, counts[row]))]
        batch = StepBatch(
            step=self._step,
            finished_rows=np.array(self._gone, dtype=np.int32),
            new_rows=new,
            new_blocks=np.array(added, dtype=np.int32).reshape(-1, 2).T,
            rows=rows,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=self._computed[rows],
            samples=np.full(len(rows), int(samples), dtype=np.int32),
            block_table=np.empty((0, 0), dtype=np.int32),
        )
        self._computed[rows] += scheduled
        self._gone = []
        self._step += 1
        return self._backend.execute(batch)

    def _missing(self, row: int, count: int) -> int:
        needed = -(-int(self._computed[row] + count) // BLOCK_SIZE)
        missing = needed - self._held[row]
        self._held[row] += max(0, missing)
        return max(0, missing)


def device_ms(results: Iterator[StepResult | Future[StepResult]], in_flight: int = 2) -> float:
    """Run the steps, at most ``in_flight`` at once; return the median of their times without the first ones."""
    pending: deque[StepResult | Future[StepResult]] = deque()
    times: list[int] = []

    def collect() -> None:
        oldest = pending.popleft()
        times.append((oldest.result() if isinstance(oldest, Future) else oldest).device_time_us)

    for result in results:
        pending.append(result)
        if len(pending) >= in_flight:
            collect()
    while pending:
        collect()
    return median(times[len(times) // 4 :]) / 1e3


class StepBenchmark:
    """One open backend, and its lines of the table."""

    def __init__(self, shape: Shape, device: Device, dtype: str, seed: int, quantization: str) -> None:
        self._shape = shape
        self._device = device
        self._max_num_rows = max(*shape.decode_batches, shape.mixed[0] + 1)
        self._max_num_tokens = max(shape.chunk, sum(shape.mixed))
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(shape.config))
            self.config = read_model_config(Path(directory))
            self._backend = TritonBackend()
            self.info = self._backend.open(
                BackendConfig(
                    model=directory,
                    device=str(device.device),
                    dtype=dtype,
                    quantization=quantization,
                    block_size=BLOCK_SIZE,
                    max_num_seqs=self._max_num_rows,
                    max_num_batched_tokens=self._max_num_tokens,
                    max_model_len=shape.max_model_len,
                    swap_space_mib=0,
                    num_kv_blocks=0 if device.is_cuda else 256,
                    seed=seed,
                    options={"weights": "random"},
                    progress=lambda what, done, total: say(f"{what} {done}/{total}"),
                )
            )
        self.dtype = getattr(torch, self.info.dtype)

    def decode(self, floors: Floors) -> list[Line]:
        """Decodes of every batch size."""
        lines = []
        for batch in self._shape.decode_batches:
            steps, context = self._stepped(), self._shape.decode_context
            say(f"computing {batch} prompts of {context}")
            steps.fill(batch, context)
            counts = dict.fromkeys(range(batch), 1)
            measured = device_ms(steps.run(counts) for _ in range(self._shape.repetitions))
            floor = floors.step_s([context + self._shape.repetitions // 2] * batch) * 1e3
            lines.append(Line(f"decode, {batch} rows after {context}", measured, floor, 0.85))
        return lines

    def prefill(self, floors: Floors) -> list[Line]:
        """Run a chunk of a new prompt, repeatedly."""
        chunk = self._shape.chunk
        measured = device_ms(self._chunks(0, chunk))
        return [Line(f"prefill, chunk of {chunk}", measured, floors.step_s([], chunk) * 1e3, 0.70)]

    def mixed(self, floors: Floors) -> list[Line]:
        """Decodes beside a chunk."""
        num_decodes, chunk = self._shape.mixed
        context = self._shape.decode_context
        measured = device_ms(self._chunks(num_decodes, chunk))
        floor = floors.step_s([context] * num_decodes, chunk) * 1e3
        return [Line(f"mixed, {num_decodes} decodes and a chunk of {chunk}", measured, floor, 1 / 1.15)]

    def close(self) -> None:
        """Close the backend."""
        self._backend.close()

    def _chunks(self, num_decodes: int, chunk: int) -> Iterator[StepResult | Future[StepResult]]:
        steps = self._stepped()
        steps.fill(num_decodes, self._shape.decode_context)
        decodes = dict.fromkeys(range(num_decodes), 1)
        for number in range(max(4, self._shape.repetitions // 4)):
            if number:
                steps.forget(num_decodes)
            new = (steps.start(num_decodes, chunk),)
            yield steps.run({**decodes, num_decodes: chunk}, new)

    def _stepped(self) -> SteppedBackend:
        return SteppedBackend(
            self._backend, self.info.num_blocks, self.config.vocab_size, self._max_num_rows, self._max_num_tokens
        )


class AttentionBenchmark:
    """The attention kernels alone, over random keys and values of one layer."""

    def __init__(self, config: ModelConfig, device: Device, dtype: torch.dtype, repetitions: int) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._repetitions = repetitions

    def decode(self, batch: int, context: int, bandwidth: float) -> Line:
        """Run ``batch`` decodes after ``context`` positions each."""
        config = self._config
        work = self._attention(batch, context, 1)
        measured = self._device.seconds(work, self._repetitions)
        num_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * self._dtype.itemsize
        return Line(f"attention, {batch} decodes after {context}", measured * 1e3, num_bytes / bandwidth * 1e3, 0.85)

    def prefill(self, length: int) -> Line:
        """Run one prompt of ``length`` tokens, beside torch's fused attention over contiguous keys and values."""
        config = self._config
        work = self._attention(1, length, length)
        measured = self._device.seconds(work, self._repetitions)
        query, key, value = (
            torch.randn(1, heads, length, config.head_dim, dtype=self._dtype, device=self._device.device)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        beside = self._device.seconds(
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
            self._repetitions,
        )
        return Line(f"attention, prompt of {length} (floor: torch's)", measured * 1e3, beside * 1e3, 0.8)

    def _attention(self, batch: int, context: int, num_queries: int) -> Callable[[], None]:
        config, device = self._config, self._device.device
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_each
        pool = torch.randn(
            num_blocks, 2 * config.num_kv_heads, BLOCK_SIZE, config.head_dim, dtype=self._dtype, device=device
        )
        tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(batch, blocks_each)
        width = config.num_heads * config.head_dim
        query = torch.randn(batch * num_queries, width, dtype=self._dtype, device=device)
        out = torch.empty_like(query)
        plan = torch.zeros(2, batch, dtype=torch.int32, device=device)
        rows = AttentionRows(
            rows=torch.arange(batch, dtype=torch.int32, device=device),
            query_start=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            kv_length=torch.full((batch,), context, dtype=torch.int32, device=device),
            block_tables=tables,
            split_ends=plan[0],
            tile_ends=plan[1],
            splits_per_item=torch.ones(1, dtype=torch.int32, device=device),
            tokens_per_tile=tokens_per_tile(
                config.num_heads, config.num_kv_heads, config.head_dim, self._dtype, device
            ),
        )
        plan_attention(rows, config.num_kv_heads)
        workspace = AttentionWorkspace.allocate(batch, config.num_heads, config.head_dim, device)
        return lambda: paged_attention(
            query,
            pool,
            out,
            rows,
            workspace,
            num_kv_heads=config.num_kv_heads,
            scale=config.head_dim**-0.5,
            has_decodes=num_queries == 1,
            has_chunks=num_queries > 1,
        )


def swap_lines(config: ModelConfig, device: Device, dtype: torch.dtype, num_tokens: int, limits: Limits) -> list[Line]:
    """Measure all blocks of a request, scattered, out to pinned memory and back, in one launch each."""
    from headway_kernels.gpu import block_moves

    count = -(-num_tokens // BLOCK_SIZE)
    shape = (2 * config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    layers = torch.randn(config.num_layers, 4 * count, *shape, dtype=dtype, device=device.device)
    host = torch.empty(count, config.num_layers, *shape, dtype=dtype, pin_memory=True)
    scattered = torch.randperm(4 * count)[:count].to(torch.int32)
    beside = torch.arange(count, dtype=torch.int32)
    out_pairs, in_pairs = (torch.stack(pair).to(device.device) for pair in ((scattered, beside), (beside, scattered)))
    out_s = device.seconds(lambda: block_moves.swap_out(layers, host, out_pairs), 10)
    in_s = device.seconds(lambda: block_moves.swap_in(layers, host, in_pairs), 10)
    return [
        Line(f"swap out, {num_tokens} tokens", out_s * 1e3, host.nbytes / limits.out_bandwidth * 1e3, 0.8),
        Line(f"swap in, {num_tokens} tokens", in_s * 1e3, host.nbytes / limits.in_bandwidth * 1e3, 0.8),
    ]


def say(text: str) -> None:
    sys.stderr.write(f"gpu_steps: {text}\n")
    sys.stderr.flush()


def run(arguments: argparse.Namespace) -> dict[str, object]:
    shape = SHAPES[arguments.shape]
    device = Device(arguments.device)
    torch.manual_seed(arguments.seed)
    sections = arguments.sections.split(",")
    say("opening the backend")
    steps = StepBenchmark(shape, device, arguments.dtype, arguments.seed, arguments.quantization)
    limits = measure_limits(device)
    floors = Floors(steps.config, steps.dtype, arguments.quantization, limits)
    lines: list[Line] = []
    for section in ("decode", "prefill", "mixed"):
        if section in sections:
            say(section)
            lines += getattr(steps, section)(floors)
    steps.close()
    if "attention" in sections:
        say("attention")
        attention = AttentionBenchmark(steps.config, device, steps.dtype, shape.repetitions)
        lines.append(attention.decode(*shape.attention_decode, limits.bandwidth))
        lines.append(attention.prefill(shape.attention_prefill))
    if "swap" in sections and device.is_cuda:
        say("swap")
        lines += swap_lines(steps.config, device, steps.dtype, shape.swapped_tokens, limits)
    return {
        **provenance(arguments.seed),
        "device": torch.cuda.get_device_name(device.device) if device.is_cuda else "cpu, interpreted",
        "shape": arguments.shape,
        "dtype": steps.info.dtype,
        "quantization": arguments.quantization,
        "limits": asdict(limits),
        "lines": [{**asdict(line), "share": line.share} for line in lines],
    }


def table(result: dict[str, object]) -> str:
    limits = result["limits"]
    rates = (
        f"copy {limits['bandwidth'] / 1e12:.2f} TB/s, products {limits['product_rate'] / 1e12:.0f} TFLOP/s, "
        f"pinned memory {limits['out_bandwidth'] / 1e9:.1f} GB/s out, {limits['in_bandwidth'] / 1e9:.1f} GB/s in"
    )
    rows = [
        f"{result['device']}, {result['shape']}, {result['dtype']}, quantization {result['quantization']}",
        rates,
        "",
        f"{'step':48} {'measured ms':>11} {'floor ms':>9} {'share':>6} {'asked':>6}",
    ]
    for line in result["lines"]:
        met = "" if line["share"] >= line["asked"] else "  missed"
        rows.append(
            f"{line['name']:48} {line['measured_ms']:11.3f} {line['floor_ms']:9.3f} {line['share']:6.2f} "
            f"{line['asked']:6.2f}{met}"
        )
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", *BYTES_OF_CODES])
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.stderr.write("gpu_steps: this host has no CUDA device; --shape tiny --device cpu tries the benchmark\n")
        return 2
    result = run(arguments)
    print(table(result))
    write_result(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
