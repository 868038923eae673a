"""Steps of the triton backend on one device, each beside its floor: the time of reading and computing alone.

Owns: the scripted steps, the table and the result file. Must not know: anything of the backend beyond its protocol,
except attention and swapping, whose kernels are timed alone; how a floor is counted (``gpu_floors``).

The limits of the floors are measured in the same run, before the model takes the memory. Weights and prompts are random,
because zeros run faster. Two steps are in flight, timed by the device's clock.

Beside each decode step stands what its parts, each timed alone, make it expect (``gpu_parts``).

Each line is written to ``--lines`` as soon as it is there. A section that fails costs its own lines only; the exit code is
then 1.

    python benchmarks/gpu_steps.py                                   # Llama-3-8B in bfloat16 on the CUDA device
    python benchmarks/gpu_steps.py --sections decode,swap --json result.json
    TRITON_INTERPRET=1 python benchmarks/gpu_steps.py --shape tiny --device cpu     # tries the benchmark, not the speed
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional

from gpu_attention import AttentionLoad
from gpu_device import Device
from gpu_floors import BYTES_OF_CODES, Floors, Limits, Line, kv_bytes_of_token
from gpu_parts import Parts, measure_parts
from gpu_shapes import SHAPES, Shape, config_of
from gpu_stepping import BLOCK_SIZE, SteppedBackend, device_ms
from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu.attention import tile_sizes_of
from headway_executor.gpu.chunk_library import LIBRARIES, lacking
from headway_executor.gpu.tuning_file import AUTO, tunings_of
from headway_executor.memory.host_speed import measure_device, measure_host
from headway_executor.memory.kv_pool import CODES
from headway_executor.models.config import ModelConfig
from headway_executor.setting_checks import KV_CACHE_DTYPES
from headway_kernels.gpu.attention.long_chunks import LibraryLacking
from headway_kernels.gpu.linear.float8 import is_native
from headway_proto.wording import one_line
from program import add_line, parser_of, provenance, write_result
from random_adapters import write_adapter

SECTIONS = ("decode", "prefill", "mixed", "adapters", "attention", "swap")
OF_A_MODEL = SECTIONS[:4]
ADAPTERS, RANK = 8, 16
_NAMED = ("shape", "dtype", "quantization", "kv_cache_dtype")
"""What a line says of its origin; the line of limits says the rest."""


def measure_limits(device: Device) -> Limits:
    """Measure as ``headway doctor`` does; a CPU has only the copy, no link."""
    if device.is_cuda:
        speed = measure_device(device.device.index or 0, say)
        return Limits(
            bandwidth=speed.copy_bytes_per_s,
            product_rate=speed.bfloat16_flops,
            out_bandwidth=speed.to_host_bytes_per_s,
            in_bandwidth=speed.from_host_bytes_per_s,
            float8_rate=float8_rate(device, 8192),
        )
    host = measure_host(say)
    return Limits(host.copy_bytes_per_s, host.float32_flops, host.copy_bytes_per_s, host.copy_bytes_per_s)


def float8_rate(device: Device, size: int) -> float:
    """Operations per second of torch's product of E4M3 matrices; 0: there is none."""
    if not is_native(device.device):
        return 0.0
    try:
        return _float8_rate(device, size)
    # It is no public function, and may be another in another version.
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        say(f"torch multiplies no 8-bit floats: {one_line(error)}")
        return 0.0


def _float8_rate(device: Device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device.device)
    seconds = device.seconds(
        lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),  # noqa: SLF001 (torch has no other)
        20,
    )
    return 2.0 * size**3 / seconds


