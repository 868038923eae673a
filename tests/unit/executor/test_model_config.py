"""Reading config.json: what transformers would understand by it, or one clear line."""

import json

import msgspec
import pytest
import torch
from transformers import AutoConfig
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.hunyuan_v1_dense import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints import CONTEXT, FAMILIES, ON_OPERATORS, WITHOUT_ROPE, make_model
from headway_executor.backend import ModelFilesError
from headway_executor.models.alibi import score_biases
from headway_executor.models.attention_config import AlibiConfig, AttentionConfig
from headway_executor.models.families import read_model_config
from headway_executor.models.rope import interleaved, rotate_, rotations

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
_MINIMAX_CODE = "modeling_minimax_m2.MiniMaxM2ForCausalLM"
NAME_THETA = {
    "gemma4",
    "gemma4-experts",
    "gemma4-keys",
    "gemma4-shared",
    "laguna",
    "laguna-channels",
    "mellum",
    "mimo_v2",
    "cohere2_moe",
    "cohere2_moe-sigmoid",
    "granitehybrid-experts",
    "lfm3",
    "lfm3-plain",
    "nemotron_h",
    "mamba2",
    "mamba",
    "kimi_linear",
    "bailing_hybrid",
    "bailing_hybrid-soft",
    "jamba",
    "falcon_mamba",
}
"""Their files have to, or they have no positions."""
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


def read(tmp_path, values, generation=None):
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_agrees_with_transformers_on_every_family(tmp_path, name):
    make_model(name).save_pretrained(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.allow_global_per_layer_attribute_access = True  # Those of most layers.
    ours = read_model_config(tmp_path)
    assert ours.architecture == theirs.architectures[0]
    num_heads = getattr(theirs, "num_attention_heads", 1)
    assert ours.num_heads == num_heads
    assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", num_heads)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    # That of BioGPT is, and not used.
    fields = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
    # Those of OLMo and OPT are not in their configuration.
    said = (getattr(theirs, field, None) for field in fields)
    if name != "minimax-factors":  # Its eps is divided by the square of a factor.
        assert ours.norm.eps == next((eps for eps in said if eps is not None), 1e-5)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    if name == "gpt_neo":
        kinds = [f"{'sliding' if kind == 'local' else 'full'}_attention" for kind in theirs.attention_layers]
        window = theirs.window_size
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in ours.layers] == windows
    for kind, layer in zip(kinds, ours.layers, strict=True):
        parameters = getattr(theirs, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}
        rope = parameters.get(kind, parameters)
        assert layer.rope is None or (layer.rope.kind, layer.rope.theta) == (rope["rope_type"], rope["rope_theta"])


def test_both_spellings_of_rope_and_dtype_mean_the_same(tmp_path):
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = LLAMA | {
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
        "rope_scaling": scaling | {"type": "llama3"},
    }
    new = LLAMA | {
        "dtype": "bfloat16",
        "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5},
    }
    assert read(tmp_path, old) == read(tmp_path, new)


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path):
    assert read(tmp_path, LLAMA).eos_token_ids == (2,)
    assert read(tmp_path, LLAMA, {"eos_token_id": [9, 7]}).eos_token_ids == (7, 9)
    assert read(tmp_path, LLAMA, {"temperature": 0.6}).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "file"),
    [
        (999, None, "config.json"),
        ([2, 999], {}, "config.json"),
        (999, {"temperature": 0.6}, "config.json"),
        (2, {"eos_token_id": 999}, "generation_config.json"),
        (999, {"eos_token_id": [1, 999]}, "generation_config.json"),
    ],
)
def test_an_end_of_sequence_id_that_is_too_large_is_blamed_on_its_file(tmp_path, in_config, in_generation, file):
    with pytest.raises(ModelFilesError, match=rf"^{file}: eos_token_id 999 is not below vocab_size 320$"):
        read(tmp_path, LLAMA | {"eos_token_id": in_config}, in_generation)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            128,
        ),
    ],
)
def test_context_includes_the_rope_scaling(tmp_path, rope, context):
    assert read(tmp_path, LLAMA | {"rope_parameters": rope}).context == context


