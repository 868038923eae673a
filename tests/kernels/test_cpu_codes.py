"""Products of weights that are codes, against the same weights in float32, in every variant that runs here."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from device_weights import drawn_table
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm, rounded_to_4_bits, unified
from headway_kernels.cpu.library import (
    BlockForm,
    CpuLibrary,
    PackedLinear,
    Team,
    WeightForm,
    installed_variants,
    runs_here,
)

VARIANTS = [path for path in installed_variants() if runs_here(path)]
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no CPU kernels that run here")

OUTPUTS = (1, 15, 16, 32, 33, 70)
INPUTS = (16, 32, 96, 97, 128, 160, 300)
ROWS = (1, 2, 5, 13, 40)
GROUPS = (16, 32, 64, 128, 300)


def drawn_codes(form, shape, draw):
    if CODE_DTYPES[form] is torch.uint8:
        return torch.randint(0, 16, shape, generator=draw, dtype=torch.uint8)
    if form is CodeForm.CODES8:
        return torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
    codes = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1  # No numbers; a subnormal one instead.
    return codes.view(torch.float8_e4m3fn)


def drawn(form, outputs, inputs, group, *, has_minima=False, is_scattered=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=draw).mul_(0.01).add_(1e-4)
    group_of = torch.randint(0, groups, (inputs,), generator=draw, dtype=torch.int32) if is_scattered else None
    minima = torch.randn(outputs, groups, generator=draw) * 0.02 if has_minima else None
    codes = drawn_codes(form, (outputs, inputs), draw)
    table = drawn_table(draw) if form is CodeForm.TABLE4 else None
    return CodedWeight(form, codes, scales, group, minima, group_of, table=table)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda path: path.stem)
def library(request):
    return CpuLibrary(request.param)


def most_of_an_output(rows, weight, *, gated):
    """No output is larger, whatever cancels (Cauchy and Schwarz); rows that are normed have norm sqrt(inputs) at most."""
    size = max(rows.norm(dim=1).max(), weight.shape[1] ** 0.5) * weight.float().norm(dim=1).max()
    return size * (2 + size) if gated else size


def assert_as_exact(product, found, expected, rows, weight, *, gated=False):
    """Has the bits, where the variant widens."""
    if isinstance(product.form, BlockForm):
        assert (found - expected).abs().max() <= 1e-6 * (1 + most_of_an_output(rows, weight, gated=gated))
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("form", CodeForm)
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_is_as_exact_as_one_with_the_widened_weights(library, form, gated):
    team = Team(library, 2)
    choose = random.Random(int(form) + 8 * gated)
    kinds = itertools.product([False, True], [False, True])
    for seed, (has_minima, is_scattered) in enumerate(list(kinds) * 4):
        outputs, inputs = (1 + gated) * choose.choice(OUTPUTS), choose.choice(INPUTS)
        weight = drawn(
            form, outputs, inputs, choose.choice(GROUPS), has_minima=has_minima, is_scattered=is_scattered, seed=seed
        )
        bias = torch.randn(outputs) if seed % 2 else None
        rows = torch.randn(choose.choice(ROWS), inputs)
        norm = torch.rand(inputs) if seed % 3 else None
        expected = PackedLinear(library, weight.float(), bias, WeightForm.FLOAT32, gated=gated)(team, rows, norm, 1e-5)
        product = PackedLinear(library, weight, bias, gated=gated)
        found = product(team, rows, norm, 1e-5)
        assert_as_exact(product, found, expected, rows, weight, gated=gated)
        one = torch.cat([product(team, rows[i : i + 1].contiguous(), norm, 1e-5) for i in range(len(rows))])
        assert torch.equal(one, found), "a row's bits depend on the number of rows"


def narrow(library, weight):
    """The weights as they may be rounded where pairs of bfloat16s are multiplied.

    They are the nearest bfloat16s; of two that are as near, those farther from zero.

    Of codes of 4 bits or floats of 8 bits in large groups with a zero, sums are scaled; so only the numbers of a table are
    rounded.
    """
    least_scaled = 64 if library.variant == "amx" else 32
    has_whole_steps = weight.scales.shape[1] == 1 or (weight.group >= least_scaled and weight.group % 32 == 0)
    has_zero = weight.minima is None
    if weight.minima is not None and weight.form is CodeForm.CODES4:
        zeros = (-weight.minima / weight.scales).round()
        has_zero = torch.equal(-zeros * weight.scales, weight.minima)
    if weight.form is not CodeForm.CODES8 and weight.group_of is None and has_zero and has_whole_steps:
        if weight.table is None:
            return weight.float()
        return replace(weight, table=tuple(torch.tensor(weight.table).bfloat16().tolist())).float()
    return ((weight.float().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


@pytest.mark.parametrize("form", CodeForm)
def test_codes_and_inputs_may_be_rounded_to_bfloat16_where_pairs_are_multiplied(library, form):
    """Elsewhere, and where digits are faster, they are not; a row's bits stay those it has alone."""
    team = Team(library, 2)
    kinds = ("symmetric", "minima", "zero points", "scattered")
    shapes = (
        (33, 97, 32),
        (70, 160, 64),
        (34, 1650, 16),
        (20, 1650, 128),
        (40, 700, 700),
        (16, 200, 96),
        (17, 1650, 1024),
    )
    for seed, (kind, (outputs, inputs, group)) in enumerate(itertools.product(kinds, shapes)):
        settings = {"has_minima": kind == "minima", "is_scattered": kind == "scattered", "seed": seed}
        weight = drawn(form, outputs, inputs, group, **settings)
        if kind == "zero points":
            zeros = torch.randint(0, 17, weight.scales.shape, generator=torch.Generator().manual_seed(seed))
            weight = replace(weight, minima=-zeros * weight.scales)
        product = PackedLinear(library, weight, torch.ones(outputs), may_be_narrow=True)
        for count in (1, 13, 40, 300):
            rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
            found = product(team, rows)
            if library.multiplies_pairs and not isinstance(product.form, BlockForm):
                sums = rows.bfloat16().double() @ narrow(library, weight).double().t() + 1
                assert (found - sums).abs().max() <= 1e-6 * (1 + most_of_an_output(rows, weight, gated=False))
            else:
                assert torch.equal(found, PackedLinear(library, weight, torch.ones(outputs))(team, rows))
            alone = [product(team, rows[i : i + 1].contiguous()) for i in range(0, count, 7)]
            assert torch.equal(torch.cat(alone), found[::7])


