"""Device errors: too little memory, a lost device, or neither.

Owns: how torch, Triton and CuPy report them. Must not know: rows.
"""

import contextlib
from collections.abc import Iterator

import torch

from headway_executor.backend import DeviceLostError, StepBatch, StepOutOfMemoryError
from headway_proto.wording import one_line

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_SIGNS_OF_CUDA = ("CUDA error", "Triton Error [CUDA]", "cudaError", "CUDA_ERROR")
_HARMLESS = ("out of resource", "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE")
"""Errors of one call, after which the device goes on."""


@contextlib.contextmanager
def translating(batch: StepBatch | None = None) -> Iterator[None]:
    """Translate the errors of a step, or of moves."""
    try:
        yield
    except Exception as error:
        raised = translated(error, 0 if batch is None else int(batch.num_scheduled_tokens.sum()))
        if raised is error:
            raise
        raise raised from error


def translated(error: Exception, num_tokens: int = 0) -> Exception:
    """Return the error to raise instead of ``error``, or ``error`` itself."""
    if isinstance(error, StepOutOfMemoryError | DeviceLostError):
        return error
    text = one_line(error)
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    ):
        return StepOutOfMemoryError(num_tokens, text) if num_tokens else error
    is_lost = isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _SIGNS_OF_CUDA)
    if is_lost and not any(sign in text for sign in (*_HARMLESS, *_OUT_OF_MEMORY)):
        return DeviceLostError(text)
    return error