@pytest.mark.parametrize("name", sorted({name for name in FAMILIES if name.startswith("llama")} - {"llama4-yarn"}))
def test_rotations_equal_transformers(tmp_path, name):
    """But of Llama 4, which normalises what is rotated, so that the factor of yarn does not count."""
    model = make_model(name)
    model.save_pretrained(tmp_path)
    config = model.config
    ours = read_model_config(tmp_path)
    num_positions = config.max_position_embeddings
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    table = rotations(ours.ropes[0], ours.head_dim, num_positions)
    half = ours.head_dim // 2
    torch.testing.assert_close(table.real, cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table.imag, sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_heads", [1, 5, 12, 16, 71, 112])
def test_biases_of_scores_equal_transformers(num_heads):
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 16, "rotary_dim": 16, "scale": 0.25}
    queries, keys = torch.tensor([7, 500]), torch.arange(501)
    mask = torch.ones(1, 501, dtype=torch.long)
    exact = score_biases(AttentionConfig(alibi=AlibiConfig(), **sizes), 501).of(queries, keys)
    rounded = score_biases(AttentionConfig(alibi=AlibiConfig(is_rounded=True), **sizes), 501).of(queries, keys)
    theirs = bloom.build_alibi_tensor(mask, num_heads, torch.float32)
    torch.testing.assert_close(exact[:, 1], (theirs - theirs[..., -1:])[:, 0], rtol=1e-5, atol=1e-4)
    # Softmax sees differences alone, and no key behind the query.
    torch.testing.assert_close(exact[:, 0, :8], exact[:, 1, 493:])
    theirs = falcon.build_alibi_tensor(mask, num_heads, torch.float32)[:, 0] * 0.25
    assert torch.equal(rounded, theirs[:, None].expand(-1, 2, -1))


