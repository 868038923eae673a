"""The supported model families: from config.json to a ``ModelConfig``.

Owns: the list of families, refusing other models. Must not know: the fields of one family, tensors.

A family is one small file here that reads its fields; see docs/models.md.
"""

import difflib
import re
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import CONFIG_FILE, GENERATION_CONFIG_FILE, ConfigFields, read_json_object
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.afmoe import read_afmoe
from headway_executor.models.families.apertus import read_apertus
from headway_executor.models.families.bamba import read_bamba
from headway_executor.models.families.bert import ENCODERS, PAIRS_HEAD, RERANKERS
from headway_executor.models.families.biogpt import read_biogpt, read_xglm
from headway_executor.models.families.bitnet import read_bitnet
from headway_executor.models.families.bloom import read_bloom
from headway_executor.models.families.cohere import read_cohere, read_cohere2, read_cohere2_moe
from headway_executor.models.families.dbrx import read_dbrx
from headway_executor.models.families.deepseek import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_deepseek_v32,
    read_glm4_moe_lite,
    read_glm_moe_dsa,
    read_minicpm3,
    read_mistral4,
    read_youtu,
)
from headway_executor.models.families.ernie import read_ernie, read_ernie_moe
from headway_executor.models.families.exaone import read_exaone4, read_exaone_moe
from headway_executor.models.families.falcon import read_falcon
from headway_executor.models.families.falcon_h1 import read_falcon_h1
from headway_executor.models.families.gemma import read_gemma1, read_gemma2, read_vaultgemma
from headway_executor.models.families.gemma3 import read_gemma3
from headway_executor.models.families.gemma3n import read_gemma3n
from headway_executor.models.families.gemma4 import read_gemma4, read_gemma4_unified
from headway_executor.models.families.glm import read_glm, read_glm4, read_glm4_moe, read_solar_open
from headway_executor.models.families.gpt2 import read_gpt2
from headway_executor.models.families.gpt_bigcode import read_gpt_bigcode
from headway_executor.models.families.gpt_neo import read_gpt_neo
from headway_executor.models.families.gpt_neox import read_gpt_neox
from headway_executor.models.families.gpt_oss import read_gpt_oss
from headway_executor.models.families.gptj import read_codegen, read_gptj
from headway_executor.models.families.granite import read_granite, read_granite_moe, read_hyperclovax
from headway_executor.models.families.granite_hybrid import read_granite_hybrid
from headway_executor.models.families.granite_swa import read_granite_moe_swa, read_granite_swa
from headway_executor.models.families.hunyuan import read_hunyuan, read_hunyuan_moe, read_hunyuan_v3
from headway_executor.models.families.jamba import read_jamba
from headway_executor.models.families.kimi_linear import read_bailing_hybrid, read_kimi_linear
from headway_executor.models.families.kolibri import read_kolibri1
from headway_executor.models.families.laguna import read_laguna
from headway_executor.models.families.lfm2 import read_lfm2, read_lfm2_moe, read_lfm3
from headway_executor.models.families.llama import (
    read_arcee,
    read_cwm,
    read_helium,
    read_internlm3,
    read_iquest_coder,
    read_llama,
    read_seed_oss,
)
from headway_executor.models.families.llama4 import read_llama4
from headway_executor.models.families.mamba1 import read_falcon_mamba, read_mamba
from headway_executor.models.families.mamba2 import read_mamba2
from headway_executor.models.families.mimo import read_mimo_v2_flash
from headway_executor.models.families.minimax import read_minimax, read_minimax_text_01
from headway_executor.models.families.mistral import read_ministral, read_ministral3, read_mistral
from headway_executor.models.families.mixtures import (
    read_dots1,
    read_flex_olmo,
    read_mellum,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from headway_executor.models.families.modernbert_decoder import read_modernbert_decoder
from headway_executor.models.families.molmo import read_molmo2
from headway_executor.models.families.mpt import read_mpt
from headway_executor.models.families.muse import read_muse_glimmer
from headway_executor.models.families.nanochat import read_nanochat
from headway_executor.models.families.nemotron_h import read_nemotron_h
from headway_executor.models.families.olmo import read_olmo1, read_olmo2, read_olmo3
from headway_executor.models.families.olmo_hybrid import read_olmo_hybrid
from headway_executor.models.families.opt import read_opt
from headway_executor.models.families.persimmon import read_persimmon
from headway_executor.models.families.phi import read_phi, read_phi3, read_phimoe
from headway_executor.models.families.qwen import read_qwen2, read_qwen3
from headway_executor.models.families.qwen_hybrid import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from headway_executor.models.families.reading import (
    CHUNKED,
    FULL,
    INDEXED,
    SLIDING,
    architecture_of,
    kinds_of,
    layer_types_of,
    refuse_unless,
)
from headway_executor.models.families.recurrent_gemma import read_recurrent_gemma
from headway_executor.models.families.smollm import read_smollm3
from headway_executor.models.families.stablelm import read_jais2, read_nemotron, read_stablelm
from headway_executor.models.families.starcoder import read_starcoder2
from headway_executor.models.families.step import read_step
from headway_executor.models.families.text_part import text_part_of

FAMILIES: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "AfmoeForCausalLM": read_afmoe,
    "ApertusForCausalLM": read_apertus,
    "ArceeForCausalLM": read_arcee,
    "BioGptForCausalLM": read_biogpt,
    "BitNetForCausalLM": read_bitnet,
    "BloomForCausalLM": read_bloom,
    "CodeGenForCausalLM": read_codegen,
    "BailingHybridForCausalLM": read_bailing_hybrid,
    "BambaForCausalLM": read_bamba,
    "Cohere2ForCausalLM": read_cohere2,
    "Cohere2MoeForCausalLM": read_cohere2_moe,
    "CohereForCausalLM": read_cohere,
    "CwmForCausalLM": read_cwm,
    "DbrxForCausalLM": read_dbrx,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "DeepseekV32ForCausalLM": read_deepseek_v32,
    "Dots1ForCausalLM": read_dots1,
    "Ernie4_5ForCausalLM": read_ernie,
    "Ernie4_5_MoeForCausalLM": read_ernie_moe,
    "Exaone4ForCausalLM": read_exaone4,
    "ExaoneMoeForCausalLM": read_exaone_moe,
    "FalconForCausalLM": read_falcon,
    "FalconH1ForCausalLM": read_falcon_h1,
    "FalconMambaForCausalLM": read_falcon_mamba,
    "FlexOlmoForCausalLM": read_flex_olmo,
    "GPTBigCodeForCausalLM": read_gpt_bigcode,
    "GPT2ForCausalLM": read_gpt2,
    "GPTJForCausalLM": read_gptj,
    "GPTNeoForCausalLM": read_gpt_neo,
    "GPTNeoXForCausalLM": read_gpt_neox,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3nForCausalLM": read_gemma3n,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4UnifiedForCausalLM": read_gemma4_unified,
    "GemmaForCausalLM": read_gemma1,
    "Glm4ForCausalLM": read_glm4,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
    "GlmForCausalLM": read_glm,
    "GlmMoeDsaForCausalLM": read_glm_moe_dsa,
    "GptOssForCausalLM": read_gpt_oss,
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeHybridForCausalLM": read_granite_hybrid,
    "GraniteMoeSWAForCausalLM": read_granite_moe_swa,
    "GraniteMoeSharedForCausalLM": read_granite_moe,
    "GraniteSWAForCausalLM": read_granite_swa,
    "HunYuanDenseV1ForCausalLM": read_hunyuan,
    "HunYuanMoEV1ForCausalLM": read_hunyuan_moe,
    "HeliumForCausalLM": read_helium,
    "HYV3ForCausalLM": read_hunyuan_v3,
    "HyperCLOVAXForCausalLM": read_hyperclovax,
    "IQuestCoderForCausalLM": read_iquest_coder,
    "InternLM3ForCausalLM": read_internlm3,
    "Jais2ForCausalLM": read_jais2,
    "LagunaForCausalLM": read_laguna,
    "JambaForCausalLM": read_jamba,
    "KimiLinearForCausalLM": read_kimi_linear,
    "Kolibri1ForCausalLM": read_kolibri1,
    "Lfm2ForCausalLM": read_lfm2,
    "Lfm2MoeForCausalLM": read_lfm2_moe,
    "Lfm3ForCausalLM": read_lfm3,
    "Llama4ForCausalLM": read_llama4,
    "LlamaForCausalLM": read_llama,
    "MPTForCausalLM": read_mpt,
    "Mamba2ForCausalLM": read_mamba2,
    "MambaForCausalLM": read_mamba,
    "MellumForCausalLM": read_mellum,
    "MiMoV2FlashForCausalLM": read_mimo_v2_flash,
    "MiniCPM3ForCausalLM": read_minicpm3,
    "MiniMaxForCausalLM": read_minimax,
    "MiniMaxM1ForCausalLM": read_minimax_text_01,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "MiniMaxText01ForCausalLM": read_minimax_text_01,
    "Ministral3ForCausalLM": read_ministral3,
    "MinistralForCausalLM": read_ministral,
    "Mistral4ForCausalLM": read_mistral4,
    "MistralForCausalLM": read_mistral,
    "MixtralForCausalLM": read_mixtral,
    "Molmo2TextForCausalLM": read_molmo2,
    "ModernBertDecoderForCausalLM": read_modernbert_decoder,
    "MptForCausalLM": read_mpt,
    "MuseGlimmerForCausalLM": read_muse_glimmer,
    "NanoChatForCausalLM": read_nanochat,
    "NemotronForCausalLM": read_nemotron,
    "NemotronHForCausalLM": read_nemotron_h,
    "OPTForCausalLM": read_opt,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "OlmoHybridForCausalLM": read_olmo_hybrid,
    "OlmoForCausalLM": read_olmo1,
    "OlmoeForCausalLM": read_olmoe,
    "PersimmonForCausalLM": read_persimmon,
    "Phi3ForCausalLM": read_phi3,
    "PhiForCausalLM": read_phi,
    "PhiMoEForCausalLM": read_phimoe,
    "PhimoeForCausalLM": read_phimoe,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "RecurrentGemmaForCausalLM": read_recurrent_gemma,
    "SeedOssForCausalLM": read_seed_oss,
    "SmolLM3ForCausalLM": read_smollm3,
    "SolarOpenForCausalLM": read_solar_open,
    "StableLmForCausalLM": read_stablelm,
    "Step3p5ForCausalLM": read_step,
    "Starcoder2ForCausalLM": read_starcoder2,
    "XGLMForCausalLM": read_xglm,
    "VaultGemmaForCausalLM": read_vaultgemma,
    "YoutuForCausalLM": read_youtu,
}
"""How to read the configuration of each architecture."""

