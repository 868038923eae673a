"""Weights in device memory, as numbers of the model's dtype or as codes, and their products with a tile of inputs.

Owns: the forms and layouts of weights, how a kernel reads them. Must not know: a layer's use, checkpoints.

Symmetric quantisation per output channel: int8 as in Jacob et al. 2018 (arXiv 1712.05877), fp8 is E4M3 of Micikevicius
et al. 2022 (arXiv 2209.05433). Codes of checkpoints have groups of inputs: see ``CodedWeight``. In registers a code
becomes a number of the inputs' dtype, exactly. Scales multiply float32 sums: of all inputs, or of each group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm
from headway_kernels.gpu.float8 import NUMBERS_TOO_SMALL, numbers_of
from headway_kernels.gpu.linear.pairs import numbers_of_fp8_pairs, numbers_of_int4_pairs


class WeightForm(IntEnum):
    """Floating numbers; signed codes of 8 bits; E4M3; signed codes of 4 bits, two in a byte; of 8 bits, two in a word.

    A kernel copies words of two bytes 16 bytes at a time, but bytes only 8 at a time.
    """

    DENSE = 0
    INT8 = 1
    FP8 = 2
    INT4 = 3
    INT8_PAIRS = 4
    FP8_PAIRS = 5


LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}
CODE_DTYPE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
WIDE_ELEMENTS = 2**22
"""Elements of a weight that are float32 at a time while it is quantised: 16 MiB."""
HALF = 16
"""Pairs of codes come in blocks of 32 inputs: a pair has one of the first 16, low, and one of the others."""
_MIDDLE = 8
_LEAST_STEP = 16
"""The least size of a dimension of ``tl.dot``."""

_FP8 = tl.constexpr(int(WeightForm.FP8))
_INT4 = tl.constexpr(int(WeightForm.INT4))
"""The first form of pairs."""
_FP8_PAIRS = tl.constexpr(int(WeightForm.FP8_PAIRS))
_HALF = tl.constexpr(HALF)
_LINE_BITS = tl.constexpr(1024)
"""Of a line of the cache."""
_LINES_AHEAD = tl.constexpr(8)
"""Lines of each output that are on their way while the grid before ends."""


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight ``[outputs, inputs]``, or with a first dimension one of each expert; all tensors contiguous.

    ``values`` ``[outputs, inputs]``: floating, int8, or the bits of E4M3 as uint8; with INT4 uint8, ``[outputs, bytes]``,
    with other pairs int16, ``[outputs, words]``.
    ``scales`` and ``minima`` float32, ``[groups, outputs]``, or None: each ``group`` inputs share them. ``order`` int32,
    ``[inputs]``, or None: which input meets a column. ``rounds_inputs``: see ``CodedWeight``.
    """

    form: WeightForm
    values: Tensor
    num_inputs: int
    group: int
    scales: Tensor | None = None
    minima: Tensor | None = None
    order: Tensor | None = None
    rounds_inputs: bool = False

    @property
    def num_outputs(self) -> int:
        """Outputs of one product."""
        return self.values.shape[-2]

    @property
    def num_groups(self) -> int:
        """Groups of inputs."""
        return 1 if self.scales is None else self.scales.shape[-2]

    @property
    def is_grouped(self) -> bool:
        """Whether sums of groups have scales, or minima, of their own."""
        return self.num_groups > 1 or self.minima is not None

    def step(self, inputs: int) -> int:
        """The inputs, at most ``inputs`` (a power of two), that a kernel takes at a time: never of two groups."""
        while self.num_groups > 1 and self.group % inputs:
            inputs //= 2
        assert inputs >= _LEAST_STEP, "groups are multiples of 16 inputs"
        return inputs


def dense(weight: Tensor) -> DeviceWeight:
    """``weight`` as it is, contiguous."""
    return DeviceWeight(WeightForm.DENSE, weight, weight.shape[-1], weight.shape[-1])


