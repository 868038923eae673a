"""Products of experts with inputs that are rounded to E4M3, beside float64 of the same roundings and each expert alone."""

import pytest
import torch

from device_weights import check_float8, drawn_codes, normal, on, rounded, wide
from headway_kernels import reference
from headway_kernels.cpu.coded_weight import CodeForm
from headway_kernels.gpu.experts.float8 import are_many, multiply_rounded_pairs
from headway_kernels.gpu.experts.grouped import ExpertPairs, sort_pairs
from headway_kernels.gpu.linear.float8 import BLOCK, FLOAT8_TILINGS, float8_linear, multiplies, workspace_size
from headway_kernels.gpu.linear.weights import coded, quantized, stacked
from headway_kernels.routing import Routing

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no products of 8-bit floats"
    ),
]
ROUTING = Routing(num_experts=5, num_chosen=2)
TOKENS, OUTPUTS, INPUTS = 80, 300, 400
ONE_TILING = tuple((tiling,) for tiling in FLOAT8_TILINGS)


def pairs_of(chosen, device):
    """Sorted pairs; an expert that there is not stands for padding."""
    pairs = ExpertPairs.allocate(len(chosen), ROUTING, device)
    pairs.chosen.copy_(chosen)
    sort_pairs(pairs)
    return pairs


def choices(num_tokens=TOKENS):
    """The last expert has no pairs, the first most, and a token is padding."""
    draw = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(4, generator=draw)[:2].sort().values for _ in range(num_tokens)])
    chosen[: num_tokens // 2, 0] = 0
    chosen[: num_tokens // 2, 1].clamp_(min=1)
    chosen[num_tokens // 3] = ROUTING.num_experts
    return chosen


def blocks_of(seed):
    """A weight in blocks of 128 x 128."""
    stored = drawn_codes(seed, CodeForm.FP8, OUTPUTS, INPUTS, BLOCK)
    stored.scales.copy_(stored.scales[::BLOCK].repeat_interleave(BLOCK, 0)[:OUTPUTS])
    return stored


def weights_of(kind, device):
    """Experts in one form, and the numbers that they stand for."""
    if kind == "blocks":
        stored = [blocks_of(seed) for seed in range(ROUTING.num_experts)]
        return [on(device, coded(some)) for some in stored], torch.stack([some.float().double() for some in stored])
    found = [wide(seed, "fp8", OUTPUTS, INPUTS, device) for seed in range(ROUTING.num_experts)]
    return [weight for weight, _ in found], torch.stack([numbers.cpu() for _, numbers in found])


def multiply(x, weight, bias, pairs, *, gathers, tilings=FLOAT8_TILINGS):
    """The product, in the middle of NaNs."""
    out = torch.full((len(pairs.order), OUTPUTS + 3), torch.nan, dtype=x.dtype, device=x.device)
    workspace = torch.full((workspace_size(*x.shape),), torch.nan, device=x.device)
    multiply_rounded_pairs(x, weight, bias, out[:, :OUTPUTS], pairs, workspace, gathers=gathers, tilings=tilings)
    assert out[:, OUTPUTS:].isnan().all()
    return out[:, :OUTPUTS]


@pytest.mark.parametrize("tilings", ONE_TILING, ids=["64 pairs", "128 pairs"])
@pytest.mark.parametrize(("kind", "dtype"), [("blocks", torch.bfloat16), ("channels", torch.float32)])
def test_each_pair_meets_its_expert(kernel_device, kind, dtype, tilings):
    weights, numbers = weights_of(kind, kernel_device)
    weight = stacked(weights)
    assert multiplies(weight)
    pairs, last = pairs_of(choices(), kernel_device), ROUTING.num_experts - 1
    bias = normal(7, ROUTING.num_experts, OUTPUTS, dtype=dtype) if kind == "channels" else None
    there = None if bias is None else bias.to(kernel_device)
    real = pairs.order[: pairs.ends[-1]].long().cpu()
    assert len(real) == 2 * (TOKENS - 1)
    chosen = pairs.chosen.cpu().clamp(max=last)

    def expected(rows):
        return reference.multiply_pairs(rounded(rows).view(*rows.shape), numbers, bias, chosen).flatten(0, 1)[real]

    x = normal(8, TOKENS, INPUTS, dtype=dtype) * INPUTS**-0.5
    found = multiply(x.to(kernel_device), weight, there, pairs, gathers=True, tilings=tilings)
    check_float8(found[: len(real)], expected(x), dtype)
    assert found[len(real) :].isnan().all()

    by_pair = normal(9, 2 * TOKENS, INPUTS, dtype=dtype) * INPUTS**-0.5
    in_order = torch.full_like(by_pair, torch.nan)
    in_order[: len(real)] = by_pair[real]
    back = multiply(in_order.to(kernel_device), weight, there, pairs, gathers=False, tilings=tilings)
    wanted = reference.multiply_pairs(rounded(by_pair).view(TOKENS, 2, INPUTS), numbers, bias, chosen)
    check_float8(back[real], wanted.flatten(0, 1)[real], dtype)


@pytest.mark.parametrize("kind", ["blocks", "channels"])
def test_a_pair_has_the_bits_of_its_expert_alone(kernel_device, kind):
    """Whatever the tiles, and whatever shares the step."""
    weights, _ = weights_of(kind, kernel_device)
    x = normal(1, TOKENS, INPUTS, dtype=torch.bfloat16).to(kernel_device)
    pairs = pairs_of(choices(), kernel_device)
    wide_tiles, narrow = (multiply(x, stacked(weights), None, pairs, gathers=True, tilings=one) for one in ONE_TILING)
    count, begin = int(pairs.ends[-1]), 0
    assert torch.equal(wide_tiles[:count], narrow[:count])
    for weight, end in zip(weights, pairs.ends.tolist(), strict=True):
        rows = x[(pairs.order[begin:end] // 2).long()]
        out = torch.empty(len(rows), OUTPUTS, dtype=x.dtype, device=x.device)
        space = torch.empty(workspace_size(*rows.shape), device=x.device)
        float8_linear(rows, weight, None, out, space)
        assert torch.equal(narrow[begin:end], out)
        begin = end


def test_they_are_many_if_an_expert_has_more_than_64_on_average():
    """Of one expert that all choose: as many as tokens."""
    assert [are_many(64, 1), are_many(65, 1)] == [False, True]
    assert [are_many(8 * tokens, 128) for tokens in (1024, 1025)] == [False, True]


def test_experts_whose_blocks_do_not_share_scales_are_not_multiplied_so():
    stored = [blocks_of(seed) for seed in range(2)]
    assert multiplies(stacked([coded(some) for some in stored]))
    stored[1].scales[130] += 1
    assert not multiplies(stacked([coded(some) for some in stored]))
    assert not multiplies(stacked([quantized(normal(0, 9, 200), "int8")] * 2))