_SUFFIX, _WITHOUT_HEAD = "ForCausalLM", "Model"
_OTHER_ENDS = re.compile("(LMHead)?Model$")
_MOST_NAMED, _MOST_COMPARED = 6, 64
_KNOWN_CODE = frozenset(
    {
        "modeling_afmoe.AfmoeForCausalLM",
        "modeling_bitnet.BitNetForCausalLM",
        "llava_qwen.LlavaQwen2ForCausalLM",
        "modeling.NemotronH_Nano_Omni_Reasoning_V3",
        "modeling.NemotronH_Nano_VL_V2",
        "modeling_phi3.Phi3ForCausalLM",
        "modeling_phimoe.PhiMoEForCausalLM",
        "modeling_deepseek.DeepseekV2ForCausalLM",
        "modeling_deepseek.DeepseekV3ForCausalLM",
        "modeling_ernie4_5.Ernie4_5_ForCausalLM",
        "modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM",
        "modeling_ernie4_5_vl.Ernie4_5_VLMoeForConditionalGeneration",
        "modeling_hyperclovax.HyperCLOVAXForCausalLM",
        "hunyuan.HunYuanMoEV1ForCausalLM",
        "modeling_falcon.FalconForCausalLM",
        "modeling_kimi.KimiLinearForCausalLM",
        "modeling_molmo2.Molmo2ForConditionalGeneration",
        "modeling_mpt.MPTForCausalLM",
        "modeling_internlm3.InternLM3ForCausalLM",
        "modeling_iquestcoder.IQuestCoderForCausalLM",
        "modeling_minicpm.MiniCPM3ForCausalLM",
        "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        "modeling_mimo_v2_flash.MiMoV2FlashForCausalLM",
        "modeling_laguna.LagunaForCausalLM",
        "modeling_step3p5.Step3p5ForCausalLM",
        "modeling_step3p7.Step3p7ForConditionalGeneration",
        "modeling_internvl_chat.InternVLChatModel",
        "modeling_minimax_m1.MiniMaxM1ForCausalLM",
        "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        "modeling_minimax_text_01.MiniMaxText01ForCausalLM",
        "modeling_nemotron_h.NemotronHForCausalLM",
        "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration",
    }
)
"""Code in checkpoints that is older than transformers' own of the same model. It is not run either.

A checkpoint made of one from the hub names the repository before it, with ``--`` between.
"""

