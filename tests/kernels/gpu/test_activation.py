"""The gated activation beside the oracle and torch's operators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from headway_executor.models import decoder
from headway_executor.models.decoder import FeedForward
from headway_kernels import reference
from headway_kernels.gpu.activation import (
    BLOCK,
    Gate,
    activate_and_multiply,
    clamped_swish_and_multiply,
    gelu_and_multiply,
    silu_and_multiply,
    xielu,
)

# Two units in the last place: an intermediate result may fall on the other side of a rounding.
TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-6},
    torch.float16: {"rtol": 2**-9, "atol": 1e-6},
}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))


@settings(max_examples=25)
@given(
    num_tokens=st.integers(0, 4),
    width=st.integers(1, 70) | st.integers(BLOCK - 2, BLOCK + 2),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(kernel_device, num_tokens, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num_tokens, 2 * width, generator=generator).mul_(4).to(kernel_device, dtype)
    out = torch.full((num_tokens, width + 3), torch.nan, device=kernel_device, dtype=dtype)
    expected = torch.empty(num_tokens, width, device=kernel_device, dtype=dtype)
    reference.silu_and_multiply(gate_up, expected)
    silu_and_multiply(gate_up, out[:, :width])
    torch.testing.assert_close(out[:, :width], expected, **TOLERANCE[dtype])
    assert out[:, width:].isnan().all()


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_is_what_the_executor_computes(kernel_device, dtype):
    # Also where the exponential overflows: silu of a large negative number is zero.
    gate = torch.linspace(-120, 120, 64).to(kernel_device, dtype).expand(2, 64)
    up = torch.linspace(-3, 3, 64).to(kernel_device, dtype).expand(2, 64)
    expected = functional.silu(gate).mul_(up)
    out = torch.empty_like(expected)
    silu_and_multiply(torch.cat([gate, up], dim=1), out)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_gelu_is_what_the_executor_computes(kernel_device, dtype):
    """Of gates and ups that lie apart, too."""
    gate = torch.linspace(-120, 120, 65).to(kernel_device, dtype).expand(2, 65)
    up = torch.linspace(-3, 3, 65).to(kernel_device, dtype).expand(2, 65)
    expected, both, found = (torch.empty(2, 65, device=kernel_device, dtype=dtype) for _ in range(3))
    reference.gelu_and_multiply(torch.cat([gate, up], dim=1), expected)
    gelu_and_multiply(torch.cat([gate, up], dim=1), both)
    activate_and_multiply(gate, up, found, Gate.GELU_TANH)
    torch.testing.assert_close(both, expected, **TOLERANCE[dtype])
    assert torch.equal(found, both)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_the_bounded_activation_is_what_the_executor_computes(kernel_device, dtype):
    gate = torch.linspace(-120, 120, 64).to(kernel_device, dtype).expand(2, 64)
    up = torch.linspace(-20, 20, 64).flip(0).to(kernel_device, dtype).expand(2, 64)
    expected = torch.empty_like(gate)
    reference.clamped_swish_and_multiply(torch.cat([gate, up], dim=1), expected)
    out = torch.empty_like(expected)
    clamped_swish_and_multiply(torch.cat([gate, up], dim=1), out)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    theirs = FeedForward(lambda rows: rows, "clamped_swish", is_gated=True, down=lambda rows: rows)
    torch.testing.assert_close(theirs(torch.cat([gate, up], dim=1).float()), expected.float(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_a_curve_is_what_the_executor_computes(kernel_device, dtype):
    """Near 0 too, where an exponential and a line are nearly the same."""
    values = torch.cat([torch.linspace(-90, 30, BLOCK), torch.linspace(-1e-3, 1e-3, 9)])
    inputs = torch.stack([values, values.flip(0)]).to(kernel_device, dtype)
    curve = torch.tensor([0.7, 0.9, 0.5], device=kernel_device)
    out = torch.full((2, len(values) + 3), torch.nan, device=kernel_device, dtype=dtype)
    xielu(inputs, out[:, : len(values)], curve)
    torch.testing.assert_close(
        out[:, : len(values)], decoder.xielu(inputs.double(), curve).to(dtype), **TOLERANCE[dtype]
    )
    assert out[:, len(values) :].isnan().all()
