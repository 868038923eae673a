"""Products of integer codes with inputs that become integers block by block, in every variant that runs here."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from device_weights import drawn_table
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm, rounded_to_4_bits, rounded_to_8_bits
from headway_kernels.cpu.library import (
    BlockForm,
    CpuLibrary,
    PackedLinear,
    StackedRows,
    Team,
    installed_variants,
    runs_here,
)
from headway_kernels.cpu.library import rounded_to_4_bits as rounded_by_library

VARIANTS = [path for path in installed_variants() if runs_here(path)]
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no CPU kernels that run here")

NORM_EPS = 1e-5
WHOLE = 0
GROUPS = {
    CodeForm.CODES4: (32, 64, WHOLE, 16, 128),
    CodeForm.CODES8: (16, 32, 64, WHOLE),
    CodeForm.TABLE4: (32, 16, 64, WHOLE),
}
SHAPES = ((1, 16), (15, 32), (33, 97), (70, 300))
MOST_OF_DIGITS = 0x7F7F7F
"""Of three signed bytes that are symmetric."""


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda path: path.stem)
def library(request):
    return CpuLibrary(request.param)


@pytest.fixture(scope="module")
def team(library):
    return Team(library, 2)


@pytest.fixture
def needs_digits(library):
    """Variants without them widen codes where inputs may not be rounded: ``test_cpu_codes`` tests that."""
    if not library.multiplies_digits:
        pytest.skip("this variant has no digits")


@pytest.fixture(params=[True, False], ids=["rounded", "digits"])
def rounds_inputs(request):
    if not request.param:
        request.getfixturevalue("needs_digits")
    return request.param


def coded(form, outputs, inputs, group, draw, *, has_minima, is_exact=False, rounds_inputs=True):
    """A weight; ``is_exact``: its scales and minima are powers of two, so that float32 holds all sums of small products."""
    size = group or inputs
    values = (outputs, -(-inputs // size))
    if form is not CodeForm.CODES8:
        codes = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), generator=draw, dtype=torch.int8)
    if is_exact:
        scales, minima = (0.5 ** torch.randint(0, 3, values, generator=draw) for _ in range(2))
    else:
        scales, minima = torch.rand(values, generator=draw) * 0.01 + 1e-4, torch.randn(values, generator=draw) * 0.02
    table = drawn_table(draw) if form is CodeForm.TABLE4 else None
    minima = minima if has_minima else None
    return CodedWeight(form, codes, scales, size, minima, rounds_inputs=rounds_inputs, table=table)


def kinds():
    for number, (form, has_minima) in enumerate(itertools.product(GROUPS, (False, True))):
        for place, (outputs, inputs) in enumerate(SHAPES):
            group = GROUPS[form][(place + number) % len(GROUPS[form])]
            yield form, has_minima, outputs, inputs, group, number * len(SHAPES) + place


def wide(weight):
    """Float64."""
    groups = torch.arange(weight.shape[1]) // weight.group
    middle = 8.0 if weight.form is CodeForm.CODES4 and weight.minima is None else 0.0
    dense = (weight.with_integers().codes.double() - middle) * weight.scales.double()[:, groups]
    return dense if weight.minima is None else dense + weight.minima.double()[:, groups]


def rounded_inputs(rows, norm, block):
    """What the kernels multiply, in float64: codes of 8 bits as float32 gives them, times scales."""
    weighted = rows if norm is None else rows * norm
    blocks = functional.pad(weighted, (0, -rows.shape[1] % block)).unflatten(1, (-1, block))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    codes = (blocks * torch.full_like(largest, 127.0).div(largest)).round()
    scaled = (codes.double() * largest.double() / 127).flatten(1)[:, : rows.shape[1]]
    if norm is None:
        return scaled
    return scaled * (rows.double().square().mean(1, keepdim=True) + NORM_EPS).rsqrt()


def normed(rows, norm):
    """The same without rounding."""
    if norm is None:
        return rows.double()
    return rows.double() * norm.double() * (rows.double().square().mean(1, keepdim=True) + NORM_EPS).rsqrt()


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_is_what_float64_gives_of_the_same_inputs(library, team, rounds_inputs, gated):
    for form, has_minima, half, inputs, group, seed in kinds():
        draw = torch.Generator().manual_seed(seed)
        weight = coded(
            form, half * (1 + gated), inputs, group, draw, has_minima=has_minima, rounds_inputs=rounds_inputs
        )
        weight = replace(weight, minima=torch.zeros_like(weight.scales)) if weight.is_for_int8 else weight
        bias = torch.randn(len(weight.codes), generator=draw) if seed % 2 else None
        norm = torch.rand(inputs, generator=draw) + 0.5 if seed % 3 else None
        rows = torch.randn(13, inputs, generator=draw)
        dense = wide(weight)
        rounded = rounded_inputs(rows, norm, 16 if group == 16 else 32) if rounds_inputs else normed(rows, norm)
        expected, sizes = rounded @ dense.t(), rounded.abs() @ dense.abs().t() + 1e-6
        if bias is not None:
            expected, sizes = expected + bias, sizes + bias.abs()
        if gated:
            (gates, ups), (gate_sizes, up_sizes) = expected.chunk(2, 1), sizes.chunk(2, 1)
            expected = functional.silu(gates) * ups
            sizes = gate_sizes * up_sizes + gate_sizes + up_sizes
        product = PackedLinear(library, weight, bias, gated=gated)
        assert isinstance(product.form, BlockForm)
        # A block's sum is exact; its scales are rounded, and so are the additions of blocks.
        errors = (product(team, rows, norm, NORM_EPS) - expected).abs() / sizes
        assert errors.max() < 2e-7 * (inputs / 16 + 12), (form, has_minima, half, inputs)


@pytest.mark.usefixtures("needs_digits")
def test_inputs_of_digits_are_as_exact_as_float32_whatever_their_sizes(library, team):
    for form, has_minima, outputs, inputs, group, seed in kinds():
        draw = torch.Generator().manual_seed(seed)
        weight = coded(form, outputs, inputs, group, draw, has_minima=has_minima, rounds_inputs=False)
        powers = torch.randint(-60, 60, (9, 1), generator=draw) + torch.randint(-12, 1, (9, inputs), generator=draw)
        rows = torch.randn(9, inputs, generator=draw) * 2.0**powers
        dense, largest = wide(weight).abs(), rows.abs().amax(1, keepdim=True).double()
        errors = PackedLinear(library, weight, None)(team, rows) - rows.double() @ wide(weight).t()
        # Of each input at most 2^-23 of the largest, and what float32 rounds in the sums, which partly cancel.
        allowed = 2.0**-23 * (largest * dense.sum(1) + (inputs / 16 + 8) * (rows.abs().double() @ dense.t()))
        allowed = allowed + 2.0**-23 * inputs / 16 * largest * weight.scales.double().amax(1) * 128
        assert (errors.abs() <= allowed).all(), (form, has_minima, outputs, inputs)


@pytest.mark.usefixtures("needs_digits")
def test_digits_scale_with_their_inputs_up_to_the_ends_of_float32(library, team):
    for form, has_minima, outputs, inputs, group, seed in kinds():
        draw = torch.Generator().manual_seed(seed)
        weight = coded(form, outputs, inputs, group, draw, has_minima=has_minima, rounds_inputs=False)
        minima = None if weight.minima is None else weight.minima / 2**12
        product = PackedLinear(library, replace(weight, scales=weight.scales / 2**12, minima=minima), None)
        rows = torch.randn(5, inputs, generator=draw).clamp(-3.9, 3.9)
        for power in (-70.0, 125.0):
            assert torch.equal(product(team, rows * 2.0**power), product(team, rows) * 2.0**power)


@pytest.mark.usefixtures("needs_digits")
def test_integers_of_24_bits_are_multiplied_exactly(library, team):
    for form, code in ((CodeForm.CODES4, 9), (CodeForm.CODES8, 1), (CodeForm.TABLE4, 2)):
        draw = torch.Generator().manual_seed(int(form))
        rows = torch.randint(-MOST_OF_DIGITS, MOST_OF_DIGITS + 1, (64, 32), generator=draw).float()
        rows[:, :4] = torch.tensor([MOST_OF_DIGITS, -MOST_OF_DIGITS, MOST_OF_DIGITS - 127, 128 - MOST_OF_DIGITS])
        each = torch.full((32, 32), 8 if form is CodeForm.CODES4 else 0, dtype=torch.uint8).fill_diagonal_(code)
        codes = each.to(torch.int8) if form is CodeForm.CODES8 else each
        table = (0, -128, 1, *range(13)) if form is CodeForm.TABLE4 else None
        weight = CodedWeight(form, codes, torch.ones(32, 1), 32, table=table)
        found = PackedLinear(library, weight, None)(team, rows)
        assert torch.equal(found, rows)


def test_sums_are_exact_integers(library, team, rounds_inputs):
    for form, has_minima, outputs, inputs, group, seed in kinds():
        draw = torch.Generator().manual_seed(seed)
        kind = {"has_minima": has_minima, "is_exact": True, "rounds_inputs": rounds_inputs}
        weight = coded(form, outputs, min(inputs, 160), group, draw, **kind)
        rows = torch.randint(-127, 128, (7, weight.shape[1]), generator=draw).float()
        rows[:, ::16] = 127.0  # So the scale of every block is 1, and the codes are these numbers.
        expected = (rows.double() @ wide(weight).t()).float()
        assert torch.equal(PackedLinear(library, weight, None)(team, rows), expected)


def test_a_row_of_a_product_does_not_depend_on_the_others(library, team, rounds_inputs):
    norm = torch.rand(300) + 0.5
    for form, group, has_minima in (
        (CodeForm.CODES4, 32, False),
        (CodeForm.CODES4, 128, True),
        (CodeForm.CODES4, 16, True),
        (CodeForm.CODES8, 16, True),
        (CodeForm.TABLE4, 32, False),
        (CodeForm.TABLE4, 16, True),
    ):
        draw = torch.Generator().manual_seed(group)
        weight = coded(form, 70, 300, group, draw, has_minima=has_minima, rounds_inputs=rounds_inputs)
        rows = torch.randn(200, 300, generator=draw)
        for gated in (False, True):
            product = PackedLinear(library, weight, None, gated=gated)
            together = product(team, rows, norm, NORM_EPS)
            for count in (*range(1, 41), 121, 199):
                assert torch.equal(product(team, rows[:count], norm, NORM_EPS), together[:count])


def test_a_value_that_is_not_finite_spoils_its_row_alone(library, team, rounds_inputs):
    rows = torch.randn(5, 96)
    rows[1, 40], rows[3, 95], rows[4] = float("nan"), float("-inf"), 0.0
    weight = replace(rounded_to_4_bits(torch.randn(20, 96)), rounds_inputs=rounds_inputs)
    found = PackedLinear(library, weight, torch.arange(20.0))(team, rows)
    assert found[[1, 3]].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert torch.equal(found[4], torch.arange(20.0))


def test_scales_that_float16_does_not_hold_stay_float32(library, team):
    draw = torch.Generator().manual_seed(0)
    weight, rows = rounded_to_4_bits(torch.randn(20, 96, generator=draw)), torch.randn(3, 96, generator=draw)
    fine = replace(weight, scales=weight.scales * (1 + 2**-13))
    coarse, found = (PackedLinear(library, one, None)(team, rows) for one in (weight, fine))
    torch.testing.assert_close(found, coarse * (1 + 2**-13), rtol=1e-5, atol=1e-5)
    assert (found - coarse).abs().max() > 1e-3


def test_which_weights_have_blocks():
    draw = torch.Generator().manual_seed(0)
    weight = coded(CodeForm.CODES4, 8, 96, 32, draw, has_minima=False)
    assert weight.has_blocks
    assert not replace(weight, group_of=torch.zeros(96, dtype=torch.int32)).has_blocks
    for form in (CodeForm.CODES4, CodeForm.CODES8, CodeForm.TABLE4):
        assert coded(form, 8, 96, 16, draw, has_minima=False).has_blocks
    numbers = coded(CodeForm.TABLE4, 8, 96, 32, draw, has_minima=False)
    assert not replace(numbers, table=(0.5, *numbers.table[1:])).has_blocks
    assert not coded(CodeForm.CODES8, 8, 96, 48, draw, has_minima=False).has_blocks
    floats = replace(weight, form=CodeForm.FP8, codes=torch.zeros(8, 96).to(torch.float8_e4m3fn))
    assert not floats.has_blocks


def test_rounding_gives_scales_that_float16_holds_unless_they_are_too_large():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[1], weight[2], weight[3] = 0.0, weight[2] * 1e-7, weight[3] * 1e7
    rounded = rounded_to_4_bits(weight)
    halves = rounded.scales.half().float()
    assert torch.equal(halves[[0, 1, 2, 4, 5]], rounded.scales[[0, 1, 2, 4, 5]])
    assert not rounded.float()[1].any()
    assert (rounded.float() - weight)[2].abs().max() < 2**-24
    assert (rounded.float() - weight)[3].norm() < 0.1 * weight[3].norm()


def squared_errors(weight, rounded):
    """Of each group of 32 inputs; the last may have fewer."""
    inputs = weight.shape[1]
    errors = functional.pad((rounded.float() - weight.float()).square(), (0, -inputs % 32))
    return errors.view(len(weight), -1, 32).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6, 32), (5, 33), (7, 80), (3, 512), (40, 1000)])
def test_the_library_rounds_to_4_bits_as_torch_does(library, dtype, outputs, inputs):
    weight = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.02).to(dtype)
    weight[1], weight[2] = 0.0, weight[2] * 1e-7
    weight[0, :8] *= 1e9
    turned = weight.t().contiguous().t()
    for parts in ((weight,), (weight[:1], weight[1:]), (turned,)):
        rounded, expected = rounded_by_library(library, StackedRows(parts)), rounded_to_4_bits(weight)
        # Two scales may be equally good; sums in another order choose the other.
        differs = rounded.scales != expected.scales
        assert differs.float().mean() <= 0.01
        torch.testing.assert_close(
            squared_errors(weight, rounded), squared_errors(weight, expected), rtol=1e-5, atol=0.0
        )
        same = ~differs.repeat_interleave(32, 1)[:, :inputs]
        assert torch.equal(rounded.codes[same], expected.codes[same])
        assert (rounded.form, rounded.group, rounded.rounds_inputs) == (expected.form, 32, True)
        assert (rounded.codes.dtype, rounded.codes.shape, rounded.scales.shape) == (
            *(expected.codes.dtype, expected.codes.shape),
            expected.scales.shape,
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_that_cannot_be_rounded_stays_visible(library, value):
    weight = torch.ones(3, 96)
    weight[1, 40] = value
    rounded = rounded_by_library(library, StackedRows((weight,)))
    assert rounded.scales.isnan().nonzero().tolist() == [[1, 1]]
    assert (rounded.codes < 16).all()


def test_rounding_to_8_bits_takes_the_nearest_codes():
    weight = torch.randn(6, 80)
    weight[2] = 0
    rounded = rounded_to_8_bits(weight)
    assert rounded.is_for_int8
    assert ((rounded.float() - weight).abs() <= 0.5001 * rounded.scales).all()
    assert rounded.codes.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127]