def quantize(weight: Tensor, kind: Literal["int8", "fp8"]) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight: ``weight[n, k]`` is about ``codes[n, k] * scales[n]``.

    ``weight`` floating, ``[N, K]``. Codes ``[N, K]``, int8 or float8_e4m3fn; positive float32 scales ``[N]``. A row's
    largest magnitude is the largest code.
    """
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=CODE_DTYPE[kind], device=weight.device)
    scales = torch.empty(num_outputs, dtype=torch.float32, device=weight.device)
    step = max(WIDE_ELEMENTS // max(num_inputs, 1), 1)
    for first in range(0, num_outputs, step):
        wide = weight[first : first + step].float()
        # For a row of zeros, or of numbers too small to divide by, any finite scale is right.
        scale = (wide.abs().amax(dim=1) / LARGEST_CODE[kind]).clamp_(min=torch.finfo(torch.float32).tiny)
        ratio = (wide / scale[:, None]).clamp_(-LARGEST_CODE[kind], LARGEST_CODE[kind])
        codes[first : first + step] = ratio.round_() if kind == "int8" else ratio
        scales[first : first + step] = scale
    return codes, scales


def quantized(weight: Tensor, kind: Literal["int8", "fp8"]) -> DeviceWeight:
    """A floating weight, ``[outputs, inputs]``, as codes with a scale for each output; with fp8 for inputs that are rounded too."""
    codes, scales = quantize(weight, kind)
    form = CodeForm.CODES8 if kind == "int8" else CodeForm.FP8
    found = coded(
        CodedWeight(form, codes, scales[:, None], max(weight.shape[1], 1), rounds_inputs=form is CodeForm.FP8)
    )
    assert found is not None
    return found


def coded(weight: CodedWeight) -> DeviceWeight | None:
    """The weight in a form for kernels; None if its groups are not of equal size, or its codes stand for no integers.

    Integers of 4 bits stay so in groups of whole blocks of 32 inputs; in other groups, and floats of 4 bits, they take a byte.
    """
    weight, order = weight.with_integers(), None
    if weight.table is not None:
        return None
    if weight.group_of is not None:
        groups = weight.group_of.to(weight.device).long()
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], torch.arange(len(order), device=order.device) // weight.group):
            return None
        weight = replace(weight, codes=_bits(weight.codes)[:, order].view(weight.codes.dtype), group_of=None)
    form, values, scales, minima = _stored(weight)
    return DeviceWeight(
        form,
        values.contiguous(),
        weight.shape[1],
        weight.group,
        scales.t().contiguous(),
        None if minima is None else minima.t().contiguous(),
        None if order is None else order.to(torch.int32),
        weight.rounds_inputs,
    )


def _stored(weight: CodedWeight) -> tuple[WeightForm, Tensor, Tensor, Tensor | None]:
    """Form, values, scales and minima, groups behind outputs."""
    has_pairs = weight.scales.shape[1] == 1 or weight.group % (2 * HALF) == 0
    if weight.form is CodeForm.FP8:
        form, values = (WeightForm.FP8_PAIRS, _paired(weight.codes)) if has_pairs else (WeightForm.FP8, weight.codes)
        return form, values if has_pairs else _bits(values), weight.scales * NUMBERS_TOO_SMALL, weight.minima
    if weight.form is CodeForm.CODES8:
        form, values = (WeightForm.INT8_PAIRS, _paired(weight.codes)) if has_pairs else (WeightForm.INT8, weight.codes)
        return form, values, weight.scales, weight.minima
    # Around the middle code, minima are small and cancel little.
    minima = None if weight.minima is None else weight.minima + _MIDDLE * weight.scales
    if not has_pairs:
        return WeightForm.INT8, weight.codes.to(torch.int8) - _MIDDLE, weight.scales, minima
    return WeightForm.INT4, _packed(weight.codes), weight.scales, minima


def _bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _blocks(codes: Tensor, padding: int) -> Tensor:
    """``[outputs, inputs]`` codes as ``[outputs, blocks, 2, HALF]``."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (2 * HALF)), value=padding)
    return padded.view(len(codes), -1, 2, HALF)


def _packed(codes: Tensor) -> Tensor:
    """``[outputs, inputs]`` codes of 4 bits as ``[outputs, bytes]``, whole blocks."""
    blocks = _blocks(codes, _MIDDLE)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1)


def _paired(codes: Tensor) -> Tensor:
    """``[outputs, inputs]`` codes of 8 bits as ``[outputs, words]``, whole blocks; the low byte of a word comes first."""
    return _blocks(_bits(codes), 0).transpose(2, 3).contiguous().view(torch.int16).flatten(1)


