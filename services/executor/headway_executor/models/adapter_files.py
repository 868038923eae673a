"""The files of an adapter as PEFT publishes them: adapter_config.json and adapter_model.safetensors.

Owns: reading and checking both. Must not know: rows, how an adapter is computed.

What changes more than ``W x`` to ``W x + s B A x`` is refused by its name, and so is every field of the configuration
that is not known here, unless it is empty. Nothing of a file is executed.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import PICKLE_SUFFIXES, ConfigFields, read_json_object
from headway_executor.checkpoint.name_patterns import name_patterns
from headway_executor.checkpoint.stored_weights.scheme import FLOATS
from headway_executor.checkpoint.weights import open_safetensors
from headway_executor.models.adapter_stacks import Stack, aliases_of, by_matrix, parameters_of, stacks_of
from headway_executor.models.config import ModelConfig
from headway_executor.models.stored_names import module_as_stored
from headway_executor.models.tensor_shapes import expected_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512

_PREFIX = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.weight")
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",  # the tensors say what is adapted
        "fan_in_fan_out",  # PEFT unsets it for linear layers
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
    }
)
_READ = frozenset(
    {"peft_type", "task_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "bias"}
    | {"init_lora_weights", "target_parameters"}
)
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
_SAME_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Ways to begin training that leave the model's weights as they are."""


class LowRankPart(NamedTuple):
    """Of one projection of the checkpoint: ``down`` ``[rank, in]``, ``up`` ``[out, rank]``, scaled; float32."""

    down: Tensor
    up: Tensor


class AdapterFiles(NamedTuple):
    """``parts`` by module, of the layers that were asked for; ``num_outputs`` of every module that an adapter may name.
    ``fingerprint``: 16 hex digits, of all.
    """

    parts: Mapping[str, LowRankPart]
    num_outputs: Mapping[str, int]
    fingerprint: str


def read_adapter_files(directory: Path, config: ModelConfig, layers: range) -> AdapterFiles:
    """Check an adapter of the model, and read what some layers need.

    Raises:
        ModelFilesError: the files are missing, damaged, not supported, or for another model.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"{directory}: no such directory; allowed: one with {CONFIG_FILE} and {WEIGHTS_FILE}")
    fields = read_json_object(directory / CONFIG_FILE)
    ranks = _ranks_of(fields)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
        found = f"; {pickles[0]} is a pickle file, which is never loaded" if pickles else ""
        raise ModelFilesError(f"{directory}: no {WEIGHTS_FILE}{found}")
    targets = _targets_of(config, fields)
    prefixes = tuple(config.names.layer.format(index) for index in layers)
    kinds_of: dict[str, set[str]] = {}
    scales: dict[str, float] = {}
    read: dict[str, dict[str, Tensor]] = {}
    file = open_safetensors(path)
    for name in sorted(file.keys()):
        target = targets.find(name)
        if target is None:
            allowed = ", ".join(sorted({module.rpartition(".")[2] for module in targets.shapes}))
            raise ModelFilesError(
                f"{path}: tensor {name[:96]} is not supported; allowed: {_PREFIX}NAME.lora_A.weight and lora_B, with a NAME "
                f"such as {next(iter(targets.shapes))} that ends with {allowed}"
            )
        module, kind, key = target
        rank, scales[module] = ranks.of(key)
        _check(path, file, name, targets.shape(module, kind, rank))
        kinds_of.setdefault(module, set()).add(kind)
        if module.startswith(prefixes):
            read.setdefault(module, {})[kind] = _finite(path, name, file.get_tensor(name).float().clone())
    for module, kinds in kinds_of.items():
        if len(kinds) != 2:
            raise ModelFilesError(f"{path}: {module} has lora_{kinds.pop()} alone; allowed: lora_A and lora_B")
    if not kinds_of:
        raise ModelFilesError(f"{path}: holds no tensors")
    parts = {
        of_one: LowRankPart(down, up)
        for module, both in read.items()
        for of_one, down, up in targets.parts(module, both["A"], both["B"] * scales[module])
    }
    num_outputs = {module: outputs for module, (outputs, _) in targets.shapes.items()}
    digest = hashlib.sha256((directory / CONFIG_FILE).read_bytes())
    digest.update(path.read_bytes())
    return AdapterFiles(parts, num_outputs, digest.hexdigest()[:16])


class _Targets(NamedTuple):
    """What an adapter of the model may add to: ``shapes`` of weights, ``[out, in]``, by module, and ``stacks`` of experts.

    ``parameters``: those that the configuration names. ``as_stored`` gives a module's name in the checkpoint.
    """

    shapes: Mapping[str, tuple[int, int]]
    stacks: Mapping[str, Stack]
    aliases: Mapping[str, str]
    parameters: tuple[str, ...]
    as_stored: Callable[[str], str]

    def find(self, name: str) -> tuple[str, str, str] | None:
        """The module of a tensor, A or B, and the module's name in patterns; None: it is of something else."""
        match = _TENSOR.fullmatch(name)
        if match is None:
            return None
        named, kind = match.groups()
        module = self.as_stored(named)
        module = self.aliases.get(module, module)
        if module in self.stacks:
            return module, kind, self.stacks[module].parameter
        is_parameter = f".{named}.weight".endswith(self.parameters)
        return (module, kind, named + ".weight" * is_parameter) if module in self.shapes else None

    def shape(self, module: str, kind: str, rank: int) -> tuple[int, int]:
        """Of a tensor."""
        stack = self.stacks.get(module)
        outputs, inputs = self.shapes[module] if stack is None else (stack.outputs, stack.inputs)
        ranks = rank if stack is None else rank * stack.num_experts
        return (ranks, inputs) if kind == "A" else (outputs, ranks)

    def parts(self, module: str, down: Tensor, up: Tensor) -> Iterable[tuple[str, Tensor, Tensor]]:
        """By module of one projection."""
        return self.stacks[module].parts(down, up) if module in self.stacks else [(module, down, up)]


