"""Variants of the product of experts in 8-bit floats that a model of the shape of Qwen3 30B-A3B or DeepSeek V3 launches."""

from dataclasses import replace

from cases_experts import DEEPSEEK, QWEN3
from cases_float8_linear import FIRST
from cases_quantized_linear import weight_of
from triton_compilation import CompileCase

from headway_kernels.gpu.experts import float8 as module
from headway_kernels.gpu.experts.grouped import grid_constants
from headway_kernels.gpu.linear.float8 import FLOAT8_TILINGS, product_constants, tiling_of


def product(name, routing, shape, group, pairs_of_expert, *, out="bf16", has_bias=False, gathers=True):
    weight = weight_of("FP8_PAIRS", shape, group)
    weight = replace(weight, values=weight.values.short())
    tiling = tiling_of(pairs_of_expert, FLOAT8_TILINGS)
    pointers = {"codes": "*fp8e4nv", "factors": "*fp32", "values": "*fp8e4nv", "scales": "*fp32", "out": f"*{out}"}
    pointers |= {"bias": f"*{out}" if has_bias else "*fp32", "pair_order": "*i32", "ends": "*i32"}
    return CompileCase(
        name=f"float8 pairs {name} {out} {shape} P={pairs_of_expert} group={group} gathers={gathers}",
        kernel=module._float8_pairs,
        signature=pointers | {"out_stride": "i32", "num_rows": "i32"},
        constants=product_constants(weight, tiling, has_bias=has_bias)
        | grid_constants(weight, routing.num_experts, routing.num_chosen, gathers=gathers),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=(*pointers, "out_stride"),
        blocks=2 if tiling.tokens == 64 else 1,
        first=FIRST,
    )


CASES = [
    product("Qwen3", QWEN3, (1536, 2048), 128, 128),
    product("Qwen3", QWEN3, (2048, 768), 128, 128, gathers=False),
    product("Qwen3", QWEN3, (1536, 2048), None, 512, out="fp16", has_bias=True),
    product("DeepSeek V3", DEEPSEEK, (4096, 7168), 128, 512),
    product("DeepSeek V3", DEEPSEEK, (7168, 2048), 128, 512, gathers=False),
]
