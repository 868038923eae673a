"""How fast this host moves bytes and multiplies.

Owns: measurements of torch's operators. Must not know: models, backends.

Each figure is the best of several rounds. A copy reads and writes every byte.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from headway_executor.memory.host_memory import free_host_bytes

_MIB = 1 << 20
_COPIED_BYTES = 256 * _MIB
_COPIED_DEVICE_BYTES = 1024 * _MIB
_MOST_SHARE = 0.1
_CPU_GEMM = 1024
_DEVICE_GEMMS = (8192, 4096, 2048)
"""A small product does not reach the rate of a large one, so a share of its rate flatters."""

_LEAST_ROUNDS = 3
_MEASURED_SECONDS = 0.5

Say = Callable[[str], None]

# Its event constructors have no types.
_untyped_cuda: Any = torch.cuda


class HostSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU: a copy, and float32 products."""

    copy_bytes_per_s: float
    float32_flops: float


class DeviceSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A CUDA device; the host's memory is pinned."""

    index: int
    copy_bytes_per_s: float
    from_host_bytes_per_s: float
    to_host_bytes_per_s: float
    bfloat16_flops: float


def measure_host(say: Say) -> HostSpeed:
    """Measure the CPU. Raises ``RuntimeError``: too little memory."""
    say("copying in main memory")
    size = min(_COPIED_BYTES, int(_MOST_SHARE * free_host_bytes()))
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copied = 2 * size / _best_seconds(lambda: target.copy_(source))
    say("multiplying in float32 on the CPU")
    left, right = torch.ones(_CPU_GEMM, _CPU_GEMM), torch.ones(_CPU_GEMM, _CPU_GEMM)
    product = torch.empty(_CPU_GEMM, _CPU_GEMM)
    seconds = _best_seconds(lambda: torch.mm(left, right, out=product))
    return HostSpeed(copy_bytes_per_s=copied, float32_flops=2 * _CPU_GEMM**3 / seconds)


def measure_device(index: int, say: Say) -> DeviceSpeed:
    """Measure a CUDA device. Raises ``RuntimeError``: too little memory, or the device fails."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        return DeviceSpeed(
            index=index,
            copy_bytes_per_s=_device_copy(device, say),
            from_host_bytes_per_s=_link(device, say, to_host=False),
            to_host_bytes_per_s=_link(device, say, to_host=True),
            bfloat16_flops=_device_gemm(device, say),
        )


def _device_copy(device: torch.device, say: Say) -> float:
    say(f"copying on {device}")
    size = min(_COPIED_DEVICE_BYTES, int(_MOST_SHARE * torch.cuda.mem_get_info(device)[0]))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _best_device_seconds(lambda: target.copy_(source))


def _link(device: torch.device, say: Say, *, to_host: bool) -> float:
    say(f"copying {'from' if to_host else 'to'} {device}")
    free = min(free_host_bytes(), torch.cuda.mem_get_info(device)[0])
    size = min(_COPIED_BYTES, int(_MOST_SHARE * free))
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    source, target = (there, here) if to_host else (here, there)
    return size / _best_device_seconds(lambda: target.copy_(source, non_blocking=True))


def _device_gemm(device: torch.device, say: Say) -> float:
    say(f"multiplying in bfloat16 on {device}")
    size = _gemm_size(torch.cuda.mem_get_info(device)[0])
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    return 2.0 * size**3 / _best_device_seconds(lambda: torch.mm(left, right, out=product))


def _gemm_size(free_bytes: int) -> int:
    """The largest size whose three matrices in bfloat16 fit into a share of the free memory."""
    fitting = (size for size in _DEVICE_GEMMS if 3 * 2 * size**2 <= _MOST_SHARE * free_bytes)
    return next(fitting, _DEVICE_GEMMS[-1])


def _best_seconds(run: Callable[[], object]) -> float:
    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return _best(timed)


def _best_device_seconds(run: Callable[[], object]) -> float:
    def timed() -> float:
        start, end = _untyped_cuda.Event(enable_timing=True), _untyped_cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return _best(timed)


def _best(timed: Callable[[], float]) -> float:
    timed()
    until = time.perf_counter() + _MEASURED_SECONDS
    times = [timed() for _ in range(_LEAST_ROUNDS)]
    while time.perf_counter() < until:
        times.append(timed())
    return min(times)
