"""Errors of a device, as torch, Triton and CuPy word them, and what the executor makes of them."""

import pytest
import torch

from headway_executor.backend import DeviceLostError, StepOutOfMemoryError
from headway_executor.host.device_errors import translated, translating


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported asynchronously"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        Exception("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        Exception("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"),
    ],
)
def test_an_error_that_stays_means_that_the_device_is_lost(error: Exception) -> None:
    found = translated(error, 7)
    assert isinstance(found, DeviceLostError)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    ],
)
def test_too_little_memory_asks_for_smaller_steps(error: Exception) -> None:
    found = translated(error, 7)
    assert isinstance(found, StepOutOfMemoryError)
    assert found.num_tokens == 7
    assert translated(error) is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        RuntimeError("Triton Error [CUDA]: out of resource: shared memory"),
        ValueError("nothing"),
    ],
)
def test_what_says_nothing_about_the_device_stays_what_it_is(error: Exception) -> None:
    assert translated(error, 7) is error


def test_what_is_not_about_the_device_passes_through_unchanged() -> None:
    error = ValueError("nothing")
    with pytest.raises(ValueError, match="nothing") as caught, translating():
        raise error
    assert caught.value is error
    assert error.__cause__ is None
    with pytest.raises(DeviceLostError) as lost, translating():
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    assert isinstance(lost.value.__cause__, torch.AcceleratorError)
