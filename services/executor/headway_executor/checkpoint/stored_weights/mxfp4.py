"""MXFP4 checkpoints (Rouhani et al. 2023, arXiv 2310.10537), as gpt-oss is published: the experts of a layer in one stack.

Owns: their tensors. Must not know: files, kernels.

A weight is a float of 4 bits (E2M1) times a power of two that 32 inputs share. Two neighbouring inputs are one byte, the
first in the low half. A scale is the power's exponent plus 127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.stored_weights.scheme import StoredTensor, StoredTensors
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_BLOCK = 32
_BYTES = ("U8",)
_LOW_4 = 15
_NO_NUMBER = 255
_ONE = 127
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of E2M1 stand for."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """See ``WeightScheme``. Which weights are stored so, the tensors say."""

    name: str = "mxfp4"
    unread: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}_blocks") is not None

    def tensors(self, base: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        outputs, inputs = shape
        if inputs % _BLOCK:
            raise ModelFilesError(f"{base}: a width of {inputs} is not allowed; allowed: multiples of {_BLOCK}")
        groups = inputs // _BLOCK
        return {
            f"{base}_blocks": StoredTensor(_BYTES, ((outputs, groups, _BLOCK // 2),)),
            f"{base}_scales": StoredTensor(_BYTES, ((outputs, groups),)),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        blocks, exponents = stored.read(f"{base}_blocks"), stored.read(f"{base}_scales")
        return of_fp4(torch.stack([blocks & _LOW_4, blocks >> 4], dim=-1).flatten(1), exponents, f"{base}_scales")


def of_fp4(numbers: Tensor, exponents: Tensor, name: str) -> CodedWeight:
    """Of floats of 4 bits, uint8, ``[outputs, inputs]``, and the scales of 32 of them.

    Raises:
        ModelFilesError: a scale is not a number; ``name`` is of the scales.
    """
    if bool((exponents == _NO_NUMBER).any()):
        raise ModelFilesError(f"{name}: a scale is not a number; allowed: 0 to {_NO_NUMBER - 1}")
    halves = torch.ldexp(torch.ones(exponents.shape), exponents.int() - (_ONE + 1))
    return CodedWeight(CodeForm.TABLE4, numbers, halves, _BLOCK, table=_TWICE)