_WAYS_OF_LOADING = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
"""The first that is named counts: ``AutoModel`` may be the same without a head."""


def read_model_config(directory: Path) -> ModelConfig:
    """Read and check a checkpoint's configuration.

    Raises:
        ModelFilesError: the file is missing or damaged, or has a value that cannot be served.
    """
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            made = "; headway gguf makes one of a GGUF file" if directory.suffix == ".gguf" else ""
            raise ModelFilesError(f"{directory}: not a model directory{made}")
    except FileNotFoundError:
        raise ModelFilesError(f"{directory}: no such model directory") from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{directory}: {getattr(error, 'strerror', None) or error}") from None
    whole = read_json_object(directory / CONFIG_FILE)
    text = text_part_of(whole)
    fields = whole if text is None else text
    read = FAMILIES.get(_OTHER_ENDS.sub(_SUFFIX, architecture_of(fields)))
    if read is None:
        raise _unknown(fields)
    _check_code(whole)
    refuse_unless(fields, "is_causal", True)  # Decoders made into models for vectors may let tokens see later ones.
    config = _within_chunks(read(fields))
    _check_kinds(fields, config)
    if text is not None:
        tensors = msgspec.structs.replace(config.names, is_part=True)
        config = msgspec.structs.replace(config, architecture=architecture_of(whole), names=tensors)
    return _with_generation_config(config, directory / GENERATION_CONFIG_FILE)


