"""Text parts: checkpoints of several models in one, of which the decoder of text is served.

Owns: which they are, where their text's fields are, what these leave out. Must not know: tensors, how a family reads fields.

Such a checkpoint is read as one of the family that its text is of. Published files leave out fields of ``text_config``
that are as transformers' class has them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import TEXT_CONFIG, ConfigFields
from headway_executor.models.families.reading import architecture_of

_SUFFIX, _SUFFIX_OF_TEXTS = "ForConditionalGeneration", "ForCausalLM"
_TIED = "tie_word_embeddings"
_NONE: Mapping[str, Any] = MappingProxyType({})


class _Text(NamedTuple):
    """The family that reads a text's fields, the fields that may be left out, and those that the file does not decide.

    With ``has_sections``, positions are of time, height and width, each for some channels (M-RoPE, Wang et al. 2024, arXiv
    2409.12191). In a text all are the same number, so this is a plain rope. ``names``: what the file calls fields that the
    family has under another name.
    """

    architecture: str
    defaults: Mapping[str, Any] = _NONE
    fixed: Mapping[str, Any] = _NONE
    has_sections: bool = False
    names: Mapping[str, str] = _NONE


_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_GEMMA3N = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
}
_GEMMA4 = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_LFM3 = {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_MUSE_GLIMMER = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
}
_QWEN3_VL = {"rope_theta": 5e5, "max_position_embeddings": 128_000}
_QWEN3_VL_MOE = _QWEN3_VL | {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "num_local_experts": 60,
}
_QWEN2_VL = _Text(
    "Qwen2ForCausalLM",
    {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80},
    {"head_dim": None},
    has_sections=True,
)

_QWEN3_5_MOE = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
}
_QWEN3_5 = _QWEN3_5_MOE | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32}
_NO_WINDOW = {"use_sliding_window": False}
_GLM4V = _Text(
    "Glm4ForCausalLM",
    {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
    {"head_dim": None, "attention_bias": True},
    has_sections=True,
)
_GLM4V_MOE = _Text(
    "Glm4MoeForCausalLM",
    {"max_position_embeddings": 65_536, "attention_bias": True},
    {"use_qk_norm": False},
    has_sections=True,
)

_GLM_OCR = _Text(
    "Glm4ForCausalLM",
    {
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    {"attention_bias": False},
    has_sections=True,
)

_EXAONE4 = _Text(
    "Exaone4ForCausalLM", _LLAMA | {"vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384}
)
_PADDLE_OCR = _Text(
    "LlamaForCausalLM",
    {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        _TIED: True,
    },
    has_sections=True,
    names={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
)
_ERNIE_VL = _Text(
    "Ernie4_5_MoeForCausalLM",
    {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "moe_intermediate_size": [1536, 512],
    },
    {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
    has_sections=True,
)
_HUNYUAN_VL = _Text(
    "HunYuanDenseV1ForCausalLM",
    _LLAMA | {"vocab_size": 290_943, _TIED: True},
    has_sections=True,
    names={"head_dim": "attention_head_dim", "vocab_size": "org_vocab_size"},
)
_MOLMO2 = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN2_5_OMNI = _Text(
    "Qwen2ForCausalLM",
    {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
    },
    has_sections=True,
)
_QWEN3_OMNI_MOE = _Text(
    "Qwen3MoeForCausalLM",
    {
        "hidden_size": 2048,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": None,
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "eos_token_id": 151_645,
    },
    _NO_WINDOW,
    has_sections=True,
)

_STEP = {"vocab_size": 128_815, "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64}
_KIMI = _Text("DeepseekV3ForCausalLM", {_TIED: True})

_TEXTS = {
    "cohere2": _Text("Cohere2ForCausalLM"),
    "exaone4": _EXAONE4,
    "exaone4_5_text": _EXAONE4,
    "gemma2": _Text("Gemma2ForCausalLM"),
    "gemma3_text": _Text("Gemma3ForCausalLM", _GEMMA3),
    "gemma4_text": _Text("Gemma4ForCausalLM", _GEMMA4),
    "glm4v_moe_text": _GLM4V_MOE,
    "glm4v_text": _GLM4V,
    "gpt_oss": _Text("GptOssForCausalLM"),
    "granite": _Text("GraniteForCausalLM"),
    "granite4_vision_text": _Text("GraniteForCausalLM", _LLAMA),
    "granitemoehybrid": _Text("GraniteMoeHybridForCausalLM"),
    "hyperclovax": _Text("HyperCLOVAXForCausalLM"),
    "lfm2": _Text("Lfm2ForCausalLM"),
    "lfm3": _Text("Lfm3ForCausalLM", _LFM3),
    "lightonocr_text": _Text("Qwen3ForCausalLM"),
    "llama": _Text("LlamaForCausalLM", _LLAMA),
    "ministral3": _Text("Ministral3ForCausalLM"),
    "mistral": _Text("MistralForCausalLM", _LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8}),
    "mistral4": _Text("Mistral4ForCausalLM"),
    "mixtral": _Text("MixtralForCausalLM"),
    "phi3": _Text("Phi3ForCausalLM"),
    "qwen2": _Text("Qwen2ForCausalLM"),
    "qwen3": _Text("Qwen3ForCausalLM"),
    "qwen3_5_moe_text": _Text("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE, has_sections=True),
    "qwen3_5_text": _Text("Qwen3_5ForCausalLM", _QWEN3_5, has_sections=True),
    "qwen3_moe": _Text("Qwen3MoeForCausalLM"),
    "smollm3": _Text("SmolLM3ForCausalLM"),
}
"""By the ``model_type`` of ``text_config``, where the whole may have several."""

_OPEN = {
    "AyaVision": "cohere2",
    "Cohere2Vision": "cohere2",
    "Glm46V": "glm4v_text",
    "Exaone4_5_": "exaone4",
    "FastVlm": "qwen2",
    "Granite4Vision": "granite4_vision_text",
    "HyperCLOVAXVisionV2": "hyperclovax",
    "Idefics2": "mistral",
    "Idefics3": "llama",
    "InternVL": "qwen2",
    "Lfm2Vl": "lfm2",
    "Lfm3Vl": "lfm3",
    "LightOnOCR": "qwen3",
    "LightOnOcr": "qwen3",
    "Llava": "llama",
    "LlavaNext": "llama",
    "LlavaNextVideo": "llama",
    "LlavaOnevision": "qwen2",
    "MiniCPMOcr": "qwen3_5_text",
    "MiniCPMV4_6": "qwen3_5_text",
    "MiniCPMV4_7": "qwen3_5_text",
    "Mistral3": "mistral",
    "Ovis2": "qwen2",
    "PerceptionLM": "llama",
    "Qwen2Audio": "qwen2",
    "SmolVLM": "llama",
    "VideoLlama3": "qwen2",
    "VipLlava": "llama",
    "Voxtral": "llama",
}
"""Wholes of which the text may be of several families, and the ``model_type`` of one that names none."""

_OWN = {
    "Ernie4_5_VLMoe": _ERNIE_VL,
    "Ernie4_5_VL_Moe": _ERNIE_VL,
    "Gemma3": _TEXTS["gemma3_text"],
    "Gemma3n": _Text("Gemma3nForCausalLM", _GEMMA3N),
    "Gemma4": _TEXTS["gemma4_text"],
    "Gemma4Unified": _Text("Gemma4UnifiedForCausalLM", _GEMMA4),
    "Glm4v": _GLM4V,
    "Glm4vMoe": _GLM4V_MOE,
    "GlmOcr": _GLM_OCR,
    "HunYuanVL": _HUNYUAN_VL,
    "KimiK25": _KIMI,
    "Kimi_K25": _KIMI,
    "Llama4": _Text("Llama4ForCausalLM"),
    "Molmo2": _Text("Molmo2TextForCausalLM", _MOLMO2),
    "MuseGlimmer": _Text("MuseGlimmerForCausalLM", _MUSE_GLIMMER),
    "NemotronHOmni": _Text("NemotronHForCausalLM"),
    "PaddleOCRVL": _PADDLE_OCR,
    "Qwen2VL": _QWEN2_VL,
    "Qwen2_5Omni": _QWEN2_5_OMNI,
    "Qwen2_5OmniThinker": _QWEN2_5_OMNI,
    "Qwen2_5_VL": _QWEN2_VL,
    "Qwen3OmniMoe": _QWEN3_OMNI_MOE,
    "Qwen3OmniMoeThinker": _QWEN3_OMNI_MOE,
    "Qwen3VL": _Text("Qwen3ForCausalLM", _QWEN3_VL, _NO_WINDOW, has_sections=True),
    "Qwen3_5": _TEXTS["qwen3_5_text"],
    "Qwen3_5Moe": _TEXTS["qwen3_5_moe_text"],
    "Step3p7": _Text("Step3p5ForCausalLM", _STEP),
    "Qwen3VLMoe": _Text("Qwen3MoeForCausalLM", _QWEN3_VL_MOE, _NO_WINDOW | {"norm_topk_prob": True}, has_sections=True),
}
"""Wholes with a text of their own."""

_NAMED = dict.fromkeys(("KimiK25", "Kimi_K25"), ("deepseek_v3", "kimi_k2"))
"""What the ``model_type`` of a text of these may be."""

_PARTS = dict.fromkeys(("Qwen2_5Omni", "Qwen3OmniMoe"), "thinker_config")
"""What is in these a whole by itself, beside a part that speaks, and has the text."""

_PUBLISHED_AS = {
    "HCXVisionV2ForCausalLM": "HyperCLOVAXVisionV2",
    "LlavaQwen2ForCausalLM": "FastVlm",
    "NemotronH_Nano_Omni_Reasoning_V3": "NemotronHOmni",
    "NemotronH_Nano_VL_V2": "NemotronHOmni",
    "NemotronH_Omni_Reasoning_V3": "NemotronHOmni",
    "Qwen2_5OmniModel": "Qwen2_5Omni",
}
"""Other names of wholes."""

_CHAT, _OTHER_CONFIG = "InternVLChatModel", "llm_config"
"""A whole as it was published before transformers had it, and where it and others have their text's fields."""

