"""Fixtures for tests in several folders."""

import os
import sys
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Before anything imports a Triton kernel: without a device, they are interpreted. The check of a device says 0.
    os.environ.setdefault("TRITON_INTERPRET", "1")


_SETTINGS_OF_PLUGINS = {"asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"), "timeout": ("timeout",)}


def pytest_addoption(parser, pluginmanager):
    """A host without these plugins knows their settings all the same, and runs the tests that need no plugin."""
    for plugin, names in _SETTINGS_OF_PLUGINS.items():
        if not pluginmanager.hasplugin(plugin):
            for name in names:
                parser.addini(name, f"of pytest-{plugin}, which is not installed")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """Tiny products gain nothing from a second thread, and torch's threads wait for each other while others run.

    For each module anew: a backend that was opened with another number has set it.
    """
    if "torch" in sys.modules:  # tests of the scheduler start without it
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_device():
    """Where Triton kernels run: a CUDA device, or the CPU under Triton's interpreter."""
    import torch

    return torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


@pytest.fixture(scope="session")
def triton_interpreter():
    """Triton's interpreter, where there is one, rounds as a device does, and takes less time.

    It cuts float32 off to bfloat16, slowly, where a device rounds to nearest; and whenever a kernel calls a function it
    patches ``triton.language`` again, which it did when the kernel began. Both are inside of Triton: where they are gone,
    tests that compare bfloat16 will say so.
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

    def called(function, *arguments, **named):
        if tl.core.is_builtin(tl.core.load):  # for functions of Triton's own library, which know it by this name
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        yield
