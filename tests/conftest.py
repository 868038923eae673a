"""Fixtures for tests in several folders."""

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # Before anything imports a Triton kernel: without a device, they are interpreted. The check of a device says 0.
    os.environ.setdefault("TRITON_INTERPRET", "1")


with contextlib.suppress(ImportError):  # a host with a device may lack it, and runs the tests that need none
    from hypothesis import settings

    # How long an example takes says more of the other processes than of it.
    settings.register_profile("headway", deadline=None)
    settings.load_profile("headway")

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup started this. What tests start would inherit that it is ignored, but does not inherit a handler.
    signal.signal(signal.SIGHUP, lambda *_: None)

_SETTINGS_OF_PLUGINS = {"asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"), "timeout": ("timeout",)}


def pytest_addoption(parser, pluginmanager):
    """A host without these plugins knows their settings all the same, and runs the tests that need no plugin."""
    for plugin, names in _SETTINGS_OF_PLUGINS.items():
        if not pluginmanager.hasplugin(plugin):
            for name in names:
                parser.addini(name, f"of pytest-{plugin}, which is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories():
    """Tests that have an event loop have the gateway's, as far as it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return {"uvloop": uvloop.new_event_loop}


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
    """Triton's interpreter, where there is one, rounds as a device does, and takes less time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


def pytest_collection_finish():
    """What was imported stays until the end: no collection of cycles need look at it again."""
    gc.freeze()
