"""The trials of the toolkits: Triton's runs under its interpreter too, CuPy's needs a device."""

import pytest
import torch

from headway_kernels.gpu import trial


def test_triton_is_tried(kernel_device):
    trial.try_triton(kernel_device)


def test_a_kernel_that_computes_something_else_is_noticed(kernel_device, monkeypatch):
    class NoKernel:
        def __getitem__(self, grid):
            return lambda *arguments: None

    monkeypatch.setattr(trial, "_add_one", NoKernel())
    with pytest.raises(trial.TrialFailed):
        trial.try_triton(kernel_device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cupy_is_tried():
    trial.try_cupy(torch.device("cuda", 0))