def test_rotating_interleaved_pairs_keeps_every_dot_product():
    torch.manual_seed(0)
    heads = torch.randn(2, 6, 3, 8)
    angles = torch.rand(6, 1, 4) * 3
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    half = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    expected = torch.einsum("thd,shd->hts", *(heads * cos + half * sin))
    ours = heads[..., interleaved(8)].contiguous()
    for part in ours:
        rotate_(part, torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(torch.einsum("thd,shd->hts", *ours), expected)


REFUSED = [
    ({"architectures": ["T5LMHeadModel"]}, "architectures"),
    ({"architectures": None}, "architectures"),
    ({"architectures": ["InternLM2ForCausalLM"], "auto_map": {"AutoModelForCausalLM": "a.B"}}, "architectures"),
    ({"num_attention_heads": 5}, "num_key_value_heads"),
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"hidden_size": None}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": -1}, "hidden_size"),
    ({"vocab_size": 1 << 40}, "vocab_size"),
    ({"vocab_size": True}, "vocab_size"),
    ({"hidden_act": "quick_gelu"}, "hidden_act"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_theta": "1e4"}, "rope_theta"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ({"eos_token_id": 320}, "eos_token_id"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "auto_map"),
    ({"is_causal": False}, "is_causal"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED)
def test_refuses_with_one_line_that_names_the_field(tmp_path, changes, field):
    with pytest.raises(ModelFilesError, match=field) as caught:
        read(tmp_path, LLAMA | changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < (1000 if field == "architectures" else 300), "families are named"


@pytest.mark.parametrize("name", ["GPT2NeoForCausalLM", "Qwen4ForCausalLM", "x" * 1000])
def test_an_unknown_family_is_answered_with_those_of_like_names_and_where_all_are(tmp_path, name):
    with pytest.raises(ModelFilesError, match=r"the table of docs/models\.md") as caught:
        read(tmp_path, LLAMA | {"architectures": [name]})
    assert name[0] == "x" or any(near in str(caught.value) for near in ("GPTNeo", "Qwen3"))
    assert len(str(caught.value)) < 1000


GEMMA4 = {"hidden_size_per_layer_input": 0}
ERNIE_VL = {"moe_intermediate_size": [32, 16]}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": None}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
OTHERS_REFUSED = [
    ("Gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma2", {"sliding_window": None, "head_dim": 8}, "sliding_window"),
    ("Gemma2", {"hidden_activation": "mish"}, "hidden_activation"),
    ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("Gemma3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("Gemma3", {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type"),
    ("GraniteSWA", {"layer_rope_theta": [1.0]}, "layer_rope_theta"),
    ("GraniteMoeSWA", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
    ("Gemma4", GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("Gemma4", GEMMA4 | {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
    ("Gemma4", GEMMA4 | {"per_layer_config": {"0": {"sliding_window": 8}}}, "per_layer_config: 0"),
    ("Gemma4", GEMMA4 | {"enable_moe_block": True, "num_experts": 4}, "top_k_experts"),
    ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    ("Gemma4", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
    ("Gemma4", {"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input"),
    ("Ernie4_5_Moe", ERNIE_VL | {"moe_num_experts": [4, 2]}, "moe_num_experts"),
    ("Ernie4_5_Moe", ERNIE_VL | {"moe_intermediate_size": [8]}, "moe_intermediate_size"),
    ("Ernie4_5_Moe", ERNIE_VL | {"mlp_layer_types": ["sparse", "sparse"]}, "mlp_layer_types"),
    ("Molmo2Text", {"qk_norm_type": "layer"}, "qk_norm_type"),
    ("Molmo2Text", {"rope_scaling_layers": [2]}, "rope_scaling_layers"),
    ("Phi3", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "short_factor"),
    ("Phi3", {"rope_scaling": LONG | {"short_factor": None}}, "short_factor"),
    ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
    ("Phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
    ("Phi3", {"partial_rotary_factor": 0.2}, "rotating 3 of 16"),
    ("Mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("Granite", {"logits_scaling": 0}, "logits_scaling"),
    ("Granite", {"residual_multiplier": "1"}, "residual_multiplier"),
    ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
    ("SmolLM3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ("Starcoder2", {"norm_epsilon": -1}, "norm_epsilon"),
    ("GPTNeoX", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("GPTNeoX", {"num_key_value_heads": 4, "head_dim": 8}, "head_dim"),
    ("GPTNeoX", {"num_key_value_heads": 4, "rotary_pct": 1.5}, "rotary_pct"),
    ("Cohere2", {"logit_scale": 0}, "logit_scale"),
    ("Cohere2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("Olmo2", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("Mixtral", {"num_local_experts": 0}, "num_local_experts"),
    ("Mixtral", {"num_local_experts": 2000}, "num_local_experts"),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("Qwen2Moe", {"mlp_only_layers": [2]}, "mlp_only_layers"),
    ("Qwen2Moe", {"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
    ("Qwen3Moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
    ("Olmoe", {"clip_qkv": 0.0}, "clip_qkv"),
    ("Dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights"),
    ("Dbrx", {"ffn_config": {"moe_top_k": 5}}, "moe_top_k"),
    ("Dbrx", {"attn_config": {"kv_n_heads": 3}}, "num_key_value_heads"),
    ("Dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("GptOss", {"swiglu_limit": 10.0}, "swiglu_limit"),
    ("GptOss", {"rope_scaling": None}, "rope_scaling"),
    ("DeepseekV2", LATENT | {"norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2", LATENT | {"topk_method": "noaux_tc"}, "topk_method"),
    ("DeepseekV2", LATENT | {"topk_method": "group_limited_greedy"}, "n_group"),
    ("DeepseekV2", LATENT | {"v_head_dim": 200}, "v_head_dim"),
    ("DeepseekV2", LATENT | {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("DeepseekV2", LATENT | {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ("DeepseekV3", LATENT | {"n_group": 3}, "n_group"),
    ("DeepseekV3", LATENT | {"n_group": 256}, "n_group"),
    ("DeepseekV3", LATENT | {"n_group": 64, "topk_group": 1}, "topk_group"),
    ("DeepseekV3", LATENT | {"scoring_func": "softmax"}, "scoring_func"),
    ("DeepseekV3", LATENT | {"attention_bias": True}, "attention_bias"),
    ("DeepseekV3", LATENT | {"moe_layer_freq": 2}, "moe_layer_freq"),
]


@pytest.mark.parametrize(("family", "changes", "field"), OTHERS_REFUSED)
def test_every_family_refuses_what_it_cannot_be(tmp_path, family, changes, field):
    with pytest.raises(ModelFilesError, match=field) as caught:
        read(tmp_path, LLAMA | {"architectures": [f"{family}ForCausalLM"]} | changes)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_longrope_is_served_up_to_the_context_before_its_scaling(tmp_path):
    values = LLAMA | {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 1024, "rope_scaling": LONG}
    assert read(tmp_path, values | {"original_max_position_embeddings": 256}).context == 256
    assert read(tmp_path, values | {"rope_scaling": LONG | {"type": "su"}}).context == 1024


@pytest.mark.parametrize("code", ["phi3.Phi3", "deepseek.DeepseekV2", "deepseek.DeepseekV3"])
def test_code_that_is_older_than_transformers_own_is_not_asked_for(tmp_path, code):
    module, _, name = code.partition(".")
    values = LLAMA | {"architectures": [f"{name}ForCausalLM"]} | (LATENT if name != "Phi3" else {}) | {"n_group": 1}
    values |= {"topk_group": 1}
    known = {"AutoConfig": f"configuration_{module}.{name}Config"}
    for repository in ("", "org/name--"):
        auto_map = known | {"AutoModelForCausalLM": f"{repository}modeling_{module}.{name}ForCausalLM"}
        assert read(tmp_path, values | {"auto_map": auto_map}) == read(tmp_path, values)
    for other in (f"other.{name}ForCausalLM", None, [f"modeling_{module}.{name}ForCausalLM"]):
        with pytest.raises(ModelFilesError, match="auto_map"):
            read(tmp_path, values | {"auto_map": known | {"AutoModelForCausalLM": other}})


def test_older_spellings_of_gemma_3_mean_the_same(tmp_path):
    base = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 16}
    old = base | {
        "sliding_window_pattern": 3,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    near, far = "sliding_attention", "full_attention"
    new = base | {
        "layer_types": [near, near, far] * 2,
        "rope_parameters": {
            near: {"rope_type": "default", "rope_theta": 2e4},
            far: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        },
    }
    assert read(tmp_path, old) == read(tmp_path, new)


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ({"index_topk_pattern": "FSF"}, ("full", "shared", "full")),
        ({"index_topk_freq": 2}, ("full", "full", "shared")),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, ("full", "shared", "full")),
        ({}, ("full", "full", "full")),
    ],
)
def test_the_layers_with_an_index_may_be_said_in_several_ways(tmp_path, said, kinds):
    model = make_model("glm_moe_dsa")
    values = model.config.to_dict() | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": None}
    assert type(model.config)(**values | said).indexer_types == list(kinds)
    config = read(tmp_path, values | said)
    assert tuple("shared" if layer.sees_as_before else "full" for layer in config.layers) == kinds


@pytest.mark.parametrize("name", [*FAMILIES, *ON_OPERATORS])
def test_what_a_file_leaves_out_is_what_transformers_takes_for_it(tmp_path, name):
    model = make_model(name)
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    usual = type(model.config)().to_dict()
    named = {field: value for field, value in values.items() if field not in usual or usual[field] != value}
    # What ends an answer is named by every published file.
    ends = {"architectures": values["architectures"], "eos_token_id": values["eos_token_id"]}
    assert read(tmp_path, named | ends) == read(tmp_path, values)


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("afmoe", {"attention_bias": True}, "attention_bias"),
        ("afmoe", {"num_expert_groups": 2}, "num_expert_groups"),
        ("laguna", {"attention_bias": True}, "attention_bias"),
        ("gpt_neo", {"attention_layers": ["global"] * 3}, "attention_layers"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 22}, "index_head_dim"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern"),
        ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": {"F": 3}}, "index_topk_pattern"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min"),
        ("ernie4_5_moe", {"moe_k": 7}, "moe_k"),
        ("exaone4", {"sliding_window": None}, "sliding_window"),
        ("gemma1", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("hunyuan", {"use_cla": True}, "use_cla"),
        ("hunyuan_moe", {"moe_topk": [2, 2, 3]}, "moe_topk"),
        ("hunyuan_moe", {"num_shared_expert": [2, 2, 2]}, "num_shared_expert"),
        ("hunyuan_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped"),
        ("hunyuan_v3", {"mlp_bias": True}, "mlp_bias"),
        ("hunyuan_v3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid"),
        ("internlm3", {"mlp_bias": False}, "mlp_bias"),
        ("iquest_coder", {"clip_qkv": 8.0}, "clip_qkv"),
        ("iquest_coder", {"use_sliding_window": True}, "use_sliding_window"),
        ("gemma3n", {"altup_active_idx": 1}, "altup_active_idx"),
        ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5, 1.0, 0.0, 0.0, 0.0]}, "activation_sparsity_pattern"),
        ("gemma3n", {"intermediate_size": [96]}, "intermediate_size"),
        ("gemma3n", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ("laguna", {"gating": "none"}, "gating"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "num_attention_heads_per_layer"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4, 5]}, "num_key_value_heads"),
        ("laguna", {"moe_router_logit_softcapping": 8.0}, "moe_router_logit_softcapping"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias"),
        ("mimo_v2", {"v_head_dim": 25}, "v_head_dim"),
        ("mimo_v2", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("mimo_v2", {"n_shared_experts": 1}, "n_shared_experts"),
        ("minicpm3", {"scale_depth": 0}, "scale_depth"),
        ("mellum", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("kolibri1", {"attention_bias": True}, "attention_bias"),
        ("kolibri1", {"sliding_window": None}, "sliding_window"),
        ("kolibri1", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("modernbert_decoder", {"local_attention": 1}, "local_attention"),
        ("modernbert_decoder", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("modernbert_decoder", {"classifier_activation": "tanh"}, "classifier_activation"),
        ("modernbert_decoder", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("bitnet", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("bitnet", {"hidden_act": "tanh"}, "hidden_act"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act"),
        ("apertus", {"post_norm": True}, "post_norm"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ("stablelm", {"head_dim": 12}, "head_dim"),
        ("biogpt", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("xglm", {"add_cross_attention": True}, "add_cross_attention"),
        ("xglm", {"pad_token_id": 5}, "pad_token_id"),
        ("muse_glimmer", {"attention_bias": True}, "attention_bias"),
        ("muse_glimmer", {"layer_rope_theta": [10_000.0, 0, 20_000.0, 0]}, "layer_rope_theta"),
        ("muse_glimmer", {"layer_rope_theta": [10_000.0, 0]}, "layer_rope_theta"),
        ("muse_glimmer", {"sliding_window": None}, "sliding_window"),
        ("muse_glimmer", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("nanochat", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("nanochat", {"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"ffn_dim": 0}, "ffn_dim"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("mpt", {"no_bias": False}, "no_bias"),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim"),
        ("gptj", {"rotary_dim": 14}, "rotary_dim"),
        ("codegen", {"n_head": 6, "num_key_value_heads": 6}, "n_head"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["global", "far"], 1]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [3]}, "attention_types"),
        ("gpt_neo", {"attention_types": 3}, "attention_types"),
        ("gpt_bigcode", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_embd": 50}, "n_head"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_refuses_what_would_change_a_result(tmp_path, name, changes, field):
    make_model(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert read(tmp_path, values)
    with pytest.raises(ModelFilesError, match=rf"^config\.json: {field} .* is not supported; allowed: "):
        read(tmp_path, values | changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", False),
        ("alibi_bias_max", 6),
        ("qk_ln", True),
        ("prefix_lm", True),
        ("attn_type", "multiquery_attention"),
    ],
)
def test_mpt_attends_as_transformers_does(tmp_path, field, value):
    make_model("mpt").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelFilesError, match=rf"^config\.json: attn_config: {field} .* is not supported; allowed: "):
        read(tmp_path, values | {"attn_config": values["attn_config"] | {field: value}})


def test_the_first_names_of_mpt_and_bloom_mean_the_same(tmp_path):
    make_model("mpt").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}, "architectures": ["MPTForCausalLM"]}
    assert read(tmp_path, values | code) == msgspec.structs.replace(
        read(tmp_path, values), architecture="MPTForCausalLM"
    )
    make_model("bloom").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    first = {"n_embed": 48, "hidden_size": 64, "num_attention_heads": 4, "n_head": None}
    assert read(tmp_path, values | first) == read(tmp_path, values)


def test_lists_of_equal_numbers_are_the_number(tmp_path):
    make_model("hunyuan_moe").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    lists = {"moe_topk": [2] * 3, "num_experts": 5, "num_shared_expert": [1] * 3, "moe_intermediate_size": [32] * 3}
    assert read(tmp_path, values | lists) == read(tmp_path, values)


def test_hunyuans_alpha_is_a_theta_for_any_length(tmp_path):
    rope = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10_000.0, "factor": 1.0}
    config = HunYuanDenseV1Config(head_dim=16, rope_parameters=rope)
    values = LLAMA | {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16}
    for parameters in ({"rope_parameters": rope}, {"rope_scaling": {**rope, "type": "dynamic"}}):
        (ours,) = read(tmp_path, values | parameters).ropes
        cos, sin = HunYuanDenseV1RotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
        table = rotations(ours, 16, 300)
        torch.testing.assert_close(table.real, cos[0, :, :8], rtol=0, atol=1e-5)
        torch.testing.assert_close(table.imag, sin[0, :, :8], rtol=0, atol=1e-5)


def test_what_transformers_has_as_a_llama_has_the_defaults_of_its_model_type(tmp_path):
    bare = {
        field: value
        for field, value in LLAMA.items()
        if field not in ("num_key_value_heads", "max_position_embeddings")
    }
    for kind, name, heads in (("internlm3", "InternLM3", 2), ("iquestcoder", "IQuestCoder", 4)):
        own = bare | {"model_type": kind, "num_attention_heads": 2 * heads, "num_key_value_heads": heads}
        as_llama, own_name = (read(tmp_path, own | {"architectures": [f"{of}ForCausalLM"]}) for of in ("Llama", name))
        assert msgspec.structs.replace(as_llama, architecture=own_name.architecture) == own_name
        assert (own_name.norm.eps, own_name.head_dim) == (1e-5, 128)
    published = bare | {"architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": True}
    assert read(tmp_path, published).attention.qkv_bias
    with pytest.raises(ModelFilesError, match=r"^config\.json: bias True is not supported"):
        read(tmp_path, published | {"qkv_bias": False})


def test_mimo_is_read_as_it_was_published(tmp_path):
    """Before transformers had it: with a field for each number of layers with windows."""
    make_model("mimo_v2").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    newer = read(tmp_path, values)
    older = {
        field: value
        for field, value in values.items()
        if field not in ("layer_types", "mlp_layer_types", "rms_norm_eps")
    }
    older |= {
        "rope_parameters": None,
        "rope_theta": 5e6,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": 19,
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "swa_num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 12,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    assert read(tmp_path, older) == newer
    for field, other in (
        ("hybrid_layer_pattern", [0, 0, 1]),
        ("moe_layer_freq", [1, 1, 1]),
        ("swa_v_head_dim", 24),
        ("swa_num_key_value_heads", 2),
        ("add_full_attention_sink_bias", True),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ):
        with pytest.raises(ModelFilesError, match=rf"^config\.json: {field} "):
            read(tmp_path, older | {field: other})


def test_dbrx_has_its_theta_among_the_fields_of_attention(tmp_path):
    values = LLAMA | {"architectures": ["DbrxForCausalLM"], "ffn_config": {"moe_normalize_expert_weights": None}}
    config = read(tmp_path, values | {"attn_config": {"rope_theta": 5e5}})
    assert config.layers[0].rope.theta == 5e5
    assert not config.experts.experts.routing.is_normalised


def test_a_null_is_no_factor_of_minicpm3(tmp_path):
    make_model("minicpm3").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    plain = read(tmp_path, values | {"scale_depth": None, "dim_model_base": None}).scalings
    assert (plain.residual, plain.logits) == (1.0, 1.0)


def test_command_rs_context_is_that_of_its_training(tmp_path):
    make_model("cohere").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert [read(tmp_path, values | more).context for more in ({}, {"model_max_length": 512})] == [CONTEXT, 512]


def test_minimax_says_how_much_of_a_head_is_rotated(tmp_path):
    make_model("minimax_m2").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    old = values | {"rotary_dim": 8, "rope_theta": 5e6, "auto_map": {"AutoModelForCausalLM": _MINIMAX_CODE}}
    assert read(tmp_path, old).attention.rotary_dim == 8


@pytest.mark.parametrize("name", sorted({*FAMILIES} - NAME_THETA - {*WITHOUT_ROPE}))
def test_a_theta_that_is_not_named_is_that_of_transformers(tmp_path, name):
    make_model(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    parameters = values["rope_parameters"]
    for section in (parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))):
        section.pop("rope_theta", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    inner = [section for section in theirs.values() if isinstance(section, dict)]
    expected = {section["rope_theta"] for section in inner or [theirs]}
    assert {rope.theta for rope in read_model_config(tmp_path).ropes} == expected


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *(
            (name, "num_key_value_heads")
            for name in ("mistral", "ministral3", "mixtral", "lfm2", "lfm2_moe", "minimax")
        ),
        ("qwen3_moe", "num_key_value_heads"),
        ("qwen3_moe", "head_dim"),
        ("granitehybrid-experts", "shared_intermediate_size"),
    ],
)
def test_a_size_that_is_absent_is_that_of_transformers(tmp_path, name, field):
    """Whatever it is in the models of the other tests."""
    model = make_model(name)
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if field != "shared_intermediate_size":
        values |= {"num_attention_heads": 16, "hidden_size": 512, "num_key_value_heads": 16}
    usual = ({"head_dim": 512 // 16} | type(model.config)().to_dict())[field]
    assert usual != values[field]
    others = {other: value for other, value in values.items() if other != field}
    assert read(tmp_path, others) == read(tmp_path, others | {field: usual})


def test_modernberts_window_may_be_named_by_itself(tmp_path):
    make_model("modernbert_decoder").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    config = read(tmp_path, values | {"sliding_window": 7})
    assert AutoConfig.from_pretrained(tmp_path).sliding_window == 7
    assert {layer.window for layer in config.layers} == {None, 7}


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "lfm3"])
def test_lfm_has_one_activation_whatever_a_file_names(tmp_path, name):
    model = make_model(name)
    values = model.config.to_dict() | {"architectures": [type(model).__name__]}
    assert read(tmp_path, values | {"hidden_act": "gelu"}) == read(tmp_path, values)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_refuses_layer_types_that_make_no_sense(tmp_path, changes):
    with pytest.raises(ModelFilesError, match=r"layer_types|use_sliding_window"):
        read(tmp_path, QWEN2 | changes)


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_refuses_files_that_hold_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_refuses_missing_directory_and_missing_file(tmp_path):
    with pytest.raises(ModelFilesError, match="no such model directory"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(ModelFilesError, match=r"config\.json: No such file"):
        read_model_config(tmp_path)
