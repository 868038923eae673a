"""The gated activation between a decoder's two MLP products (SwiGLU, Shazeer 2020, arXiv 2002.05202).

Owns: ``silu(gate) * up``. Must not know: layers.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements per program: eight per thread, read in 16-byte pieces if the dtype has 2 bytes."""
NUM_WARPS = 4


def silu_and_multiply(gate_up: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up``.

    ``gate_up`` ``[T, 2 I]``, gate before up, and ``out`` ``[T, I]``, any row stride; one floating dtype. ``silu(gate)``
    is float32, rounded before the product.
    """
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    _silu_and_multiply[(num_tokens, triton.cdiv(width, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _silu_and_multiply(gate_up, out, gate_up_stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channels < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * gate_up_stride + channels, mask=within, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + channels, mask=within, other=0.0).to(tl.float32)
    # gate / (1 + exp(-gate)), without an exponential that overflows.
    decayed = tl.exp(-tl.abs(gate))
    activated = tl.where(gate >= 0, gate, gate * decayed) / (1.0 + decayed)
    tl.store(out + row * out_stride + channels, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=within)
