"""Random adapters in PEFT's published layout, and their merge into a model of transformers.

The merge is the reference: ``W + s B A``, computed from the files alone.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int,
    targets: tuple[str, ...] = ALL_PROJECTIONS,
    rank: int = 4,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write an adapter of the modules of ``model`` whose names end with ``targets``; return its directory."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            outputs, inputs = module.weight.shape
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * strength
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
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "inference_mode": True,
        "base_model_name_or_path": "somewhere",
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields | config))
    return directory


def merge_adapter(directory: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Add an adapter to the weights of ``model`` and return it."""
    config = json.loads((directory / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "adapter_model.safetensors").items()}
    with torch.no_grad():
        for name, down in tensors.items():
            if ".lora_A." in name:
                module = model.get_submodule(name.removeprefix(_PREFIX).removesuffix(".lora_A.weight"))
                module.weight += scale * tensors[name.replace(".lora_A.", ".lora_B.")] @ down
    return model
