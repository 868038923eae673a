"""Granite 4: Granite with a state, of Mamba 2, in most layers."""

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.granite import read_mixture, read_scaled
from headway_executor.models.families.mamba import read_state
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    is_of_gguf,
    kinds_of,
    num_layers_of,
    read_feed_forward,
)
from headway_executor.models.tensor_names import TensorNames

_DENSE_NAMES = TensorNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_NAMES_APART = TensorNames(gate_up=("shared_mlp.gate_proj", "shared_mlp.up_proj"), down="shared_mlp.down_proj")
_SHARED_SIZE = 1024
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}


def read_granite_hybrid(fields: ConfigFields) -> ModelConfig:
    """``GraniteMoeHybridForCausalLM``: without experts, what is shared elsewhere is the feed-forward."""
    kinds = kinds_of(fields, [LINEAR] * num_layers_of(fields), (LINEAR, FULL, *_OLDER_KINDS))
    recurrence = read_state(fields, prefix="mamba")
    recurrences = [recurrence if _OLDER_KINDS.get(kind, kind) == LINEAR else None for kind in kinds]
    positions = fields.values.get("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise fields.refuse("position_embedding_type", "rope, nope, or absent")
    rotates = [positions == "rope"] * len(kinds)
    if fields.integer("num_local_experts", 8, low=0):
        mixture = read_mixture(fields, _SHARED_SIZE)
        return read_scaled(fields, mixture, recurrences=recurrences, rotates=rotates)
    names = _NAMES_APART if is_of_gguf(fields) else _DENSE_NAMES
    width = fields.integer("shared_intermediate_size", _SHARED_SIZE)
    dense = msgspec.structs.replace(read_feed_forward(fields), intermediate_size=width)
    return read_scaled(fields, dense, names=names, recurrences=recurrences, rotates=rotates)
