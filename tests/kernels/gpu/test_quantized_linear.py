"""Quantised weights, and products with them beside the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_weights import drawn_codes, normal, on, wide
from headway_kernels import reference
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm, rounded_to_4_bits
from headway_kernels.gpu.linear import weights as weights_module
from headway_kernels.gpu.linear.quantized import quantized_linear
from headway_kernels.gpu.linear.weights import WeightForm, coded, quantize

KINDS = ("int8", "fp8")
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-4},
    torch.float16: {"rtol": 2**-10, "atol": 2e-4},
}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
MANY_INPUTS = 1100
"""Many tiles, and no multiple of any."""


def multiply(x, weight, bias=None):
    """The product, in the middle of NaNs."""
    num_outputs = weight.num_outputs
    out = torch.full((x.shape[0] + 1, num_outputs + 5), torch.nan, dtype=x.dtype, device=x.device)
    quantized_linear(x, weight, bias, out[:-1, :num_outputs])
    assert out[-1].isnan().all()
    assert out[:, num_outputs:].isnan().all()
    return out[:-1, :num_outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_close_to_the_weight(kind, monkeypatch):
    monkeypatch.setattr(weights_module, "WIDE_ELEMENTS", 150)  # several blocks of rows, the last one short
    weight = normal(0, 7, 50, dtype=torch.bfloat16)
    weight[3] = 0
    weight[4] *= 1e-30
    codes, scales = quantize(weight, kind)
    assert codes.dtype == weights_module.CODE_DTYPE[kind]
    assert (scales > 0).all()
    assert (codes.float().abs().amax(dim=1)[[0, 1, 2, 4, 5, 6]] == weights_module.LARGEST_CODE[kind]).all()
    assert not codes[3].float().any()
    restored = codes.float() * scales[:, None]
    # Half a step of int8; of fp8, half a unit of three bits of mantissa, or of the smallest codes.
    allowed = 0.5001 * scales[:, None] * (1 if kind == "int8" else 2**-9) + (0 if kind == "int8" else 1) * (
        weight.float().abs() * 2**-4
    )
    assert ((restored - weight.float()).abs() <= allowed).all()


def test_numbers_too_small_to_divide_by_give_numbers():
    for kind in KINDS:
        codes, scales = quantize(torch.full((1, 4), 1e-42), kind)
        assert codes.float().isfinite().all()
        assert scales.isfinite().all()


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 20) | st.sampled_from((64, 65, 130, 260)),
    num_outputs=st.integers(1, 140),
    num_inputs=st.integers(1, 300) | st.sampled_from((128, 256, MANY_INPUTS)),
    spare=st.sampled_from((0, 3)),
    dtype=DTYPES,
    kind=st.sampled_from(KINDS),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(kernel_device, num_tokens, num_outputs, num_inputs, spare, dtype, kind, has_bias, seed):
    weight, dense = wide(seed, kind, num_outputs, num_inputs, kernel_device)
    x = torch.full((num_tokens, num_inputs + spare), torch.nan, dtype=dtype, device=kernel_device)
    x[:, :num_inputs] = normal(seed + 1, num_tokens, num_inputs) * num_inputs**-0.5
    x = x[:, :num_inputs]
    bias = normal(seed + 2, num_outputs, dtype=dtype, device=kernel_device) if has_bias else None
    expected = torch.empty(num_tokens, num_outputs, dtype=dtype, device=kernel_device)
    reference.quantized_linear(x, dense, bias, expected)
    torch.testing.assert_close(multiply(x, weight, bias), expected, **TOLERANCE[dtype])


@settings(max_examples=25)
@given(
    form=st.sampled_from(CodeForm),
    num_tokens=st.sampled_from((1, 3, 20, 70)),
    num_outputs=st.integers(1, 70),
    num_inputs=st.integers(1, 200) | st.sampled_from((256, MANY_INPUTS)),
    group=st.sampled_from((16, 32, 48, 64, 128, 4096)),
    has_minima=st.booleans(),
    has_order=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_codes_of_checkpoints_are_what_they_stand_for(
    kernel_device, form, num_tokens, num_outputs, num_inputs, group, has_minima, has_order, dtype, seed
):
    stored = drawn_codes(seed, form, num_outputs, num_inputs, group, has_minima=has_minima, has_order=has_order)
    weight = coded(stored)
    x = normal(seed + 1, num_tokens, num_inputs, dtype=dtype) * num_inputs**-0.5
    expected = torch.empty(num_tokens, num_outputs, dtype=dtype)
    reference.quantized_linear(x, stored.float(), None, expected)
    found = multiply(x.to(kernel_device), on(kernel_device, weight))
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCE[dtype])


def test_codes_come_in_pairs_if_groups_are_whole_blocks():
    stored = rounded_to_4_bits(normal(0, 6, 100))
    assert coded(stored).form is WeightForm.INT4
    assert coded(stored).values.shape == (6, 64)
    assert coded(drawn_codes(0, CodeForm.CODES4, 6, 96, 48)).form is WeightForm.INT8
    assert coded(drawn_codes(0, CodeForm.CODES8, 6, 96, 48)).form is WeightForm.INT8
    assert coded(drawn_codes(0, CodeForm.FP8, 6, 96, 48)).form is WeightForm.FP8
    for form, paired in ((CodeForm.CODES8, WeightForm.INT8_PAIRS), (CodeForm.FP8, WeightForm.FP8_PAIRS)):
        weight = coded(drawn_codes(0, form, 6, 100, 64))
        assert weight.form is paired
        assert weight.values.shape == (6, 64)
    uneven = drawn_codes(0, CodeForm.CODES4, 6, 64, 32, has_order=True)
    uneven.group_of[:] = 0
    assert coded(uneven) is None


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_every_code_is_its_number(kernel_device, dtype):
    patterns = torch.arange(256, dtype=torch.uint8)
    for form, code_dtype in CODE_DTYPES.items():
        codes = patterns[:16] if code_dtype is torch.uint8 else patterns.view(code_dtype)
        codes = codes[codes.float().isfinite()][:, None].expand(-1, 16).contiguous()
        x = torch.zeros(1, 16, dtype=dtype, device=kernel_device)
        x[0, 3] = 1
        table = tuple(range(-128, 128, 17)) if form is CodeForm.TABLE4 else None
        stored = CodedWeight(form, codes, torch.ones(len(codes), 1), 16, table=table)
        found = multiply(x, on(kernel_device, coded(stored)))
        assert torch.equal(found[0].float().cpu(), stored.float()[:, 3]), form
