"""Variants of the product of a few tokens that a model of Llama 3 8B's shape launches."""

from triton_compilation import CompileCase

from headway_kernels.gpu import skinny_linear as module
from headway_kernels.gpu.activation import Gate

QKV, OUTPUT, GATE_UP, DOWN, HEAD = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)


def product(shape, num_tokens, gate=Gate.NONE, dtype="bf16", *, has_bias=False):
    num_stages, constants = module.product_constants(num_tokens, *shape, gate, has_bias=has_bias)
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | {"partial": "*fp32", "arrived": "*i32"}
    return CompileCase(
        name=f"skinny {dtype} {shape} T={num_tokens} {gate.name} bias={has_bias} splits={constants['SPLITS']}",
        kernel=module.skinny_kernel,
        signature=pointers | {"x_stride": "i32", "out_stride": "i32", "num_tokens": "i32"},
        constants=constants | {"WIDE": False},
        num_warps=module.NUM_WARPS,
        num_stages=num_stages,
        aligned=(*pointers, "x_stride", "out_stride"),
        max_registers=module.MAX_REGISTERS,
        blocks=2,
        fetches_ahead=True,
    )


CASES = [
    product(QKV, 16, has_bias=True),
    product(OUTPUT, 64),
    product(GATE_UP, 16, Gate.SILU),
    product(GATE_UP, 64, Gate.SILU),
    product(DOWN, 16, dtype="fp16"),
    product(HEAD, 64),
    product((2880, 2880), 16, Gate.CLAMPED, has_bias=True),
]
