"""Fixtures for tests in several folders."""

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Before anything imports a Triton kernel: without a device, they are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def one_torch_thread():
    """Tiny products gain nothing from a second thread, and torch's threads spin beside those of others."""
    import torch  # here, so that the tests of the scheduler start without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_device():
    """Where Triton kernels run: a CUDA device, or the CPU under Triton's interpreter."""
    import torch

    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
