"""The product of a few tokens beside the oracle, and results that depend on no company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from device_weights import drawn_codes, normal, on, wide
from headway_kernels import reference
from headway_kernels.cpu.coded_weight import CodeForm
from headway_kernels.gpu.activation import Gate
from headway_kernels.gpu.linear import skinny as module
from headway_kernels.gpu.linear.skinny import skinny_linear
from headway_kernels.gpu.linear.weights import coded, dense

TOLERANCE = {torch.bfloat16: {"rtol": 2**-7, "atol": 2e-3}, torch.float16: {"rtol": 2**-10, "atol": 2e-4}}
ACTIVATIONS = {
    Gate.SILU: reference.silu_and_multiply,
    Gate.CLAMPED: reference.clamped_swish_and_multiply,
    Gate.GELU_TANH: reference.gelu_and_multiply,
}
SPLIT_INPUTS = 700
"""Enough for several splits, and no multiple of any tile."""


def workspace_for(weight):
    partial, arrived = module.workspace_sizes(weight.num_outputs, weight.num_inputs)
    device = weight.values.device
    return torch.full((partial,), torch.nan, device=device), torch.zeros(arrived, dtype=torch.int32, device=device)


def multiply(x, weight, bias=None, gate=Gate.NONE, workspace=None):
    """The product, in the middle of NaNs."""
    width = weight.num_outputs // (1 if gate is Gate.NONE else 2)
    out = torch.full((len(x) + 1, width + 5), torch.nan, dtype=x.dtype, device=x.device)
    partial, arrived = workspace or workspace_for(weight)
    skinny_linear(x, weight, bias, out[:-1, :width], partial, arrived, gate)
    assert not arrived.any()
    assert out[-1].isnan().all()
    assert out[:, width:].isnan().all()
    return out[:-1, :width]


def expected_of(x, numbers, bias, gate):
    expected = torch.empty(len(x), len(numbers), dtype=x.dtype, device=x.device)
    reference.quantized_linear(x, numbers.double(), bias, expected)
    if gate is Gate.NONE:
        return expected
    gated = expected[:, : len(numbers) // 2].clone()
    ACTIVATIONS[gate](expected, gated)
    return gated


@settings(max_examples=20)
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
    expected = expected_of(x, weight, bias, gate)
    tolerance = TOLERANCE[dtype]
    if gate is not Gate.NONE:
        # A sum between two numbers is rounded to either, and then its product is, too: as in the test of activations.
        tolerance = tolerance | {"rtol": 2 * tolerance["rtol"]}
    torch.testing.assert_close(multiply(x, dense(weight), bias, gate), expected, **tolerance)


@settings(max_examples=25)
@given(
    form=st.sampled_from(CodeForm),
    num_tokens=st.sampled_from((1, 16, 17, 64)),
    half_outputs=st.integers(1, 40),
    num_inputs=st.integers(1, 200) | st.sampled_from((256, SPLIT_INPUTS)),
    group=st.sampled_from((16, 32, 48, 64, 128, 4096)),
    has_minima=st.booleans(),
    has_order=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    gate=st.sampled_from((Gate.NONE, Gate.SILU)),
    seed=st.integers(0, 2**31),
)
def test_codes_are_what_they_stand_for(
    kernel_device, form, num_tokens, half_outputs, num_inputs, group, has_minima, has_order, has_bias, dtype, gate, seed
):
    stored = drawn_codes(seed, form, 2 * half_outputs, num_inputs, group, has_minima=has_minima, has_order=has_order)
    x = normal(seed + 1, num_tokens, num_inputs, dtype=dtype) * num_inputs**-0.5
    bias = normal(seed + 2, 2 * half_outputs, dtype=dtype) if has_bias else None
    expected = expected_of(x, stored.float(), bias, gate)
    own_bias = None if bias is None else bias.to(kernel_device)
    found = multiply(x.to(kernel_device), on(kernel_device, coded(stored)), own_bias, gate)
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCE[dtype])


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
    weight = dense(normal(0, 60, num_inputs, dtype=torch.bfloat16, device=kernel_device))
    x = normal(1, module.MOST_TOKENS, num_inputs, dtype=torch.bfloat16, device=kernel_device)
    together = multiply(x, weight, gate=gate)
    for number in numbers:
        assert torch.equal(multiply(x[:number], weight, gate=gate), together[:number]), number
    for first in (1, 20, 63):
        assert torch.equal(multiply(x[first:], weight, gate=gate), together[first:]), first


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_with_codes_it_does_not_either(kernel_device, kind):
    weight, _ = wide(0, kind, 70, SPLIT_INPUTS, kernel_device)
    x = normal(1, module.MOST_TOKENS, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device)
    together = multiply(x, weight)
    for number in SOME_NUMBERS:
        assert torch.equal(multiply(x[:number], weight), together[:number]), number
    assert torch.equal(multiply(x[20:], weight), together[20:])


def test_whoever_comes_last_adds_in_the_same_order(kernel_device):
    weight = dense(normal(0, 70, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device))
    x = normal(1, 3, SPLIT_INPUTS, dtype=torch.bfloat16, device=kernel_device)
    workspace = partial, arrived = workspace_for(weight)
    usual = multiply(x, weight, workspace=workspace)
    splits, _ = module.cut(weight.num_outputs, weight.num_inputs)
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