_SECTIONED = {"mrope": "default", "xdrope": "dynamic"}
"""What kinds of ropes of sections are in a text."""

_INDEX = "an index of the keys that a query sees"
_REASONS = {
    "DeepseekV4": f"{_INDEX}, and several hidden states of a token that are mixed (hyper-connections)",
    "Glm5Next": f"{_INDEX}, and several hidden states of a token that are mixed (hyper-connections)",
    "MistralLarge4": f"{_INDEX}, and layers that share compressed rows",
    "Mllama": "layers that attend to pictures",
    "MuseSpark": "gates of the hidden state, and norms of what each expert gives",
    "PaliGemma": "attention to later tokens of the prompt",
}
"""What no backend has, of wholes and of models of text alone that are often asked for."""


def text_part_of(fields: ConfigFields) -> ConfigFields | None:
    """The fields of the text of a whole, for its family; None: the checkpoint is of one model.

    Raises:
        ModelFilesError: the text is of no family that is served.
    """
    name = architecture_of(fields)
    whole = _PUBLISHED_AS.get(name, name.removesuffix(_SUFFIX))
    reason = _REASONS.get(whole.removesuffix(_SUFFIX_OF_TEXTS))
    if reason is not None:
        raise ModelFilesError(f"{fields.source}: architectures [{name!r}] is not supported, which has {reason}")
    if whole == name != _CHAT:
        return None
    part = fields.section(_PARTS[whole]) if whole in _PARTS else None
    if part is not None:
        fields = ConfigFields(part.source, {**fields.values, **part.values})
    inner = fields.section(TEXT_CONFIG) or fields.section(_OTHER_CONFIG)
    text = _text_of(fields, inner, whole)
    # Qwen2-VL was published with the fields of its text beside those of the whole.
    values = dict((inner or fields).values)
    values |= {field: value for field, value in text.defaults.items() if values.get(field) is None} | dict(text.fixed)
    for either in (("dtype", "torch_dtype"), ("eos_token_id",)):
        if any(fields.values.get(field) is not None for field in either):
            values |= {field: fields.values.get(field) for field in either}
    said = [section for section in (fields, inner) if section is not None and section.values.get(_TIED) is not None]
    values |= {"architectures": [text.architecture]}
    values |= {_TIED: any(section.flag(_TIED, default=False) for section in said)} if said else {}
    if text.has_sections:
        values |= {field: _plain(values.get(field)) for field in ("rope_scaling", "rope_parameters")}
    return ConfigFields(fields.source if inner is None else inner.source, values).renamed(**text.names)


def _text_of(fields: ConfigFields, inner: ConfigFields | None, whole: str) -> _Text:
    if whole in _NAMED and inner is not None and inner.values.get("model_type") not in (None, *_NAMED[whole]):
        raise inner.refuse("model_type", ", ".join(_NAMED[whole]))
    if whole in _OWN:
        return _OWN[whole]
    default = "" if whole == _CHAT else _OPEN.get(whole)
    if default is None:
        served = ", ".join(sorted(_OPEN.keys() | _OWN.keys()))
        raise fields.refuse("architectures", f"the text of {served}, each with {_SUFFIX}")
    inner = inner or ConfigFields(fields.source, {})
    kind = inner.values.get("model_type") or default
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise inner.refuse("model_type", ", ".join(_TEXTS))
    return _TEXTS[kind]


def _plain(rope: object) -> object:
    """A rope of sections as the one that it is in a text."""
    if not isinstance(rope, dict):
        return rope
    kind = rope.get("rope_type", rope.get("type"))
    plain = _SECTIONED.get(kind) if isinstance(kind, str) else None
    return rope if plain is None else rope | {"rope_type": plain}
