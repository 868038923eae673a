"""Variants of the kernels around latent attention that models of the shapes of DeepSeek V3 and MiniCPM3 launch."""

import torch
from triton_compilation import CompileCase

from headway_kernels.gpu import latent
from headway_kernels.gpu.linear import heads

BLOCK_SIZE = 16
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def product(dtype, num_tokens, num_outputs, num_inputs):
    pointers = dict.fromkeys(("x", "weight", "out"), f"*{dtype}")
    strides = dict.fromkeys(("x_stride", "x_head_stride", "out_stride", "out_head_stride"), "i32")
    return CompileCase(
        name=f"heads {dtype} {num_inputs} to {num_outputs} T={num_tokens}",
        kernel=heads.multiply_heads_kernel,
        signature=pointers | strides | {"num_tokens": "i32"},
        constants=heads.product_constants(num_tokens, num_outputs, num_inputs, _DTYPES[dtype])
        | {"WIDE": dtype == "fp32"},
        num_warps=heads.NUM_WARPS,
        num_stages=heads.NUM_STAGES,
        aligned=(*pointers, *strides),
        blocks=2,
        fetches_ahead=True,
    )


def stored(dtype, num_heads, rank, shared, plain, *, grows=False, codes=False):
    pointers = dict.fromkeys(("compressed", "norm", "queries", "wide", "pool_layer"), f"*{dtype}")
    pointers |= dict.fromkeys(("cosines", "sines", "query_factors"), "*fp32") | ({"pool_layer": "*u8"} if codes else {})
    strides = ("compressed_stride", "queries_stride", "queries_head_stride", "wide_stride", "wide_head_stride")
    return CompileCase(
        name=f"store_latent {dtype} {shared}+{rank} codes={codes} grows={grows}",
        kernel=latent.store_latent_kernel,
        signature=pointers | dict.fromkeys(strides, "i32") | {"positions": "*i32", "slots": "*i32", "eps": "fp32"},
        constants=latent.sizes(num_heads, rank, shared, plain)
        | {"GROWS": grows, "CODED": int(codes), "BLOCK_SIZE": BLOCK_SIZE}
        | {"BLOCK_STRIDE": BLOCK_SIZE * (rank + shared + int(codes))},
        num_warps=latent.NUM_WARPS,
        aligned=(*pointers, *strides),
        blocks=4,
    )


CASES = [
    product("bf16", 16, 512, 128),
    product("bf16", 64, 128, 512),
    product("bf16", 64, 64, 256),
    product("fp32", 64, 128, 512),
    stored("bf16", 128, 512, 64, 128),
    stored("bf16", 40, 256, 32, 64, codes=True),
    stored("bf16", 32, 256, 64, 64, grows=True),
    stored("fp32", 128, 512, 64, 128),
]
