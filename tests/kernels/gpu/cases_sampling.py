"""The variants of the sampling kernels that a backend launches, as ``triton_compilation`` wants them."""

from triton_compilation import CompileCase

from headway_kernels.gpu.sampling import (
    distribution,
    draw,
    logprobs,
    narrowing,
    penalties,
    truncation,
)

CHUNK = 4096
_TYPES = {
    "logits_ptr": "*bf16",
    "seed_ptr": "*i64",
    "top_p_ptr": "*fp64",
    "min_p_ptr": "*fp64",
    "chunk_sum_ptr": "*i64",
    "chunk_weight_ptr": "*i64",
    "range_weight_ptr": "*i64",
    "pivot_weight_ptr": "*i64",
    "narrowed_weight_ptr": "*i64",
    "logits_stride": "i32",
    "store_stride": "i32",
    "vocab_size": "i32",
    "num_chunks": "i32",
}
_FLOATS = {
    "temperature", "repetition", "presence", "frequency", "entry_biases", "adjusted", "chunk_max",
    "chunk_survey", "row_max", "row_scale", "row_share", "out_logprobs", "out_normalisers",
}  # fmt: skip


def case(name, kernel, logits="*bf16", **constants):
    """Types by the arguments' names; pointers to whole tensors are aligned, and so is a vocabulary of 128 256."""
    signature = {}
    for argument in kernel.arg_names:
        if argument.isupper():
            continue
        if argument in _TYPES:
            signature[argument] = logits if argument == "logits_ptr" else _TYPES[argument]
        else:
            signature[argument] = "*fp32" if argument.removesuffix("_ptr") in _FLOATS else "*i32"
    aligned = tuple(
        n for n in signature if n in {"logits_ptr", "logits_stride", "vocab_size", "words_ptr", "adjusted_ptr"}
    )
    return CompileCase(
        name,
        kernel,
        signature,
        constants,
        num_warps=1 if kernel is distribution._merge_kernel else 8,
        aligned=aligned,
        shows_fusion="row_share_ptr" in kernel.arg_names and kernel is not distribution._merge_kernel,
    )


CASES = [
    case("clear", penalties._clear_kernel, CHUNK=CHUNK),
    case("count", penalties._count_kernel, PARTS=16, TILE=512),
    case("adjust", penalties._adjust_kernel, CHUNK=CHUNK),
    case("entries", penalties._entries_kernel, TILE=256),
    *(
        case(
            f"statistics {kind}",
            distribution.statistics_kernel,
            logits,
            CHUNK=CHUNK,
            WITH_SUM=with_sum,
            RAW=raw,
        )
        for kind, logits, with_sum, raw in (
            ("greedy", "*bf16", False, False),
            ("random", "*bf16", True, False),
            ("raw", "*fp16", True, True),
            ("adjusted", "*fp32", True, False),
        )
    ),
    case("merge greedy", distribution._merge_kernel, CHUNKS=32, RANDOM=False),
    case("merge random", distribution._merge_kernel, CHUNKS=32, RANDOM=True),
    case("survey", truncation._survey_kernel, CHUNK=CHUNK),
    case("list", truncation._list_kernel, CHUNK=CHUNK, CHUNKS=32),
    *(case(f"narrow {i}", narrowing._narrow_kernel, CHUNK=CHUNK, CHUNKS=32, ROUND=i) for i in range(2)),
    case("gather", narrowing._gather_kernel, CHUNK=CHUNK, CHUNKS=32),
    case("threshold", truncation._threshold_kernel, TILE=1024, PIVOTS=8, CHUNK=CHUNK),
    case("weigh", draw._weigh_kernel, CHUNK=CHUNK),
    case("draw", draw._draw_kernel, "*fp32", CHUNK=CHUNK, CHUNKS=32),
    case("logprob", logprobs._logprob_kernel, CHUNKS=32),
]
