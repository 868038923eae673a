"""States of channels: some numbers of each (Mamba), or one (RG-LRU), with the gates behind them.

Owns: a kernel for each. Must not know: convolutions, the products that say what stays.

Mamba (Gu & Dao 2023, arXiv 2312.00752) has a step for each channel and a decay for each number. RG-LRU (De et al. 2024, arXiv
2402.19427) has two sigmoids for each channel: how much of a value is taken, and how much of the state stays.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.activation import sigmoid
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.recurrence.bounds import RowBounds, known_numbers, programs_along
from headway_kernels.gpu.recurrence.gates import GateKind, activated_gate
from headway_kernels.gpu.recurrence.heads import softplus
from headway_kernels.states import HeadNumbers

NUMBERS_PER_PROGRAM = 512
"""Of a state of several numbers; as many decays lie beside them in the registers of a warp."""
CHANNELS_PER_PROGRAM = 64
"""Of a state of one number."""
NUM_WARPS = 1


def scan_channels(
    values: Tensor,
    steps: Tensor,
    selected: Tensor,
    gates: Tensor,
    numbers: HeadNumbers,
    states: Tensor,
    bounds: RowBounds,
    out: Tensor,
) -> None:
    """Run the tokens of rows through their states, which go on; ``out`` ``[T, channels]`` is behind gates by SiLU.

    ``values``, ``steps`` (before their bias) and ``gates`` ``[T, channels]``; ``selected`` ``[T, 2 * key_dim]``: keys, queries; any row
    strides, one floating dtype. ``numbers`` are contiguous. ``states`` float32, ``[rows, key_dim, channels]``, contiguous.
    """
    num_rows, channels = len(bounds.rows), out.shape[1]
    if num_rows == 0:
        return
    key_dim = selected.shape[1] // 2
    padded_keys = triton.next_power_of_2(key_dim)
    block = channels_of(padded_keys)
    parts = triton.cdiv(channels, block)
    _scan_channels[(programs_along(num_rows, parts), parts)](
        values,
        steps,
        selected,
        gates,
        numbers.decay,
        numbers.step_bias,
        numbers.skip,
        states,
        bounds.rows,
        bounds.query_start,
        bounds.first_position,
        out,
        num_rows,
        values.stride(0),
        steps.stride(0),
        selected.stride(0),
        gates.stride(0),
        out.stride(0),
        CHANNELS=channels,
        KEY_DIM=key_dim,
        PADDED_KEYS=padded_keys,
        BLOCK=block,
        num_warps=NUM_WARPS,
        **dependent_launch(values.device),
    )


def channels_of(padded_keys: int) -> int:
    """Channels of a program, a power of two."""
    return max(NUMBERS_PER_PROGRAM // padded_keys, 8)


def scan_unit(
    values: Tensor,
    made: Tensor,
    gates: Tensor,
    numbers: HeadNumbers,
    states: Tensor,
    bounds: RowBounds,
    out: Tensor,
    kind: GateKind,
) -> None:
    """The same with one number of each channel; ``out`` is behind gates of ``kind``.

    ``made`` ``[num_blocks, T, 2 * width]``, contiguous, of the model's dtype: what is taken and what stays of each block's channels, before bias
    and sigmoid. ``states`` float32, ``[rows, channels]``.
    """
    num_rows, channels = len(bounds.rows), out.shape[1]
    if num_rows == 0:
        return
    parts = triton.cdiv(channels, CHANNELS_PER_PROGRAM)
    _scan_unit[(programs_along(num_rows, parts), parts)](
        values,
        made,
        gates,
        numbers.decay,
        numbers.block_bias,
        states,
        bounds.rows,
        bounds.query_start,
        bounds.first_position,
        out,
        num_rows,
        values.stride(0),
        made.stride(0),
        gates.stride(0),
        out.stride(0),
        CHANNELS=channels,
        WIDTH=made.shape[2] // 2,
        KIND=int(kind),
        BLOCK=CHANNELS_PER_PROGRAM,
        num_warps=NUM_WARPS,
        **dependent_launch(values.device),
    )


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["selected", "gates", "rows", "query_start", "first_position"],
)
def _scan_channels(
    values,
    steps,
    selected,
    gates,
    decay,
    step_bias,
    skip,
    states,
    rows,
    query_start,
    first_position,
    out,
    num_rows,
    values_stride,
    steps_stride,
    selected_stride,
    gates_stride,
    out_stride,
    CHANNELS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    number = tl.arange(0, PADDED_KEYS)
    in_key = number < KEY_DIM
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = channel < CHANNELS
    in_state = in_key[:, None] & within[None, :]
    of_channels = number[:, None] * CHANNELS + channel[None, :]
    for entry in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if end > start:
            place = states + tl.load(rows + entry).to(tl.int64) * (KEY_DIM * CHANNELS) + of_channels
            known = known_numbers(tl.load(first_position + entry), number, KEY_DIM)
            state = tl.load(place, mask=known[:, None] & within[None, :], other=0.0)
            decays = tl.load(decay + of_channels, mask=in_state, other=0.0)
            bias = tl.load(step_bias + channel, mask=within, other=0.0)
            skipped = tl.load(skip + channel, mask=within, other=0.0)
            at = start.to(tl.int64)
            for _ in range(start, end):
                key = tl.load(selected + at * selected_stride + number, mask=in_key, other=0.0).to(tl.float32)
                query = tl.load(selected + at * selected_stride + KEY_DIM + number, mask=in_key, other=0.0).to(
                    tl.float32
                )
                value = tl.load(values + at * values_stride + channel, mask=within, other=0.0).to(tl.float32)
                step = tl.load(steps + at * steps_stride + channel, mask=within, other=0.0).to(tl.float32)
                gate = tl.load(gates + at * gates_stride + channel, mask=within, other=0.0).to(tl.float32)
                step = softplus(step + bias)
                state = state * tl.exp(decays * step[None, :]) + key[:, None] * (value * step)[None, :]
                result = (tl.sum(query[:, None] * state, 0) + value * skipped) * gate * sigmoid(gate)
                tl.store(out + at * out_stride + channel, result.to(out.dtype.element_ty), mask=within)
                at += 1
            tl.store(place, state, mask=in_state)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["gates", "rows", "query_start", "first_position"]
)
def _scan_unit(
    values,
    made,
    gates,
    decay,
    block_bias,
    states,
    rows,
    query_start,
    first_position,
    out,
    num_rows,
    values_stride,
    made_stride,
    gates_stride,
    out_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
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
            place = states + tl.load(rows + entry).to(tl.int64) * CHANNELS + channel
            position = tl.load(first_position + entry)
            known = known_numbers(position, channel, CHANNELS)
            state = tl.load(place, mask=known, other=0.0)
            decays = tl.load(decay + channel, mask=within, other=0.0)
            taken_bias = tl.load(block_bias + channel, mask=within, other=0.0)
            staying_bias = tl.load(block_bias + CHANNELS + channel, mask=within, other=0.0)
            of_block = made + (channel // WIDTH).to(tl.int64) * made_stride + channel % WIDTH
            at = start.to(tl.int64)
            for _ in range(start, end):
                value = tl.load(values + at * values_stride + channel, mask=within, other=0.0).to(tl.float32)
                gate = tl.load(gates + at * gates_stride + channel, mask=within, other=0.0).to(tl.float32)
                taken = tl.load(of_block + at * (2 * WIDTH), mask=within, other=0.0).to(tl.float32)
                staying = tl.load(of_block + at * (2 * WIDTH) + WIDTH, mask=within, other=0.0).to(tl.float32)
                logarithm = sigmoid(staying + staying_bias) * decays
                # A first token is taken whole.
                written = tl.where(position > 0, tl.sqrt(1.0 - tl.exp(2.0 * logarithm)), 1.0)
                state = state * tl.exp(logarithm) + written * value * sigmoid(taken + taken_bias)
                result = state * activated_gate(gate, KIND)
                tl.store(out + at * out_stride + channel, result.to(out.dtype.element_ty), mask=within)
                at += 1
                position += 1
            tl.store(place, state, mask=within)
