"""Variants of the attention kernels, as the table of tile sizes and some models ask for them."""

import torch
from triton_compilation import CompileCase

from headway_kernels.gpu.attention import kernels as attention_kernels
from headway_kernels.gpu.attention import tuning as attention_tuning
from headway_kernels.gpu.attention.tiles import BY_DISTANCE, BY_PLACE

POINTERS = ("query", "pool", "out")
LENGTHS = ("rows", "query_start", "kv_length", "block_tables", "split_ends", "tile_ends", "splits_per_item", "arrived")
STRIDES = ("query_stride", "out_stride", "table_stride")


def case(
    name,
    kernel,
    element="*bf16",
    pool=None,
    num_warps=4,
    num_stages=3,
    max_registers=None,
    blocks=1,
    first=0,
    below=1000,
    **constants,
):
    """``constants`` may hold more than the kernel takes."""
    types = {"window": "i32", "factor": "fp32", "cap": "fp32", "num_rows": "i32"}
    types |= dict.fromkeys(POINTERS, element) | {"pool": pool or element}
    types |= dict.fromkeys(("sinks", "slopes", "partial", "log_sum_exp"), "*fp32")
    types |= dict.fromkeys(LENGTHS, "*i32") | dict.fromkeys(STRIDES, "i32")
    signature = {key: kind for key, kind in types.items() if key in kernel.arg_names}
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constants={key: value for key, value in constants.items() if key in kernel.arg_names},
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=tuple(key for key, kind in signature.items() if kind.startswith("*") or key in STRIDES),
        max_registers=max_registers,
        blocks=blocks,
        first=first,
        below=below,
    )


def model(
    major,
    head_dim,
    element,
    *,
    group=4,
    block_size=16,
    window=False,
    soft_cap=False,
    sinks=False,
    alibi=0,
    codes=False,
    stride=None,
    num_shared=0,
    below=1000,
):
    """The kernels of one model, cut as for devices of compute capability ``major``."""
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[element]
    sizes = attention_tuning.tile_sizes(head_dim, dtype, is_coded=codes, is_latent=num_shared > 0)
    tuning = attention_tuning.tuning_for(major, sizes)
    if num_shared:  # Of so many heads, those of a program.
        group //= attention_tuning.latent_groups(group, tuning)
    tokens = max(1, tuning.chunk.query_tile // group)
    constants = {
        "GROUP": group,
        "NUM_KV_HEADS": 8,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": stride or (1 if num_shared else 16) * block_size * (num_shared + head_dim + int(codes)),
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": max(16, attention_tuning.power_of_two(head_dim)),
        "SHARED": num_shared,
        "PADDED_SHARED": max(16, attention_tuning.power_of_two(num_shared)),
        "CODED": int(codes),
        "PADDED_ROWS": 256,
        "HAS_WINDOW": window,
        "HAS_SOFT_CAP": soft_cap,
        "HAS_SINKS": sinks,
        "ALIBI": alibi,
        "TOKENS": tokens,
        "TOKENS_PER_TILE": tokens,
    }
    vectors = {
        "chunk": max(16, attention_tuning.power_of_two(tokens * group)),
        "decode": max(16, tuning.decode.query_tile, attention_tuning.power_of_two(group)),
    }
    kernels = {"chunk": attention_kernels.chunk_kernel, "decode": attention_kernels.decode_kernel}
    return [
        case(
            f"{kind} {f'{num_shared}+' if num_shared else ''}{head_dim} {element} for {major}.x"
            f"{', alibi' if alibi else ''}{', codes' if codes else ''}",
            kernel,
            element,
            "*u8" if codes else None,
            getattr(tuning, kind).num_warps,
            getattr(tuning, kind).num_stages,
            tuning.decode.max_registers if kind == "decode" else None,
            getattr(tuning, kind).programs_per_multiprocessor,
            10 * major,
            below,
            QUERY_TILE=vectors[kind],
            KEY_TILE=getattr(tuning, kind).key_tile,
            **constants,
        )
        for kind, kernel in kernels.items()
    ]


def of_every_head(capability):
    """What ships for a processor, in each padded head size: too many for every test run."""
    kinds = (("*bf16", False), ("*bf16", True), ("*fp32", False))
    return [
        found
        for head_dim in (64, 128, 256, 512)
        for element, codes in kinds
        for found in model(capability // 10, head_dim, element, codes=codes)
    ] + [
        found
        for rank in (256, 512)
        for element, codes in kinds
        for found in model(capability // 10, rank, element, codes=codes, num_shared=64, group=128)
    ]


CASES = [
    case("plan", attention_kernels.plan_kernel, TOKENS_PER_TILE=32, PADDED_ROWS=4096, MOST_ITEMS=256, MOST_TOKENS=512),
    *model(9, 128, "*bf16"),
    *model(9, 128, "*bf16", codes=True, below=100),
    *model(10, 128, "*bf16", codes=True),
    *model(10, 256, "*bf16"),
    *model(9, 80, "*fp16", group=7, block_size=64, window=True, soft_cap=True),
    *model(9, 64, "*bf16", group=8, window=True, sinks=True),
    *model(9, 128, "*bf16", group=1, alibi=BY_DISTANCE.value),
    *model(9, 64, "*fp16", group=1, alibi=BY_PLACE.value),
    *model(9, 512, "*bf16", group=8, stride=16 * 16 * 5888, below=100),  # Of layers that stand behind each other.
    *model(9, 512, "*bf16", group=16, num_shared=64, below=100),  # DeepSeek V2 Lite, or an eighth of V3.
    *model(10, 512, "*bf16", group=128, num_shared=64),
    *model(9, 256, "*bf16", group=40, num_shared=32, below=100),  # MiniCPM3.
    *model(9, 512, "*bf16", group=128, num_shared=64, codes=True, below=100),
    *model(8, 80, "*fp16", group=7, block_size=64, window=True, soft_cap=True, below=90),
    *model(8, 64, "*bf16", group=8, window=True, sinks=True, below=90),
    *model(8, 12, "*fp32", group=1, block_size=8),
    *model(8, 12, "*fp32", group=1, block_size=8, codes=True),
]
