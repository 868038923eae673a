"""Checkpoints of compressed-tensors: integers of 2 to 8 bits, and floats of 4 and 8 bits.

Owns: their description, the tensors of integers. Must not know: files, kernels.

Integers are symmetric around the middle code or have zeros; the packed ones and their zeros are stored with half of the
range added. Whoever rounds activations finds their scales: those that are stored are not read. Which weights are left as they
are (``ignore``), the tensors say; with several groups, ``targets`` say which group a weight has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.name_patterns import name_patterns
from headway_executor.checkpoint.stored_weights.float4 import Float4
from headway_executor.checkpoint.stored_weights.float8 import Float8, block_of, scale_shapes, spread
from headway_executor.checkpoint.stored_weights.scheme import (
    BYTES,
    FLOATS,
    WORDS,
    SchemesByName,
    SchemesByTensors,
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

_NAME = "compressed-tensors"
_FLOATS_OF_4_BITS = {
    "mxfp4-pack-quantized": Float4(_NAME, ".weight_packed", ".weight_scale"),
    "nvfp4-pack-quantized": Float4(
        _NAME, ".weight_packed", ".weight_scale", group=16, total=".weight_global_scale", divides=True
    ),
}
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *_FLOATS_OF_4_BITS,
)
_MIXED = "mixed-precision"
"""Each group has a format of its own."""
_PATTERN = "re:"
_ALL = "Linear"
_STRATEGIES = ("tensor", "channel", "group", "block")
_IN_GROUPS_OF_THEIR_OWN = (True, "group", "dynamic")
"""Values of ``actorder`` with which a tensor names each input's group."""
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Integers; see ``WeightScheme``. ``group`` None: one group of all inputs. ``block``: of outputs and inputs, or None."""

    bits: int
    is_packed: bool
    has_zeros: bool
    group: int | None
    block: tuple[int, int] | None
    rounds_inputs: bool = False
    name: str = _NAME
    has_order: bool = False
    zeros: tuple[str, ...] = ()

    def holds(self, base: str, stored: StoredTensors) -> bool:
        """See ``WeightScheme``."""
        if self.is_packed:
            return stored.dtype(f"{base}.weight_packed") is not None
        return stored.dtype(f"{base}.weight") in BYTES

    def tensors(self, base: str, shape: tuple[int, int], stored: StoredTensors) -> dict[str, StoredTensor]:
        """See ``WeightScheme``."""
        del stored
        (outputs, inputs), scales = shape, self._scale_shapes(shape)
        found = {f"{base}.weight_scale": StoredTensor(FLOATS, scales)}
        if not self.is_packed:
            found[f"{base}.weight"] = StoredTensor(BYTES, (shape,))
            if self.has_zeros:
                found[f"{base}.weight_zero_point"] = StoredTensor(BYTES, scales)
            return found
        found[f"{base}.weight_packed"] = StoredTensor(WORDS, ((outputs, words_of(base, inputs, self.bits)),))
        if self.has_zeros:
            groups = groups_of(inputs, self.group or inputs)
            found[f"{base}.weight_zero_point"] = StoredTensor(
                WORDS, ((groups_of(outputs * self.bits, _WORD_BITS), groups),)
            )
        found[f"{base}.weight_g_idx"] = StoredTensor(WORDS, ((inputs,),), is_optional=not self.has_order)
        return found

    def read(self, base: str, stored: StoredTensors) -> CodedWeight:
        """See ``WeightScheme``."""
        scales = stored.read(f"{base}.weight_scale")
        codes = self._codes(base, stored)
        outputs, inputs = codes.shape
        group = (self.block[1] if self.block else self.group) or inputs
        scales = scales if self.group else spread(scales, outputs, self.block)
        group_of = None
        if stored.dtype(f"{base}.weight_g_idx") is not None:
            group_of = grouping(stored.read(f"{base}.weight_g_idx"), group, scales.shape[1], base)
        zeros = self._zeros(base, outputs, stored)
        weight = of_integers(codes, zeros, scales, bits=self.bits, group=group, group_of=group_of)
        return replace(weight, rounds_inputs=self.rounds_inputs)

    def _codes(self, base: str, stored: StoredTensors) -> Tensor:
        """Unsigned."""
        if not self.is_packed:
            return self._unsigned(stored.read(f"{base}.weight"))
        return unpacked(stored.read(f"{base}.weight_packed"), self.bits, 1)

    def _zeros(self, base: str, outputs: int, stored: StoredTensors) -> Tensor | None:
        """Unsigned, ``[outputs, groups]``."""
        if not self.has_zeros:
            return None
        found = stored.read(f"{base}.weight_zero_point")
        if self.is_packed:
            return unpacked(found, self.bits, 0)[:outputs]
        zeros = self._unsigned(found).int()
        return zeros if self.group else spread(zeros, outputs, self.block)

    def _unsigned(self, integers: Tensor) -> Tensor:
        """Of signed ones of ``bits`` bits, each in a byte."""
        return (integers.view(torch.uint8) + (1 << (self.bits - 1))) & ((1 << self.bits) - 1)

    def _scale_shapes(self, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        if self.group:
            return ((shape[0], groups_of(shape[1], self.group)),)
        return scale_shapes(shape, self.block)


def compressed_tensors_of(fields: ConfigFields) -> WeightScheme:
    """The format that a ``quantization_config`` describes. Raises ``ModelFilesError``: it is another."""
    if not fields.values.get("config_groups") and fields.values.get("kv_cache_scheme"):
        return SchemesByTensors(_NAME)
    if fields.values.get("format") not in (*_FORMATS, _MIXED):
        raise fields.refuse("format", ", ".join((*_FORMATS, _MIXED)))
    sparsity = fields.section("sparsity_config")
    if sparsity is not None and sparsity.values.get("format", "dense") != "dense":
        raise sparsity.refuse("format", "dense")
    if fields.values.get("transform_config"):
        raise fields.refuse("transform_config", "none")
    groups = fields.section("config_groups")
    if groups is None:
        raise fields.refuse("config_groups", "an object of groups")
    by_target: dict[str, WeightScheme] = {}
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise groups.refuse(name, "an object with weights")
        by_target |= dict.fromkeys(_targets_of(group), _of_group(group, fields.values["format"]))
    usual = next(iter(by_target.values()))
    return usual if len(groups.values) == 1 else SchemesByName(usual, _choice(fields, by_target))


def _choice(fields: ConfigFields, by_target: Mapping[str, WeightScheme]) -> Callable[[str], WeightScheme | None]:
    """The group of a name: by the name, else by the first pattern in the order of their letters, else that of all."""
    regular = sorted(target for target in by_target if target.startswith(_PATTERN))
    patterns = name_patterns(fields, "config_groups", [target.removeprefix(_PATTERN) for target in regular])
    of_all = by_target.get(_ALL)

    def chosen(base: str) -> WeightScheme | None:
        if base in by_target:
            return by_target[base]
        found = (by_target[target] for target, pattern in zip(regular, patterns, strict=True) if pattern.match(base))
        return next(found, of_all)

    return chosen


def _targets_of(group: ConfigFields) -> list[str]:
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise group.refuse("targets", "a list of names")
    return targets


def _of_group(group: ConfigFields, usual_format: str) -> WeightScheme:
    weights = group.section("weights")
    if weights is None:
        raise group.refuse("weights", "an object")
    if group.values.get("output_activations"):
        raise group.refuse("output_activations", "none")
    written = group.values.get("format") or usual_format
    if written not in _FORMATS:
        raise group.refuse("format", ", ".join(_FORMATS))
    if written in _FLOATS_OF_4_BITS:
        return _of_4_bits(weights, _FLOATS_OF_4_BITS[written])
    scheme = _of_weights(weights, is_packed=written == "pack-quantized")
    is_float = isinstance(scheme, Float8)
    return replace(scheme, rounds_inputs=_rounds(group.section("input_activations"), is_float=is_float))


def _of_4_bits(weights: ConfigFields, layout: Float4) -> Float4:
    for field, value in (("type", "float"), ("num_bits", 4), ("group_size", layout.group)):
        if weights.values.get(field) != value:
            raise weights.refuse(field, str(value))
    if not weights.flag("symmetric", default=True):
        raise weights.refuse("symmetric", "true with floats")
    return layout


def _rounds(inputs: ConfigFields | None, *, is_float: bool) -> bool:
    """Whether inputs are rounded to floats of 8 bits, or to integers as the CPU kernels round them.

    Other roundings are not read, and not made. Floats in blocks are nearer to the inputs than with any scale that is asked for.
    """
    asked: dict[str, object] = {"num_bits": 8, "type": "float"}
    if not is_float:
        asked = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    return inputs is not None and all(inputs.values.get(name) == value for name, value in asked.items())


def _of_weights(weights: ConfigFields, *, is_packed: bool) -> CompressedTensors | Float8:
    kind = weights.values.get("type", "int")
    if kind not in ("int", "float") or (is_packed and kind == "float"):
        raise weights.refuse("type", "int" if is_packed else "int or float")
    allowed = (8,) if kind == "float" else tuple(range(2, 9))
    bits = weights.integer("num_bits", 8)
    if bits not in allowed:
        raise weights.refuse("num_bits", ", ".join(map(str, allowed)))
    if weights.values.get("dynamic"):
        raise weights.refuse("dynamic", "false")
    size = check_group_size(weights, "group_size")
    strategy = weights.values.get("strategy") or ("group" if size else "channel")
    if strategy not in _STRATEGIES or (strategy == "block" and is_packed):
        raise weights.refuse("strategy", "tensor, channel or group" if is_packed else ", ".join(_STRATEGIES))
    if strategy == "group" and not size:
        raise weights.refuse("group_size", "a positive multiple of 16")
    block = block_of(weights, "block_structure")
    if strategy == "block" and block is None:
        raise weights.refuse("block_structure", "two positive multiples of 16")
    symmetric = weights.flag("symmetric", default=True)
    if kind == "float" and not symmetric:
        raise weights.refuse("symmetric", "true with floats")
    if is_packed and not symmetric and strategy == "tensor":
        raise weights.refuse("strategy", "channel or group with zero points")
    if kind == "float":
        in_group = (1, size) if size else None
        return Float8(_NAME, {"block": block, "group": in_group}.get(strategy), rounds_inputs=False)
    return CompressedTensors(
        bits=bits,
        is_packed=is_packed,
        has_zeros=not symmetric,
        group=size if strategy == "group" else None,
        block=block if strategy == "block" else None,
        has_order=weights.values.get("actorder") in _IN_GROUPS_OF_THEIR_OWN,
    )
