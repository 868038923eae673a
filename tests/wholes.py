"""Tiny random checkpoints of several models in one, of which Headway serves the text.

``make_whole(directory, name)`` writes one, as transformers 5 saves it, or with names as transformers 4 had them.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from checkpoints import (
    CONTEXT,
    DELTA,
    GEMMA4,
    GEMMA4_SMALL,
    MUSE_GLIMMER,
    VOCAB_SIZE,
    randomise,
    small_sizes,
    tokenizer,
)

_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model"}
_PIXTRAL = _CLIP | {"model_type": "pixtral"}
_QWEN2_VL_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 4}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


def _text(kind: str, **changes: object) -> dict[str, object]:
    return small_sizes(**changes) | {"model_type": kind}


_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
_MISTRAL = _text("mistral", sliding_window=None, head_dim=16)

_DELTA = DELTA | {"head_dim": 24}

_WHOLES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "gemma3": (
        "Gemma3",
        _SIGLIP,
        _text("gemma3_text", sliding_window=20, head_dim=16, query_pre_attn_scalar=24, tie_word_embeddings=True),
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        _text("gemma4_text", **GEMMA4_SMALL),
    ),
    "mistral3": ("Mistral3", _PIXTRAL, _MISTRAL),
    "mistral3-ministral3": (
        "Mistral3",
        _PIXTRAL,
        _text(
            "ministral3",
            head_dim=16,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.4,
            },
        ),
    ),
    "mistral3-mistral4": (
        "Mistral3",
        _PIXTRAL,
        _text(
            "mistral4",
            num_key_value_heads=4,
            q_lora_rank=20,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=14,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.4,
            },
        ),
    ),
    "qwen2_vl": ("Qwen2VL", _QWEN2_VL_VISION, _text("qwen2_vl_text", rope_parameters=_SECTIONS)),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        _QWEN_VISION,
        _text("qwen2_5_vl_text", rope_parameters=_SECTIONS, tie_word_embeddings=True),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _QWEN_VISION,
        _text("qwen3_vl_text", head_dim=12, rope_parameters=_SECTIONS | {"mrope_interleaved": True}),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _QWEN_VISION,
        _text(
            "qwen3_vl_moe_text",
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            rope_parameters=_SECTIONS,
        ),
    ),
    "qwen3_5": ("Qwen3_5", _QWEN_VISION, _text("qwen3_5_text", rope_parameters=_SECTIONS, **_DELTA)),
    "qwen3_5_moe": ("Qwen3_5Moe", _QWEN_VISION, _text("qwen3_5_moe_text", rope_parameters=_SECTIONS, **_DELTA)),
    "llama4": (
        "Llama4",
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        _text("llama4_text", head_dim=12, num_local_experts=4, intermediate_size=32, intermediate_size_mlp=40),
    ),
    "llava": ("Llava", _CLIP, _text("llama")),
    "llava_next": ("LlavaNext", _CLIP, _MISTRAL),
    "llava_onevision": ("LlavaOnevision", _SIGLIP, _text("qwen2", tie_word_embeddings=True)),
    "internvl": (
        "InternVL",
        _CLIP | {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
        _text("qwen3", head_dim=16),
    ),
    "idefics3": ("Idefics3", _SIGLIP | {"model_type": "idefics3_vision"}, _text("llama", pad_token_id=0)),
    "smolvlm": ("SmolVLM", _SIGLIP | {"model_type": "smolvlm_vision"}, _text("llama", pad_token_id=0)),
}
_GLM4V_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}
_GLM4V_ROPE = _SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
_WHOLES |= {
    "glm4v": ("Glm4v", _GLM4V_VISION, _text("glm4v_text", rope_parameters=_SECTIONS)),
    "glm46v": (
        "Glm46V",
        _GLM4V_VISION | {"model_type": "glm4v_vision"},
        _text("glm4v_text", rope_parameters=_GLM4V_ROPE),
    ),
    "glm4v_moe": (
        "Glm4vMoe",
        _GLM4V_VISION,
        _text(
            "glm4v_moe_text",
            head_dim=12,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            routed_scaling_factor=1.5,
            rope_parameters=_GLM4V_ROPE,
        ),
    ),
}
_WHOLES["kimi_k25"] = (
    "Kimi_K25",
    {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    _text(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=20,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=14,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
)
_WHOLES["step3p7"] = (
    "Step3p7",
    {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
    _text(
        "step3p5",
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        moe_router_scaling_factor=1.5,
        share_expert_dim=24,
        num_sliding_attention_heads=6,
        query_pre_attn_scalar=24,
        sliding_window=20,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        swiglu_limits=[0.0, 0.5, None, None],
        swiglu_limits_shared=[0.7, None, 0.4, None],
        rope_theta=[10_000.0, 20_000.0] * 2,
        partial_rotary_factors=[0.5, 1.0] * 2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        pad_token_id=0,
    ),
)
_SECTIONS_OF_8 = _SECTIONS | {"mrope_section": [2, 3, 3]}
_PLAIN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_HEADS = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
_MOLMO2_VISION = _PLAIN_VISION | _HEADS | {"image_size": [8, 8]}
_MOLMO2_ADAPTER = _HEADS | {
    "model_type": "molmo2_adapter",
    "intermediate_size": 16,
    "text_hidden_size": 48,
    "vision_feature_layer": [0],
}
_MINICPM = _text("qwen3_5_text", rope_parameters=_SECTIONS, **_DELTA)
_SCALED = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0, "attention_multiplier": 0.1}
_UNIFIED = {field: value for field, value in GEMMA4.items() if field != "hidden_size_per_layer_input"}
_WHOLES |= {
    "gemma4_unified": (
        "Gemma4Unified",
        {"patch_size": 2, "mm_embed_dim": 48, "mm_posemb_size": 4, "output_proj_dims": 48},
        _text("gemma4_unified_text", pad_token_id=1, attention_k_eq_v=True, num_global_key_value_heads=1, **_UNIFIED),
    ),
    "minicpmv4_6": ("MiniCPMV4_6", _PLAIN_VISION, _MINICPM),
    "minicpmv4_7": ("MiniCPMV4_7", _PLAIN_VISION, _MINICPM),
    "minicpm_ocr": ("MiniCPMOcr", _PLAIN_VISION, _MINICPM | {"tie_word_embeddings": True}),
    "exaone4_5": (
        "Exaone4_5_",
        _QWEN_VISION | {"num_key_value_heads": 2},
        _text(
            "exaone4",
            head_dim=16,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "ernie4_5_vl": (
        "Ernie4_5_VLMoe",
        _PLAIN_VISION | {"depth": 1, "num_heads": 2},
        _text(
            "ernie4_5_vl_moe_text",
            num_attention_heads=3,
            num_key_value_heads=1,
            moe_num_experts=6,
            moe_k=3,
            moe_intermediate_size=[20, 12],
            rope_parameters=_SECTIONS | {"mrope_section": [3, 3, 2]},
        ),
    ),
    "granite4_vision": ("Granite4Vision", _SIGLIP | {"hidden_size": 64}, _text("granite4_vision_text", **_SCALED)),
    "hunyuan_vl": (
        "HunYuanVL",
        _PLAIN_VISION | {"max_image_size": 8},
        _text(
            "hunyuan_vl_text",
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "factor": 1.0,
                "alpha": 8.0,
                "mrope_section": [2, 2, 2, 2],
            },
        ),
    ),
    "molmo2": (
        "Molmo2",
        _MOLMO2_VISION,
        _text("molmo2_text", head_dim=16, additional_vocab_size=4, attention_bias=True),
    ),
    "molmo2-olmo": (
        "Molmo2",
        _MOLMO2_VISION,
        _text(
            "molmo2_text",
            head_dim=16,
            additional_vocab_size=4,
            qk_norm_type="olmo",
            norm_after=True,
            max_position_embeddings=CONTEXT // 4,
            rope_scaling_layers=[1],
            rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        ),
    ),
    "ovis2": ("Ovis2", _PLAIN_VISION | {"vocab_size": 24}, _text("qwen2", tie_word_embeddings=True)),
    "perception_lm": ("PerceptionLM", _CLIP | {"model_args": {"embed_dim": 16}}, _text("llama")),
    "hyperclovax_vision_v2": (
        "HyperCLOVAXVisionV2",
        _QWEN_VISION | {"model_type": "qwen2_5_vl_vision"},
        _text("hyperclovax", **_SCALED),
    ),
    "video_llama_3": ("VideoLlama3", _PLAIN_VISION, _text("qwen2")),
    "fast_vlm": ("FastVlm", _CLIP, _text("qwen2")),
    "qwen2_5_omni": ("Qwen2_5OmniThinker", _QWEN_VISION, _text("qwen2_5_omni_text", rope_parameters=_SECTIONS)),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeThinker",
        _QWEN_VISION,
        _text(
            "qwen3_omni_moe_text",
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=False,
            rope_parameters=_SECTIONS | {"mrope_interleaved": True},
        ),
    ),
    "glm_ocr": (
        "GlmOcr",
        _GLM4V_VISION,
        _text("glm_ocr_text", head_dim=16, rope_parameters=_SECTIONS_OF_8),
    ),
    "paddleocr_vl": (
        "PaddleOCRVL",
        _PLAIN_VISION,
        _text("paddleocr_vl_text", head_dim=16, use_bias=True, rope_parameters=_SECTIONS_OF_8),
    ),
    "lighton_ocr": ("LightOnOcr", _PIXTRAL, _text("qwen3", head_dim=16, tie_word_embeddings=True)),
}

_AUDIO = {
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
    "max_source_positions": 8,
    "output_dim": 48,
}
_FIELDS: dict[str, dict[str, object]] = {
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {"insert_layer_id": 0},
    "minicpm_ocr": {"insert_layer_id": 0},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]]},
    "molmo2": {"adapter_config": _MOLMO2_ADAPTER},
    "molmo2-olmo": {"adapter_config": _MOLMO2_ADAPTER},
    "ovis2": {"vocab_size": VOCAB_SIZE, "hidden_size": 48},
    "qwen2_5_omni": {"audio_config": _AUDIO, "vision_start_token_id": VOCAB_SIZE},
    "qwen3_omni_moe": {
        "audio_config": _AUDIO | {"downsample_hidden_size": 8},
        "vision_start_token_id": VOCAB_SIZE,
    },
}
"""Of the whole, beside vision and text."""

_WHOLES["muse_glimmer"] = (
    "MuseGlimmer",
    {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    _text("muse_glimmer_text", **MUSE_GLIMMER),
)
WHOLES = tuple(_WHOLES)
"""Names that ``make_whole`` knows."""


def make_whole(directory: Path, name: str, **changes: object) -> PreTrainedModel:
    """Write the checkpoint of a whole with its tokenizer into ``directory`` and return the model itself, float32.

    ``changes`` are of its text's fields.
    """
    of_class, vision, text = _WHOLES[name]
    text = deepcopy(text) | changes  # configurations change what they are given
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": bool(text["tie_word_embeddings"])}
    config = getattr(transformers, f"{of_class}Config")(
        vision_config=deepcopy(vision), text_config=text, **deepcopy(_FIELDS.get(name, {})), **tied
    )
    config._attn_implementation = "eager"
    model = randomise(getattr(transformers, f"{of_class}ForConditionalGeneration")(config), name)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    if (
        name == "kimi_k25"
    ):  # As it is published; transformers 5.23 saves layers of the text under the name of those that see.
        rename_tensors(
            directory, lambda stored: stored.replace("language_model.model.blocks.", "language_model.model.layers.")
        )
    if name.startswith("molmo2"):  # transformers cuts what it has joined in halves.
        path, of_words = directory / "model.safetensors", "model.transformer.wte."
        tensors = load_file(path)
        joined = torch.cat([tensors.pop(f"{of_words}{part}") for part in ("embedding", "new_embedding")])
        tensors |= {
            f"{of_words}embedding": joined[:VOCAB_SIZE].clone(),
            f"{of_words}new_embedding": joined[VOCAB_SIZE:].clone(),
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return model


def rename_tensors(directory: Path, renamed: Callable[[str], str]) -> None:
    """Store all tensors under other names."""
    path = directory / "model.safetensors"
    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def change_config(directory: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    """Write config.json anew."""
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
