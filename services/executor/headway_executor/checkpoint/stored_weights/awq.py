"""AWQ checkpoints (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ writes them for its ``gemm`` kernels.

Owns: their tensors. Must not know: files, kernels.

Codes and zeros of eight neighbouring outputs are one word, in an order of its own.
"""

from dataclasses import dataclass

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    WORDS,
    StoredTensor,
    StoredTensors,
    check_group_size,
    groups_of,
    of_integers,
    unpacked,
    words_of,
)
from headway_kernels.cpu.coded_weight import CodedWeight

_BITS = 4
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, of a word's i-th code."""


@dataclass(frozen=True, slots=True)
class Awq:
    """See ``WeightScheme``. ``group`` None: one group of all inputs."""

    group: int | None
    name: str = "awq"
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.qweight") is not None

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        outputs, inputs = shape
        groups = groups_of(inputs, self.group or inputs)
        return {
            f"{base}.qweight": StoredTensor(WORDS, ((inputs, words_of(base, outputs, _BITS)),)),
            f"{base}.qzeros": StoredTensor(WORDS, ((groups, words_of(base, outputs, _BITS)),)),
            f"{base}.scales": StoredTensor(FLOATS, ((groups, outputs),)),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        codes = unpacked(stored.read(f"{base}.qweight"), _BITS, 1, _ORDER).t()
        zeros = unpacked(stored.read(f"{base}.qzeros"), _BITS, 1, _ORDER).t()
        scales = stored.read(f"{base}.scales").t()
        return of_integers(codes, zeros, scales, bits=_BITS, group=self.group or codes.shape[1])


def awq_of(fields: ConfigFields) -> Awq:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    if fields.values.get("bits", fields.values.get("w_bit")) != _BITS:
        raise fields.refuse("bits", "4")
    for field in ("version", "checkpoint_format", "format"):
        if str(fields.values.get(field) or "gemm").lower() != "gemm":
            raise fields.refuse(field, "gemm")
    if not fields.flag("zero_point", default=True):
        raise fields.refuse("zero_point", "true")
    size = "q_group_size" if "q_group_size" in fields.values else "group_size"
    return Awq(group=check_group_size(fields, size))
