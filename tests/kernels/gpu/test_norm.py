"""RMSNorm with the addition before it, beside the oracle and the executor's operator."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.models.decoder import RmsNorm
from headway_kernels import reference
from headway_kernels.gpu.norm import add_layer_norm, add_rms_norm

EPS = 1e-5
# Two units in the last place: an intermediate result may fall on the other side of a rounding.
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-3},
    torch.float16: {"rtol": 2**-9, "atol": 1e-3},
}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))
SEEDS = st.integers(0, 2**31)


def padded(seed, shape, dtype, device, spare):
    """Random rows with ``spare`` NaNs behind each."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((shape[0], shape[1] + spare), torch.nan)
    whole[:, : shape[1]] = torch.randn(shape, generator=generator)
    return whole.to(device, dtype)[:, : shape[1]]


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 4),
    width=st.integers(1, 300),
    spare=st.integers(0, 3),
    dtype=DTYPES,
    adds=st.booleans(),
    multiplies=st.booleans(),
    seed=SEEDS,
)
def test_equals_the_oracle(kernel_device, num_tokens, width, spare, dtype, adds, multiplies, seed):
    hidden = padded(seed, (num_tokens, width), dtype, kernel_device, spare)
    delta = padded(seed + 1, (num_tokens, width), dtype, kernel_device, 1) if adds else None
    weight = padded(seed + 2, (1, width), dtype, kernel_device, 0)[0]
    out = torch.full((num_tokens, width + spare), torch.nan, device=kernel_device, dtype=dtype)
    expected_hidden, expected = hidden.clone(), torch.empty_like(hidden)
    factor = padded(seed + 3, (1, 1), dtype, kernel_device, 0)[0] if adds and multiplies else None
    reference.add_rms_norm(expected_hidden, delta, weight, expected, eps=EPS, factor=factor)
    add_rms_norm(hidden, delta, weight, out[:, :width], eps=EPS, factor=factor)
    assert torch.equal(hidden, expected_hidden)
    torch.testing.assert_close(out[:, :width], expected, **TOLERANCE[dtype])
    assert out[:, width:].isnan().all()


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 4),
    width=st.integers(2, 300),
    dtype=DTYPES,
    adds=st.booleans(),
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_layer_norms_equal_the_oracle(kernel_device, num_tokens, width, dtype, adds, has_bias, seed):
    hidden = padded(seed, (num_tokens, width), dtype, kernel_device, 2)
    delta = padded(seed + 1, (num_tokens, width), dtype, kernel_device, 1) if adds else None
    weight, bias = padded(seed + 2, (2, width), torch.float32, kernel_device, 0)
    out = torch.full((num_tokens, width + 2), torch.nan, device=kernel_device, dtype=dtype)
    expected_hidden, expected = hidden.clone(), torch.empty_like(hidden)
    arguments = (weight, bias if has_bias else None)
    reference.add_layer_norm(expected_hidden, delta, *arguments, expected, eps=EPS)
    add_layer_norm(hidden, delta, *arguments, out[:, :width], eps=EPS)
    assert torch.equal(hidden, expected_hidden)
    # Rows of nearly equal numbers lose precision by centring.
    torch.testing.assert_close(out[:, :width], expected, **(TOLERANCE[dtype] | {"atol": 2e-3}))
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_is_what_the_executor_computes(kernel_device, dtype):
    hidden = padded(1, (3, 256), dtype, kernel_device, 0)
    delta = padded(2, (3, 256), dtype, kernel_device, 0)
    weight = padded(3, (1, 256), dtype, kernel_device, 0)[0]
    expected = RmsNorm(weight, EPS)(hidden + delta)
    out = torch.empty_like(hidden)
    add_rms_norm(hidden, delta, weight, out, eps=EPS)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("place", ["delta", "hidden"])
def test_output_may_lie_where_a_summand_did(place, kernel_device):
    hidden, delta = (padded(seed, (2, 100), torch.bfloat16, kernel_device, 0) for seed in (1, 2))
    weight, bias = padded(3, (2, 100), torch.bfloat16, kernel_device, 0)
    for norm in (partial(add_rms_norm, weight=weight), partial(add_layer_norm, weight=weight, bias=bias)):
        expected = torch.empty_like(hidden)
        norm(hidden.clone(), delta, out=expected, eps=EPS)
        summands = {"hidden": hidden.clone(), "delta": delta.clone()}
        norm(**summands, out=summands[place], eps=EPS)
        assert torch.equal(summands[place], expected)
