"""Variants of products with codes that a model of Llama 3 8B's shape launches, and float32 ones."""

import torch
from triton_compilation import CompileCase

from headway_kernels.gpu.linear import quantized as module
from headway_kernels.gpu.linear.weights import DeviceWeight, WeightForm

ATTENTION_OUTPUT, GATE_UP = (4096, 4096), (28672, 4096)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {"DENSE": None, "INT8": "*i8", "FP8": "*u8", "INT4": "*u8", "INT8_PAIRS": "*i16", "FP8_PAIRS": "*i16"}
PAIRS = {"INT4", "INT8_PAIRS", "FP8_PAIRS"}


def weight_of(form, shape, group=None, *, minima=False, ordered=False):
    """A weight without numbers: inputs share scales by ``group``, or all."""
    outputs, inputs = shape
    empty = {"device": "meta", "dtype": torch.float32}
    scales = torch.empty(-(-inputs // group) if group else 1, outputs, **empty)
    return DeviceWeight(
        WeightForm[form],
        torch.empty(outputs, inputs // 2 if form in PAIRS else inputs, **empty),
        inputs,
        group or inputs,
        None if form == "DENSE" else scales,
        torch.empty_like(scales) if minima else None,
        torch.empty(inputs, **empty) if ordered else None,
    )


def pointers_of(dtype, form, *, has_bias):
    kinds = {"values": POINTERS[form] or f"*{dtype}", "scales": "*fp32", "minima": "*fp32", "order": "*i32"}
    return kinds | {"x": f"*{dtype}", "out": f"*{dtype}", "bias": f"*{dtype}" if has_bias else "*fp32"}


def product(dtype, form, shape, num_tokens, group=None, *, has_bias=False, **kind):
    weight = weight_of(form, shape, group, **kind)
    tiling = module.choose_tiling(num_tokens, weight, DTYPES[dtype])
    pointers = pointers_of(dtype, form, has_bias=has_bias)
    return CompileCase(
        name=f"product {dtype} {form} {shape} T={num_tokens} group={group} bias={has_bias}",
        kernel=module._product,
        signature=pointers | {"x_stride": "i32", "out_stride": "i32", "num_tokens": "i32"},
        constants=module.product_constants(weight, tiling, has_bias=has_bias) | {"WIDE": dtype == "fp32"},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=(*pointers, "x_stride", "out_stride"),
    )


CASES = [
    product("bf16", "INT8_PAIRS", GATE_UP, 256),
    product("bf16", "INT8_PAIRS", GATE_UP, 2048, has_bias=True),
    product("fp16", "FP8_PAIRS", GATE_UP, 2048),
    product("fp32", "INT8_PAIRS", ATTENTION_OUTPUT, 16),
    product("bf16", "INT4", GATE_UP, 2048, 128),
    product("bf16", "INT4", ATTENTION_OUTPUT, 256, 32, minima=True, ordered=True),
    product("bf16", "FP8_PAIRS", GATE_UP, 2048, 128),
    product("fp32", "INT4", ATTENTION_OUTPUT, 16, 32),
]
