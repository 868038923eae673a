"""Activations between a decoder's two MLP products: SwiGLU and GEGLU (Shazeer 2020, arXiv 2002.05202), that of gpt-oss (OpenAI
2025, arXiv 2508.10925), and xIELU (Huang & Schlag 2024, arXiv 2411.13010).

Owns: ``silu(gate) * up``, the same with GELU or bounds, and a curve without a gate. Must not know: layers.
"""

import math
from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch


class Gate(IntEnum):
    """What may lie behind a product: nothing, ``silu_and_multiply``, ``clamped_swish_and_multiply``, ``gelu_and_multiply``."""

    NONE = 0
    SILU = 1
    CLAMPED = 2
    GELU_TANH = 3


BLOCK = 1024
"""Elements per program: eight per thread, read in 16-byte pieces if the dtype has 2 bytes."""
NUM_WARPS = 4
_LIMIT = tl.constexpr(7.0)
_SLOPE = tl.constexpr(1.702)
_CLAMPED = tl.constexpr(int(Gate.CLAMPED))
_GELU_TANH = tl.constexpr(int(Gate.GELU_TANH))
_OF_GELU = tl.constexpr(2 * (2 / math.pi) ** 0.5)
"""Half of 1 + tanh(x) is the sigmoid of 2 x."""
_OF_CUBE = tl.constexpr(0.044715)


def silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up``.

    ``gate_up`` ``[T, 2 I]``, gate before up, and ``out`` ``[T, I]``, any row stride; one floating dtype. ``silu(gate)``
    is float32, rounded before the product.
    """
    _of_halves(gate_up, out, Gate.SILU)


def clamped_swish_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``out = gate * sigmoid(1.702 * gate) * (up + 1)``, gates bounded by 7 from above, ups on both sides.

    As ``silu_and_multiply``; only the result is rounded.
    """
    _of_halves(gate_up, out, Gate.CLAMPED)


def gelu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``out = gelu(gate) * up``, where GELU has a tanh in place of the error function (Hendrycks & Gimpel 2016, arXiv 1606.08415).

    As ``silu_and_multiply``.
    """
    _of_halves(gate_up, out, Gate.GELU_TANH)


def xielu(inputs: Tensor, out: Tensor, curve: Tensor) -> None:
    """Above 0, ``out = a x^2 + c x``; below, ``b (e^x - 1 - x) + c x``; float32, then rounded.

    ``inputs`` and ``out`` ``[T, I]``, any row stride, one floating dtype; ``curve`` a, b and c: float32, ``[3]``.
    """
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    _xielu[(num_tokens, triton.cdiv(width, BLOCK))](
        inputs,
        out,
        curve,
        inputs.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **dependent_launch(out.device),
    )


@triton.jit
def _xielu(
    inputs,
    out,
    curve,
    inputs_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channels < WIDTH
    x = tl.load(inputs + row * inputs_stride + channels, mask=within, other=0.0).to(tl.float32)
    low = tl.minimum(x, 0.0)
    # Near 0 the difference would be lost in rounding.
    series = 1 / 6 + low * (1 / 24 + low * (1 / 120 + low * (1 / 720 + low * (1 / 5040))))
    bent = tl.where(low > -0.25, low * low * (0.5 + low * series), tl.exp(low) - 1.0 - low)
    result = tl.where(x > 0, tl.load(curve) * x * x, tl.load(curve + 1) * bent) + tl.load(curve + 2) * x
    tl.store(out + row * out_stride + channels, result.to(out.dtype.element_ty), mask=within)


def _of_halves(gate_up: Tensor, out: Tensor, gate: Gate) -> None:
    activate_and_multiply(gate_up, gate_up[:, out.shape[1] :], out, gate)


def activate_and_multiply(gates: Tensor, ups: Tensor, out: Tensor, gate: Gate) -> None:
    """The same of gates and ups that lie apart, ``[T, I or more]``."""
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    _activate_and_multiply[(num_tokens, triton.cdiv(width, BLOCK))](
        gates,
        ups,
        out,
        gates.stride(0),
        ups.stride(0),
        out.stride(0),
        WIDTH=width,
        GATE=int(gate),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **dependent_launch(out.device),
    )


@triton.jit
def _activate_and_multiply(
    gates,
    ups,
    out,
    gates_stride,
    ups_stride,
    out_stride,
    WIDTH: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channels < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gates + row * gates_stride + channels, mask=within, other=0.0).to(tl.float32)
    up = tl.load(ups + row * ups_stride + channels, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + channels, activated(gate, up, dtype, GATE).to(dtype), mask=within)


@triton.jit
def activated(gate, up, dtype: tl.constexpr, GATE: tl.constexpr):
    """Float32 gates and ups to their product, float32."""
    if GATE == _CLAMPED:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        swished = gate * sigmoid(gate * _SLOPE)
    elif GATE == _GELU_TANH:
        swished = gelu_tanh(gate).to(dtype).to(tl.float32)
    else:
        swished = silu(gate).to(dtype).to(tl.float32)
    return swished * up


@triton.jit
def silu(values):
    """In float32, as the others here."""
    return values * sigmoid(values)


@triton.jit
def gelu_tanh(values):
    """GELU with a tanh in place of the error function."""
    return values * sigmoid(values * (values * values * _OF_CUBE + 1.0) * _OF_GELU)


@triton.jit
def sigmoid(values):
    """Without an exponential that overflows."""
    decayed = tl.exp(-tl.abs(values))
    return tl.where(values >= 0, 1.0, decayed) / (1.0 + decayed)
