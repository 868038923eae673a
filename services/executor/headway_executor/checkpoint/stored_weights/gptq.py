"""GPTQ checkpoints (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

Owns: their tensors. Must not know: files, kernels.

``qweight`` holds the codes of an output along the inputs, ``qzeros`` its zeros along the outputs. The first format stores
each zero less one. With act order, ``g_idx`` names each input's group.
"""

from dataclasses import dataclass

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    WORDS,
    StoredTensor,
    StoredTensors,
    check_group_size,
    grouping,
    groups_of,
    of_integers,
    unpacked,
    words_of,
)
from headway_kernels.cpu.coded_weight import CodedWeight

_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What was taken from each stored zero."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """See ``WeightScheme``. ``group`` None: one group of all inputs; ``less``: see ``_FORMATS``."""

    bits: int
    group: int | None
    less: int
    name: str = "gptq"
    unread: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.qweight") is not None

    def tensors(self, base: str, shape: tuple[int, int]) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        outputs, inputs = shape
        groups = groups_of(inputs, self.group or inputs)
        return {
            f"{base}.qweight": StoredTensor(WORDS, ((words_of(base, inputs, self.bits), outputs),)),
            f"{base}.qzeros": StoredTensor(WORDS, ((groups, words_of(base, outputs, self.bits)),)),
            f"{base}.scales": StoredTensor(FLOATS, ((groups, outputs),)),
            f"{base}.g_idx": StoredTensor(WORDS, ((inputs,),), is_optional=True),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        codes = unpacked(stored.read(f"{base}.qweight"), self.bits, 0).t()
        group = self.group or codes.shape[1]
        zeros = unpacked(stored.read(f"{base}.qzeros"), self.bits, 1).t().int() + self.less
        scales = stored.read(f"{base}.scales").t()
        group_of = None
        if stored.dtype(f"{base}.g_idx") is not None:
            group_of = grouping(stored.read(f"{base}.g_idx"), group, scales.shape[1], base)
        return of_integers(codes, zeros, scales, bits=self.bits, group=group, group_of=group_of)


def gptq_of(fields: ConfigFields) -> Gptq:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.refuse("bits", "4 or 8")
    written = fields.values.get("checkpoint_format") or "gptq"
    if not isinstance(written, str) or written not in _FORMATS:
        raise fields.refuse("checkpoint_format", " or ".join(_FORMATS))
    if fields.values.get("dynamic"):
        raise fields.refuse("dynamic", "none: all weights have the same bits")
    if fields.values.get("pack_dtype") not in (None, "int32"):
        raise fields.refuse("pack_dtype", "int32")
    return Gptq(bits=bits, group=check_group_size(fields, "group_size"), less=_FORMATS[written])
