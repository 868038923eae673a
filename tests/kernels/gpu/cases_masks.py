"""The mask kernel as a backend launches it, as ``triton_compilation`` wants it."""

from triton_compilation import CompileCase

from headway_kernels.gpu import masks

CASES = [
    CompileCase(
        f"exclude {logits}",
        masks._exclude,
        {"logits": logits, "places": "*i64", "words": "*i32", "logits_stride": "i32", "words_stride": "i32"},
        {"VOCAB": 128_256, "BLOCK": masks._TOKENS_PER_PROGRAM},
        num_warps=masks._NUM_WARPS,
        aligned=("logits", "places", "words"),
    )
    for logits in ("*bf16", "*fp32")
]
