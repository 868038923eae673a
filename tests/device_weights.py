"""Weights as codes for tests of products, on a device, and the numbers that they stand for."""

from dataclasses import replace

import torch

from headway_kernels import kv_codes
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm
from headway_kernels.gpu.linear.float8 import BLOCK
from headway_kernels.gpu.linear.weights import quantize, quantized

ON_A_DEVICE = {"rtol": 2**-8, "atol": 2e-3}
"""Its tensor cores add the products of a block with fewer bits."""


def normal(seed, *shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def wide(seed, kind, num_outputs, num_inputs, device):
    """A quantised weight, and the numbers that it stands for."""
    codes, scales = quantize(normal(seed, num_outputs, num_inputs, device=device), kind)
    return quantized(codes.float() * scales[:, None], kind), codes.double() * scales.double()[:, None]


def on(device, weight):
    tensors = ("values", "scales", "minima", "order")
    moved = {name: getattr(weight, name) for name in tensors if getattr(weight, name) is not None}
    return replace(weight, **{name: tensor.to(device) for name, tensor in moved.items()})


def drawn_codes(seed, form, num_outputs, num_inputs, group, *, has_minima=False, has_order=False):
    """A weight as a checkpoint may have it."""
    draw = torch.Generator().manual_seed(seed)
    shape, groups = (num_outputs, num_inputs), -(-num_inputs // group)
    if form is CodeForm.FP8:
        codes = (torch.randn(shape, generator=draw) * 30).to(torch.float8_e4m3fn)
    else:
        low, high = (0, 16) if CODE_DTYPES[form] is torch.uint8 else (-128, 128)
        codes = torch.randint(low, high, shape, generator=draw).to(CODE_DTYPES[form])
    scales = torch.rand(num_outputs, groups, generator=draw) / 50
    minima = -torch.rand(num_outputs, groups, generator=draw) / 10 if has_minima else None
    group_of = None
    if has_order:
        group_of = (torch.arange(num_inputs) // group)[torch.randperm(num_inputs, generator=draw)].to(torch.int32)
    table = drawn_table(draw) if form is CodeForm.TABLE4 else None
    return CodedWeight(form, codes, scales, group, minima, group_of, table=table)


def drawn_table(draw):
    """What codes of 4 bits may stand for."""
    return tuple(torch.randint(-128, 128, (16,), generator=draw).tolist())


def rounded(x):
    """As ``float8_linear`` rounds, float64."""
    blocks = torch.nn.functional.pad(x.cpu().float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    return kv_codes.decode(*kv_codes.encode(blocks)).flatten(1)[:, : x.shape[1]].double()


def check_float8(found, expected, dtype):
    tolerance = ON_A_DEVICE if found.is_cuda else {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(found.cpu(), expected.to(dtype), **tolerance)
