"""Variants of low-rank additions that a model of Llama 3 8B's shape launches."""

from triton_compilation import CompileCase

from headway_kernels.gpu.experts import low_rank as of_experts
from headway_kernels.gpu.linear import low_rank as module

RANK = 1536
"""Of three projections side by side, each with the largest rank."""
_TILES = {"tables": "*i64", "tokens": "*i32"}
_NUMBERS = {"num_tokens": "i32", "site": "i32"}


def shrink(dtype, num_inputs, num_heads=1):
    """Of heads, as those of keys of latent attention."""
    pointers = _TILES | {"x": f"*{dtype}", "workspace": "*fp32"}
    return CompileCase(
        name=f"shrink {dtype} {num_inputs} heads={num_heads}",
        kernel=module._shrink,
        signature=pointers | _NUMBERS | {"x_stride": "i32", "x_head_stride": "i32"},
        constants={
            "INPUTS": num_inputs,
            "SPLIT_INPUTS": module.SPLIT_INPUTS,
            "BLOCK_INPUTS": module.BLOCK_INPUTS,
            "OWN_DOWNS": num_heads > 1,
            "NUM_HEADS": num_heads,
            "RANK_STRIDE": RANK,
            "BLOCK_RANK": module.BLOCK_RANK,
        },
        num_warps=module.NUM_WARPS,
        aligned=(*pointers, "x_stride", "x_head_stride"),
        blocks=4,
    )


def expand(dtype, num_outputs, splits, num_heads=1):
    """Of heads, as those of values of latent attention."""
    pointers = _TILES | {"workspace": "*fp32", "out": f"*{dtype}"}
    return CompileCase(
        name=f"expand {dtype} {num_outputs} splits={splits} heads={num_heads}",
        kernel=module._expand,
        signature=pointers | _NUMBERS | {"out_stride": "i32", "out_head_stride": "i32"},
        constants={
            "OUTPUTS": num_outputs,
            "SPLITS": splits,
            "BLOCK_OUTPUTS": module.BLOCK_OUTPUTS,
            "OWN_UPS": num_heads > 1,
            "NUM_HEADS": num_heads,
            "RANK_STRIDE": RANK,
            "BLOCK_RANK": module.BLOCK_RANK,
        },
        num_warps=module.NUM_WARPS,
        aligned=(*pointers, "out_stride", "out_head_stride"),
        blocks=3,
    )


def of_pairs(kernel, dtype, num_inputs, num_outputs, *, gathers):
    """Of Qwen3 30B-A3B's shape."""
    is_shrink = kernel is of_experts._shrink_pairs
    pointers = {"tables": "*i64", "chosen": "*i32", "order": "*i32", "ends": "*i32", "workspace": "*fp32"}
    splits = -(-num_inputs // module.SPLIT_INPUTS)
    own = {"INPUTS": num_inputs, "SPLIT_INPUTS": module.SPLIT_INPUTS, "BLOCK_INPUTS": module.BLOCK_INPUTS}
    other = {"OUTPUTS": num_outputs, "SPLITS": splits, "BLOCK_OUTPUTS": of_experts.BLOCK_OUTPUTS}
    pointers |= {"x" if is_shrink else "out": f"*{dtype}"}
    stride = "x_stride" if is_shrink else "out_stride"
    return CompileCase(
        name=f"{kernel.__name__} {dtype} {num_inputs} to {num_outputs}",
        kernel=kernel,
        signature=pointers | {stride: "i32", "first": "i32", "at_once": "i32", "site": "i32"},
        constants=(own if is_shrink else other)
        | {"NUM_EXPERTS": 128, "NUM_CHOSEN": 8, "GATHERS": gathers, "RANK_STRIDE": 1024}
        | {"BLOCK_RANK": module.BLOCK_RANK},
        num_warps=module.NUM_WARPS,
        aligned=(*pointers, stride),
    )


CASES = [
    shrink("bf16", 4096),
    shrink("fp32", 14336),
    expand("bf16", 28672, 4),
    expand("bf16", 4096, 14),
    shrink("bf16", 128, num_heads=128),
    expand("bf16", 128, 1, num_heads=128),
    of_pairs(of_experts._shrink_pairs, "bf16", 2048, 1536, gathers=True),
    of_pairs(of_experts._expand_pairs, "bf16", 768, 2048, gathers=False),
]
