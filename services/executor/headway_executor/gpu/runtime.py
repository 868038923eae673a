"""The difference between a CUDA device and Triton's interpreter on a CPU.

Owns: pinned memory, the steps' stream. Must not know: models, rows.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.setting_checks import check_interpreted


class Mark(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Sleep until the device has passed this point."""
        ...

    def microseconds_since(self, earlier: "Mark") -> int:
        """Time on the device's clock."""
        ...


class Runtime(Protocol):
    """One device as the backend uses it."""

    device: torch.device
    is_cuda: bool

    def on_stream(self) -> AbstractContextManager[None]:
        """Launch everything inside on the steps' stream."""
        ...

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for transfers."""
        ...

    def mark(self) -> Mark:
        """A mark behind all launches so far."""
        ...


class CudaRuntime:
    """A CUDA device with its own stream."""

    is_cuda = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """See ``Runtime``."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """See ``Runtime``."""
        return _CudaMark(self.stream)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: a waiting thread sleeps and leaves its core to the launching thread.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _CudaMark)
        return int(earlier.event.elapsed_time(self.event) * 1000)


class InterpretedRuntime:
    """A CPU on which Triton interprets kernels; a launch is synchronous."""

    device = torch.device("cpu")
    is_cuda = False

    def on_stream(self) -> AbstractContextManager[None]:
        """See ``Runtime``."""
        return contextlib.nullcontext()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``Runtime``."""
        return torch.empty(shape, dtype=dtype)

    def mark(self) -> Mark:
        """See ``Runtime``."""
        return _HostMark()


class _HostMark:
    def __init__(self) -> None:
        self.nanoseconds = time.perf_counter_ns()

    def wait(self) -> None: ...

    def microseconds_since(self, earlier: Mark) -> int:
        assert isinstance(earlier, _HostMark)
        return (self.nanoseconds - earlier.nanoseconds) // 1000


def runtime_for(device: torch.device) -> Runtime:
    """The runtime of ``device``.

    Raises:
        BackendConfigError: a CPU without Triton's interpreter.
    """
    if device.type == "cuda":
        return CudaRuntime(device)
    check_interpreted(os.environ)
    return InterpretedRuntime()


def fetched(runtime: Runtime, values: Tensor) -> Tensor:
    """Copy to main memory; valid once the device has passed it."""
    return runtime.host_tensor(tuple(values.shape), values.dtype).copy_(values, non_blocking=True)


def sent(runtime: Runtime, values: NDArray[Any]) -> Tensor:
    """Copy to the device, in order with launches. Pinned memory lives until torch has read it."""
    here = torch.from_numpy(values)
    staged = runtime.host_tensor(tuple(here.shape), here.dtype).copy_(here)
    return staged.to(runtime.device, non_blocking=True)


class UploadRing:
    """Slots of ``size`` int32 numbers in host memory, used in turn."""

    def __init__(self, runtime: Runtime, size: int, *, num_slots: int = 8) -> None:
        self._runtime = runtime
        self._slots = [runtime.host_tensor((size,), torch.int32) for _ in range(num_slots)]
        self._arrays: list[NDArray[np.int32]] = [slot.numpy() for slot in self._slots]
        self._sent: list[Mark | None] = [None] * num_slots
        self._next = 0
        self.size = size

    def next_slot(self) -> NDArray[np.int32]:
        """The memory to fill now: int32, shape ``[size]``."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.wait()
        return self._arrays[self._next]

    def send(self, target: Tensor, count: int) -> None:
        """Copy ``count`` numbers to ``target`` on the current stream."""
        target[:count].copy_(self._slots[self._next][:count], non_blocking=True)
        self._sent[self._next] = self._runtime.mark()
        self._next = (self._next + 1) % len(self._slots)
