"""Variants of the product of a few tokens that a model of Llama 3 8B's shape launches, with numbers and with codes."""

from cases_quantized_linear import pointers_of, weight_of
from triton_compilation import CompileCase

from headway_kernels.gpu.activation import Gate
from headway_kernels.gpu.linear import skinny as module

QKV, OUTPUT, GATE_UP, DOWN, HEAD = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)


def product(shape, num_tokens, gate=Gate.NONE, form="DENSE", group=None, *, dtype="bf16", has_bias=False, **kind):
    weight = weight_of(form, shape, group, **kind)
    num_stages, constants = module.product_constants(num_tokens, weight, gate, has_bias=has_bias)
    pointers = pointers_of(dtype, form, has_bias=has_bias) | {"partial": "*fp32", "arrived": "*i32"}
    name = f"{form} {shape} T={num_tokens} group={group} {gate.name} bias={has_bias} splits={constants['SPLITS']}"
    return CompileCase(
        name=f"skinny {dtype} {name}",
        kernel=module.skinny_kernel,
        signature=pointers | {"x_stride": "i32", "out_stride": "i32", "num_tokens": "i32"},
        constants=constants | {"WIDE": False},
        num_warps=module.NUM_WARPS,
        num_stages=num_stages,
        aligned=(*pointers, "x_stride", "out_stride"),
        max_registers=module.MAX_REGISTERS,
        blocks=2,
        fetches_ahead=True,
    )


CASES = [
    product(QKV, 16, has_bias=True),
    product(OUTPUT, 64),
    product(GATE_UP, 16, Gate.SILU),
    product(GATE_UP, 64, Gate.SILU),
    product(GATE_UP, 64, Gate.GELU_TANH),
    product(DOWN, 16, dtype="fp16"),
    product(HEAD, 64),
    product((2880, 2880), 16, Gate.CLAMPED, has_bias=True),
    product(QKV, 16, form="INT8_PAIRS", has_bias=True),
    product(OUTPUT, 16, form="FP8_PAIRS"),
    product(GATE_UP, 64, Gate.SILU, "INT8_PAIRS"),
    product(DOWN, 64, form="FP8_PAIRS", dtype="fp16"),
    product(DOWN, 64, form="FP8_PAIRS", group=128),
    product(GATE_UP, 16, Gate.SILU, "INT4", 128),
    product(DOWN, 16, form="INT4", group=32, minima=True),
    product(OUTPUT, 64, form="INT4", group=128, minima=True, ordered=True),
    product(DOWN, 16, form="INT8", group=16),
]
