"""Root mean square normalisation (Zhang & Sennrich 2019, arXiv 1910.07467) and layer normalisation (Ba et al. 2016,
arXiv 1607.06450), with the addition before them, in one pass over memory.

Owns: a kernel for each. Must not know: sublayers.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch

ELEMENTS_PER_THREAD = 16
"""Elements of a row per thread, as float32 in registers, up to ``MOST_WARPS``."""
MOST_WARPS = 16


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, *, eps: float, factor: Tensor | None = None
) -> None:
    """``hidden += delta``, then ``hidden *= factor``, both in place, then ``out = hidden / rms(hidden) * weight``.

    ``hidden``, ``delta`` (or None) and ``out`` ``[T, C]``, any row stride; ``weight`` ``[C]``, ``factor`` ``[1]`` (beside a
    ``delta``) or None; one floating dtype, but ``weight`` may be float32.
    ``out`` may be ``delta``, or ``hidden``, which then does not keep the sum. ``C`` up to 65536: registers hold a row.

    The sum, its product and the normalised row are rounded, as in four operators; the rest is float32.
    """
    num_tokens, width = hidden.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_tokens,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        weight if factor is None else factor,
        out,
        hidden.stride(0),
        hidden.stride(0) if delta is None else delta.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        HAS_FACTOR=factor is not None,
        KEEPS_SUM=delta is not None and out.data_ptr() != hidden.data_ptr(),
        num_warps=warps_for(block),
        **dependent_launch(hidden.device),
    )


def add_layer_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float
) -> None:
    """``hidden += delta`` in place, then ``out = (hidden - mean) / deviation * weight + bias``.

    As ``add_rms_norm``; ``bias`` (or None) ``[C]``. Only the sum and the result are rounded.
    """
    num_tokens, width = hidden.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _add_layer_norm[(num_tokens,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        weight if bias is None else bias,
        out,
        hidden.stride(0),
        hidden.stride(0) if delta is None else delta.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        KEEPS_SUM=delta is not None and out.data_ptr() != hidden.data_ptr(),
        HAS_BIAS=bias is not None,
        num_warps=warps_for(block),
        **dependent_launch(hidden.device),
    )


def warps_for(block: int) -> int:
    """Warps per row of ``block`` (a power of two) elements."""
    return min(max(block // (32 * ELEMENTS_PER_THREAD), 1), MOST_WARPS)


@triton.jit(do_not_specialize=["eps"])
def _add_rms_norm(
    hidden,
    delta,
    weight,
    factor,
    out,
    hidden_stride,
    delta_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    within = channels < WIDTH
    dtype = hidden.dtype.element_ty
    values = tl.load(hidden + row * hidden_stride + channels, mask=within, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row * delta_stride + channels, mask=within, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        if HAS_FACTOR:
            rounded = (rounded.to(tl.float32) * tl.load(factor).to(tl.float32)).to(dtype)
        if KEEPS_SUM:
            tl.store(hidden + row * hidden_stride + channels, rounded, mask=within)
        values = rounded.to(tl.float32)
    inverse = tl.math.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    normalised = (values * inverse).to(dtype).to(tl.float32)
    scaled = normalised * tl.load(weight + channels, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + channels, scaled.to(dtype), mask=within)


@triton.jit(do_not_specialize=["eps"])
def _add_layer_norm(
    hidden,
    delta,
    weight,
    bias,
    out,
    hidden_stride,
    delta_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    within = channels < WIDTH
    dtype = hidden.dtype.element_ty
    values = tl.load(hidden + row * hidden_stride + channels, mask=within, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + row * delta_stride + channels, mask=within, other=0.0).to(tl.float32)
        rounded = values.to(dtype)
        if KEEPS_SUM:
            tl.store(hidden + row * hidden_stride + channels, rounded, mask=within)
        values = rounded.to(tl.float32)
    centred = tl.where(within, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    inverse = tl.math.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    scaled = centred * inverse * tl.load(weight + channels, mask=within, other=0.0).to(tl.float32)
    if HAS_BIAS:
        scaled += tl.load(bias + channels, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + channels, scaled.to(dtype), mask=within)
