"""Finds the tiles with which a device runs the attention of decodes and chunks, products with codes and experts fastest.

Owns: which tiles are tried, the choice, the file. Must not know: how a kernel uses its tiles, who reads the file.

From the tiles that ship, one number at a time is changed to the next in its list; the fastest of these is where the search
goes on, until none is faster by more than ``--margin``. Both sides of a comparison are timed by turns in one run, and
their ratio is the geometric mean over the loads. Tiles that cannot be launched are passed over; tiles with another result
are a failure.

    python benchmarks/gpu_tune.py                                   # for this user's executors, on the CUDA device
    python benchmarks/gpu_tune.py --shape qwen3-30b-a3b --sections attention,pairs --output tiles.json
    TRITON_INTERPRET=1 python benchmarks/gpu_tune.py --shape tiny --device cpu --most 2 --output tiles.json   # tries the tool

Without ``--output``, the file is beside that of ``--lines``, or else where the ``triton`` backend looks for it. Sections that
are not tuned keep what it has.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from gpu_attention import AttentionLoad
from gpu_device import Device
from gpu_shapes import SHAPES, Shape, config_of
from headway_executor.gpu.attention import tile_sizes_of
from headway_executor.gpu.tuning_file import (
    AttentionTiles,
    KernelTiles,
    ProductTiles,
    TuningFile,
    as_tunings,
    device_name,
    file_of,
    read,
)
from headway_executor.models.config import ModelConfig
from headway_executor.setting_checks import KV_CACHE_DTYPES
from headway_kernels.cpu.coded_weight import rounded_to_4_bits
from headway_kernels.gpu.attention.tuning import AttentionTuning
from headway_kernels.gpu.experts.float8 import are_many, multiply_rounded_pairs
from headway_kernels.gpu.experts.grouped import ExpertPairs, multiply_pairs, sort_pairs
from headway_kernels.gpu.linear.float8 import FLOAT8_TILINGS, float8_linear, is_native, tiling_of, workspace_size
from headway_kernels.gpu.linear.quantized import Tiling, quantized_linear
from headway_kernels.gpu.linear.weights import DeviceWeight, coded, dense, quantized, stacked
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS, Tunings, shipped_pair_tiling, shipped_tilings
from headway_proto.wording import one_line
from program import add_line, count, parser_of

T = TypeVar("T")
SECTIONS = ("attention", "products", "pairs")
Launching = Callable[[Any], Callable[[], object]]
CHOICES: Mapping[str, tuple[int, ...]] = {
    "query_tile": (16, 32, 64, 128),
    "key_tile": (16, 32, 64, 128),
    "tokens": (32, 64, 128),
    "outputs": (32, 64, 128, 256),
    "inputs": (32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6),
    "programs_per_multiprocessor": (1, 2, 3, 4),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Load(Generic[T]):
    """``launching`` makes ready for some tiles and returns what is timed; it writes ``out``."""

    name: str
    launching: Callable[[T], Callable[[], object]]
    out: Tensor


class WrongResult(RuntimeError):  # noqa: N818 (it names the finding)
    """Tiles gave another result than those that ship."""


def neighbours(tiles: T, names: Sequence[str]) -> Iterator[T]:
    """The same tiles but for one number, which is the next smaller or larger that is allowed."""
    for name in names:
        value, allowed = getattr(tiles, name), CHOICES[name]
        smaller, larger = [one for one in allowed if one < value], [one for one in allowed if one > value]
        for other in (*smaller[-1:], *larger[:1]):
            yield replace(tiles, **{name: other})  # type: ignore[type-var]


def climb(start: T, names: Sequence[str], ratio: Callable[[T, T], float | None], *, margin: float, most: int) -> T:
    """Go from ``start`` to the fastest neighbour, as long as one is faster by ``margin``; try ``most`` at most.

    ``ratio``: the time of the first over that of the second, or None if the first cannot be launched.
    """
    best, tried = start, {start}
    while True:
        found: list[tuple[float, T]] = []
        for tiles in neighbours(best, names):
            if tiles in tried or len(tried) > most:
                continue
            tried.add(tiles)
            measured = ratio(tiles, best)
            if measured is not None and measured < 1 - margin:
                found.append((measured, tiles))
        if not found:
            return best
        best = min(found, key=lambda entry: entry[0])[1]


class Contest(Generic[T]):
    """Compares tiles on some loads by turns. ``seconds`` times one launch."""

    def __init__(
        self,
        loads: Sequence[Load[T]],
        shipped: T,
        seconds: Callable[[Callable[[], object]], float],
        rounds: int,
        say: Callable[[str], None],
    ) -> None:
        self._loads = loads
        self._seconds = seconds
        self._rounds = rounds
        self._say = say
        self._expected = [self._result(load, shipped) for load in loads]

    def ratio(self, tiles: T, other: T) -> float | None:
        """See ``climb``. Raises ``WrongResult``."""
        ratios = []
        for load, expected in zip(self._loads, self._expected, strict=True):
            try:
                found = self._result(load, tiles)
            except Exception as error:  # noqa: BLE001 (whatever the reason, these tiles are not for this device)
                self._say(f"{tiles}: cannot be launched: {one_line(error, 100)}")
                return None
            tolerance = TOLERANCE[expected.dtype]
            if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
                raise WrongResult(f"{load.name} with {tiles} gives another result")
            ratios.append(self._time_ratio(load, tiles, other))
        mean = math.prod(ratios) ** (1 / len(ratios))
        self._say(f"{tiles}: {mean:.3f} of the time")
        return mean

    def _time_ratio(self, load: Load[T], tiles: T, other: T) -> float:
        mine, others = load.launching(tiles), load.launching(other)
        times = [(self._seconds(mine), self._seconds(others)) for _ in range(self._rounds)]
        return median(time for time, _ in times) / median(time for _, time in times)

    @staticmethod
    def _result(load: Load[T], tiles: T) -> Tensor:
        load.launching(tiles)()
        return load.out.clone()


class Tuner:
    """The sections for one model's shape; ``seconds`` times one launch."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        arguments: argparse.Namespace,
        seconds: Callable[[Callable[[], object]], float],
        say: Callable[[str], None],
    ) -> None:
        self._shape = shape
        self._config: ModelConfig = config_of(shape)
        self._device = device
        self._dtype = dtype
        self._arguments = arguments
        self._seconds = seconds
        self._say = say
        self._shipped = Tunings(device)

    def attention(self) -> list[AttentionTiles]:
        """Of decodes and of chunks, over numbers and over codes."""
        # In float32, a pool of codes has the tiles of one of numbers.
        kinds = KV_CACHE_DTYPES if self._dtype.itemsize == 2 else KV_CACHE_DTYPES[:1]
        return [self._attention(kv_cache_dtype) for kv_cache_dtype in kinds]

    def products(self) -> list[ProductTiles]:
        """Of more tokens than are few, for each shipped tiling of so many; with fp8 also of rounded inputs."""
        found = self._products(self._dtype, ("int8", "fp8", "int4"), PRODUCT_NAMES)
        if is_native(self._device):
            found += self._products(torch.float8_e4m3fn, ("fp8",), FLOAT8_NAMES)
        return found

    def _products(self, inputs: torch.dtype, forms: Sequence[str], names: Sequence[str]) -> list[ProductTiles]:
        weights = [self._weight(shape, form) for shape in self._layer_shapes() for form in forms]
        found = []
        for tiling in shipped_tilings(inputs):
            if tiling.max_tokens is not None and tiling.max_tokens <= MOST_FEW_TOKENS:
                continue
            num_tokens = tiling.max_tokens or self._shape.chunk
            loads = [self._product(weight, num_tokens, inputs) for weight in weights]
            best = self._climb(f"products of {num_tokens} tokens, inputs {inputs}", loads, tiling, names)
            found.append(self._as_product(best, inputs))
        return found

    def pairs(self) -> list[ProductTiles]:
        """Of tokens and experts, in steps of one token, of some and of a chunk; none without experts."""
        feeds = [layer.feed_forward for layer in self._config.layers if layer.feed_forward.experts is not None]
        if not feeds:
            return []
        shape, routing = (2 * feeds[0].intermediate_size, self._config.hidden_size), feeds[0].experts.routing
        loads = [self._pairs(shape, tokens) for tokens in (1, MOST_FEW_TOKENS, self._shape.chunk)]
        best = self._climb("pairs", loads, shipped_pair_tiling(self._dtype), PRODUCT_NAMES)
        found = [self._as_product(best, self._dtype)]
        if is_native(self._device) and are_many(self._shape.chunk * routing.num_chosen, routing.num_experts):
            mean = self._shape.chunk * routing.num_chosen // routing.num_experts
            load, start = self._rounded_pairs(shape, self._shape.chunk), tiling_of(mean, FLOAT8_TILINGS)
            best = self._climb("pairs, inputs E4M3", [load], replace(start, max_tokens=None), FLOAT8_NAMES)
            found.append(self._as_product(best, torch.float8_e4m3fn))
        return found

    def _attention(self, kv_cache_dtype: str) -> AttentionTiles:
        is_coded = kv_cache_dtype != KV_CACHE_DTYPES[0]
        sizes = tile_sizes_of(self._config.attention, self._dtype, is_coded=is_coded)
        shipped = self._shipped.of_attention(sizes)
        batch, context = self._shape.attention_decode
        prompt = self._shape.attention_prefill
        decodes = [self._attention_load(kv_cache_dtype, rows, context, 1) for rows in (batch, 1)]
        chunks = [self._attention_load(kv_cache_dtype, 1, context, size) for context, size in ((prompt, prompt), (2 * prompt, prompt // 4))]  # fmt: skip
        found: dict[str, KernelTiles] = {}
        for kind, loads in (("decode", decodes), ("chunk", chunks)):
            names = [name for name in ATTENTION_NAMES if kind == "chunk" or name != "query_tile"]
            pairs = [Load(load.name, _one_kind(load.launching, shipped, kind), load.out) for load in loads]
            best = self._climb(f"{kind}, KV cache {kv_cache_dtype}", pairs, getattr(shipped, kind), names)
            found[kind] = KernelTiles(**asdict(best))
        return AttentionTiles(sizes.channels, sizes.stored_bytes, found["decode"], found["chunk"], sizes.is_latent)

    def _attention_load(self, kv_cache_dtype: str, batch: int, context: int, num_queries: int) -> Load[AttentionTuning]:
        sizes = {"batch": batch, "context": context, "num_queries": num_queries}
        load = AttentionLoad(self._config, self._device, self._dtype, kv_cache_dtype, **sizes)
        return Load(f"attention of {batch} x {num_queries} tokens at {context}", load.launching, load.out)

    def _layer_shapes(self) -> list[tuple[int, int]]:
        config = self._config
        qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        inner = config.layers[0].feed_forward.intermediate_size
        return [(qkv, config.hidden_size), (2 * inner, config.hidden_size), (config.hidden_size, inner)]

    def _weight(self, shape: tuple[int, int], form: str) -> DeviceWeight:
        numbers = torch.randn(shape, dtype=self._dtype, device=self._device)
        if form == "int4":
            weight = coded(rounded_to_4_bits(numbers))
            assert weight is not None
            return weight
        return quantized(numbers, "int8" if form == "int8" else "fp8")

    def _product(self, weight: DeviceWeight, num_tokens: int, inputs: torch.dtype) -> Load[Tiling]:
        x = torch.randn(num_tokens, weight.num_inputs, dtype=self._dtype, device=self._device) / 16
        out = torch.empty(num_tokens, weight.num_outputs, dtype=self._dtype, device=self._device)

        size = workspace_size(*x.shape) if inputs == torch.float8_e4m3fn else 0
        workspace = torch.empty(size, dtype=torch.float32, device=self._device)

        def launching(tiling: Tiling) -> Callable[[], None]:
            tilings = (replace(tiling, max_tokens=None),)
            if size:
                return lambda: float8_linear(x, weight, None, out, workspace, tilings)
            return lambda: quantized_linear(x, weight, None, out, tilings)

        return Load(f"product {weight.num_outputs} x {weight.num_inputs} {weight.form.name}", launching, out)

    def _pairs(self, shape: tuple[int, int], num_tokens: int) -> Load[Tiling]:
        weight, x, out, pairs = self._experts(shape, num_tokens, dense)

        def launching(tiling: Tiling) -> Callable[[], None]:
            return lambda: multiply_pairs(x, weight, None, out, pairs, gathers=True, tiling=tiling)

        return Load(f"experts of {num_tokens} tokens", launching, out)

    def _rounded_pairs(self, shape: tuple[int, int], num_tokens: int) -> Load[Tiling]:
        weight, x, out, pairs = self._experts(shape, num_tokens, lambda numbers: quantized(numbers, "fp8"))
        workspace = torch.empty(workspace_size(*x.shape), dtype=torch.float32, device=self._device)

        def launching(tiling: Tiling) -> Callable[[], None]:
            return lambda: multiply_rounded_pairs(
                x, weight, None, out, pairs, workspace, gathers=True, tilings=(tiling,)
            )

        return Load(f"experts of {num_tokens} tokens, rounded", launching, out)

    def _experts(
        self, shape: tuple[int, int], num_tokens: int, form: Callable[[Tensor], DeviceWeight]
    ) -> tuple[DeviceWeight, Tensor, Tensor, ExpertPairs]:
        """Weights, inputs, room for results, and pairs."""
        experts = next(layer.feed_forward.experts for layer in self._config.layers if layer.feed_forward.experts)
        routing = experts.routing
        weight = stacked([form(torch.randn(shape, dtype=self._dtype, device=self._device)) for _ in range(routing.num_experts)])  # fmt: skip
        assert weight is not None
        pairs = ExpertPairs.allocate(num_tokens, routing, self._device)
        chosen = [torch.randperm(routing.num_experts)[: routing.num_chosen].sort().values for _ in range(num_tokens)]
        pairs.chosen.copy_(torch.stack(chosen))
        sort_pairs(pairs)
        x = torch.randn(num_tokens, shape[1], dtype=self._dtype, device=self._device) / 16
        out = torch.empty(num_tokens * routing.num_chosen, shape[0], dtype=self._dtype, device=self._device)
        return weight, x, out, pairs

    def _climb(self, name: str, loads: Sequence[Load[T]], shipped: T, names: Sequence[str]) -> T:
        self._say(name)
        contest = Contest(loads, shipped, self._seconds, self._arguments.rounds, self._say)
        margin, most = self._arguments.margin, self._arguments.most
        best = climb(shipped, names, contest.ratio, margin=margin, most=most)
        self._say(f"{name}: {best}{'' if best != shipped else ', as it ships'}")
        return best

    @staticmethod
    def _as_product(tiling: Tiling, inputs: torch.dtype) -> ProductTiles:
        fields = {name: getattr(tiling, name) for name in ("max_tokens", *PRODUCT_NAMES)}
        return ProductTiles(element_bytes=inputs.itemsize, **fields)


ATTENTION_NAMES = ("query_tile", "key_tile", "num_warps", "num_stages", "programs_per_multiprocessor")
PRODUCT_NAMES = ("tokens", "outputs", "inputs", "num_warps", "num_stages")
FLOAT8_NAMES = tuple(name for name in PRODUCT_NAMES if name != "inputs")
"""Inputs come in the blocks in which they are rounded."""


def _one_kind(launching: Launching, shipped: AttentionTuning, kind: str) -> Launching:
    """Launch with tiles of one of the two kernels."""
    return lambda tiles: launching(replace(shipped, **{kind: tiles}))


def merged(old: TuningFile | None, new: TuningFile) -> TuningFile:
    """What ``new`` has, and what only ``old`` has."""
    if old is None or old.device != new.device:
        return new
    attention = {tiles.sizes: tiles for tiles in (*old.attention, *new.attention)}
    products = {(tiles.element_bytes, tiles.max_tokens or 0): tiles for tiles in (*old.products, *new.products)}
    pairs = {tiles.element_bytes: tiles for tiles in (*old.pairs, *new.pairs)}
    return msgspec.structs.replace(
        new,
        attention=tuple(attention[key] for key in sorted(attention)),
        products=tuple(products[key] for key in sorted(products)),
        pairs=tuple(pairs[key] for key in sorted(pairs)),
        said=(*old.said, *new.said),
    )


def say(text: str) -> None:
    sys.stderr.write(f"gpu_tune: {text}\n")
    sys.stderr.flush()


def place_of_file(arguments: argparse.Namespace, device: torch.device) -> Path:
    """Where the file goes."""
    path: Path = arguments.output or file_of(device_name(device))
    return path if arguments.output or arguments.lines is None else arguments.lines.parent / path.name


def tune(arguments: argparse.Namespace, seconds: Callable[[Callable[[], object]], float]) -> Path:
    """Tune the sections; return the file, which has each section as soon as it is tuned."""
    device = torch.device(arguments.device)
    shape = SHAPES[arguments.shape]
    name = arguments.dtype if arguments.dtype != "auto" else str(shape.config["torch_dtype"])
    dtype: torch.dtype = getattr(torch, name)
    path = place_of_file(arguments, device)
    tuner = Tuner(shape, device, dtype, arguments, seconds, say)
    for section in arguments.sections.split(","):
        say(section)
        said = f"{section} of {arguments.shape} in {name}, torch {torch.__version__}"
        found = {section: tuple(getattr(tuner, section)())}
        new = TuningFile(device=device_name(device), said=(said,), **found)
        whole = merged(read(path) if path.is_file() else None, new)
        as_tunings(whole, device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
        add_line(arguments.lines, {"kind": "tiles", "section": section, **msgspec.to_builtins(new)})
    return path


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--lines", type=Path, help="add each section, as soon as it is tuned, to this file")
    parser.add_argument("--output", type=Path, help="the file of tiles")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--rounds", type=count, default=7, help="times that two tilings take turns")
    parser.add_argument("--margin", type=float, default=0.02, help="by which other tiles must be faster")
    parser.add_argument("--most", type=count, default=60, help="tiles to try for one kernel")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        say("this host has no CUDA device; --shape tiny --device cpu tries the tool")
        return 2
    started, device = time.monotonic(), Device(arguments.device)
    try:
        path = tune(arguments, lambda work: device.seconds(work, 1, warm_ups=1 if device.is_cuda else 0))
    except WrongResult as error:
        say(f"FAILED: {error}")
        return 1
    print(f"{path}, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
