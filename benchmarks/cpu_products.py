"""Speed of the CPU kernels' products, for every variant that this processor runs.

Owns: the shapes, the turns, the table and the result file. Must not know: how a variant multiplies.

Each kind of product of a Llama with 135M parameters, with so many copies that no cache holds them: weights come from
memory, as in a model. The best few products of ``--repetitions`` rounds, in which forms and variants take turns.
``of_float32`` is how many times as fast a form is as float32 in the same variant.

    python benchmarks/cpu_products.py --forms float32,int8 --rows 1,8,32,256 --json result.json
    python benchmarks/cpu_products.py --variants avx2 --forms float32,int4-exact --shapes gate_up
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm, rounded_to_4_bits
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm, installed_variants, runs_here
from program import count, counts, parser_of, provenance, write_result

BYTES_OF_WEIGHTS = 300e6
OPERATIONS_OF_A_PIECE = 4e8
SCALED = 32
"""Inputs that share a scale in a GGUF file."""


def q8_0(weight: Tensor) -> CodedWeight:
    """Bytes with a scale for 32 inputs, as in a GGUF file; ``weight`` has whole groups."""
    groups = weight.unflatten(1, (-1, SCALED))
    scales = (groups.abs().amax(2) / 127).half().float()
    codes = (groups / scales[..., None]).round().flatten(1).to(torch.int8)
    return CodedWeight(CodeForm.CODES8, codes, scales, SCALED, rounds_inputs=True)


def drawn(form: CodeForm, group: int, *, has_minima: bool = False) -> Callable[[Tensor], CodedWeight]:
    """Random codes for exact products, since their values cost nothing. ``group`` 0: one scale an output."""
    most = 16 if CODE_DTYPES[form] is torch.uint8 else 120
    table = tuple(range(-120, 120, 15)) if form is CodeForm.TABLE4 else None

    def of(weight: Tensor) -> CodedWeight:
        outputs, inputs = weight.shape
        codes = torch.randint(0, most, (outputs, inputs), dtype=torch.uint8).view(CODE_DTYPES[form])
        scales = torch.rand(outputs, -(-inputs // group) if group else 1) * 0.01 + 0.001
        return CodedWeight(form, codes, scales, group or inputs, -scales if has_minima else None, table=table)

    return of


@dataclass(frozen=True)
class Form:
    """``bytes`` of a weight, with its scales; ``coded`` rounds it to codes; ``is_narrow``: these may be rounded to bfloat16."""

    kind: WeightForm
    bytes: float
    coded: Callable[[Tensor], CodedWeight] | None = None
    is_narrow: bool = False


FORMS = {
    "float32": Form(WeightForm.FLOAT32, 4),
    "bfloat16": Form(WeightForm.BFLOAT16, 2),
    "bfloat16-rounded": Form(WeightForm.PAIRS, 2),
    "int8": Form(WeightForm.INT8, 1),
    "int4": Form(WeightForm.FLOAT32, 9 / 16, rounded_to_4_bits),
    "int4-exact": Form(
        WeightForm.FLOAT32, 5 / 8, lambda weight: replace(rounded_to_4_bits(weight), rounds_inputs=False)
    ),
    "q8_0": Form(WeightForm.FLOAT32, 17 / 16, q8_0),
    "q8_0-exact": Form(WeightForm.FLOAT32, 9 / 8, lambda weight: replace(q8_0(weight), rounds_inputs=False)),
    "int8-exact": Form(WeightForm.FLOAT32, 1, drawn(CodeForm.CODES8, 0)),
    "w4a16-64": Form(WeightForm.FLOAT32, 9 / 16, drawn(CodeForm.CODES4, 64)),
    "w4a16-128": Form(WeightForm.FLOAT32, 17 / 32, drawn(CodeForm.CODES4, 128)),
    "awq-128": Form(WeightForm.FLOAT32, 9 / 16, drawn(CodeForm.CODES4, 128, has_minima=True)),
    "q4_k-exact": Form(WeightForm.FLOAT32, 3 / 4, drawn(CodeForm.CODES4, 32, has_minima=True)),
    "q6_k-exact": Form(WeightForm.FLOAT32, 5 / 4, drawn(CodeForm.CODES8, 16)),
    "q2_k-exact": Form(WeightForm.FLOAT32, 1, drawn(CodeForm.CODES4, 16, has_minima=True)),
    "q3_k-exact": Form(WeightForm.FLOAT32, 3 / 4, drawn(CodeForm.CODES4, 16)),
    "iq4_xs-exact": Form(WeightForm.FLOAT32, 5 / 8, drawn(CodeForm.TABLE4, 32)),
    "fp8": Form(WeightForm.FLOAT32, 33 / 32, drawn(CodeForm.FP8, 128)),
    "mxfp4": Form(WeightForm.FLOAT32, 5 / 8, drawn(CodeForm.TABLE4, 32)),
}
FORMS |= {
    f"{name}-rounded": replace(FORMS[name], is_narrow=True)
    for name in ("int4-exact", "w4a16-128", "awq-128", "fp8", "mxfp4")
}
"""With "exact", and from w4a16 on, inputs stay float32: codes are widened, or inputs cut into digits. With "rounded", inputs are
rounded to bfloat16, and so is what codes stand for, where the processor has something for that."""


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


def variants(num_threads: int, names: str | None) -> dict[str, Variant]:
    """Return those of some names, or all, that run here, the best first."""
    libraries = [CpuLibrary(path) for path in installed_variants() if runs_here(path)]
    here = [library.variant for library in libraries]
    wanted = names.split(",") if names else here
    if not set(wanted) <= set(here):
        raise SystemExit(f"--variants is {names}; allowed: those that this processor runs, {','.join(here) or 'none'}")
    return {
        library.variant: Variant(library, Team(library, num_threads))
        for library in libraries
        if library.variant in wanted
    }


def packed(
    shape: Shape, name: str, chosen: dict[str, Variant], bytes_of_weights: float
) -> dict[str, list[PackedLinear]]:
    """Return the copies of one product in a form, by variant."""
    form, weight = FORMS[name], torch.randn(shape.outputs, shape.inputs) * 0.02
    if form.kind in (WeightForm.BFLOAT16, WeightForm.PAIRS):
        weight = weight.bfloat16().float()
    held = form.coded(weight) if form.coded else weight
    num_copies = max(1, int(bytes_of_weights / (weight.numel() * form.bytes)))
    return {
        variant: [
            PackedLinear(each.library, held, None, form.kind, gated=shape.gated, may_be_narrow=form.is_narrow)
            for _ in range(num_copies)
        ]
        for variant, each in chosen.items()
    }


def in_a_piece(shape: Shape, rows: int) -> int:
    """Return the products that are timed at once: few, so that other processes spoil few of the times."""
    return max(1, int(OPERATIONS_OF_A_PIECE / (2 * rows * shape.outputs * shape.inputs)))


def batched(copies: list[PackedLinear], size: int) -> list[list[PackedLinear]]:
    """Return whole pieces, or all in one."""
    size = min(size, len(copies))
    return [copies[first : first + size] for first in range(0, len(copies) - size + 1, size)]


def measure(
    shape: Shape, forms: list[str], all_rows: list[int], chosen: dict[str, Variant], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Return billions of operations per second of each form and variant, by number of rows."""
    products = {form: packed(shape, form, chosen, arguments.bytes_of_weights) for form in forms}
    records: list[dict[str, object]] = []
    for rows in all_rows:
        inputs = torch.randn(rows, shape.inputs)
        outputs = {name: products[forms[0]][name][0].new_outputs(rows) for name in chosen}
        seconds = {form: dict.fromkeys(chosen, float("inf")) for form in forms}
        for _ in range(arguments.repetitions):
            for form, by_variant in products.items():
                for name, copies in by_variant.items():
                    for piece in batched(copies, in_a_piece(shape, rows)):
                        started = time.perf_counter()
                        for product in piece:
                            product(chosen[name].team, inputs, out=outputs[name])
                        taken = (time.perf_counter() - started) / len(piece)
                        seconds[form][name] = min(seconds[form][name], taken)
        operations = 2 * rows * shape.outputs * shape.inputs
        for form in forms:
            rates = {name: float(f"{operations / taken / 1e9:.3g}") for name, taken in seconds[form].items()}
            record: dict[str, object] = {**asdict(shape), "form": form, "rows": rows, "giga_operations_per_s": rates}
            print(f"{form:>10} {shape.name:>8} {rows:>5}" + "".join(f"{rate:>9}" for rate in rates.values()), end="")
            if "float32" in forms:
                ratios = {name: round(seconds["float32"][name] / taken, 3) for name, taken in seconds[form].items()}
                record["of_float32"] = ratios
                print("".join(f"{ratio:>9.2f}" for ratio in ratios.values()), end="")
            print()
            records.append(record)
    return records


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--forms", default=",".join(FORMS), help="how weights are held")
    parser.add_argument("--variants", help="of the processor's instruction sets; all that run here if not given")
    parser.add_argument("--rows", type=counts, default="1,8,32,128,256")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("--bytes-of-weights", type=float, default=BYTES_OF_WEIGHTS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    chosen = variants(arguments.threads, arguments.variants)
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes.split(",")]
    print("billions of operations per second, and times float32\n      form  product  rows", *chosen)
    results = [
        record
        for shape in shapes
        for record in measure(shape, arguments.forms.split(","), arguments.rows, chosen, arguments)
    ]
    record = {"benchmark": "cpu_products", "threads": arguments.threads, **provenance(arguments.seed)}
    write_result(arguments.json, record | {"results": results})


if __name__ == "__main__":
    main()
