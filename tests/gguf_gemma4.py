"""Random models of Gemma 4, and how llama.cpp's converter (``conversion/gemma.py``) writes them: see ``gguf_files``."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH
from numpy.typing import NDArray

from checkpoints import VOCAB_SIZE

Values = NDArray[np.float32]

_KINDS = ["sliding_attention", "full_attention"]
_DENSE: dict[str, object] = {
    "layer_types": _KINDS * 2,
    "num_hidden_layers": 4,
    "global_head_dim": 24,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
_VALUES_ARE_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_SMALL: dict[str, object] = {
    "layer_types": _KINDS * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "pad_token_id": 1,
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "gemma4": ("Gemma4", _DENSE),
    "gemma4-small": ("Gemma4", _DENSE | _SMALL),
    "gemma4-experts": ("Gemma4", _DENSE | _VALUES_ARE_KEYS | _EXPERTS),
}
ARCHITECTURES = {"Gemma4": MODEL_ARCH.GEMMA4}
NUMBERS = ("router.proj.weight",)
"""What stays float32, beside what does in other families."""


def unread_keys(
    name: str, values: Values, config: dict[str, Any], kinds: tuple[str, ...]
) -> Iterator[tuple[str, Values]]:
    """With the queries of a layer that shares keys and values, what it has of these ``kinds``, which nothing reads."""
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    if "layers." not in name or int(name.split(".")[2]) < first:
        return
    if "self_attn.q_proj" in name:
        keys = values[: len(values) // config["num_attention_heads"] * config["num_key_value_heads"]]
        yield from ((name.replace("q_proj", f"{kind}_proj"), keys) for kind in kinds)
    elif "self_attn.q_norm" in name:
        yield name.replace("q_norm", "k_norm"), values


def change(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """What has no end gets one, and two scales of the router those of weights that they multiply.

    Not ``is_absorbed``: gates and ups are apart, and layers that share keys have some of their own, which nothing reads.
    """
    number = int(name.split(".")[2]) if "layers." in name else 0
    layer = f"blk.{number}"
    if not config["is_absorbed"]:
        yield from unread_keys(name, values, config, ("k",))
    if not config["is_absorbed"] and name.endswith("experts.gate_up_proj"):
        for place, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{layer}.ffn_{place}_exps.weight", half
        return
    if name.endswith("router.scale"):
        yield f"{layer}.ffn_gate_inp.scale", values
    elif name.endswith("per_expert_scale"):
        yield f"{layer}.ffn_down_exps.scale", values
    else:
        yield name if name.endswith(".weight") else f"{name}.weight", values


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The keys that this family has."""
    near = [kind == "sliding_attention" for kind in config["layer_types"]]
    far_head = next((own["head_dim"] for own in config["per_layer_config"].values()), config["head_dim"])
    own_heads = [config["per_layer_config"].get(str(i), {}).get("num_key_value_heads") for i in range(len(near))]
    if any(own_heads):
        writer.add_head_count_kv([own or config["num_key_value_heads"] for own in own_heads])
    num_shared = config["num_kv_shared_layers"]
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(near)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length(far_head)
    writer.add_value_length(far_head)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(far_head)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    if config["enable_moe_block"]:
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["use_double_wide_mlp"]:
        size, num_own = config["intermediate_size"], len(near) - num_shared
        writer.add_feed_forward_length([size] * num_own + [2 * size] * num_shared)
    turned = int(far_head * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (far_head // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
