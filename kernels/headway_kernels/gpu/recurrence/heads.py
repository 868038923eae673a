"""States that are a matrix for each head: the gated delta rule, and Mamba 2.

Owns: this kernel. Must not know: convolutions, gates behind it.

With a key k, a value v and a query q of a token, what stays of a state S ``[key_dim, value_dim]`` is ``S' = decay * S``. The delta
rule (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464) writes ``S = S' + k (strength * (v - k S'))``, with keys and queries of
unit length; its decay may differ by channel of a key (Kimi Delta Attention, Kimi Team 2025, arXiv 2510.26692). Mamba 2 (Dao
& Gu 2024, arXiv 2405.21060) writes ``S = S' + k (step * v)``. The result is ``q S``.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.activation import sigmoid
from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.recurrence.bounds import RowBounds, known_numbers, programs_along
from headway_kernels.states import HeadNumbers

NUMBERS_PER_PROGRAM = 1024
"""Of a state, which are 32 registers of a thread: of one warp, so that no sum over a key waits for other warps."""
NUM_WARPS = 1
_KEY_EPS = tl.constexpr(1e-6)


class HeadShape(NamedTuple):
    """Each of ``num_key_heads`` serves heads that follow each other; with ``keys_take_turns``, key heads serve one head each in turn.

    ``is_delta``: the delta rule; ``doubles_strengths``: it writes up to twice a value; ``decay_bound`` (below 0): no logarithm of a
    decay is beyond that; None: there is no bound.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    is_delta: bool
    keys_take_turns: bool = False
    doubles_strengths: bool = False
    decay_bound: float | None = None


def run_heads(
    shape: HeadShape,
    convolved: Tensor,
    strengths: Tensor | None,
    steps: Tensor | None,
    numbers: HeadNumbers,
    states: Tensor,
    bounds: RowBounds,
    out: Tensor,
) -> None:
    """Run the tokens of rows through their states, which go on; ``out`` ``[T, heads * value_dim]``.

    ``convolved`` ``[T, channels]``: queries, keys, values; ``strengths`` ``[T, heads]`` of the delta rule, before their sigmoid;
    ``steps`` ``[T, heads]``, or ``[T, heads * key_dim]``, before their bias, or None; any row strides, one floating dtype. ``numbers`` are
    contiguous. ``states`` float32, ``[rows, heads, key_dim, value_dim]``, contiguous.
    """
    num_rows = len(bounds.rows)
    if num_rows == 0:
        return
    padded_keys, block = block_of(shape.key_dim, shape.value_dim)
    step_bias, skip = numbers.step_bias, numbers.skip
    by_channel = step_bias is not None and len(step_bias) > shape.num_heads
    strengths_ = convolved if strengths is None else strengths
    steps_ = convolved if steps is None else steps
    slices = triton.cdiv(shape.value_dim, block)
    _run_heads[(programs_along(num_rows, shape.num_heads * slices), shape.num_heads, slices)](
        convolved,
        strengths_,
        steps_,
        numbers.decay,
        numbers.decay if step_bias is None else step_bias,
        numbers.decay if skip is None else skip,
        states,
        bounds.rows,
        bounds.query_start,
        bounds.first_position,
        out,
        num_rows,
        convolved.stride(0),
        strengths_.stride(0),
        steps_.stride(0),
        out.stride(0),
        0.0 if shape.decay_bound is None else shape.decay_bound,
        shape.key_dim**-0.5,
        NUM_HEADS=shape.num_heads,
        NUM_KEY_HEADS=shape.num_key_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        PADDED_KEYS=padded_keys,
        BLOCK=block,
        DELTA=shape.is_delta,
        TURNS=shape.keys_take_turns,
        DOUBLES=shape.doubles_strengths,
        STEPS=steps is not None,
        BY_CHANNEL=by_channel,
        BOUNDED=shape.decay_bound is not None,
        SKIPS=skip is not None,
        num_warps=NUM_WARPS,
        **dependent_launch(convolved.device),
    )


