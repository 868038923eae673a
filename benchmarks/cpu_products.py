"""Speed of the CPU kernels' products, for every variant that this processor runs.

Owns: the shapes, the turns, the table and the result file. Must not know: how a variant multiplies.

Each kind of product of a Llama with 135M parameters, with so many copies that no cache holds them: weights come from
memory, as in a model. The best of ``--repetitions`` rounds, in which the variants take turns.

    python benchmarks/cpu_products.py --forms float32,int8 --rows 1,8,32,256 --json result.json
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm, rounded_to_4_bits
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm, installed_variants, runs_here
from program import count, counts, parser_of, provenance, write_result

BYTES_OF_WEIGHTS = 300e6
SCALED = 32
"""Inputs that share a scale in a GGUF file."""


def q8_0(weight: Tensor) -> CodedWeight:
    """Bytes with a scale for 32 inputs, as in a GGUF file; ``weight`` has whole groups."""
    groups = weight.unflatten(1, (-1, SCALED))
    scales = (groups.abs().amax(2) / 127).half().float()
    codes = (groups / scales[..., None]).round().flatten(1).to(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes, scales, SCALED, rounds_inputs=True)


@dataclass(frozen=True)
class Form:
    """``bytes`` of a weight, with its scales; ``coded`` rounds it to codes."""

    kind: WeightForm
    bytes: float
    coded: Callable[[Tensor], CodedWeight] | None = None


FORMS = {
    "float32": Form(WeightForm.FLOAT32, 4),
    "bfloat16": Form(WeightForm.BFLOAT16, 2),
    "int8": Form(WeightForm.INT8, 1),
    "int4": Form(WeightForm.FLOAT32, 9 / 16, rounded_to_4_bits),
    "int4-exact": Form(
        WeightForm.FLOAT32, 5 / 8, lambda weight: replace(rounded_to_4_bits(weight), rounds_inputs=False)
    ),
    "q8_0": Form(WeightForm.FLOAT32, 17 / 16, q8_0),
    "q8_0-exact": Form(WeightForm.FLOAT32, 9 / 8, lambda weight: replace(q8_0(weight), rounds_inputs=False)),
}
"""With "exact", codes are widened, and inputs stay float32."""


@dataclass(frozen=True)
class Shape:
    """One kind of product. ``gated``: half of the outputs are gates of the others."""

    name: str
    outputs: int
    inputs: int
    gated: bool = False


SHAPES = (
    Shape("qkv", 960, 576),
    Shape("output", 576, 576),
    Shape("gate_up", 3072, 576, gated=True),
    Shape("down", 576, 1536),
    Shape("head", 49152, 576),
)


@dataclass(frozen=True)
class Variant:
    """A variant and its threads."""

    library: CpuLibrary
    team: Team


def variants(num_threads: int) -> dict[str, Variant]:
    """Return those that run here, the best first."""
    libraries = [CpuLibrary(path) for path in installed_variants() if runs_here(path)]
    return {library.variant: Variant(library, Team(library, num_threads)) for library in libraries}


def measure(
    shape: Shape, form: str, all_rows: list[int], chosen: dict[str, Variant], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Return billions of operations per second of each variant, by number of rows."""
    weight = torch.randn(shape.outputs, shape.inputs) * 0.02
    if form == "bfloat16":
        weight = weight.bfloat16().float()
    held = FORMS[form].coded(weight) if FORMS[form].coded else weight
    num_copies = max(1, int(arguments.bytes_of_weights / (weight.numel() * FORMS[form].bytes)))
    products = {
        name: [
            PackedLinear(variant.library, held, None, FORMS[form].kind, gated=shape.gated) for _ in range(num_copies)
        ]
        for name, variant in chosen.items()
    }
    records: list[dict[str, object]] = []
    for rows in all_rows:
        inputs = torch.randn(rows, shape.inputs)
        seconds = dict.fromkeys(chosen, float("inf"))
        for _ in range(arguments.repetitions):
            for name, variant in chosen.items():
                started = time.perf_counter()
                for product in products[name]:
                    product(variant.team, inputs)
                seconds[name] = min(seconds[name], (time.perf_counter() - started) / num_copies)
        operations = 2 * rows * weight.numel()
        rates = {name: float(f"{operations / taken / 1e9:.3g}") for name, taken in seconds.items()}
        records.append({**asdict(shape), "form": form, "rows": rows, "giga_operations_per_s": rates})
        print(f"{form:>10} {shape.name:>8} {rows:>5}" + "".join(f"{rate:>9}" for rate in rates.values()))
    return records


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--forms", default=",".join(FORMS), help="how weights are held")
    parser.add_argument("--rows", type=counts, default="1,8,32,128,256")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("--bytes-of-weights", type=float, default=BYTES_OF_WEIGHTS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    chosen = variants(arguments.threads)
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes.split(",")]
    all_rows = arguments.rows
    print("billions of operations per second\n      form  product  rows" + "".join(f"{name:>9}" for name in chosen))
    results = [
        record
        for form in arguments.forms.split(",")
        for shape in shapes
        for record in measure(shape, form, all_rows, chosen, arguments)
    ]
    record = {"benchmark": "cpu_products", "threads": arguments.threads, **provenance(arguments.seed)}
    write_result(arguments.json, record | {"results": results})


if __name__ == "__main__":
    main()
