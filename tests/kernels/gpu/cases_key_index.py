"""Variants of the kernels of an index of keys that DeepSeek V3.2 launches: 64 heads of 128 channels, 2,048 keys."""

import torch
from cases_attention import model
from triton_compilation import CompileCase

from headway_kernels.gpu import key_index as module

HEADS, HEAD_DIM, CHOSEN, SHARED, WIDTH, HIDDEN, BLOCK_SIZE = 64, 128, 2048, 64, 576, 7168, 16
_STEP = {"rows": "*i32", "query_start": "*i32", "block_tables": "*i32", "positions": "*i32", "num_rows": "i32"}
_POOL = {
    "BLOCK_SIZE": BLOCK_SIZE,
    "BLOCK_STRIDE": 2 * BLOCK_SIZE * WIDTH,
    "WIDTH": WIDTH,
    "BEFORE_KEYS": BLOCK_SIZE * WIDTH,
}


def case(kernel, dtype, signature, strides=(), **constants):
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return CompileCase(
        name=f"{kernel.__name__.lstrip('_')} {dtype}",
        kernel=kernel,
        signature=signature | dict.fromkeys(strides, "i32"),
        constants=constants,
        num_warps=module.CHOICE_WARPS if kernel is module._choose_keys else module.NUM_WARPS,
        aligned=(*pointers, *strides),
        max_registers=module.MAX_REGISTERS if kernel in (module._choose_keys, module._score_keys) else None,
    )


def stored(dtype):
    pointers = dict.fromkeys(("queries", "keys", "pool_layer"), f"*{dtype}")
    columns = {"positions": "*i32", "slots": "*i32", "cosines": "*fp32", "sines": "*fp32"}
    sizes = {"NUM_HEADS": HEADS, "HEAD_DIM": HEAD_DIM, "PAIRS": SHARED // 2}
    blocks = {"BLOCK_HEADS": HEADS, "BLOCK_PAIRS": SHARED // 2, "BLOCK_DIM": HEAD_DIM}
    return case(module._store_index, dtype, pointers | columns, **sizes, **blocks, **_POOL)


def weighed(dtype):
    return case(
        module._weigh_heads,
        dtype,
        {"inputs": f"*{dtype}", "weight": "*fp32", "splits": "*fp32", "num_tokens": "i32"},
        ("inputs_stride",),
        INPUTS=HIDDEN,
        NUM_HEADS=HEADS,
        BLOCK_TOKENS=16,
        BLOCK_HEADS=HEADS,
        BLOCK_INPUTS=module.BLOCK_INPUTS,
        SPLIT_INPUTS=module.SPLIT_INPUTS,
    )


def scored(dtype):
    pointers = dict.fromkeys(("queries", "pool_layer"), f"*{dtype}") | dict.fromkeys(("weights", "scores"), "*fp32")
    return case(
        module._score_keys,
        dtype,
        pointers | _STEP | {"first_token": "i32"},
        ("table_stride", "scores_stride", "split_stride"),
        NUM_HEADS=HEADS,
        HEAD_DIM=HEAD_DIM,
        SPLITS=module.num_splits(HIDDEN),
        BLOCK_HEADS=HEADS,
        BLOCK_DIM=HEAD_DIM,
        NUM_CHOSEN=CHOSEN,
        PADDED_ROWS=256,
        KEY_TILE=module.key_tile({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]),
        **_POOL,
    )


CASES = [
    stored("bf16"),
    weighed("bf16"),
    weighed("fp32"),
    scored("bf16"),
    scored("fp32"),
    case(
        module._choose_keys,
        "fp32",
        {"scores": "*fp32", "lengths": "*i32", "chosen": "*i32"} | _STEP | {"first_token": "i32"},
        ("table_stride", "scores_stride"),
        NUM_CHOSEN=CHOSEN,
        PADDED_ROWS=256,
        BLOCK_SIZE=BLOCK_SIZE,
        VECTORS_PER_BLOCK=2 * BLOCK_SIZE,
        TILE=module.CHOICE_TILE,
    ),
    case(
        module._count_seen,
        "fp32",
        dict.fromkeys(("positions", "query_start", "lengths", "starts"), "*i32")
        | {"num_tokens": "i32", "num_rows": "i32"},
        NUM_CHOSEN=CHOSEN,
        PADDED_ROWS=256,
    ),
    case(
        module._cut_rows,
        "fp32",
        dict.fromkeys(("positions", "query_start", "rows", "whole_rows", "whole_lengths", "whole_starts"), "*i32")
        | {"num_rows": "i32"},
        NUM_CHOSEN=CHOSEN,
        BLOCK=module.CHOICE_TILE,
    ),
    # Of what is chosen: each vector is a block.
    model(9, 512, "*bf16", group=128, num_shared=SHARED, block_size=1, below=100)[1],
]
