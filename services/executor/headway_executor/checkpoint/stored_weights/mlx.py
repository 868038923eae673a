"""Checkpoints of MLX (``mlx_lm.convert``): integers of 2 to 8 bits, each group with a scale and a minimum.

Owns: their tensors. Must not know: files, kernels.

Embeddings and heads are quantised as other weights are. The description names weights that differ, with fields of their own,
or false for those that are not quantised.
"""

from dataclasses import dataclass

import torch

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    SchemesByName,
    StoredTensor,
    StoredTensors,
    WeightScheme,
    groups_of,
    unpacked,
    with_minima,
    words_of,
)
from headway_kernels.cpu.coded_weight import CodedWeight

_WORDS = ("U32",)
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Mlx:
    """See ``WeightScheme``."""

    bits: int
    group: int
    name: str = "mlx"
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.weight") in _WORDS

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        outputs, inputs = shape
        of_groups = StoredTensor(FLOATS, ((outputs, groups_of(inputs, self.group)),))
        return {
            f"{base}.weight": StoredTensor(_WORDS, ((outputs, words_of(base, inputs, self.bits)),)),
            f"{base}.scales": of_groups,
            f"{base}.biases": of_groups,
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        codes = unpacked(stored.read(f"{base}.weight").view(torch.int32), self.bits, 1)
        scales, minima = stored.read(f"{base}.scales").float(), stored.read(f"{base}.biases").float()
        return with_minima(codes, scales, minima, bits=self.bits, group=self.group)


def mlx_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization`` describes. Raises ``ModelFilesError``: it is another."""
    usual = _one_of(fields)
    own = {base: fields.section(base) for base, value in fields.values.items() if isinstance(value, dict)}
    schemes: dict[str, WeightScheme | None] = {base: _one_of(some) for base, some in own.items() if some is not None}
    schemes |= {base: None for base, value in fields.values.items() if value is False}
    return SchemesByName(usual, lambda base: schemes.get(base, usual)) if schemes else usual


def _one_of(fields: ConfigFields) -> Mlx:
    if fields.values.get("mode", "affine") != "affine":
        raise fields.refuse("mode", "affine")
    for field, allowed in (("bits", _BITS), ("group_size", _GROUPS)):
        if fields.values.get(field) not in allowed:
            raise fields.refuse(field, ", ".join(map(str, allowed)))
    return Mlx(fields.integer("bits"), fields.integer("group_size"))
