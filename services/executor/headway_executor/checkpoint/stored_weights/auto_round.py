"""Checkpoints of AutoRound (Cheng et al. 2023, arXiv 2309.05516), which has the tensors of GPTQ or AWQ.

Owns: its description. Must not know: tensors, files, kernels.

``packing_format`` names the layout; ``extra_config`` changes fields for some weights, by name or by pattern.
"""

from collections.abc import Callable, Mapping

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.name_patterns import name_patterns
from headway_executor.checkpoint.stored_weights.awq import awq_of
from headway_executor.checkpoint.stored_weights.gptq import gptq_of
from headway_executor.checkpoint.stored_weights.scheme import SchemesByName, WeightScheme

_LAYOUTS: Mapping[str, tuple[Callable[[ConfigFields], WeightScheme], str]] = {
    "auto_round": (gptq_of, "gptq_v2"),
    "auto_round:auto_awq": (awq_of, "gemm"),
    "auto_round:auto_gptq": (gptq_of, "gptq"),
    "auto_round:gptqmodel": (gptq_of, "gptq_v2"),
}
"""By ``packing_format``: whose tensors, and the name of their layout there."""
_MOST_BITS = 8
"""Weights with more are not quantised."""


def auto_round_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    usual = _one_of(fields)
    some = fields.section("extra_config")
    if some is None:
        return usual
    schemes: dict[str, WeightScheme | None] = {}
    for key in some.values:
        own = some.section(key)
        changed = {} if own is None else own.values
        is_wide = own is not None and own.integer("bits", 1) > _MOST_BITS
        schemes[key] = None if is_wide else _one_of(ConfigFields(f"{some.source}: {key}", {**fields.values, **changed}))
    changing = [key for key in schemes if some.values[key]]
    patterns = name_patterns(fields, "extra_config", [f".*?(?:{key})" for key in changing])

    def chosen(base: str) -> WeightScheme | None:
        """A name goes before the first pattern that is in it and changes something."""
        if base in schemes:
            return schemes[base]
        return next(
            (schemes[key] for key, pattern in zip(changing, patterns, strict=True) if pattern.match(base)), usual
        )

    return SchemesByName(usual, chosen)


def _one_of(fields: ConfigFields) -> WeightScheme:
    layout = fields.values.get("packing_format")
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise fields.refuse("packing_format", ", ".join(_LAYOUTS))
    if fields.values.get("data_type", "int") != "int":
        raise fields.refuse("data_type", "int")
    if fields.values.get("act_bits") not in (None, 16, 32):
        raise fields.refuse("act_bits", "16")
    for field in ("rotation_config", "transform_config"):
        if fields.values.get(field):
            raise fields.refuse(field, "none")
    read, name = _LAYOUTS[layout]
    kept = {field: fields.values.get(field) for field in ("bits", "group_size")}
    return read(ConfigFields(fields.source, {**kept, "format": name}))
