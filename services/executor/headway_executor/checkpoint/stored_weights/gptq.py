"""GPTQ checkpoints (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

Owns: their tensors. Must not know: files, kernels.

``qweight`` holds the codes of an output along the inputs, ``qzeros`` its zeros along the outputs. The first format takes one
from each zero, in whole words: a zero of 0 borrows from its neighbour, as in GPTQModel. (Not with 3 bits, which share words.) With act order, ``g_idx`` names
each input's group. AutoGPTQ's early files have biases of zeros, which the model does not have. GPTQModel has rules for some
weights (``dynamic``), which change fields of the description or leave the weights as they are.
"""

from dataclasses import dataclass

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.name_patterns import name_patterns
from headway_executor.checkpoint.stored_weights.scheme import (
    FLOATS,
    WORDS,
    SchemesByName,
    StoredTensor,
    StoredTensors,
    WeightScheme,
    check_group_size,
    grouping,
    groups_of,
    of_integers,
    unpacked,
    words_of,
)
from headway_kernels.cpu.coded_weight import CodedWeight
from headway_proto.wording import shown

_FORMATS = {"gptq": True, "gptq_v2": False}
"""Whether one was taken from each zero."""
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Gptq:
    """See ``WeightScheme``. ``group`` None: one group of all inputs; ``is_less``: see ``_FORMATS``."""

    bits: int
    group: int | None
    is_less: bool
    has_order: bool = False
    name: str = "gptq"
    zeros: tuple[str, ...] = (".bias",)

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        return stored.dtype(f"{base}.qweight") is not None

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        outputs, inputs = shape
        groups = groups_of(inputs, self.group or inputs)
        return {
            f"{base}.qweight": StoredTensor(WORDS, ((words_of(base, inputs, self.bits), outputs),)),
            f"{base}.qzeros": StoredTensor(WORDS, ((groups, words_of(base, outputs, self.bits)),)),
            f"{base}.scales": StoredTensor(FLOATS, ((groups, outputs),)),
            f"{base}.g_idx": StoredTensor(WORDS, ((inputs,),), is_optional=not self.has_order),
        }

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        codes = unpacked(stored.read(f"{base}.qweight"), self.bits, 0).t()
        group = self.group or codes.shape[1]
        words = stored.read(f"{base}.qzeros")
        if self.is_less and self.bits in _ONES:
            zeros = unpacked(words + _ONES[self.bits], self.bits, 1).t()
        else:
            zeros = (unpacked(words, self.bits, 1).t() + self.is_less) & ((1 << self.bits) - 1)
        scales = stored.read(f"{base}.scales").t()
        group_of = None
        if stored.dtype(f"{base}.g_idx") is not None:
            group_of = grouping(stored.read(f"{base}.g_idx"), group, scales.shape[1], base)
        return of_integers(codes, zeros, scales, bits=self.bits, group=group, group_of=group_of)


def gptq_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    usual = _one_of(fields)
    rules = fields.section("dynamic")
    if rules is None:
        return usual
    patterns = name_patterns(fields, "dynamic", [rule.removeprefix("-:").removeprefix("+:") for rule in rules.values])
    schemes = [_of_rule(fields, rules, rule) for rule in rules.values]

    def chosen(base: str) -> Gptq | None:
        """Of the first rule whose pattern the name begins with, as in GPTQModel."""
        found = (scheme for pattern, scheme in zip(patterns, schemes, strict=True) if pattern.match(base))
        return next(found, usual)

    return SchemesByName(usual, chosen)


def _of_rule(fields: ConfigFields, rules: ConfigFields, rule: str) -> Gptq | None:
    """None: the weights of the rule are not quantised."""
    changes = rules.section(rule)
    if rule.startswith("-:"):
        return None
    own = {} if changes is None else changes.values
    return _one_of(ConfigFields(f"{rules.source}: {shown(rule)}", {**fields.values, **own}))


def _one_of(fields: ConfigFields) -> Gptq:
    bits = fields.integer("bits")
    if bits not in _BITS:
        raise fields.refuse("bits", ", ".join(map(str, _BITS)))
    field = "checkpoint_format" if fields.values.get("checkpoint_format") else "format"
    written = fields.values.get(field) or "gptq"
    if not isinstance(written, str) or written not in _FORMATS:
        raise fields.refuse(field, " or ".join(_FORMATS))
    if fields.values.get("is_marlin_format"):
        raise fields.refuse("is_marlin_format", "false")
    if fields.values.get("adapter"):
        raise fields.refuse("adapter", "none")
    if fields.values.get("pack_dtype") not in (None, "int32"):
        raise fields.refuse("pack_dtype", "int32")
    return Gptq(
        bits=bits,
        group=check_group_size(fields, "group_size"),
        is_less=_FORMATS[written],
        has_order=fields.flag("desc_act", default=False),
    )
