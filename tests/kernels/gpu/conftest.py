"""Rounding as on a device, where Triton kernels are interpreted."""

import os

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def nearest_bfloat16():
    """Triton's interpreter cuts float32 off to bfloat16, where a device rounds to nearest; and it takes its time.

    An internal function of Triton's: where it is gone, tests that compare bfloat16 will say so.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
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
