"""The files of an adapter as PEFT publishes them: adapter_config.json and adapter_model.safetensors.

Owns: reading and checking both. Must not know: rows, how an adapter is computed.

What changes more than ``W x`` to ``W x + s B A x`` is refused by its name, and so is every field of the configuration
that is not known here, unless it is empty. Nothing of a file is executed.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import PICKLE_SUFFIXES, ConfigFields, read_json_object
from headway_executor.checkpoint.stored_weights.scheme import FLOATS
from headway_executor.checkpoint.weights import open_safetensors
from headway_executor.models.adapter_stacks import Stack, aliases_of, by_matrix, stacks_of
from headway_executor.models.config import ModelConfig
from headway_executor.models.loading import expected_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 512

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",  # the tensors say what is adapted
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
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "target_parameters"}
)
_SAME_BASE = (None, True, False, "gaussian", "orthogonal")
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
    rank, scale = _rank_and_scale(fields)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
        found = f"; {pickles[0]} is a pickle file, which is never loaded" if pickles else ""
        raise ModelFilesError(f"{directory}: no {WEIGHTS_FILE}{found}")
    targets = _targets_of(config, fields)
    prefixes = tuple(config.names.layer.format(index) for index in layers)
    kinds_of: dict[str, set[str]] = {}
    read: dict[str, dict[str, Tensor]] = {}
    file = open_safetensors(path)
    for name in sorted(file.keys()):
        target = targets.find(name)
        if target is None:
            allowed = ", ".join(sorted({module.rpartition(".")[2] for module in targets.shapes}))
            raise ModelFilesError(
                f"{path}: tensor {name[:96]} is not supported; allowed: lora_A and lora_B of {allowed}"
            )
        module, kind = target
        _check(path, file, name, targets.shape(module, kind, rank))
        kinds_of.setdefault(module, set()).add(kind)
        if module.startswith(prefixes):
            read.setdefault(module, {})[kind] = file.get_tensor(name).float().clone()
    for module, kinds in kinds_of.items():
        if len(kinds) != 2:
            raise ModelFilesError(f"{path}: {module} has lora_{kinds.pop()} alone; allowed: lora_A and lora_B")
    if not kinds_of:
        raise ModelFilesError(f"{path}: holds no tensors")
    parts = {
        of_one: LowRankPart(down, up)
        for module, both in read.items()
        for of_one, down, up in targets.parts(module, both["A"], both["B"] * scale)
    }
    num_outputs = {module: outputs for module, (outputs, _) in targets.shapes.items()}
    digest = hashlib.sha256((directory / CONFIG_FILE).read_bytes())
    digest.update(path.read_bytes())
    return AdapterFiles(parts, num_outputs, digest.hexdigest()[:16])


class _Targets(NamedTuple):
    """What an adapter of the model may add to: ``shapes`` of weights, ``[out, in]``, by module, and ``stacks`` of experts."""

    shapes: Mapping[str, tuple[int, int]]
    stacks: Mapping[str, Stack]
    aliases: Mapping[str, str]

    def find(self, name: str) -> tuple[str, str] | None:
        """The module of a tensor, and A or B; None: it is of something else."""
        match = _TENSOR.fullmatch(name)
        module = "" if match is None else self.aliases.get(match[1], match[1])
        return (module, match[2]) if match is not None and (module in self.shapes or module in self.stacks) else None

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
    return _Targets(_modules_of(config), stacks_of(config, fields), aliases_of(config))


def _rank_and_scale(fields: ConfigFields) -> tuple[int, float]:
    values = fields.values
    if values.get("peft_type") != "LORA":
        raise fields.refuse("peft_type", "LORA")
    if values.get("task_type") not in (None, "CAUSAL_LM"):
        raise fields.refuse("task_type", "CAUSAL_LM")
    if values.get("bias", "none") != "none":
        raise fields.refuse("bias", "none")
    if values.get("init_lora_weights") not in _SAME_BASE:
        raise fields.refuse("init_lora_weights", "true, false, gaussian or orthogonal, which leave the model as it is")
    for field, value in values.items():
        if field not in _READ | _WITHOUT_EFFECT and value:
            raise fields.refuse(field, "nothing")
    rank = fields.integer("r", high=MAX_RANK)
    alpha = fields.number("lora_alpha")
    return rank, alpha / (math.sqrt(rank) if fields.flag("use_rslora", default=False) else rank)


def _modules_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The shapes of the weights, ``[out, in]``, that an adapter may add to, by module."""
    prefixes = tuple(config.names.layer.format(index) for index in range(config.num_layers))
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected_tensors(by_matrix(config)).items()
        if len(shape) == 2 and name.startswith(prefixes)
    }


def _check(path: Path, file: object, name: str, wanted: tuple[int, ...]) -> None:
    view = file.get_slice(name)  # type: ignore[attr-defined]
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != wanted:
        raise ModelFilesError(
            f"{path}: tensor {name[:96]} has shape {list(shape)}; the model and r ask for {list(wanted)}"
        )
    if dtype not in FLOATS:
        raise ModelFilesError(f"{path}: tensor {name[:96]} has dtype {dtype}; allowed: {', '.join(FLOATS)}")