def _targets_of(config: ModelConfig, fields: ConfigFields) -> _Targets:
    parameters = parameters_of(fields)
    named = tuple(f".{parameter}" for parameter in parameters)
    return _Targets(
        _modules_of(config), stacks_of(config, parameters), aliases_of(config), named, partial(module_as_stored, config)
    )


class _Numbers(NamedTuple):
    """A number of each module: the one of the first pattern that the name fits, or its end behind a dot, as in PEFT."""

    of_patterns: list[tuple[re.Pattern[str], float]]
    otherwise: float

    def of(self, key: str) -> float:
        """Of a module."""
        return next((number for pattern, number in self.of_patterns if pattern.match(key)), self.otherwise)


class _Ranks(NamedTuple):
    ranks: _Numbers
    alphas: _Numbers
    is_by_root: bool

    def of(self, key: str) -> tuple[int, float]:
        """The rank of a module, and the factor on its product."""
        rank = int(self.ranks.of(key))
        return rank, self.alphas.of(key) / (math.sqrt(rank) if self.is_by_root else rank)


def _ranks_of(fields: ConfigFields) -> _Ranks:
    """Check the configuration. Raises ``ModelFilesError``: it asks for something else."""
    values = fields.values
    if values.get("peft_type") != "LORA":
        raise fields.refuse("peft_type", "LORA")
    if values.get("task_type") not in _TASKS:
        raise fields.refuse("task_type", "CAUSAL_LM or FEATURE_EXTRACTION")
    if values.get("bias", "none") != "none":
        raise fields.refuse("bias", "none")
    if values.get("init_lora_weights") not in _SAME_BASE:
        raise fields.refuse(
            "init_lora_weights", "true, false, gaussian, orthogonal, eva or mica, which leave the model as it is"
        )
    for field, value in values.items():
        if field not in _READ | _WITHOUT_EFFECT and value:
            raise fields.refuse(field, "nothing")

    def rank(some: ConfigFields, field: str) -> float:
        return some.integer(field, high=MAX_RANK)

    return _Ranks(
        _numbers(fields, "r", "rank_pattern", rank),
        _numbers(fields, "lora_alpha", "alpha_pattern", ConfigFields.number),
        fields.flag("use_rslora", default=False),
    )


def _numbers(fields: ConfigFields, field: str, by_pattern: str, read: Callable[[ConfigFields, str], float]) -> _Numbers:
    section = fields.section(by_pattern)
    keys = [] if section is None else list(section.values)
    patterns = name_patterns(fields, by_pattern, [rf"(.*\.)?({key})$" for key in keys])
    numbers = [] if section is None else [read(section, key) for key in keys]
    return _Numbers(list(zip(patterns, numbers, strict=True)), read(fields, field))


def _modules_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shapes of the weights, ``[out, in]``, that an adapter may add to, by module."""
    prefixes = tuple(config.names.layer.format(index) for index in range(config.num_layers))
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected_tensors(by_matrix(config)).items()
        if len(shape) == 2 and name.startswith(prefixes) and name.endswith(".weight")
    }


def _finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not bool(tensor.isfinite().all()):
        raise ModelFilesError(f"{path}: tensor {name[:96]} holds a value that is not finite; allowed: finite numbers")
    return tensor


def _check(path: Path, file: object, name: str, wanted: tuple[int, ...]) -> None:
    view = file.get_slice(name)  # type: ignore[attr-defined]
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != wanted:
        raise ModelFilesError(
            f"{path}: tensor {name[:96]} has shape {list(shape)}; the model and its rank ask for {list(wanted)}"
        )
    if dtype not in FLOATS:
        raise ModelFilesError(f"{path}: tensor {name[:96]} has dtype {dtype}; allowed: {', '.join(FLOATS)}")
