"""Quantised weights, and products with them beside the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import reference
from headway_kernels.gpu import quantized_linear as module
from headway_kernels.gpu.quantized_linear import quantize, quantized_linear, workspace_elements

pytestmark = pytest.mark.usefixtures("one_torch_thread")
KINDS = ("int8", "fp8")
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-4},
    torch.float16: {"rtol": 2**-10, "atol": 2e-4},
}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
SPLIT_INPUTS = 1100
"""Enough for two splits under the tilings for few tokens, and no multiple of any tile."""


def normal(seed, *shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def multiply(x, codes, scales, bias=None):
    """The product, in the middle of NaNs."""
    num_outputs, num_inputs = codes.shape
    out = torch.full((x.shape[0] + 1, num_outputs + 5), torch.nan, dtype=x.dtype, device=x.device)
    size = workspace_elements(num_outputs, num_inputs, x.dtype)
    workspace = torch.full((size,), torch.nan, device=x.device)
    quantized_linear(x, codes, scales, bias, out[:-1, :num_outputs], workspace)
    assert out[-1].isnan().all()
    assert out[:, num_outputs:].isnan().all()
    return out[:-1, :num_outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_close_to_the_weight(kind, monkeypatch):
    monkeypatch.setattr(module, "WIDE_ELEMENTS", 150)  # several blocks of rows, the last one short
    weight = normal(0, 7, 50, dtype=torch.bfloat16)
    weight[3] = 0
    weight[4] *= 1e-30
    codes, scales = quantize(weight, kind)
    assert codes.dtype == module.CODE_DTYPE[kind]
    assert (scales > 0).all()
    assert (codes.float().abs().amax(dim=1)[[0, 1, 2, 4, 5, 6]] == module.LARGEST_CODE[kind]).all()
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


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 20) | st.sampled_from((64, 65, 130, 260)),
    num_outputs=st.integers(1, 140),
    num_inputs=st.integers(1, 300) | st.sampled_from((128, 256, SPLIT_INPUTS)),
    spare=st.sampled_from((0, 3)),
    dtype=DTYPES,
    kind=st.sampled_from(KINDS),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(kernel_device, num_tokens, num_outputs, num_inputs, spare, dtype, kind, has_bias, seed):
    codes, scales = quantize(normal(seed, num_outputs, num_inputs, device=kernel_device), kind)
    x = torch.full((num_tokens, num_inputs + spare), torch.nan, dtype=dtype, device=kernel_device)
    x[:, :num_inputs] = normal(seed + 1, num_tokens, num_inputs) * num_inputs**-0.5
    x = x[:, :num_inputs]
    bias = normal(seed + 2, num_outputs, dtype=dtype, device=kernel_device) if has_bias else None
    expected = torch.empty(num_tokens, num_outputs, dtype=dtype, device=kernel_device)
    reference.quantized_linear(x, codes, scales, bias, expected)
    torch.testing.assert_close(multiply(x, codes, scales, bias), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_every_code_is_its_number(kernel_device, dtype):
    patterns = torch.arange(256, dtype=torch.uint8)
    for kind, code_dtype in module.CODE_DTYPE.items():
        codes = patterns.view(code_dtype)
        codes = codes[codes.float().isfinite()][:, None].expand(-1, 16).contiguous().to(kernel_device)
        x = torch.zeros(1, 16, dtype=dtype, device=kernel_device)
        x[0, 3] = 1
        found = multiply(x, codes, torch.ones(len(codes), device=kernel_device))
        assert torch.equal(found[0].float(), codes[:, 3].float()), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_does_not_depend_on_its_company(kernel_device, kind):
    codes, scales = quantize(normal(0, 70, SPLIT_INPUTS, device=kernel_device), kind)
    x = normal(1, 16, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device)
    together = multiply(x, codes, scales)
    for num_tokens in (1, 2, 5):
        assert torch.equal(multiply(x[:num_tokens], codes, scales), together[:num_tokens])


def test_a_short_workspace_is_refused(kernel_device):
    codes, scales = quantize(normal(0, 8, SPLIT_INPUTS, device=kernel_device), "int8")
    x = normal(1, 1, SPLIT_INPUTS, device=kernel_device)
    size = workspace_elements(8, SPLIT_INPUTS, x.dtype)
    assert size > 0
    with pytest.raises(ValueError, match="workspace has"):
        quantized_linear(x, codes, scales, None, torch.empty(1, 8, device=kernel_device), x.new_empty(1))


@given(
    num_outputs=st.integers(1, 200_000),
    num_inputs=st.integers(1, 60_000),
    tiling=st.sampled_from(module.TILINGS + module.FLOAT32_TILINGS),
)
def test_splits_cover_the_inputs(num_outputs, num_inputs, tiling):
    splits, split_inputs = module._split(num_outputs, num_inputs, tiling)
    assert 1 <= splits <= module.MOST_SPLITS
    assert (splits - 1) * split_inputs < num_inputs <= splits * split_inputs
    assert split_inputs % tiling.inputs == 0
    assert splits == 1 or tiling.max_tokens <= tiling.tokens
