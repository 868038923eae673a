"""Gates, and the norm before or behind them: the last of what happens to tokens in a layer with a state.

Owns: this kernel. Must not know: states.
"""

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.activation import gelu_tanh, sigmoid, silu
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.norm import warps_for

BLOCK = 1024
"""Channels of a program, if there is no norm."""


class GateKind(IntEnum):
    """The activation of gates."""

    SILU = 0
    SIGMOID = 1
    GELU_TANH = 2


_SILU = tl.constexpr(int(GateKind.SILU))
_SIGMOID = tl.constexpr(int(GateKind.SIGMOID))


def gate_results(
    results: Tensor,
    gates: Tensor,
    norm: Tensor | None,
    query_start: Tensor,
    *,
    kind: GateKind,
    are_first: bool,
    eps: float,
) -> None:
    """Normalise, then multiply by the activation of gates, in place; if gates ``are_first``, the other way round.

    ``results`` and ``gates`` ``[T, inner]``, any row stride, one floating dtype; ``norm`` float32 ``[norms, norm_dim]``, contiguous: weights of
    root mean square norms of channels side by side, or None. ``query_start`` int32: its last entry is the number of tokens, and
    padding behind them stays as it is. In float32; the result is rounded.
    """
    num_tokens, inner = results.shape
    if num_tokens == 0:
        return
    width = inner if norm is None else norm.shape[1]
    block = BLOCK if norm is None else triton.next_power_of_2(width)
    _gate_results[(num_tokens, triton.cdiv(width, block) if norm is None else norm.shape[0])](
        results,
        gates,
        gates if norm is None else norm,
        query_start[-1:],
        results.stride(0),
        gates.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        NORMS=norm is not None,
        KIND=int(kind),
        FIRST=are_first,
        num_warps=warps_for(block),
        **dependent_launch(results.device),
    )


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["gates", "num_tokens"])
def _gate_results(
    results,
    gates,
    norm,
    num_tokens,
    results_stride,
    gates_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    token = tl.program_id(0)
    if token < tl.load(num_tokens):
        part = tl.program_id(1)
        if NORMS:
            within = tl.arange(0, BLOCK) < WIDTH
            channel = part * WIDTH + tl.arange(0, BLOCK)
        else:
            channel = part * BLOCK + tl.arange(0, BLOCK)
            within = channel < WIDTH
        place = results + token.to(tl.int64) * results_stride + channel
        values = tl.load(place, mask=within, other=0.0).to(tl.float32)
        gate = tl.load(gates + token.to(tl.int64) * gates_stride + channel, mask=within, other=0.0).to(tl.float32)
        gate = activated_gate(gate, KIND)
        if FIRST:
            values *= gate
        if NORMS:
            values *= tl.math.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
            values *= tl.load(norm + channel, mask=within, other=0.0)
        if not FIRST:
            values *= gate
        tl.store(place, values.to(results.dtype.element_ty), mask=within)


@triton.jit
def activated_gate(gate, KIND: tl.constexpr):
    """A ``GateKind`` of gates, in float32."""
    if KIND == _SILU:
        activated = silu(gate)
    elif KIND == _SIGMOID:
        activated = sigmoid(gate)
    else:
        activated = gelu_tanh(gate)
    return activated
