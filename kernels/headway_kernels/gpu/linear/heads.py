"""Products of heads, each with a weight of its own (latent attention: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2).

Owns: the product. Must not know: what heads are of.

A token's result does not depend on the number of tokens: all tiles have the same outputs, and add inputs in the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.linear.weights import WeightForm, fetch_ahead, multiply_tile

BLOCK_OUTPUTS = 64
NUM_WARPS = 4
NUM_STAGES = 3
_FEW_TOKENS, _MANY_TOKENS = 16, 64

_DENSE = tl.constexpr(int(WeightForm.DENSE))


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out[:, h] = x[:, h] @ weight[h].T``, sums in float32, rounded once.

    ``x`` ``[T, heads, K]`` and ``out`` ``[T, heads, N]``, any strides of tokens and heads; ``weight`` ``[heads, N, K]``,
    contiguous. One floating dtype.
    """
    num_tokens, num_heads, num_inputs = x.shape
    num_outputs = weight.shape[1]
    assert weight.is_contiguous(), "weights are read in rows"
    assert weight.shape == (num_heads, num_outputs, num_inputs), "each head has a weight of that many inputs"
    assert out.shape == (num_tokens, num_heads, num_outputs), "each head has that many outputs"
    assert x.stride(2) == out.stride(2) == 1, "tokens and heads may lie apart, elements not"
    constants = product_constants(num_tokens, num_outputs, num_inputs, x.dtype)
    token_tiles = triton.cdiv(num_tokens, constants["BLOCK_TOKENS"])
    multiply_heads_kernel[(num_heads, triton.cdiv(num_outputs, BLOCK_OUTPUTS), token_tiles)](
        x,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        num_tokens,
        **constants,
        WIDE=x.dtype == torch.float32 or not x.is_cuda,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        **dependent_launch(x.device),
    )


def product_constants(num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> dict[str, int]:
    """The constants of the kernel. float32 has no tensor cores of full precision: its operands fill registers."""
    return {
        "OUTPUTS": num_outputs,
        "INPUTS": num_inputs,
        "BLOCK_TOKENS": _FEW_TOKENS if num_tokens <= _FEW_TOKENS or dtype == torch.float32 else _MANY_TOKENS,
        "BLOCK_OUTPUTS": BLOCK_OUTPUTS,
        "BLOCK_INPUTS": 32 if dtype == torch.float32 else 64,
    }


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_heads_kernel(
    x,
    weight,
    out,
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    num_tokens,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has some outputs of a head, and some tokens."""
    head = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    tokens = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    values = weight + head.to(tl.int64) * (OUTPUTS * INPUTS)
    # Beyond the edge, read the last token and output again: this needs no mask in the loop, and changes no result.
    row = tl.minimum(outputs, OUTPUTS - 1)
    if PDL:
        fetch_ahead(values, row, 0, INPUTS, _DENSE)
    await_grid(PDL)
    sums = multiply_tile(
        x + tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_stride + head * x_head_stride,
        values,
        values,
        values,
        values,
        row,
        0,
        INPUTS,
        OUTPUTS,
        INPUTS,
        INPUTS,
        _DENSE,
        INPUTS,
        False,
        False,
        False,
        False,
        WIDE,
        BLOCK_TOKENS,
        BLOCK_OUTPUTS,
        BLOCK_INPUTS,
    )
    place = out + tokens[:, None].to(tl.int64) * out_stride + head * out_head_stride + outputs[None, :]
    within = (tokens < num_tokens)[:, None] & (outputs < OUTPUTS)[None, :]
    tl.store(place, tl.trans(sums).to(out.dtype.element_ty), mask=within)
