"""Products of E4M3 codes with inputs that are rounded to such codes, beside float64 of the same roundings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_weights import check_float8, drawn_codes, normal, on, rounded, wide
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm
from headway_kernels.gpu.linear import float8 as module
from headway_kernels.gpu.linear.float8 import BLOCK, float8_linear, multiplies, workspace_size
from headway_kernels.gpu.linear.weights import coded, quantized

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no products of 8-bit floats"
    ),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def multiply(x, weight, bias=None, tilings=module.FLOAT8_TILINGS):
    """The product, in the middle of NaNs."""
    out = torch.full((len(x) + 1, weight.num_outputs + 5), torch.nan, dtype=x.dtype, device=x.device)
    workspace = torch.full((workspace_size(*x.shape),), torch.nan, device=x.device)
    float8_linear(x, weight, bias, out[:-1, : weight.num_outputs], workspace, tilings)
    assert out[-1].isnan().all()
    assert out[:, weight.num_outputs :].isnan().all()
    return out[:-1, : weight.num_outputs]


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 5) | st.sampled_from((64, 65, 130, 260)),
    num_outputs=st.integers(1, 140),
    num_inputs=st.integers(1, 300) | st.sampled_from((128, 256, 1100)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_float64_of_the_rounded_inputs(
    kernel_device, num_tokens, num_outputs, num_inputs, dtype, has_bias, seed
):
    weight, dense = wide(seed, "fp8", num_outputs, num_inputs, kernel_device)
    x = torch.full((num_tokens, num_inputs + 3), torch.nan, dtype=dtype, device=kernel_device)
    # Blocks of different sizes.
    x[:, :num_inputs] = normal(seed + 1, num_tokens, num_inputs) * num_inputs**-0.5
    x[:, : num_inputs // 2] *= 2.0**-9
    x = x[:, :num_inputs]
    bias = normal(seed + 2, num_outputs, dtype=dtype, device=kernel_device) if has_bias else None
    expected = rounded(x) @ dense.cpu().t() + (0 if bias is None else bias.cpu().double())
    check_float8(multiply(x, weight, bias), expected, dtype)


@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), [(300, 700, 256), (128, 128, 128), (70, 400, 128)])
def test_blocks_of_weights_have_scales_of_their_own(kernel_device, num_outputs, num_inputs, group):
    stored = drawn_codes(3, CodeForm.FP8, num_outputs, num_inputs, group)
    stored.scales.copy_(stored.scales[::BLOCK].repeat_interleave(BLOCK, 0)[:num_outputs])
    weight = coded(stored)
    assert multiplies(weight)
    x = normal(4, 70, num_inputs) * num_inputs**-0.5
    expected = rounded(x) @ stored.float().double().t()
    check_float8(multiply(x.to(kernel_device), on(kernel_device, weight)), expected, torch.float32)


def test_rounding_costs_little(kernel_device):
    """An input keeps four bits, whatever the others of its row are."""
    x = normal(0, 80, 1024, dtype=torch.bfloat16)
    x[:, 500] = 300.0
    weight = normal(1, 90, 1024) / 32
    weight[:, 500] = 0
    exact = x.double() @ weight.double().t()
    found = multiply(x.to(kernel_device), quantized(weight.to(kernel_device), "fp8")).cpu().double()
    assert ((found - exact).square().mean() / exact.square().mean()).sqrt() < 0.05


def test_a_row_does_not_depend_on_its_company(kernel_device):
    """Nor on the tiles that its number of tokens chooses."""
    weight = quantized(normal(0, 140, 300).to(kernel_device), "fp8")
    x = normal(1, 300, 300, dtype=torch.bfloat16).to(kernel_device)
    alone = multiply(x, weight)
    for first, count in ((0, 1), (37, 70), (44, 256), (3, 297)):
        assert torch.equal(multiply(x[first : first + count], weight), alone[first : first + count]), count


def test_what_is_no_number_spoils_its_own_row_alone(kernel_device):
    weight = quantized(normal(0, 20, 300).to(kernel_device), "fp8")
    x = normal(1, 9, 300)
    expected = multiply(x.to(kernel_device), weight)
    x[4, 7], x[6, 299], x[8] = torch.inf, torch.nan, 0
    found = multiply(x.to(kernel_device), weight)
    assert not found[[4, 6]].isfinite().any()
    assert not found[8].any()
    others = [0, 1, 2, 3, 5, 7]
    assert torch.equal(found[others], expected[others])


def test_weights_in_other_forms_are_not_multiplied_so():
    assert multiplies(quantized(normal(0, 9, 200), "fp8"))
    assert not multiplies(quantized(normal(0, 9, 200), "int8"))
    for group in (48, 64):
        assert not multiplies(coded(drawn_codes(0, CodeForm.FP8, 9, 192, group)))
    codes = normal(0, 200, 256).to(torch.float8_e4m3fn)
    scales = torch.ones(200, 2)
    assert multiplies(coded(CodedWeight(CodeForm.FP8, codes, scales, 128)))
    scales[130] = 2
    assert not multiplies(coded(CodedWeight(CodeForm.FP8, codes, scales, 128)))
