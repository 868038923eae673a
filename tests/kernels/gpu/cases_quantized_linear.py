"""Variants of products with 8-bit codes that a model of Llama 3 8B's shape launches, and float32 ones."""

import torch
from triton_compilation import CompileCase

from headway_kernels.gpu import quantized_linear as module

ATTENTION_OUTPUT, GATE_UP, DOWN = (4096, 4096), (28672, 4096), (4096, 14336)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def product(dtype, kind, shape, num_tokens, *, has_bias=False):
    tiling = module.choose_tiling(num_tokens, DTYPES[dtype])
    constants = module.product_constants(*shape, tiling, is_fp8=kind == "fp8", has_bias=has_bias)
    pointers = {"codes": "*u8" if kind == "fp8" else "*i8", "scales": "*fp32", "workspace": "*fp32"}
    pointers |= {"x": f"*{dtype}", "out": f"*{dtype}", "bias": f"*{dtype}" if has_bias else "*fp32"}
    return CompileCase(
        name=f"product {dtype} {kind} {shape} T={num_tokens} bias={has_bias} splits={constants['SPLITS']}",
        kernel=module._product,
        signature=pointers | {"x_stride": "i32", "out_stride": "i32", "num_tokens": "i32"},
        constants=constants | {"WIDE": dtype == "fp32"},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=(*pointers, "x_stride", "out_stride"),
    )


def sums(dtype, kind, shape, num_tokens):
    tiling = module.choose_tiling(num_tokens, DTYPES[dtype])
    constants = module.product_constants(*shape, tiling, is_fp8=kind == "fp8", has_bias=False)
    assert constants["SPLITS"] > 1
    pointers = {"workspace": "*fp32", "scales": "*fp32", "bias": "*fp32", "out": f"*{dtype}"}
    kept = {name: constants[name] for name in ("OUTPUTS", "SPLITS", "IS_FP8", "HAS_BIAS")}
    return CompileCase(
        name=f"add_splits {dtype} {kind} {shape} T={num_tokens}",
        kernel=module._add_splits,
        signature=pointers | {"out_stride": "i32"},
        constants=kept | {"SPLIT_TOKENS": tiling.tokens, "BLOCK": module.SUMS_PER_PROGRAM},
        num_warps=module.SUM_WARPS,
        aligned=(*pointers, "out_stride"),
    )


CASES = [
    product("bf16", "int8", ATTENTION_OUTPUT, 16),
    product("bf16", "fp8", ATTENTION_OUTPUT, 16),
    product("bf16", "int8", GATE_UP, 16),
    product("bf16", "fp8", DOWN, 64),
    product("bf16", "int8", DOWN, 64),
    product("bf16", "int8", GATE_UP, 256),
    product("bf16", "int8", GATE_UP, 2048, has_bias=True),
    product("bf16", "fp8", GATE_UP, 2048),
    product("fp16", "fp8", GATE_UP, 2048),
    product("fp32", "int8", ATTENTION_OUTPUT, 16),
    product("fp32", "fp8", ATTENTION_OUTPUT, 2048),
    sums("bf16", "int8", ATTENTION_OUTPUT, 16),
    sums("fp32", "fp8", ATTENTION_OUTPUT, 16),
]