def _unknown(fields: ConfigFields) -> ModelFilesError:
    """Names what is spelled most alike: there are too many families for a line."""
    families = [name.removesuffix(_SUFFIX) for name in FAMILIES]
    asked = _OTHER_ENDS.sub("", architecture_of(fields).removesuffix(_SUFFIX))
    near = difflib.get_close_matches(asked[:_MOST_COMPARED], families, _MOST_NAMED, cutoff=0.0)
    encoders = ", ".join(sorted(name.removesuffix(_WITHOUT_HEAD) for name in ENCODERS - RERANKERS.keys()))
    return fields.refuse(
        "architectures",
        f"one of the {len(families)} in the table of docs/models.md, such as {', '.join(near)}, each with {_SUFFIX} or "
        f"{_WITHOUT_HEAD}; or {encoders}, each with {_WITHOUT_HEAD} or {PAIRS_HEAD}",
    )


def _within_chunks(config: ModelConfig) -> ModelConfig:
    """See ``LayerConfig.chunk``."""
    chunk = min((layer.chunk for layer in config.layers if layer.chunk is not None), default=config.context)
    if chunk >= config.context:
        return config
    note = f"attention is in chunks of {chunk} tokens, so the context has as many here, of the model's {config.context}"
    return msgspec.structs.replace(config, context=chunk, context_note=note)


def _check_kinds(fields: ConfigFields, config: ModelConfig) -> None:
    """Not all families read ``layer_types``; none may be asked there for what it does not do. Those with states do."""
    if config.has_states:
        return
    if config.has_index:
        kinds_of(fields, [INDEXED] * config.num_layers, [INDEXED])
        return
    kinds = [CHUNKED if layer.chunk else FULL if layer.window is None else SLIDING for layer in config.layers]
    if layer_types_of(fields, kinds) != kinds:
        raise fields.refuse("layer_types", "as this family has its windows, or absent")


def _check_code(fields: ConfigFields) -> None:
    named = fields.values.get("auto_map")
    model = next((named[way] for way in _WAYS_OF_LOADING if way in named), None) if isinstance(named, dict) else None
    if named is not None and not (isinstance(model, str) and model.rpartition("--")[2] in _KNOWN_CODE):
        raise ModelFilesError(f"{fields.source}: auto_map asks for code from the checkpoint, which is never run")


def _with_generation_config(config: ModelConfig, path: Path) -> ModelConfig:
    named = read_json_object(path).token_ids("eos_token_id") if path.exists() else ()
    token_ids = named or config.eos_token_ids
    wide = [token_id for token_id in token_ids if token_id >= config.vocab_size]
    if wide:
        file = path.name if named else CONFIG_FILE
        raise ModelFilesError(f"{file}: eos_token_id {wide[0]} is not below vocab_size {config.vocab_size}")
    return msgspec.structs.replace(config, eos_token_ids=token_ids)