def stacked(weights: Sequence[DeviceWeight]) -> DeviceWeight | None:
    """Weights of experts, one behind the other; None if they do not have one form."""
    first = weights[0]
    kinds = {
        (some.form, some.values.shape, some.values.dtype, some.group, some.scales is None, some.minima is None,
         some.order is None)
        for some in weights
    }  # fmt: skip
    if len(kinds) > 1:
        return None

    def together(name: str) -> Tensor | None:
        tensors = [getattr(some, name) for some in weights]
        return None if tensors[0] is None else torch.stack(tensors)

    values = together("values")
    assert values is not None
    return replace(first, values=values, scales=together("scales"), minima=together("minima"), order=together("order"))


def tile_constants(weight: DeviceWeight) -> dict[str, int | bool]:
    """The constants of ``multiply_tile`` and ``finished`` that a weight decides."""
    return {
        "OUTPUTS": weight.num_outputs,
        "INPUTS": weight.num_inputs,
        "ROW": weight.values.shape[-1],
        "FORM": int(weight.form),
        "GROUP": weight.group,
        "GROUPED": weight.is_grouped,
        "HAS_MINIMA": weight.minima is not None,
        "HAS_ORDER": weight.order is not None,
        "SCALED": weight.form is not WeightForm.DENSE and not weight.is_grouped,
    }


