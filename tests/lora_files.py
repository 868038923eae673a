"""Random adapters in PEFT's published layout, and their merge into a model of transformers.

The merge is the reference: ``W + s B A``, computed from the files alone. Of experts there are two layouts: one pair of matrices
for each matrix of an expert, as PEFT wrote for transformers 4, and one for all experts of a layer, as ``target_parameters``
gives with transformers 5 (``ParamWrapper`` in ``peft/tuners/lora/layer.py``).
"""

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int,
    targets: tuple[str, ...] = ALL_PROJECTIONS,
    parameters: tuple[str, ...] = (),
    experts: tuple[str, ...] = (),
    rank: int = 4,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write an adapter of the modules of ``model`` whose names end with ``targets``; return its directory.

    ``parameters`` are of experts or routers in one tensor. ``experts`` are matrices of an expert, of every second one, such as
    ``mlp.experts.{}.up_proj``, with braces for its number. ``config`` may have ``rank_pattern``.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(module: str, outputs: int, inputs: int, key: str = "", count: int = 1) -> None:
        ranks = count * int(_of_pattern(config.get("rank_pattern", {}), key or module, rank))
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = torch.randn(ranks, inputs, generator=generator) * inputs**-0.5
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = torch.randn(outputs, ranks, generator=generator) * strength

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear | Conv1D):
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            add(name, *weight.shape)
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        if name.endswith(parameters) and parameters and parameter.dim() == 2:
            add(module, *parameter.shape, name)
        elif name.endswith(parameters) and parameters:
            is_inner = own == "gate_up_proj" and any(other.endswith("down_proj") for other in parameters)
            count, outputs, inputs = _outputs_first(model, parameter).shape
            add(module + ".base_layer" * is_inner, outputs, inputs, name, count)
    for index, layer in enumerate(model.model.layers if experts else ()):
        of_experts = getattr(getattr(layer, "mlp", getattr(layer, "block_sparse_moe", None)), "experts", None)
        for name in experts if of_experts is not None else ():
            is_back = name.endswith(("down_proj", "w2"))
            whole = of_experts.down_proj if is_back else of_experts.gate_up_proj
            count, outputs, inputs = whole.shape
            for number in range(0, count, 2):
                add(f"model.layers.{index}.{name.format(number)}", outputs if is_back else outputs // 2, inputs)
    assert tensors
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": list(targets),
        "target_parameters": list(parameters) or None,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
        "exclude_modules": ["lm_head"],
        "alora_invocation_tokens": None,
        "arrow_config": None,
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "fan_in_fan_out": False,
        "layer_replication": None,
        "loftq_config": {},
        "lora_bias": False,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "peft_version": "0.18.0",
        "qalora_group_size": 16,
        "trainable_token_indices": None,
        "use_qalora": False,
        "inference_mode": True,
        "base_model_name_or_path": "somewhere",
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    return directory


def merge_adapter(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Add an adapter to the weights of ``model`` and return it."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
                up = _scale(module, config) * tensors[name.replace(".lora_A.", ".lora_B.")]
                _merge(model, module, down, up, config)
    return model


def _scale(module: str, config: dict[str, object]) -> float:
    key = module
    if module.endswith((".experts", ".base_layer")):
        key = f"{module.removesuffix('.base_layer')}.{_stacked_parameter(module, config)}"
    elif any(f".{module}.weight".endswith(f".{name}") for name in config["target_parameters"] or ()):  # type: ignore[attr-defined]
        key = f"{module}.weight"
    rank = _of_pattern(config["rank_pattern"], key, config["r"])
    return _of_pattern(config["alpha_pattern"], key, config["lora_alpha"]) / (
        math.sqrt(rank) if config["use_rslora"] else rank
    )


def _of_pattern(patterns: object, key: str, otherwise: object) -> float:
    """As PEFT finds it (``get_pattern_key`` in ``peft/utils/other.py``)."""
    found = (number for pattern, number in patterns.items() if re.match(rf"(.*\.)?({pattern})$", key))  # type: ignore[attr-defined]
    return next(found, otherwise)


def _stacked_parameter(module: str, config: dict[str, object]) -> str:
    targets = [str(target).rpartition(".")[2] for target in config["target_parameters"]]  # type: ignore[attr-defined]
    is_inner = module.endswith(".base_layer") or "down_proj" not in targets
    return "gate_up_proj" if is_inner else "down_proj"


def _merge(model: PreTrainedModel, name: str, down: torch.Tensor, up: torch.Tensor, config: dict[str, object]) -> None:
    of_expert = re.fullmatch(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)", name)
    if of_expert is not None:
        layer, number = model.get_submodule(of_expert[1]), int(of_expert[2])
        experts = getattr(layer, "mlp", getattr(layer, "block_sparse_moe", None)).experts
        if of_expert[3] in ("down_proj", "w2"):
            experts.down_proj[number] += up @ down
        else:
            gates, ups = experts.gate_up_proj[number].chunk(2)
            (gates if of_expert[3] in ("gate_proj", "w1") else ups).add_(up @ down)
        return
    module = model.get_submodule(name.removesuffix(".base_layer"))
    if not hasattr(module, "gate_up_proj"):
        module.weight += (up @ down).t() if isinstance(module, Conv1D) else up @ down
        return
    parameter = _outputs_first(model, getattr(module, _stacked_parameter(name, config)))
    count = len(parameter)
    downs, ups = down.reshape(count, -1, down.shape[1]), up.reshape(len(up), -1, count)
    parameter += torch.einsum("ore,eri->eoi", ups, downs)


def _outputs_first(model: PreTrainedModel, experts: torch.Tensor) -> torch.Tensor:
    """gpt-oss has inputs before outputs."""
    return experts.transpose(1, 2) if model.config.model_type == "gpt_oss" else experts
