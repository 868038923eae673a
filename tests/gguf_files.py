"""Random models of every architecture that ``headway gguf`` reads, as files in llama.cpp's layout.

``make_model(directory, name)`` writes a checkpoint with transformers; ``write_file`` makes a GGUF file of it, as llama.cpp's
converter does. The names of tensors come from the ``gguf`` package's own map of transformers' names, and the keys from its
writer. What is done to weights is described in ``conversion/*.py`` of ggml-org/llama.cpp; each function here names its file.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import gguf_gemma4
import gguf_newer
import gguf_older
import gguf_states
from checkpoints import CONTEXT, VOCAB_SIZE, randomise, small_sizes, tokenizer

Values = NDArray[np.float32]
Tensors = dict[str, Values]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": CONTEXT,
    "partial_rotary_factor": 0.75,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 8,
    "routed_scaling_factor": 1.5,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5}
_HALF_ROPE = _DEFAULT_ROPE | {"partial_rotary_factor": 0.5}
_GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_multiplier": 0.1}
_CORRECTED: dict[str, object] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _DEFAULT_ROPE}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": _DEFAULT_ROPE,
        },
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "num_key_value_heads": 4}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": 20,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "deepseek2-lite": (
        "DeepseekV2",
        {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}} | _LATENT,
    ),
    "deepseek2": (
        "DeepseekV2",
        {"q_lora_rank": 32, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"} | _LATENT,
    ),
    "deepseek2-v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 32,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        }
        | _LATENT,
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "rope_parameters": _DEFAULT_ROPE,
        },
    ),
    "mistral3": (
        "Ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi3-long": (
        "Phi3",
        {
            "rope_parameters": _LONG_ROPE,
            "max_position_embeddings": 4 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": _DEFAULT_ROPE}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_multiplier": 0.1},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0, "rope_parameters": _DEFAULT_ROPE}),
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": True, "rope_parameters": _DEFAULT_ROPE}),
    "gptneox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4, "head_dim": None}),
    "gptneox-in-turn": (
        "GPTNeoX",
        {"rotary_pct": 1.0, "use_parallel_residual": False, "num_key_value_heads": 4, "head_dim": None},
    ),
    "cohere2": (
        "Cohere2",
        {
            "sliding_window": 20,
            "num_hidden_layers": 5,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
            "rope_parameters": _DEFAULT_ROPE,
        },
    ),
}
FURTHER: dict[str, tuple[str, dict[str, object]]] = {
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "olmo2-olmo3": (
        "Olmo3",
        {
            "sliding_window": 20,
            "num_hidden_layers": 5,
            "rope_parameters": {"sliding_attention": _DEFAULT_ROPE, "full_attention": YARN | {"rope_theta": 20_000.0}},
        },
    ),
    "exaone4": ("Exaone4", {"sliding_window": 20, "num_hidden_layers": 5, "rope_parameters": _DEFAULT_ROPE}),
    "arcee": ("Arcee", {}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed_oss": ("SeedOss", {}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "intermediate_size": 128,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan-dense": ("HunYuanDenseV1", {}),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 3, "intermediate_size": 32}),
    "granitemoe": ("GraniteMoe", _GRANITE | {"num_local_experts": 4, "intermediate_size": 32}),
    "granitemoe-shared": (
        "GraniteMoeShared",
        _GRANITE | {"num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 64},
    ),
    "command-r": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True, "rope_parameters": _DEFAULT_ROPE}),
    "command-r-norms": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True, "use_qk_norm": True}),
    "glm4": ("Glm4", {"rope_parameters": _HALF_ROPE}),
    "glm4moe": ("Glm4Moe", _CORRECTED | {"use_qk_norm": True, "rope_parameters": _HALF_ROPE}),
    "dots1": ("Dots1", _CORRECTED | {"num_key_value_heads": 4, "sliding_window": None, "norm_topk_prob": True}),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "rope_parameters": _HALF_ROPE},
    ),
    "phi2": ("Phi", {"num_key_value_heads": 4, "rope_parameters": _HALF_ROPE}),
    "stablelm": ("StableLm", {"head_dim": None, "use_qkv_bias": True, "rope_parameters": _HALF_ROPE}),
    "stablelm-parallel": (
        "StableLm",
        {"head_dim": None, "use_parallel_residual": True, "rope_parameters": _HALF_ROPE},
    ),
    "nemotron": ("Nemotron", {"rope_parameters": _HALF_ROPE}),
    "lfm2": ("Lfm2", _CONVOLUTIONS | {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}),
    "lfm2moe": (
        "Lfm2Moe",
        _CONVOLUTIONS
        | {
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
}
FURTHER |= gguf_states.MODELS | gguf_older.MODELS | gguf_gemma4.MODELS | gguf_newer.MODELS
MODELS |= FURTHER
"""By name: the family in transformers' words, and its configuration."""