def tile_tensors(weight: DeviceWeight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, scales, minima and order; what is missing is replaced by something."""
    something = weight.values
    parts: tuple[Any, ...] = (weight.scales, weight.minima, weight.order)
    scales, minima, order = (something if part is None else part for part in parts)
    return weight.values, scales, minima, order


@triton.jit
def fetch_ahead(values, outputs, first, ROW: tl.constexpr, FORM: tl.constexpr):
    """Bring the beginning of a tile's weights, from input ``first`` on, to the second cache; nothing waits for it."""
    line: tl.constexpr = _LINE_BITS // values.dtype.element_ty.primitive_bitwidth
    place = first // 2 if FORM >= _INT4 else first
    ahead = tl.minimum(place + tl.arange(0, _LINES_AHEAD) * line, ROW - 1)
    pointers = values + outputs.to(tl.int64)[:, None] * ROW + ahead[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def multiply_tile(
    x_rows,
    values,
    scales,
    minima,
    order,
    outputs,
    first,
    last,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Sums over the inputs ``first`` to ``last``, float32, ``[BLOCK_OUTPUTS, BLOCK_TOKENS]``; only GROUPED ones are scaled.

    ``x_rows`` and ``outputs`` are valid rows and outputs. The weight is the left operand, which tensor cores take from
    registers; the long side of a tile is then outputs. Triton's pipeliner takes only what goes into a product;
    scales, which come behind it, are loaded a turn ahead. (It takes no loop that carries more than one turn.)
    """
    outputs = outputs.to(tl.int64)
    rows = values + outputs * ROW
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), dtype=tl.float32)
    if GROUPED:
        scale, least = _of_group(scales, minima, first, last, outputs, OUTPUTS, GROUP, HAS_MINIMA)
    for start in range(first, last, BLOCK_INPUTS):
        if GROUPED:
            following = start + BLOCK_INPUTS
            next_scale, next_least = _of_group(scales, minima, following, last, outputs, OUTPUTS, GROUP, HAS_MINIMA)
            part = tl.zeros((BLOCK_OUTPUTS, BLOCK_TOKENS), dtype=tl.float32)
        else:
            part = sums
        if FORM >= _INT4:
            place = tl.arange(0, BLOCK_INPUTS // 2)
            pairs = _loaded(rows, start // 2 + place, ROW, INPUTS % BLOCK_INPUTS != 0)
            low = start + place // _HALF * (2 * _HALF) + place % _HALF
            x_low = _inputs(x_rows, order, low, INPUTS, INPUTS % BLOCK_INPUTS != 0, HAS_ORDER, WIDE)
            x_high = _inputs(x_rows, order, low + _HALF, INPUTS, INPUTS % BLOCK_INPUTS != 0, HAS_ORDER, WIDE)
            low_numbers, high_numbers = _of_pairs(pairs, x_low.dtype, FORM, HAS_E4M3, WIDE)
            part = tl.dot(low_numbers, x_low, part, input_precision="ieee")
            part = tl.dot(high_numbers, x_high, part, input_precision="ieee")
        else:
            inputs = start + tl.arange(0, BLOCK_INPUTS)
            codes = _loaded(rows, inputs, INPUTS, INPUTS % BLOCK_INPUTS != 0)
            x_tile = _inputs(x_rows, order, inputs, INPUTS, INPUTS % BLOCK_INPUTS != 0, HAS_ORDER, WIDE)
            part = tl.dot(_numbers(codes, x_tile.dtype, FORM, HAS_E4M3), x_tile, part, input_precision="ieee")
        if GROUPED:
            sums += part * scale[:, None]
            if HAS_MINIMA:
                if FORM >= _INT4:
                    total = tl.sum(x_low.to(tl.float32), 0) + tl.sum(x_high.to(tl.float32), 0)
                else:
                    total = tl.sum(x_tile.to(tl.float32), 0)
                sums += least[:, None] * total[None, :]
            scale, least = next_scale, next_least
        else:
            sums = part
    return sums


@triton.jit
def finished(sums, scales, bias, outputs, OUTPUTS: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums with the scale of their output, if they are to be ``SCALED``, and its bias."""
    within = outputs < OUTPUTS
    results = sums
    if SCALED:
        results = sums * tl.load(scales + outputs, mask=within, other=0.0)
    if HAS_BIAS:
        results += tl.load(bias + outputs, mask=within, other=0.0).to(tl.float32)
    return results


@triton.jit
def _of_group(
    scales, minima, start, last, outputs, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr
):
    """Scales and minima, if there are any, of each output for the group of input ``start``, or for that of the last input."""
    place = tl.minimum(start, last - 1) // GROUP * OUTPUTS + outputs
    scale = tl.load(scales + place)
    least = scale
    if HAS_MINIMA:
        least = tl.load(minima + place)
    return scale, least


@triton.jit
def _loaded(rows, places, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        tile = tl.load(rows[:, None] + places[None, :], mask=(places < WIDTH)[None, :], other=0)
    else:
        tile = tl.load(rows[:, None] + places[None, :])
    return tile


@triton.jit
def _inputs(
    x_rows, order, inputs, INPUTS: tl.constexpr, MASKED: tl.constexpr, HAS_ORDER: tl.constexpr, WIDE: tl.constexpr
):
    places = inputs
    if HAS_ORDER:
        places = tl.load(order + inputs, mask=inputs < INPUTS, other=0)
    if MASKED:
        tile = tl.load(x_rows[None, :] + places[:, None], mask=(inputs < INPUTS)[:, None], other=0.0)
    else:
        tile = tl.load(x_rows[None, :] + places[:, None])
    if WIDE:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _of_pairs(pairs, dtype: tl.constexpr, FORM: tl.constexpr, HAS_E4M3: tl.constexpr, WIDE: tl.constexpr):
    """The low and the high number of each pair. Triton's interpreter knows no instructions, and is always ``WIDE``."""
    if FORM == _FP8_PAIRS and not WIDE:
        low, high = numbers_of_fp8_pairs(pairs, dtype)
    elif FORM == _INT4 and not WIDE:
        low, high = numbers_of_int4_pairs(pairs, dtype)
    else:
        low = _of_pair(pairs, dtype, FORM, HAS_E4M3, False)
        high = _of_pair(pairs, dtype, FORM, HAS_E4M3, True)
    return low, high


@triton.jit
def _of_pair(pairs, dtype: tl.constexpr, FORM: tl.constexpr, HAS_E4M3: tl.constexpr, HIGH: tl.constexpr):
    """One number of each pair."""
    if FORM == _INT4:
        codes = ((pairs >> 4) if HIGH else (pairs & 15)).to(tl.int8) - 8
    else:
        codes = ((pairs >> 8) if HIGH else pairs).to(tl.int8)
        if FORM == _FP8_PAIRS:
            codes = codes.to(tl.uint8, bitcast=True)
    return _numbers(codes, dtype, FORM, HAS_E4M3)


@triton.jit
def _numbers(codes, dtype: tl.constexpr, FORM: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Values as numbers of ``dtype``, exactly; those of fp8 are too small: ``quantize`` makes no NaN, checkpoints with it are
    refused.
    """
    if FORM == _FP8 or FORM == _FP8_PAIRS:  # noqa: PLR1714, SIM109 (constants, no tuple of them)
        return numbers_of(codes, dtype, HAS_E4M3)
    return codes.to(dtype)
