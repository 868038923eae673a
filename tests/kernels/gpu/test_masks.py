"""Masks on the device: what they exclude is minus infinity, and nothing else is touched."""

import numpy as np
import pytest
import torch

from headway_kernels.gpu.masks import exclude


@pytest.mark.parametrize("vocab_size", [7, 32, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_mask_excludes_and_nothing_else(kernel_device, vocab_size, dtype):
    draw = np.random.default_rng(vocab_size)
    allowed = draw.random((3, vocab_size)) < 0.3
    packed = np.packbits(allowed, axis=1, bitorder="little")
    words = np.zeros((3, -(-vocab_size // 32) * 4), dtype=np.uint8)
    words[:, : packed.shape[1]] = packed
    words[:, packed.shape[1] :] = draw.integers(0, 256, words[:, packed.shape[1] :].shape)  # of no tokens
    before = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = [4, 0, 3]
    expected = before.clone()
    for number, place in enumerate(places):
        expected[place][torch.from_numpy(~allowed[number])] = -torch.inf
    logits = before.clone().to(kernel_device)
    exclude(
        logits, torch.tensor(places, device=kernel_device), torch.from_numpy(words.view(np.int32)).to(kernel_device)
    )
    assert torch.equal(logits.cpu(), expected)


def test_no_masks_are_no_launch(kernel_device):
    logits = torch.ones(2, 8, device=kernel_device)
    exclude(
        logits,
        torch.zeros(0, dtype=torch.int64, device=kernel_device),
        torch.zeros((0, 1), dtype=torch.int32, device=kernel_device),
    )
    assert torch.equal(logits.cpu(), torch.ones(2, 8))