def block_of(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The padded channels of a key, and the channels of a value of one program; powers of two."""
    padded = triton.next_power_of_2(key_dim)
    return padded, min(max(NUMBERS_PER_PROGRAM // padded, 4), triton.next_power_of_2(value_dim))


@triton.jit(
    do_not_specialize=["num_rows", "decay_bound", "query_factor"],
    do_not_specialize_on_alignment=["strengths", "steps", "rows", "query_start", "first_position"],
)
def _run_heads(
    convolved,
    strengths,
    steps,
    decay,
    step_bias,
    skip,
    states,
    rows,
    query_start,
    first_position,
    out,
    num_rows,
    convolved_stride,
    strengths_stride,
    steps_stride,
    out_stride,
    decay_bound,
    query_factor,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    TURNS: tl.constexpr,
    DOUBLES: tl.constexpr,
    STEPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    SKIPS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    head = tl.program_id(1)
    key_head = head % NUM_KEY_HEADS if TURNS else head // (NUM_HEADS // NUM_KEY_HEADS)
    channel = tl.arange(0, PADDED_KEYS)
    in_key = channel < KEY_DIM
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_value = column < VALUE_DIM
    in_state = in_key[:, None] & in_value[None, :]
    queries = convolved + key_head * KEY_DIM + channel
    values = convolved + 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    of_head = tl.load(decay + head)
    skipped = tl.load(skip + head)
    if BY_CHANNEL:
        own_steps = steps + head * KEY_DIM + channel
        bias = tl.load(step_bias + head * KEY_DIM + channel, mask=in_key, other=0.0)
    else:
        own_steps = steps + head
        bias = tl.load(step_bias + head)
    for entry in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        start = tl.load(query_start + entry)
        end = tl.load(query_start + entry + 1)
        if end > start:
            of_row = tl.load(rows + entry).to(tl.int64) * NUM_HEADS + head
            place = states + (of_row * KEY_DIM + channel[:, None]) * VALUE_DIM + column[None, :]
            known = known_numbers(tl.load(first_position + entry), channel, KEY_DIM)
            state = tl.load(place, mask=known[:, None] & in_value[None, :], other=0.0)
            at = start.to(tl.int64)
            # Each turn loads what the next one needs: else the chain of turns would wait for memory.
            query, key, value, step, strength = _load_token(
                queries, values, own_steps, strengths + head, at, convolved_stride, steps_stride, strengths_stride,
                in_key, in_value, KEYS=NUM_KEY_HEADS * KEY_DIM, DELTA=DELTA, STEPS=STEPS, BY_CHANNEL=BY_CHANNEL,
            )  # fmt: skip
            for _ in range(start, end):
                next_query, next_key, next_value, next_step, next_strength = _load_token(
                    queries, values, own_steps, strengths + head, tl.minimum(at + 1, end - 1), convolved_stride,
                    steps_stride, strengths_stride, in_key, in_value, KEYS=NUM_KEY_HEADS * KEY_DIM, DELTA=DELTA,
                    STEPS=STEPS, BY_CHANNEL=BY_CHANNEL,
                )  # fmt: skip
                if DELTA:
                    key *= tl.math.rsqrt(tl.sum(key * key, 0) + _KEY_EPS)
                    query *= tl.math.rsqrt(tl.sum(query * query, 0) + _KEY_EPS) * query_factor
                logarithm, step = _decay_of(step, bias, of_head, decay_bound, STEPS=STEPS, BOUNDED=BOUNDED)
                state *= tl.exp(logarithm)[:, None] if BY_CHANNEL else tl.exp(logarithm)
                written = _written(state, key, value, step, strength, DELTA=DELTA, DOUBLES=DOUBLES)
                state += key[:, None] * written[None, :]
                result = tl.sum(query[:, None] * state, 0)
                if SKIPS:
                    result += value * skipped
                target = out + at * out_stride + head * VALUE_DIM + column
                tl.store(target, result.to(out.dtype.element_ty), mask=in_value)
                query, key, value, step, strength = next_query, next_key, next_value, next_step, next_strength
                at += 1
            tl.store(place, state, mask=in_state)


@triton.jit
def _decay_of(step, bias, of_head, decay_bound, STEPS: tl.constexpr, BOUNDED: tl.constexpr):
    """The logarithm of what stays, and the step behind its activation; without steps, the head's own and 1."""
    logarithm = of_head
    if STEPS:
        step += bias
        if BOUNDED:
            logarithm = decay_bound * sigmoid(-of_head * step)
        else:
            step = softplus(step)
            logarithm = of_head * step
    return logarithm, step


@triton.jit
def _written(state, key, value, step, strength, DELTA: tl.constexpr, DOUBLES: tl.constexpr):
    """What a key writes: a part of what is new of the value, or so much of the value as the step says."""
    if DELTA:
        share = sigmoid(strength)
        if DOUBLES:
            share *= 2.0
        written = (value - tl.sum(key[:, None] * state, 0)) * share
    else:
        written = value * step
    return written


@triton.jit
def _load_token(
    queries,
    values,
    steps,
    strengths,
    at,
    convolved_stride,
    steps_stride,
    strengths_stride,
    in_key,
    in_value,
    KEYS: tl.constexpr,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):
    """Query, key, value, step and strength of a token, in float32; 1 if there are no steps, or no strengths."""
    query = tl.load(queries + at * convolved_stride, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(queries + at * convolved_stride + KEYS, mask=in_key, other=0.0).to(tl.float32)
    value = tl.load(values + at * convolved_stride, mask=in_value, other=0.0).to(tl.float32)
    step = 1.0
    strength = 1.0
    if STEPS:
        if BY_CHANNEL:
            step = tl.load(steps + at * steps_stride, mask=in_key, other=0.0).to(tl.float32)
        else:
            step = tl.load(steps + at * steps_stride).to(tl.float32)
    if DELTA:
        strength = tl.load(strengths + at * strengths_stride).to(tl.float32)
    return query, key, value, step, strength


@triton.jit
def softplus(values):
    """``log(1 + exp(values))``; beyond 20, the values. The quotient gives what rounding took from ``1 + exp(values)``."""
    grown = tl.exp(tl.minimum(values, 20.0))
    more = 1.0 + grown
    rounded = more - 1.0
    logarithm = tl.where(rounded == 0.0, grown, tl.log(more) * (grown / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(values > 20.0, values, logarithm)
