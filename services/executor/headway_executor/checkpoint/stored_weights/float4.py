"""Floats of 4 bits (E2M1; Rouhani et al. 2023, arXiv 2310.10537), as MXFP4 and NVFP4 checkpoints have them.

Owns: their tensors. Must not know: files, kernels, which format has which layout.

Two neighbouring inputs are one byte, the first in the low half. MXFP4 has a power of two for 32 inputs, NVFP4 a float of
8 bits for 16 and one number for all, which multiplies or divides.
"""

from dataclasses import dataclass

from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    FP8,
    POWERS,
    UNSIGNED_BYTES,
    StoredTensor,
    StoredTensors,
    pairs,
    wide,
)
from headway_kernels.cpu.coded_weight import CodedWeight, CodeForm

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of E2M1 stand for."""


@dataclass(frozen=True, slots=True)
class Float4:
    """See ``WeightScheme``. Which weights are stored so, the tensors say.

    ``codes``, ``scales`` and ``total``: how their names end; ``total`` None: there is none. ``group``: inputs that share a
    scale. ``by_group``: codes have one dimension more, that of their groups.
    """

    name: str
    codes: str
    scales: str
    group: int = 32
    total: str | None = None
    divides: bool = False
    by_group: bool = False
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(base + self.codes) in UNSIGNED_BYTES

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        outputs, inputs = shape
        if inputs % self.group:
            raise ModelFilesError(f"{base}: a width of {inputs} is not allowed; allowed: multiples of {self.group}")
        groups = inputs // self.group
        in_bytes = (outputs, groups, self.group // 2) if self.by_group else (outputs, inputs // 2)
        found = {
            base + self.codes: StoredTensor(UNSIGNED_BYTES, (in_bytes,)),
            base + self.scales: StoredTensor(POWERS if self.total is None else FP8, ((outputs, groups),)),
        }
        return found if self.total is None else found | {base + self.total: StoredTensor(FLOATS, ((), (1,)))}

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        scales = wide(stored.read(base + self.scales))
        if self.total is not None:
            total = stored.read(base + self.total).float()
            scales = scales / total if self.divides else scales * total
        return of_fp4(pairs(stored.read(base + self.codes)).flatten(1), scales)


def of_fp4(numbers: Tensor, scales: Tensor) -> CodedWeight:
    """Of floats of 4 bits, uint8, ``[outputs, inputs]``, and scales, float32, ``[outputs, groups]``."""
    group = numbers.shape[1] // scales.shape[1]
    return CodedWeight(CodeForm.TABLE4, numbers, scales / 2, group, table=_TWICE)


MXFP4 = Float4("mxfp4", "_blocks", "_scales", by_group=True)
"""As gpt-oss is published: the experts of a layer in one stack."""
