"""Adapters of random numbers, in PEFT's layout.

Owns: their files. Must not know: what is measured with them.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headway_executor.models.families import read_model_config
from headway_executor.models.tensor_shapes import expected_tensors


def write_adapter(directory: Path, model: Path, rank: int, seed: int, dtype: torch.dtype) -> None:
    """Write a random adapter of every projection of the model's layers."""
    directory.mkdir()
    torch.manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(read_model_config(model)).items():
        if len(shape) == 2 and name.startswith("model.layers."):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = (torch.randn(rank, shape[1]) * 0.02).to(dtype)
            tensors[f"{module}.lora_B.weight"] = (torch.randn(shape[0], rank) * 0.02).to(dtype)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
