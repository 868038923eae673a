"""Variants of the product of 8-bit floats that a model of Llama 3 8B's shape launches, and the rounding before it."""

from dataclasses import replace

from cases_quantized_linear import weight_of
from triton_compilation import CompileCase

from headway_kernels.gpu.linear import float8 as module

GATE_UP, DOWN = (28672, 4096), (4096, 14336)
FIRST = 89
"""The first processors that multiply these codes."""


def product(shape, num_tokens, group=None, *, out="bf16", has_bias=False):
    weight = weight_of("FP8_PAIRS", shape, group)
    weight = replace(weight, values=weight.values.short())
    tiling = next(t for t in module.FLOAT8_TILINGS if t.max_tokens is None or num_tokens <= t.max_tokens)
    pointers = {"codes": "*fp8e4nv", "factors": "*fp32", "values": "*fp8e4nv", "scales": "*fp32", "out": f"*{out}"}
    pointers["bias"] = f"*{out}" if has_bias else "*fp32"
    return CompileCase(
        name=f"float8 product {out} {shape} T={num_tokens} group={group} bias={has_bias}",
        kernel=module._float8_product,
        signature=pointers | {"out_stride": "i32", "num_tokens": "i32"},
        constants=module.product_constants(weight, tiling, has_bias=has_bias) | {"BAND": module.OUTPUT_TILES_PER_BAND},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=(*pointers, "out_stride"),
        blocks=2 if tiling.tokens == 64 else 1,
        first=FIRST,
    )


def rounding(dtype, num_inputs):
    return CompileCase(
        name=f"round_inputs {dtype} {num_inputs}",
        kernel=module._round_inputs,
        signature={"x": f"*{dtype}", "codes": "*i16", "factors": "*fp32", "x_stride": "i32", "num_tokens": "i32"},
        constants={"INPUTS": num_inputs, "BLOCKS_AT_ONCE": module.BLOCKS_AT_ONCE},
        aligned=("x", "codes", "factors", "x_stride"),
        first=FIRST,
    )


CASES = [
    product(GATE_UP, 256, has_bias=True),
    product(GATE_UP, 2048),
    product(DOWN, 256, 128),
    product(DOWN, 2048, 128, out="fp16"),
    rounding("bf16", 4096),
    rounding("fp32", 14336),
]