@pytest.mark.parametrize("form", [CodeForm.CODES4, CodeForm.FP8])
def test_rounding_to_bfloat16_leaves_numbers_that_it_holds(library, form):
    """Each code, also those of 8-bit floats that have no exponent, is multiplied with each place of a row."""
    team, inputs = Team(library, 2), 64
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(inputs).view(256, inputs)
    codes = codes % 16 if form is CodeForm.CODES4 else codes[(codes[:, 0] & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    scales = torch.linspace(0.5, 2, len(codes))[:, None].bfloat16().float().contiguous()
    weight = CodedWeight(form, codes.contiguous(), scales, inputs)
    found = PackedLinear(library, weight, None, may_be_narrow=True)(team, torch.eye(inputs))
    assert torch.equal(found, weight.float().t())


@pytest.mark.parametrize("form", CodeForm)
@pytest.mark.parametrize("count", [1, 9, 30, 100])
def test_a_gated_product_may_round_codes_to_bfloat16(library, form, count):
    """The inputs are normalised before they are rounded."""
    team, inputs, draw = Team(library, 2), 320, torch.Generator().manual_seed(count)
    weight = drawn(form, 70, inputs, 64)
    rows, norm = torch.randn(count, inputs, generator=draw), torch.rand(inputs, generator=draw)
    product = PackedLinear(library, weight, None, gated=True, may_be_narrow=True)
    found = product(team, rows, norm, 1e-5)
    if not library.multiplies_pairs or isinstance(product.form, BlockForm):
        assert torch.equal(found, PackedLinear(library, weight, None, gated=True)(team, rows, norm, 1e-5))
        return
    normed = rows * (rows.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt() * norm
    gates, ups = (normed.double() @ narrow(library, weight).double().t()).split(35, dim=1)
    expected = torch.nn.functional.silu(gates) * ups
    assert (found - expected).abs().max() <= 0.004 * most_of_an_output(rows, weight, gated=True)
    assert torch.equal(product(team, rows[-1:].contiguous(), norm, 1e-5), found[-1:])


@pytest.mark.parametrize("gated", [False, True])
def test_codes_may_stand_for_any_numbers(library, gated):
    """They are never cut into digits, nor are their inputs rounded."""
    team, draw = Team(library, 2), torch.Generator().manual_seed(5)
    numbers = tuple(torch.randn(16, generator=draw).tolist())
    for inputs, group in itertools.product((96, 300), (16, 64, 300)):
        weight = replace(drawn(CodeForm.TABLE4, 34, inputs, group), table=numbers, rounds_inputs=True)
        product = PackedLinear(library, weight, None, gated=gated)
        assert product.form is CodeForm.TABLE4
        for count in (1, 5, 40):
            rows = torch.randn(count, inputs, generator=draw)
            exact = PackedLinear(library, weight.float(), None, WeightForm.FLOAT32, gated=gated)
            assert torch.equal(product(team, rows), exact(team, rows))


@pytest.mark.parametrize("form", CodeForm)
@pytest.mark.parametrize("count", [7, 40, 300])
def test_rows_share_what_their_first_tile_widens(library, form, count):
    """Over more inputs, and more rows, than are multiplied at once."""
    team = Team(library, 2)
    weight = drawn(form, 33, 1650, 32, has_minima=True)
    rows = torch.randn(count, 1650, generator=torch.Generator().manual_seed(count))
    product = PackedLinear(library, weight, None)
    found = product(team, rows)
    assert_as_exact(product, found, PackedLinear(library, weight.float(), None)(team, rows), rows, weight)
    assert torch.equal(found[:1], product(team, rows[:1])), "a row's bits depend on the number of rows"


@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_for_rounded_inputs_is_multiplied_as_int8(library, gated):
    """Codes, -128 too, and scales stay what they are; inputs are rounded row by row, as the format asks."""
    team = Team(library, 2)
    for seed, (outputs, inputs) in enumerate(itertools.product((2, 34, 70), (16, 97, 300))):
        weight = replace(drawn(CodeForm.CODES8, outputs, inputs, inputs, seed=seed), rounds_inputs=True)
        assert weight.is_for_int8
        bias, rows = torch.randn(outputs), torch.randn(5, inputs)
        largest = rows.abs().amax(1, keepdim=True)
        # As the kernels do: a division would round some input that lies between two codes to the other one.
        found = (rows * torch.full_like(largest, 127.0).div(largest)).round().double() @ weight.codes.double().t()
        expected = (found * largest / 127 * weight.scales.t() + bias).float()
        if gated:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        product = PackedLinear(library, weight, bias, gated=gated)
        torch.testing.assert_close(product(team, rows), expected, rtol=1e-4, atol=1e-4)
    exact = drawn(CodeForm.CODES8, 8, 64, 32)
    assert not replace(exact, rounds_inputs=True).is_for_int8, "groups of inputs have no int8 product"


def test_widening_rounds_once():
    weight = drawn(CodeForm.CODES4, 8, 64, 32, has_minima=True)
    exact = weight.codes.double() * weight.scales.double().repeat_interleave(32, 1)
    assert torch.equal(weight.float(), (exact + weight.minima.double().repeat_interleave(32, 1)).float())
    plain = drawn(CodeForm.CODES4, 8, 64, 32)
    assert torch.equal(plain.float(), (plain.codes.float() - 8) * plain.scales.repeat_interleave(32, 1))


def test_unified_parts_are_the_same_weights():
    fine, coarse = (drawn(CodeForm.CODES4, 8, 64, group, has_minima=group == 32) for group in (32, 64))
    bytes_ = drawn(CodeForm.CODES8, 4, 64, 16)
    plain = drawn(CodeForm.CODES4, 4, 64, 32)
    for parts in ([fine, fine], [coarse, coarse], [fine, plain], [fine, coarse], [fine, bytes_], [bytes_, bytes_]):
        same = unified(parts)
        assert len({(part.form, part.group, part.minima is None) for part in same}) == 1
        assert all(torch.equal(part.float(), was.float()) for part, was in zip(same, parts, strict=True))
    assert unified([fine, plain])[0].form is CodeForm.CODES4
    small, other = (drawn(CodeForm.TABLE4, 8, 64, 32, seed=seed) for seed in (0, 1))
    assert unified([small, small]) == [small, small]
    for part in (coarse, other):
        assert [each.form for each in unified([small, part])] == [CodeForm.CODES8] * 2
        assert torch.equal(unified([small, part])[0].float(), small.float())
    numbers = replace(small, table=(0.5, *small.table[1:]))
    assert unified([numbers, other]) is None
    assert [each.form for each in unified([numbers, numbers])] == [CodeForm.TABLE4] * 2
    floats = drawn(CodeForm.FP8, 8, 64, 32)
    assert unified([floats, fine]) is None
    assert unified([floats, floats]) == [floats, floats]
    scattered = [drawn(CodeForm.CODES4, 8, 64, 32, is_scattered=True, seed=seed) for seed in (1, 1, 2)]
    assert unified(scattered[:2]) == scattered[:2]
    assert unified(scattered[1:]) is None


@pytest.mark.parametrize("form", CodeForm)
def test_rows_are_chosen_and_ordered_as_in_the_widened_weight(form):
    weight = drawn(form, 12, 64, 32, has_minima=True)
    order = torch.tensor([3, 1, 0, 11])
    assert torch.equal(weight.with_rows(lambda rows: rows[order]).float(), weight.float()[order])
    assert weight.codes.dtype == CODE_DTYPES[form]


def test_rounding_to_4_bits_takes_the_nearest_codes():
    weight = torch.randn(6, 80, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    rounded = rounded_to_4_bits(weight)
    assert rounded.shape == weight.shape
    scales = rounded.scales.repeat_interleave(32, 1)[:, :80]
    errors = (rounded.float() - weight).abs() / scales.abs()
    inside = (rounded.codes > 0) & (rounded.codes < 15)
    assert errors[inside].max() <= 0.5001
    assert not rounded.float()[2].any()
    assert (rounded.float() - weight).square().mean().sqrt() < 0.1 * weight.square().mean().sqrt()