_ARCHITECTURES = (
    {
        "Llama": MODEL_ARCH.LLAMA,
        "Mixtral": MODEL_ARCH.LLAMA,
        "Qwen2": MODEL_ARCH.QWEN2,
        "Qwen3": MODEL_ARCH.QWEN3,
        "Qwen2Moe": MODEL_ARCH.QWEN2MOE,
        "Qwen3Moe": MODEL_ARCH.QWEN3MOE,
        "Olmoe": MODEL_ARCH.OLMOE,
        "GptOss": MODEL_ARCH.GPT_OSS,
        "DeepseekV2": MODEL_ARCH.DEEPSEEK2,
        "DeepseekV3": MODEL_ARCH.DEEPSEEK2,
        "Llama4": MODEL_ARCH.LLAMA4,
        "Ministral3": MODEL_ARCH.MISTRAL3,
        "Gemma2": MODEL_ARCH.GEMMA2,
        "Gemma3": MODEL_ARCH.GEMMA3,
        "Phi3": MODEL_ARCH.PHI3,
        "Olmo2": MODEL_ARCH.OLMO2,
        "Granite": MODEL_ARCH.GRANITE,
        "SmolLM3": MODEL_ARCH.SMOLLM3,
        "Starcoder2": MODEL_ARCH.STARCODER2,
        "GPTNeoX": MODEL_ARCH.GPTNEOX,
        "Cohere2": MODEL_ARCH.COHERE2,
        "Gemma": MODEL_ARCH.GEMMA,
        "Olmo": MODEL_ARCH.OLMO,
        "Olmo3": MODEL_ARCH.OLMO2,
        "Exaone4": MODEL_ARCH.EXAONE4,
        "Arcee": MODEL_ARCH.ARCEE,
        "SeedOss": MODEL_ARCH.SEED_OSS,
        "Ernie4_5": MODEL_ARCH.ERNIE4_5,
        "Ernie4_5_Moe": MODEL_ARCH.ERNIE4_5_MOE,
        "HunYuanDenseV1": MODEL_ARCH.HUNYUAN_DENSE,
        "HunYuanMoEV1": MODEL_ARCH.HUNYUAN_MOE,
        "GraniteMoe": MODEL_ARCH.GRANITE_MOE,
        "GraniteMoeShared": MODEL_ARCH.GRANITE_MOE,
        "Cohere": MODEL_ARCH.COMMAND_R,
        "Glm4": MODEL_ARCH.GLM4,
        "Glm4Moe": MODEL_ARCH.GLM4_MOE,
        "Dots1": MODEL_ARCH.DOTS1,
        "MiniMaxM2": MODEL_ARCH.MINIMAXM2,
        "Phi": MODEL_ARCH.PHI2,
        "StableLm": MODEL_ARCH.STABLELM,
        "Nemotron": MODEL_ARCH.NEMOTRON,
        "Lfm2": MODEL_ARCH.LFM2,
        "Lfm2Moe": MODEL_ARCH.LFM2MOE,
    }
    | gguf_states.ARCHITECTURES
    | gguf_older.ARCHITECTURES
    | gguf_gemma4.ARCHITECTURES
    | gguf_newer.ARCHITECTURES
)
_WITH_PARTS = ("Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
_PERMUTED = ("Llama", "Ministral3", "Mixtral", "Granite", "SmolLM3", "Olmo", "Arcee")


def make_model(directory: Path, name: str, kind: Kind) -> PreTrainedModel:
    """Write a checkpoint whose weights a file of this ``kind`` holds exactly; return the model."""
    family, changes = MODELS[name]
    sizes = small_sizes(hidden_size=64, head_dim=16) | changes
    if sizes["head_dim"] is None:  # To Falcon, it is no field.
        del sizes["head_dim"]
    config = getattr(transformers, f"{family}TextConfig" if family in _WITH_PARTS else f"{family}Config")
    kind_of_model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(0)
    # Only the eager attention of transformers has soft caps.
    model = randomise(kind_of_model(config(attn_implementation="eager", **sizes)), family.lower())
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    rounded = {tensor: _rounded(family, tensor, values, kind) for tensor, values in stored.items()}
    save_file(rounded, directory / "model.safetensors", metadata={"format": "pt"})
    return kind_of_model.from_pretrained(directory, attn_implementation="eager").eval()


_UNROUNDED = ("_bias", "conv.conv.weight", "conv1d.weight", "norm.weight", "A_log")


def _rounded(family: str, name: str, values: torch.Tensor, kind: Kind) -> torch.Tensor:
    if values.dim() == 1 or name.endswith(_UNROUNDED) or kind == Kind.F32:
        return values
    if name.endswith(("kv_b_proj.weight", ".mlp.w2")):
        # The file has one half of it turned around, and three numbers are exact in blocks of either direction.
        return torch.tensor(0.25).copysign(values) * (values.abs() > values.abs().median())
    is_stack = values.dim() == 3 and not name.endswith(".weight")
    is_turned = is_stack and family not in (*gguf_states.CHANGES, "Gemma4")  # inputs before outputs
    is_turned |= family == "GPT2" and ".h." in name
    rows = values.transpose(-2, -1) if is_turned else values
    of_experts = Kind.MXFP4 if kind == Kind.MXFP4 and is_stack else Kind.Q8_0 if kind == Kind.MXFP4 else kind
    again = torch.from_numpy(dequantised(quantised(np.ascontiguousarray(rows), of_experts), of_experts))
    return (again.transpose(-2, -1) if is_turned else again).contiguous()


def quantised(values: Values, kind: Kind) -> NDArray[Any]:
    """In blocks, or as smaller floats."""
    return gguf.quants.quantize(values, kind)


def dequantised(stored: NDArray[Any], kind: Kind) -> Values:
    """As float32."""
    return gguf.quants.dequantize(stored, kind).astype(np.float32)


_NUMBERS = (
    *("norm.weight", ".bias", "gate.weight", "router.weight", "conv.conv.weight", "conv1d.weight"),
    *("A_log", ".D"),
    *gguf_gemma4.NUMBERS,
)
"""What stays float32."""


def write_file(
    path: Path,
    directory: Path,
    kind: Kind,
    *,
    is_absorbed: bool = True,
    most_tensors: int = 0,
    architecture: MODEL_ARCH | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the file of a checkpoint. With MXFP4 only stacks of experts are in it, and other matrices in Q8_0.

    ``is_absorbed``: latent attention in the newer form; ``change`` may add to the metadata. With ``most_tensors`` there are
    several files. ``architecture`` is another than the family's.
    """
    config = gguf_older.with_usual_names(json.loads((directory / "config.json").read_text()))
    config = gguf_newer.with_usual_names(config)
    config.setdefault("max_position_embeddings", config.get("model_max_length"))
    config["is_absorbed"] = is_absorbed and "n_routed_experts" in config
    family = config["architectures"][0].removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    tensors = {name: tensor.numpy() for name, tensor in load_file(directory / "model.safetensors").items()}
    if architecture is None:
        is_mixture = "moe" in config.get("layers_block_type", ())
        architecture = MODEL_ARCH.NEMOTRON_H_MOE if is_mixture else _ARCHITECTURES[family]
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=most_tensors)
    _add_settings(writer, config)
    _SETTINGS.get(family, lambda *_: None)(writer, config)
    _add_tokens(writer, directory)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _in_layout(family, config, tensors):
        place = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        of_this = kind
        if values.ndim == 1 or (name.endswith(_NUMBERS) and not name.endswith("per_layer_input_gate.weight")):
            of_this = Kind.F32
        elif kind == Kind.MXFP4 and "experts" not in name:
            of_this = Kind.Q8_0
        writer.add_tensor(place, quantised(np.ascontiguousarray(values), of_this), raw_dtype=of_this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _in_layout(family: str, config: dict[str, Any], tensors: Tensors) -> Iterator[tuple[str, Values]]:
    """What the converter's ``modify_tensors`` gives for all tensors."""
    stacks: dict[str, list[tuple[int, Values]]] = {}
    for name, values in tensors.items():
        if name.startswith("model.altup_"):
            stacks.setdefault(re.sub(r"\.\d+\.", ".", name), []).append((int(name.split(".")[2]), values))
            continue
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            stacks.setdefault(f"{before}.experts.{rest}", []).append((int(number), values))
            continue
        yield from _CHANGES.get(family, _as_it_is)(name, values, config)
    for name, of_experts in stacks.items():
        # LFM2's converter leaves out the decoder's name in front.
        place = name.removeprefix("model.") if "feed_forward.experts" in name else name
        if family == "Jamba":
            place = name.replace("feed_forward", "mlp")
        if ".mixer.experts." in name:  # as Nemotron's does
            place = name.replace("backbone", "model").replace("mixer", "mlp")
        yield place, np.stack([values for _, values in sorted(of_experts, key=lambda pair: pair[0])])


def _as_it_is(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    yield name, values


def _permuted(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/llama.py``: channel i beside channel i + half, in queries and keys."""
    heads = next((config[f"num_{kind}_heads"] for kind in ("attention", "key_value") if _is_of(kind, name)), None)
    if heads is not None:
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    yield name, values


def _is_of(kind: str, name: str) -> bool:
    return f".{'q' if kind == 'attention' else 'k'}_proj." in name


def _gemma(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/gemma.py``: norms have 1 added."""
    yield name, values + 1 if name.endswith("norm.weight") else values


def _gpt_neox(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/gptneox.py``: all queries, then all keys, then all values."""
    if "query_key_value" in name:
        by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = np.concatenate([by_head[:, part].reshape(-1, *values.shape[1:]) for part in range(3)])
    yield name, values


def _gpt_oss(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/gpt_oss.py``: gates and ups take turns in a checkpoint, with outputs last; here they are apart."""
    is_bias = name.endswith("_bias")
    base, end = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    rows = values if is_bias or values.ndim != 3 else values.swapaxes(1, 2)
    if base.endswith("experts.gate_up_proj"):
        prefix = base.removesuffix("gate_up_proj")
        yield f"{prefix}gate_proj.{end}", rows[:, ::2]
        yield f"{prefix}up_proj.{end}", rows[:, 1::2]
    elif base.endswith("experts.down_proj"):
        yield f"{base}.{end}", rows
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, values


def _llama4(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/llama.py``: gates and ups are apart, with outputs first."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate_proj", "up_proj"), np.split(values.swapaxes(1, 2), 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}.weight"), half
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values.swapaxes(1, 2)
    else:
        yield name, values


def _granite_moe(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/granite.py``: gates and ups are apart. Their names are those of other families with such places."""
    if name.endswith("input_linear.weight"):
        prefix = name[: name.index(".", len("model.layers.")) + 1]
        place = "mlp.experts" if "sparse" in name else "mlp.shared_expert"
        for kind, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{prefix}{place}.{kind}_proj.weight", half
    else:
        yield from _permuted(name, values, config)


def _corrected(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/base.py``: what has no end of its own gets one, and loses dimensions of 1."""
    if name.endswith("e_score_correction_bias"):
        name, values = name.replace("_bias", ".bias"), values.flatten()
    yield name, values


def _lfm2(name: str, values: Values, _: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/lfm2.py``: a convolution has two dimensions, and a correction an end."""
    if "conv.conv" in name:
        values = values.squeeze(1)
    yield name.replace("expert_bias", "expert_bias.bias"), values


def _deepseek(name: str, values: Values, config: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """``conversion/deepseek.py``: keys and values of latent attention are apart, and the keys turned around."""
    if "kv_b_proj" in name and config["is_absorbed"]:
        plain = config["qk_nope_head_dim"]
        by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        yield name.replace("kv_b_proj", "k_b_proj"), by_head[:, :plain].swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), by_head[:, plain:]
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


_Change = Callable[[str, Values, dict[str, Any]], Iterator[tuple[str, Values]]]
_CHANGES: dict[str, _Change] = dict.fromkeys(_PERMUTED, _permuted) | {
    **dict.fromkeys(("Gemma", "Gemma2", "Gemma3", "Nemotron"), _gemma),
    **dict.fromkeys(("GraniteMoe", "GraniteMoeShared"), _granite_moe),
    **dict.fromkeys(("Ernie4_5_Moe", "Glm4Moe", "Dots1", "MiniMaxM2"), _corrected),
    **dict.fromkeys(("Lfm2", "Lfm2Moe"), _lfm2),
    **gguf_states.CHANGES,
    **gguf_older.CHANGES,
    **gguf_newer.CHANGES,
    "GraniteMoeHybrid": gguf_states.mamba(_granite_moe),
    "Bamba": gguf_states.mamba(_permuted),
    "Gemma4": gguf_gemma4.change,
    "GPTNeoX": _gpt_neox,
    "GptOss": _gpt_oss,
    "Llama4": _llama4,
    "DeepseekV2": _deepseek,
    "DeepseekV3": _deepseek,
}


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/base.py``, ``TextModel.set_gguf_parameters``."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config["architectures"][0] in ("Mamba2ForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM"):
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(config["num_attention_heads"])
    absorbs = "kv_lora_rank" in config and config["is_absorbed"]
    kv_heads = 1 if absorbs else config["num_key_value_heads"]
    if config["architectures"] == ["GraniteMoeHybridForCausalLM"] or "conv" in (config.get("layer_types") or ()):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]]
    writer.add_head_count_kv(kv_heads)
    if config.get("head_dim") is not None and "kv_lora_rank" not in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    has_experts = config.get("num_local_experts") != 0 and "moe" in config.get("layers_block_type", ["moe"])
    for name, add in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("norm_eps", writer.add_layer_norm_eps),
        ("moe_num_experts", writer.add_expert_count),
        ("moe_k", writer.add_expert_used_count),
        ("moe_topk", writer.add_expert_used_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        if config.get(name) is not None and (has_experts or "expert" not in add.__name__):
            add(config[name])
    if "rope_parameters" in config:
        _add_rope(writer, config["rope_parameters"])


def _add_rope(writer: gguf.GGUFWriter, parameters: dict[str, Any]) -> None:
    rope = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _add_head_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/llama.py``."""
    writer.add_rope_dimension_count(config["head_dim"])


def _add_qwen_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/qwen.py``."""
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/gpt_oss.py``."""
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/deepseek.py``: attention is of one head of keys, whose values are the compressed row."""
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    expanded = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    if config["is_absorbed"]:
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(expanded[0])
        writer.add_value_length_mla(expanded[1])
    else:
        writer.add_key_length(expanded[0])
        writer.add_value_length(expanded[1])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _add_llama4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/llama.py``."""
    _add_head_rope(writer, config)
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_ministral3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/mistral3.py``."""
    _add_head_rope(writer, config)
    writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
    writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _add_gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/gemma.py``."""
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _add_window(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/gemma.py``; a file says nothing of which layers have the window."""
    writer.add_sliding_window(config["sliding_window"])


def _add_phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/phi.py``."""
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * config["head_dim"]))
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        original, context = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(context / original) / np.log(original))))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/granite.py``."""
    _add_head_rope(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _add_gpt_neox(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/gptneox.py``."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(config["rope_parameters"].get("partial_rotary_factor", 0.25) * head_dim))
    writer.add_parallel_residual(config["use_parallel_residual"])


def _add_cohere2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/command_r.py``."""
    writer.add_logit_scale(config["logit_scale"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add_olmo(writer: gguf.GGUFWriter, _: dict[str, Any]) -> None:
    """``conversion/olmo.py``."""
    writer.add_layer_norm_eps(1e-5)


def _add_windows(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/olmo.py``, ``conversion/exaone.py``."""
    if config["sliding_window"] is None:
        return
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_cohere(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/command_r.py``."""
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add_partial_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/glm.py``, ``conversion/nemotron.py``, ``conversion/phi.py``, ``conversion/minimax.py``."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * config["rope_parameters"]["partial_rotary_factor"]))


def _add_stablelm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``StableLMModel`` of ``convert_hf_to_gguf.py``."""
    _add_partial_rope(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def _add_minimax(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/minimax.py``."""
    _add_partial_rope(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_corrected(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/dots1.py``."""
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_glm4_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/glm.py``."""
    _add_corrected(writer, config)
    _add_partial_rope(writer, config)


def _add_ernie_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/ernie.py``; the length of shared experts there is another one."""
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])


def _add_hunyuan_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/hunyuan.py``."""
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)


def _add_granite_moe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/granite.py``."""
    _add_granite(writer, config)
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _add_granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _add_granite_moe(writer, config)
    gguf_states.add_granite_hybrid(writer, config)


def _add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """``conversion/lfm2.py``."""
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_experts" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_SETTINGS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "Llama": _add_head_rope,
    "Mixtral": _add_head_rope,
    "SmolLM3": _add_head_rope,
    "Qwen2Moe": _add_qwen_moe,
    "Qwen3Moe": _add_qwen_moe,
    "GptOss": _add_gpt_oss,
    "DeepseekV2": _add_deepseek,
    "DeepseekV3": _add_deepseek,
    "Llama4": _add_llama4,
    "Lfm2": _add_lfm2,
    "Lfm2Moe": _add_lfm2,
    "GraniteMoeHybrid": _add_granite_hybrid,
    "Bamba": gguf_states.add_granite_hybrid,
    "Mpt": gguf_older.add_mpt,
    "Qwen3Next": gguf_states.add_qwen,
    "NemotronH": gguf_states.add_nemotron_h,
    "Mamba2": gguf_states.add_mamba2,
    "Mamba": gguf_states.add_mamba,
    "FalconMamba": gguf_states.add_mamba,
    "Jamba": gguf_states.add_jamba,
    "KimiLinear": gguf_states.add_kimi,
    "FalconH1": gguf_states.add_falcon_h1,
    "Qwen3_5": gguf_states.add_qwen,
    "Qwen3_5Moe": gguf_states.add_qwen,
    "Ministral3": _add_ministral3,
    "Gemma2": _add_gemma2,
    "Gemma3": _add_window,
    "Gemma4": gguf_gemma4.add_settings,
    "Phi3": _add_phi3,
    "Granite": _add_granite,
    "GPTNeoX": _add_gpt_neox,
    "Cohere2": _add_cohere2,
    "Olmo": _add_olmo,
    "Olmo3": _add_windows,
    "Exaone4": _add_windows,
    "Arcee": _add_head_rope,
    "Ernie4_5_Moe": _add_ernie_moe,
    "HunYuanMoEV1": _add_hunyuan_moe,
    "GraniteMoe": _add_granite_moe,
    "GraniteMoeShared": _add_granite_moe,
    "Cohere": _add_cohere,
    "Glm4": _add_partial_rope,
    "Glm4Moe": _add_glm4_moe,
    "Dots1": _add_corrected,
    "MiniMaxM2": _add_minimax,
    "Phi": _add_partial_rope,
    "StableLm": _add_stablelm,
    "Nemotron": _add_partial_rope,
    **gguf_newer.SETTINGS,
}


def _add_tokens(writer: gguf.GGUFWriter, directory: Path) -> None:
    found = json.loads((directory / "tokenizer.json").read_text())
    tokens = [token for token, _ in sorted(found["model"]["vocab"].items(), key=lambda pair: pair[1])]
    special = {added["content"] for added in found["added_tokens"]}
    tokens += [f"<unused {number}>" for number in range(VOCAB_SIZE - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in found["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
