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


@pytest.fixture(scope="session")
def nearest_bfloat16():
    """Triton's interpreter cuts float32 off to bfloat16, where a device rounds to nearest; and it takes its time.

    An internal function of Triton's: where it is gone, tests that compare bfloat16 will say so.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def converted(values, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16)
            return rounded.numpy()
        if (source, target) == (tl.bfloat16, tl.float32):
            return (values.astype("uint32") << 16).reshape(values.shape)
        return original(values, source, target, rounding_mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        yield
