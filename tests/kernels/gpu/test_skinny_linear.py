"""The product of a few tokens beside the oracle, and results that depend on no company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import reference
from headway_kernels.gpu import skinny_linear as module
from headway_kernels.gpu.activation import Gate
from headway_kernels.gpu.skinny_linear import skinny_linear

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOLERANCE = {torch.bfloat16: {"rtol": 2**-7, "atol": 2e-3}, torch.float16: {"rtol": 2**-10, "atol": 2e-4}}
ACTIVATIONS = {
    Gate.SILU: reference.silu_and_multiply,
    Gate.CLAMPED: reference.clamped_swish_and_multiply,
}
SPLIT_INPUTS = 700
"""Enough for several splits, and no multiple of any tile."""


def normal(seed, *shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def workspace_for(weight):
    partial, arrived = module.workspace_sizes(*weight.shape)
    return torch.full((partial,), torch.nan, device=weight.device), weight.new_zeros(arrived, dtype=torch.int32)


def multiply(x, weight, bias=None, gate=Gate.NONE, workspace=None):
    """The product, in the middle of NaNs."""
    width = len(weight) // (1 if gate is Gate.NONE else 2)
    out = torch.full((len(x) + 1, width + 5), torch.nan, dtype=x.dtype, device=x.device)
    partial, arrived = workspace or workspace_for(weight)
    skinny_linear(x, weight, bias, out[:-1, :width], partial, arrived, gate)
    assert not arrived.any()
    assert out[-1].isnan().all()
    assert out[:, width:].isnan().all()
    return out[:-1, :width]


@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.sampled_from((1, 2, 15, 16, 17, 33, 63, 64)),
    half_outputs=st.integers(1, 70),
    num_inputs=st.integers(1, 300) | st.sampled_from((128, 256, SPLIT_INPUTS)),
    spare=st.sampled_from((0, 3)),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    has_bias=st.booleans(),
    gate=st.sampled_from(Gate),
    seed=st.integers(0, 2**31),
)
def test_equals_the_oracle(kernel_device, num_tokens, half_outputs, num_inputs, spare, dtype, has_bias, gate, seed):
    weight = normal(seed, 2 * half_outputs, num_inputs, dtype=dtype, device=kernel_device)
    x = torch.full((num_tokens, num_inputs + spare), torch.nan, dtype=dtype, device=kernel_device)
    x[:, :num_inputs] = normal(seed + 1, num_tokens, num_inputs, dtype=dtype, device=kernel_device) * num_inputs**-0.5
    x = x[:, :num_inputs]
    bias = normal(seed + 2, 2 * half_outputs, dtype=dtype, device=kernel_device) if has_bias else None
    expected = torch.empty(num_tokens, 2 * half_outputs, dtype=dtype, device=kernel_device)
    reference.quantized_linear(x, weight.double(), bias, expected)
    if gate is not Gate.NONE:
        gate_up, expected = expected, expected[:, :half_outputs].clone()
        ACTIVATIONS[gate](gate_up, expected)
    torch.testing.assert_close(multiply(x, weight, bias, gate), expected, **TOLERANCE[dtype])


EVERY_NUMBER = range(1, module.MOST_TOKENS)
SOME_NUMBERS = (1, 2, 15, 16, 17, 31, 33, 63)


@pytest.mark.parametrize(
    ("gate", "num_inputs", "numbers"),
    [
        (Gate.NONE, 300, EVERY_NUMBER),
        (Gate.SILU, SPLIT_INPUTS, SOME_NUMBERS),
        (Gate.NONE, 96, SOME_NUMBERS),
        pytest.param(Gate.SILU, SPLIT_INPUTS, EVERY_NUMBER, marks=pytest.mark.deep),
    ],
)
def test_a_result_does_not_depend_on_the_number_of_tokens(kernel_device, gate, num_inputs, numbers):
    weight = normal(0, 60, num_inputs, dtype=torch.bfloat16, device=kernel_device)
    x = normal(1, module.MOST_TOKENS, num_inputs, dtype=torch.bfloat16, device=kernel_device)
    together = multiply(x, weight, gate=gate)
    for number in numbers:
        assert torch.equal(multiply(x[:number], weight, gate=gate), together[:number]), number
    for first in (1, 20, 63):
        assert torch.equal(multiply(x[first:], weight, gate=gate), together[first:]), first


def test_whoever_comes_last_adds_in_the_same_order(kernel_device):
    weight = normal(0, 70, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device)
    x = normal(1, 3, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device)
    workspace = partial, arrived = workspace_for(weight)
    usual = multiply(x, weight, workspace=workspace)
    splits, _ = module.cut(*weight.shape)
    assert splits > 2
    if x.is_cuda:
        return  # Blocks come in no order there.
    # The sums of every split are in memory from before, so that an earlier block can be told that it is the last.
    for early in range(1, splits):
        arrived.fill_(early)
        out = torch.empty_like(usual)
        skinny_linear(x, weight, None, out, partial, arrived, Gate.NONE)
        assert torch.equal(out, usual)
        arrived.zero_()


@given(num_outputs=st.integers(1, 200_000), num_inputs=st.integers(1, 60_000))
def test_splits_cover_the_inputs(num_outputs, num_inputs):
    splits, split_inputs = module.cut(num_outputs, num_inputs)
    assert 1 <= splits <= module.MOST_SPLITS
    assert (splits - 1) * split_inputs < num_inputs <= splits * split_inputs
    assert split_inputs % module.BLOCK_INPUTS == 0


def test_only_few_tokens_of_16_bits_are_taken():
    assert module.takes(1, torch.bfloat16)
    assert module.takes(64, torch.float16)
    assert not module.takes(65, torch.bfloat16)
    assert not module.takes(0, torch.bfloat16)
    assert not module.takes(1, torch.float32)