class StepBenchmark:
    """One open backend, and its lines of the table."""

    def __init__(
        self, shape: Shape, device: Device, dtype: str, seed: int, quantization: str, kv_cache_dtype: str
    ) -> None:
        self._shape = shape
        self._device = device
        self._max_num_rows = max(*shape.decode_batches, shape.mixed[0] + 1)
        self._max_num_tokens = max(shape.chunk, sum(shape.mixed))
        config = config_of(shape)
        self._vocab_size = config.vocab_size
        self._has_experts = any(layer.feed_forward.experts is not None for layer in config.layers)
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(shape.config))
            self._backend = TritonBackend()
            self.info = self._backend.open(
                BackendConfig(
                    model=directory,
                    device=str(device.device),
                    dtype=dtype,
                    quantization=quantization,
                    kv_cache_dtype=kv_cache_dtype,
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

    def decode(self, floors: Floors) -> Iterator[Line | Parts]:
        """Decodes of every batch size, and of what each consists."""
        for batch in self._shape.decode_batches:
            steps, context = self._stepped(), self._shape.decode_context
            say(f"computing {batch} prompts of {context}")
            steps.fill(batch, context)
            counts = dict.fromkeys(range(batch), 1)
            measured = device_ms(steps.run(counts) for _ in range(self._shape.repetitions))
            reached = [context + self._shape.repetitions // 2] * batch
            line = floors.line(f"decode, {batch} rows after {context}", measured, reached, 0, 0.85)
            yield line
            parts = measure_parts(self._backend, self._device, batch)
            yield Parts(line.name, measured, line.floor_ms, parts)

    def prefill(self, floors: Floors) -> Iterator[Line]:
        """Run a chunk of a new prompt, repeatedly."""
        chunk = self._shape.chunk
        measured = device_ms(self._chunks(0, chunk))
        yield floors.line(f"prefill, chunk of {chunk}", measured, [], chunk, 0.70)

    def mixed(self, floors: Floors) -> Iterator[Line]:
        """Decodes beside a chunk."""
        num_decodes, chunk = self._shape.mixed
        context = self._shape.decode_context
        measured = device_ms(self._chunks(num_decodes, chunk))
        name = f"mixed, {num_decodes} decodes and a chunk of {chunk}"
        yield floors.line(name, measured, [context] * num_decodes, chunk, 1 / 1.15)

    def adapters(self, floors: Floors) -> Iterator[Line]:
        """Decodes with adapters, which are read too, beside the same without; of experts, nobody knows which a step reads."""
        if self._has_experts:
            return
        batch, context = max(batch for batch in self._shape.decode_batches if batch <= 64), self._shape.decode_context
        names, num_bytes = self._loaded_adapters()
        counts, reached = dict.fromkeys(range(batch), 1), [context + self._shape.repetitions // 2] * batch
        for chosen, read, said in (([""], 0, "no adapters"), (names, num_bytes, f"{ADAPTERS} adapters of rank {RANK}")):
            steps = self._stepped()
            steps.fill(batch, context, chosen)
            measured = device_ms(steps.run(counts) for _ in range(self._shape.repetitions))
            yield floors.line(f"decode, {batch} rows, {said}", measured, reached, 0, 0.70, num_more_bytes=read)

    def _loaded_adapters(self) -> tuple[list[str], int]:
        """Names, and the bytes of all on the device."""
        names, num_bytes = [], 0
        with tempfile.TemporaryDirectory() as directory:
            model = Path(directory) / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(self._shape.config))
            for number in range(ADAPTERS):
                path = Path(directory) / str(number)
                write_adapter(path, model, RANK, number, torch.float32)
                num_bytes += (path / "adapter_model.safetensors").stat().st_size
                names.append(self._backend.load_adapter(self._backend.read_adapter(str(number), str(path))).identity)
        return names, num_bytes

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
            self._backend, self.info.num_blocks, self._vocab_size, self._max_num_rows, self._max_num_tokens
        )


class AttentionBenchmark:
    """The attention kernels alone, over random keys and values of one layer."""

    def __init__(
        self, config: ModelConfig, device: Device, dtype: torch.dtype, kv_cache_dtype: str, repetitions: int
    ) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._kv_cache_dtype = kv_cache_dtype
        self._repetitions = repetitions

    def lines(self, shape: Shape, limits: Limits) -> Iterator[Line]:
        """Decodes and prompts, in the sizes of ``shape``; prompts also by each library that is there."""
        yield self._decode(*shape.attention_decode, limits.bandwidth)
        yield from self._prefill(shape.attention_prefill)

    def _decode(self, batch: int, context: int, bandwidth: float) -> Line:
        """Run ``batch`` decodes after ``context`` positions each."""
        config = self._config
        work = self._launching(self._load(batch, context, 1))
        measured = self._device.seconds(work, self._repetitions)
        num_bytes = batch * context * kv_bytes_of_token(config, self._dtype, self._kv_cache_dtype) / config.num_layers
        return Line(f"attention, {batch} decodes after {context}", measured * 1e3, num_bytes / bandwidth * 1e3, 0.85)

    def _prefill(self, length: int) -> Iterator[Line]:
        """Run one prompt of ``length`` tokens, beside torch's fused attention over contiguous keys and values."""
        config = self._config
        load = self._load(1, length, length)
        measured = self._device.seconds(self._launching(load), self._repetitions)
        kv_heads, key_dim, value_dim = config.num_kv_heads, config.head_dim, config.attention.attended_dim
        query, key, value = (
            torch.randn(1, heads, length, width, dtype=self._dtype, device=self._device.device)
            for heads, width in ((config.num_heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
        )
        beside = self._device.seconds(
            lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
            self._repetitions,
        )
        yield Line(f"attention, prompt of {length} (floor: torch's)", measured * 1e3, beside * 1e3, 0.8)
        is_coded = self._kv_cache_dtype == CODES
        for library in LIBRARIES.values():
            if lacking(library, config, self._dtype, self._device.device, is_coded=is_coded):
                continue
            with contextlib.suppress(LibraryLacking):
                measured = self._device.seconds(load.launching_library(library.find), self._repetitions)
                yield Line(f"attention, prompt of {length} by {library.said}", measured * 1e3, beside * 1e3, 0.8)

    def _load(self, batch: int, context: int, num_queries: int) -> AttentionLoad:
        return AttentionLoad(
            self._config,
            self._device.device,
            self._dtype,
            self._kv_cache_dtype,
            batch=batch,
            context=context,
            num_queries=num_queries,
        )

    def _launching(self, load: AttentionLoad) -> Callable[[], None]:
        tunings = tunings_of(AUTO, self._device.device)
        is_coded = self._kv_cache_dtype == CODES
        return load.launching(
            tunings.of_attention(tile_sizes_of(self._config.attention, self._dtype, is_coded=is_coded))
        )


def swap_lines(
    config: ModelConfig, device: Device, dtype: torch.dtype, num_tokens: int, limits: Limits
) -> Iterator[Line]:
    """Measure all blocks of a request, scattered, out to pinned memory and back, in one launch each."""
    from headway_kernels.gpu import block_moves

    count = -(-num_tokens // BLOCK_SIZE)
    shape = (config.attention.num_vectors, BLOCK_SIZE, config.attention.vector_dim)
    layers = torch.randn(config.num_layers, 4 * count, *shape, dtype=dtype, device=device.device)
    host = torch.empty(count, config.num_layers, *shape, dtype=dtype, pin_memory=True)
    scattered = torch.randperm(4 * count)[:count].to(torch.int32)
    beside = torch.arange(count, dtype=torch.int32)
    out_pairs, in_pairs = (torch.stack(pair).to(device.device) for pair in ((scattered, beside), (beside, scattered)))
    out_s = device.seconds(lambda: block_moves.swap_out(layers, host, out_pairs), 10)
    yield Line(f"swap out, {num_tokens} tokens", out_s * 1e3, host.nbytes / limits.out_bandwidth * 1e3, 0.8)
    in_s = device.seconds(lambda: block_moves.swap_in(layers, host, in_pairs), 10)
    yield Line(f"swap in, {num_tokens} tokens", in_s * 1e3, host.nbytes / limits.in_bandwidth * 1e3, 0.8)


def say(text: str) -> None:
    sys.stderr.write(f"gpu_steps: {text}\n")
    sys.stderr.flush()


class Run:
    """The chosen sections, one after the other; each line is written and said as soon as it is there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._shape = SHAPES[arguments.shape]
        self._arguments = arguments
        self._device = Device(arguments.device)
        self._config = config_of(self._shape)
        dtype = arguments.dtype if arguments.dtype != "auto" else str(self._shape.config["torch_dtype"])
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._lines: list[dict[str, object]] = []
        self._parts: list[dict[str, object]] = []
        self._failures: list[str] = []
        name = torch.cuda.get_device_name(self._device.device) if self._device.is_cuda else "cpu, interpreted"
        # Before anything is measured: what can fail here must cost no figure.
        self._origin = {
            **provenance(arguments.seed),
            "device": name,
            "torch": torch.__version__,
            "shape": arguments.shape,
            "dtype": dtype,
            "quantization": arguments.quantization,
            "kv_cache_dtype": arguments.kv_cache_dtype,
        }

    def result(self) -> dict[str, object]:
        """Measure everything; return it. ``failures`` names the sections that broke off, and why."""
        limits = measure_limits(self._device)
        self._origin["limits"] = asdict(limits)
        add_line(self._arguments.lines, {"kind": "limits", **self._origin})
        sections = self._arguments.sections.split(",")
        if {"attention", "swap"} & {*sections}:
            self._without_model(sections, limits)
        if {*OF_A_MODEL} & {*sections}:
            self._attempt("opening the model", lambda: self._steps(sections, limits))
        return {**self._origin, "lines": self._lines, "parts": self._parts, "failures": self._failures}

    def _without_model(self, sections: list[str], limits: Limits) -> None:
        """Before one takes the memory."""
        if "attention" in sections:
            attention = AttentionBenchmark(
                self._config, self._device, self._dtype, self._arguments.kv_cache_dtype, self._shape.repetitions
            )
            self._attempt("attention", lambda: self._add(attention.lines(self._shape, limits)))
        if "swap" in sections and self._device.is_cuda:
            tokens = self._shape.swapped_tokens
            self._attempt(
                "swap", lambda: self._add(swap_lines(self._config, self._device, self._dtype, tokens, limits))
            )

    def _steps(self, sections: list[str], limits: Limits) -> None:
        arguments = self._arguments
        forms = arguments.quantization, arguments.kv_cache_dtype
        steps = StepBenchmark(self._shape, self._device, arguments.dtype, arguments.seed, *forms)
        floors = Floors(self._config, steps.dtype, *forms, limits)
        for section in OF_A_MODEL:
            if section in sections:
                lines: Iterator[Line | Parts] = getattr(steps, section)(floors)
                self._attempt(section, lambda lines=lines: self._add(lines))  # type: ignore[misc]
        steps.close()

    def _add(self, lines: Iterator[Line | Parts]) -> None:
        origin = {name: self._origin[name] for name in _NAMED}
        for line in lines:
            if isinstance(line, Parts):
                parts = {**asdict(line), "expected_ms": line.expected_ms, "said": line.said}
                self._parts.append(parts)
                add_line(self._arguments.lines, {"kind": "parts", **parts, **origin})
                continue
            found = {**asdict(line), "share": line.share}
            self._lines.append(found)
            add_line(self._arguments.lines, {"kind": "step", **found, **origin})
            say(f"{line.name}: {line.measured_ms:.3f} ms, floor {line.floor_ms:.3f} ms, share {line.share:.2f}")

    def _attempt(self, section: str, work: Callable[[], None]) -> None:
        say(section)
        try:
            work()
        except Exception as error:  # noqa: BLE001 (the other sections have figures of their own)
            reason = f"{section}: {type(error).__name__}: {one_line(error)}"
            self._failures.append(reason)
            add_line(self._arguments.lines, {"kind": "failure", "name": section, "reason": reason})
            say(f"FAILED {reason}")


def table(result: dict[str, object]) -> str:
    limits = result["limits"]
    rates = (
        f"copy {limits['bandwidth'] / 1e12:.2f} TB/s, products {limits['product_rate'] / 1e12:.0f} TFLOP/s, "
        f"of 8-bit floats {limits['float8_rate'] / 1e12:.0f} TFLOP/s, "
        f"pinned memory {limits['out_bandwidth'] / 1e9:.1f} GB/s out, {limits['in_bandwidth'] / 1e9:.1f} GB/s in"
    )
    rows = [
        ", ".join(str(result[name]) for name in ("device", "shape", "dtype")),
        f"quantization {result['quantization']}, KV cache {result['kv_cache_dtype']}",
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
    return "\n".join([*rows, *(parts["said"] for parts in result["parts"])])


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--lines", type=Path, help="add each line, as soon as it is measured, to this file")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", *BYTES_OF_CODES])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    arguments = parser.parse_args(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.stderr.write("gpu_steps: this host has no CUDA device; --shape tiny --device cpu tries the benchmark\n")
        return 2
    result = Run(arguments).result()
    print(table(result))
    write_result(arguments.json, result)
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
