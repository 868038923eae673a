"""The causal convolution over the last tokens of a row, with which every kind of state begins.

Owns: this kernel, the inputs that it keeps. Must not know: what is made of its results.

Gates before and behind it: LFM2 (Liquid AI 2025, arXiv 2511.23404).
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.activation import silu
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.recurrence.bounds import RowBounds, programs_along
from headway_kernels.states import Convolution

TOKENS, CHANNELS_PER_PROGRAM = 16, 64
"""Tokens of a turn, and channels: with few channels, one long prompt still has programs for many processors."""
NUM_WARPS = 4


def convolve(
    inputs: Tensor,
    past: Tensor,
    weights: Convolution,
    bounds: RowBounds,
    out: Tensor,
    *,
    is_gated: bool,
    has_silu: bool,
) -> None:
    """``out[t] = bias + sum over i of taps[i] * inputs[t - taps + 1 + i]``, then perhaps SiLU; ``past`` goes on.

    ``inputs`` ``[T, channels or more]`` and ``out`` ``[T, channels]``, any row stride, one floating dtype, in other memory.
    If it ``is_gated``, gates follow the channels in ``inputs``: those of what goes in, then of what comes out.
    ``past`` float32, ``[rows, taps - 1, channels]``, contiguous. ``weights`` has ``taps`` float32 ``[taps, channels]``, contiguous, and
    ``bias`` float32 ``[channels]`` or None.
    """
    num_rows, channels = len(bounds.rows), out.shape[1]
    if num_rows == 0:
        return
    taps, bias = weights
    parts = triton.cdiv(channels, CHANNELS_PER_PROGRAM)
    _convolve[(programs_along(num_rows, parts * NUM_WARPS), parts)](
        inputs,
        past,
        taps,
        taps if bias is None else bias,
        bounds.rows,
        bounds.query_start,
        bounds.first_position,
        out,
        num_rows,
        inputs.stride(0),
        out.stride(0),
        CHANNELS=channels,
        TAPS=len(taps),
        HAS_BIAS=bias is not None,
        GATED=is_gated,
        SILU=has_silu,
        TOKENS=TOKENS,
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(inputs.device),
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "query_start", "first_position"])
def _convolve(
    inputs,
    past,
    taps,
    bias,
    rows,
    query_start,
    first_position,
    out,
    num_rows,
    inputs_stride,
    out_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channel < CHANNELS
    for entry in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if end > start:
            goes_on = tl.load(first_position + entry) > 0
            kept = past + tl.load(rows + entry).to(tl.int64) * ((TAPS - 1) * CHANNELS) + channel
            for first in range(start, end, TOKENS):
                token = first + tl.arange(0, TOKENS)
                total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
                if HAS_BIAS:
                    total += tl.load(bias + channel, mask=within, other=0.0)[None, :]
                for tap in tl.static_range(TAPS):
                    source = token - (TAPS - 1 - tap)
                    is_here = (source >= start) & (token < end)
                    place = inputs + source.to(tl.int64)[:, None] * inputs_stride + channel[None, :]
                    values = _gated(place, is_here[:, None] & within[None, :], CHANNELS, GATED)
                    if tap < TAPS - 1:
                        # A row that begins has nothing before.
                        is_past = tl.where(goes_on, source, end) < start
                        place = kept[None, :] + (source - start + TAPS - 1)[:, None] * CHANNELS
                        before = tl.load(place, mask=is_past[:, None] & within[None, :], other=0.0)
                        values = tl.where(is_past[:, None], before, values)
                    total += values * tl.load(taps + tap * CHANNELS + channel, mask=within, other=0.0)[None, :]
                if SILU:
                    total = silu(total)
                written = (token < end)[:, None] & within[None, :]
                if GATED:
                    gates = inputs + token.to(tl.int64)[:, None] * inputs_stride + 2 * CHANNELS + channel[None, :]
                    total *= tl.load(gates, mask=written, other=0.0).to(tl.float32)
                target = out + token.to(tl.int64)[:, None] * out_stride + channel[None, :]
                tl.store(target, total.to(out.dtype.element_ty), mask=written)
            # Other threads have read what is written now.
            tl.debug_barrier()
            for tap in tl.static_range(TAPS - 1):
                source = end - (TAPS - 1) + tap
                is_here = tl.where(source >= start, channel, CHANNELS) < CHANNELS
                values = _gated(inputs + source.to(tl.int64) * inputs_stride + channel, is_here, CHANNELS, GATED)
                # What comes from the past comes from a later place, which is not written yet.
                is_past = tl.where(tl.where(goes_on, source, end) < start, channel, CHANNELS) < CHANNELS
                before = tl.load(kept + (source - start + TAPS - 1) * CHANNELS, mask=is_past, other=0.0)
                tl.store(kept + tap * CHANNELS, tl.where(is_past, before, values), mask=within)


@triton.jit
def _gated(place, wanted, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """What the convolution is over, in float32; 0 where it is not wanted."""
    values = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        values *= tl.load(place + CHANNELS, mask=wanted, other=0.0).to(tl.float32)
    return values
