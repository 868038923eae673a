"""The text of checkpoints of several models against the whole model of transformers: the same tokens."""

import json
import random
import re

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from backend_driver import BackendDriver, Request, load_adapter
from checkpoints import VOCAB_SIZE, make_checkpoint
from group_backend import InlineGroup
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.models.families import read_model_config
from lora_files import merge_adapter, write_adapter
from quantised_checkpoints import quantise
from wholes import WHOLES, change_config, make_whole, rename_tensors

NUM_OUTPUT = 16
KERNELS = ("compiled", "eager")
NEW_NAMES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
"""Between transformers 4.52 and 5, some were saved with the names that the modules have since."""


def open_backend(directory, backend=None, **settings):
    backend = TorchBackend() if backend is None else backend
    config = {"model": str(directory), "dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 80, "block_size": 8}
    return backend, backend.open(BackendConfig(**(config | settings)))


def prompts():
    draw = random.Random(0)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (5, 40)]


def run(opened, adapter=""):
    requests = [Request(prompt, NUM_OUTPUT, adapter=adapter) for prompt in prompts()]
    BackendDriver(*opened).run(requests, budget=17)
    return [request.output for request in requests]


def tokens(directory, **settings):
    return run(open_backend(directory, **settings))


def expected_of(model):
    model.generation_config.eos_token_id = None
    size = {"max_new_tokens": NUM_OUTPUT, "min_new_tokens": NUM_OUTPUT, "do_sample": False}
    return [
        model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **size)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts()
    ]


@pytest.mark.parametrize("name", WHOLES)
def test_tokens_are_those_of_the_whole_model(tmp_path, name):
    expected = expected_of(make_whole(tmp_path, name))
    warnings = []
    for kernels in KERNELS:
        assert tokens(tmp_path, options={"kernels": kernels}, warn=warnings.append) == expected
    assert not warnings
    shown = read_model_config(tmp_path).architecture
    assert shown.endswith("ForConditionalGeneration")


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llava", "qwen2_vl"])
def test_names_of_transformers_5_are_read_as_well(tmp_path, name):
    expected = expected_of(make_whole(tmp_path, name))
    renamed = NEW_NAMES if name != "qwen2_vl" else {"visual.": "model.visual.", "model.": "model.language_model."}

    def new(stored):
        old = next((old for old in renamed if stored.startswith(old)), "")
        return renamed.get(old, "") + stored.removeprefix(old)

    rename_tensors(tmp_path, new)
    assert tokens(tmp_path) == expected


def test_internvl_is_read_as_it_was_published(tmp_path):
    """In the names and fields of the code that it came with, which is not run."""
    expected = expected_of(make_whole(tmp_path, "internvl"))
    code = "modeling_internvl_chat.InternVLChatModel"

    def as_published(config):
        text = config["text_config"] | {"architectures": ["Qwen3ForCausalLM"]}
        asked = {"AutoModel": code, "AutoModelForCausalLM": code}
        return {"architectures": ["InternVLChatModel"], "llm_config": text, "auto_map": asked}

    change_config(tmp_path, as_published)
    for published_name, name in NEW_NAMES.items():
        rename_tensors(tmp_path, lambda stored, old=name, new=published_name: re.sub(f"^{re.escape(old)}", new, stored))
    assert tokens(tmp_path) == expected
    change_config(tmp_path, lambda config: config | {"llm_config": {"model_type": "internlm2"}})
    with pytest.raises(
        ModelFilesError, match="llm_config: model_type 'internlm2' is not supported; allowed: cohere2, "
    ):
        read_model_config(tmp_path)


@pytest.mark.parametrize("form", ["compiled", "eager", "fast"])
@pytest.mark.parametrize("turned", [False, True])
def test_ranks_share_experts_in_one_tensor(tmp_path, form, turned):
    expected = expected_of(make_whole(tmp_path, "qwen3_vl_moe", moe_intermediate_size=64))
    if turned:
        turn_experts(tmp_path)
    options = {"kernels": "eager", "tensor_parallel_form": "fast"} if form == "fast" else {"kernels": form}
    backend = InlineGroup(tensor_parallel=2)
    assert tokens(tmp_path, backend=backend, options=options) == expected
    backend.close()


@pytest.mark.parametrize("form", ["exact", "fast"])
def test_ranks_share_experts_in_three_stacks(tmp_path, form):
    expected = expected_of(make_whole(tmp_path, "step3p7"))
    backend = InlineGroup(tensor_parallel=2)
    options = {"kernels": "eager", "tensor_parallel_form": form}
    assert tokens(tmp_path, backend=backend, options=options) == expected
    backend.close()


def test_step_is_read_as_it_was_published(tmp_path):
    """Before transformers had it: as a text alone, with a list for what differs by layer, also of one behind the last."""
    make_whole(tmp_path, "step3p7")
    newer = read_model_config(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    renamed = {
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "share_expert_dim": "share_expert_dims",
    }
    gone = {"num_sliding_attention_heads", "per_layer_config", "mlp_layer_types", "rope_parameters"}
    rope = text["rope_parameters"]["full_attention"]
    older = {renamed.get(field, field): value for field, value in text.items() if field not in gone}
    older |= {
        "architectures": ["Step3p5ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"},
        "num_nextn_predict_layers": 1,
        "layer_types": [*text["layer_types"], "sliding_attention"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "rope_theta": [10_000.0, 20_000.0] * 2 + [20_000.0],
        "partial_rotary_factors": [0.5, 1.0] * 2 + [1.0],
        "rope_scaling": {field: value for field, value in rope.items() if field != "rope_theta"},
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": "1,2,3",
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 16,
            "true_head_dim": 16,
        },
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
    }

    def read(**changes):
        (tmp_path / "config.json").write_text(json.dumps(older | changes))
        return read_model_config(tmp_path)

    names = msgspec.structs.replace(newer.names, is_part=False, ignored_layers=1)
    assert read() == msgspec.structs.replace(newer, architecture="Step3p5ForCausalLM", names=names, dtype=read().dtype)
    for field, other in (
        ("zero_centered", False),
        ("use_rope_layers", [0]),
        ("mlp_bias", True),
        ("swiglu_limits", [1.0]),
        ("rope_theta", [1.0, 2.0, 3.0, 4.0]),
        ("moe_layers_enum", "1,two"),
        ("hidden_act", "gelu"),
        ("per_layer_config", {"1": {"num_attention_heads": 8}}),
    ):
        with pytest.raises(ModelFilesError, match=rf"^config\.json: {field} "):
            read(**{field: other})
    with pytest.raises(ModelFilesError, match=r"attention_other_setting: head_dim 8 is not supported"):
        read(attention_other_setting={"head_dim": 8})


def test_the_text_of_gemma_3n_has_its_names_beside_other_models(tmp_path):
    """A whole takes a library for what sees, so its text stands for it here."""
    expected = expected_of(make_checkpoint(tmp_path, "gemma3n"))
    change_config(
        tmp_path,
        lambda text: {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "eos_token_id": 0},
    )
    for front in ("model.language_model.", "language_model.model."):
        rename_tensors(tmp_path, lambda stored, front=front: re.sub(r"^(.*model\.)", front, stored))
        assert tokens(tmp_path, options={"kernels": "eager"}) == expected


def test_the_text_of_nemotron_omni_has_its_names_beside_other_models(tmp_path):
    """Its text stands for a whole here, too, in the fields and names that it was published with."""
    expected = expected_of(make_checkpoint(tmp_path, "nemotron_h"))
    name = "NemotronH_Nano_Omni_Reasoning_V3"
    code = {"auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    change_config(tmp_path, lambda text: {"architectures": [name], "llm_config": text, "eos_token_id": 0} | code)
    rename_tensors(tmp_path, lambda stored: f"language_model.{stored}")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"sound_encoder.layers.0.norm.weight": torch.ones(8)}, path)
    assert tokens(tmp_path) == expected


def test_the_text_of_fast_vlm_may_stand_beside_what_sees(tmp_path):
    """As it was published: all under one name, also the fields."""
    expected = expected_of(make_whole(tmp_path, "fast_vlm"))
    code = {"auto_map": {"AutoModelForCausalLM": "llava_qwen.LlavaQwen2ForCausalLM"}}
    published = {"architectures": ["LlavaQwen2ForCausalLM"], "model_type": "llava_qwen2"} | code
    change_config(tmp_path, lambda config: config.pop("text_config") | published)
    rename_tensors(tmp_path, lambda stored: stored.replace("model.language_model.", "model."))
    path = tmp_path / "model.safetensors"
    assert any(stored.startswith("model.vision_tower.") for stored in load_file(path))
    assert tokens(tmp_path) == expected
    save_file(load_file(path) | {"model.layers.3.mlp.down_proj.weight": torch.ones(8)}, path)
    with pytest.raises(ModelFilesError, match=r"tensor model\.layers\.3\.mlp\.down_proj\.weight does not belong"):
        open_backend(tmp_path)


@pytest.mark.parametrize(
    ("name", "older", "kind"),
    [("granite4_vision", "Granite4Vision", "granite"), ("lighton_ocr", "LightOnOCR", "lightonocr_text")],
)
def test_texts_have_older_names(tmp_path, name, older, kind):
    expected = expected_of(make_whole(tmp_path, name))
    published = {"architectures": [f"{older}ForConditionalGeneration"]}
    change_config(
        tmp_path, lambda config: config | published | {"text_config": config["text_config"] | {"model_type": kind}}
    )
    assert tokens(tmp_path) == expected


def turn_experts(directory):
    """As published: inputs before outputs."""
    path = directory / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(turned, path, metadata={"format": "pt"})


def test_experts_with_inputs_before_outputs_are_read_as_published(tmp_path):
    expected = expected_of(make_whole(tmp_path, "qwen3_vl_moe"))
    turn_experts(tmp_path)
    for kernels in KERNELS:
        assert tokens(tmp_path, options={"kernels": kernels}) == expected


@pytest.mark.parametrize("inner", [20, 24])
def test_experts_of_8_bit_floats_may_lie_in_one_tensor(tmp_path, inner):
    """As transformers has them, outputs before inputs: a square of 48 too."""
    make_whole(tmp_path / "model", "qwen3_vl_moe", moe_intermediate_size=inner)
    reference = quantise(tmp_path / "model", "fp8-stacks")
    for kernels in KERNELS:
        assert tokens(tmp_path / "model", options={"kernels": kernels}) == tokens(reference)
    turn_experts(tmp_path / "model")
    with pytest.raises(
        ModelFilesError, match=r"mlp\.experts\.gate_up_proj(_scale_inv)? has shape .* config\.json asks for"
    ):
        open_backend(tmp_path / "model")


def test_fields_that_published_files_leave_out_are_those_of_transformers(tmp_path):
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_model_config(tmp_path)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.context, config.dtype, config.eos_token_ids) == (131_072, "bfloat16", (1, 106))
    assert config.tie_word_embeddings
    near, far = config.layers[0], config.layers[5]
    assert (near.window, near.rope.kind, near.rope.theta) == (1024, "default", 10_000.0)
    assert (far.window, far.rope.kind, far.rope.theta, far.rope.factor) == (None, "linear", 1_000_000.0, 8.0)


def test_the_first_qwen2_vl_has_the_fields_of_its_text_beside_the_others(tmp_path):
    expected = expected_of(make_whole(tmp_path, "qwen2_vl"))

    def flat(config):
        text = config.pop("text_config")
        sections = text.pop("rope_parameters")["mrope_section"]
        return text | config | {"rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": sections}}

    change_config(tmp_path, flat)
    assert tokens(tmp_path) == expected


def test_ernie_is_read_as_it_was_published(tmp_path):
    """With two numbers in place of one, and all fields beside each other."""
    expected = expected_of(make_whole(tmp_path, "ernie4_5_vl"))
    code = "modeling_ernie4_5_vl.Ernie4_5_VLMoeForConditionalGeneration"

    def flat(config):
        text = config.pop("text_config")
        rope = {"type": "default", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        both = {"moe_num_experts": [6, 6], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [2, 1]}
        gone = text.pop("mlp_layer_types")
        assert gone == ["dense", "sparse", "sparse"]
        return text | config | both | {"rope_scaling": rope, "auto_map": {"AutoModelForCausalLM": code}}

    change_config(tmp_path, lambda config: flat(config) | {"rope_theta": 10_000.0})
    assert tokens(tmp_path) == expected


@pytest.mark.parametrize("name", ["ernie4_5_vl", "molmo2"])
@pytest.mark.parametrize("form", ["exact", "fast"])
def test_ranks_share_what_is_stored_in_another_way(tmp_path, name, form):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    expected = expected_of(make_whole(tmp_path, name, **heads))
    backend = InlineGroup(tensor_parallel=2)
    options = {"kernels": "eager", "tensor_parallel_form": form}
    assert tokens(tmp_path, backend=backend, options=options) == expected
    backend.close()


def test_adapters_of_ups_before_gates(tmp_path):
    """In one tensor, of which the adapter has one product."""
    model = make_whole(tmp_path / "model", "molmo2")
    draw = torch.Generator().manual_seed(1)
    down, up = (torch.randn(size, generator=draw) * 0.3 for size in ((2, 48), (192, 2)))
    adapter = write_adapter(tmp_path / "adapter", model.model.language_model, seed=1, targets=("o_proj",), rank=2)
    module = "base_model.model.model.transformer.blocks.1.mlp.ff_proj"
    added = {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    save_file(added, adapter / "adapter_model.safetensors")
    alpha = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]
    mlp = model.model.language_model.layers[1].mlp
    with torch.no_grad():
        ups, gates = (up @ down * alpha / 2).chunk(2)
        mlp.up_proj.weight += ups
        mlp.gate_proj.weight += gates
    expected = expected_of(model)
    for kernels in KERNELS:
        opened = open_backend(tmp_path / "model", options={"kernels": kernels})
        loaded = load_adapter(opened[0], "one", str(adapter))
        assert run(opened, loaded.identity) == expected != run(opened)


@pytest.mark.parametrize(
    ("name", "published", "places"),
    [
        ("qwen2_5_omni", "Qwen2_5OmniModel", ("model.",)),
        ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", ("model.", "model.language_model.")),
    ],
)
def test_what_thinks_and_what_speaks_are_parts_of_one_whole(tmp_path, name, published, places):
    expected = expected_of(make_whole(tmp_path, name))
    change_config(
        tmp_path, lambda config: {"architectures": [published], "thinker_config": config, "talker_config": {}}
    )
    rename_tensors(tmp_path, lambda stored: f"thinker.{stored.removeprefix('thinker.')}")
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"talker.model.norm.weight": torch.ones(8)}, path)
    old = r"^thinker\.model\.(language_model\.)?(?=embed|layers|norm)"
    for place in places:
        rename_tensors(tmp_path, lambda stored, place=place: re.sub(old, f"thinker.{place}", stored))
        assert tokens(tmp_path) == expected
    config = read_model_config(tmp_path)
    assert (config.architecture, config.eos_token_ids) == (published, (0,))


def test_hunyuan_is_read_as_it_was_published(tmp_path):
    """With the fields of its text beside the others, and under other names."""
    expected = expected_of(make_whole(tmp_path, "hunyuan_vl"))

    def flat(config):
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        sections = {"type": "xdrope", "alpha": rope["alpha"], "factor": 1.0, "xdrope_section": rope["mrope_section"]}
        theirs = {"attention_head_dim": text.pop("head_dim"), "org_vocab_size": text["vocab_size"]}
        return text | config | theirs | {"rope_theta": 10_000.0, "rope_scaling": sections}

    change_config(tmp_path, flat)
    assert tokens(tmp_path) == expected


def test_paddle_ocr_is_read_as_it_was_published(tmp_path):
    expected = expected_of(make_whole(tmp_path, "paddleocr_vl"))
    code = "modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration"

    def flat(config):
        text = config.pop("text_config")
        rope = {"type": "default", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        return text | config | {"rope_theta": 10_000.0, "rope_scaling": rope, "auto_map": {"AutoModel": code}}

    change_config(tmp_path, flat)
    assert tokens(tmp_path) == expected
    change_config(tmp_path, lambda config: config | {"auto_map": {"AutoModel": "modeling.Other"}})
    with pytest.raises(ModelFilesError, match="auto_map asks for code from the checkpoint"):
        read_model_config(tmp_path)


def test_the_layer_of_glm_ocr_that_predicts_further_tokens_is_not_read(tmp_path):
    expected = expected_of(make_whole(tmp_path, "glm_ocr"))
    path = tmp_path / "model.safetensors"
    further = {"model.language_model.layers.3.eh_proj.weight": torch.ones(8)}
    save_file(load_file(path) | further, path)
    assert tokens(tmp_path) == expected


def test_hyperclova_x_has_an_older_name(tmp_path):
    make_whole(tmp_path, "hyperclovax_vision_v2")
    newer = read_model_config(tmp_path)
    change_config(tmp_path, lambda config: config | {"architectures": ["HCXVisionV2ForCausalLM"]})
    assert read_model_config(tmp_path) == msgspec.structs.replace(newer, architecture="HCXVisionV2ForCausalLM")


def test_gemma_4_unified_is_gemma_4_with_other_defaults(tmp_path):
    """Also alone, without what it lacks of the fields of Gemma 4."""
    text = {"hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16}
    configs = []
    for text_config in ({}, {"use_bidirectional_attention": None, "enable_moe_block": True}):
        whole = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text | text_config}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        configs.append(read_model_config(tmp_path))
    alone = text | {"architectures": ["Gemma4UnifiedForCausalLM"], "vocab_size": 262_144, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(alone))
    config = read_model_config(tmp_path)
    assert configs[0] == configs[1]
    assert configs[0].layers == config.layers
    assert (config.context, config.vocab_size, config.tie_word_embeddings) == (262_144, 262_144, True)
    assert (config.layers[0].window, config.layers[5].window, config.layer_inputs) == (1024, None, None)
    (tmp_path / "config.json").write_text(json.dumps(alone | {"use_bidirectional_attention": "all"}))
    with pytest.raises(ModelFilesError, match="use_bidirectional_attention 'all' is not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_what_a_text_part_leaves_out_is_what_transformers_takes_for_it(tmp_path, name):
    make_whole(tmp_path, name)
    whole = json.loads((tmp_path / "config.json").read_text())
    for field in ("rope_parameters", "rope_theta", "rope_scaling", "max_position_embeddings"):
        whole["text_config"].pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    theirs, ours = AutoConfig.from_pretrained(tmp_path).get_text_config(), read_model_config(tmp_path)
    assert {rope.theta for rope in ours.ropes} == {theirs.rope_parameters["rope_theta"]}
    assert ours.context == theirs.max_position_embeddings


def test_what_is_not_read_is_not_waited_for(tmp_path):
    make_whole(tmp_path, "llava", hidden_size=256, intermediate_size=1024)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"vision_tower.odd.weight": torch.zeros(1 << 20)}, path)
    seen = []
    open_backend(tmp_path, progress=lambda what, done, total: seen.append((what, done, total)))
    read = [(done, total) for what, done, total in seen if what == "reading the weights, MiB"]
    assert read[-1] == (read[-1][1], read[-1][1])
    assert 0 < read[-1][1] <= (path.stat().st_size >> 20) - 4


def test_ropes_of_sections_are_those_of_such_models_alone(tmp_path):
    make_whole(tmp_path, "llava")
    sections = {"type": "mrope", "mrope_section": [2, 2, 2]}
    change_config(tmp_path, lambda config: config | {"text_config": config["text_config"] | {"rope_scaling": sections}})
    with pytest.raises(
        ModelFilesError, match=r"config\.json: text_config: rope_scaling: type 'mrope' is not supported"
    ):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        ({"architectures": ["MllamaForConditionalGeneration"]}, "layers that attend to pictures"),
        ({"architectures": ["MistralLarge4ForConditionalGeneration"]}, "an index of the keys"),
        ({"architectures": ["Glm5NextForConditionalGeneration"]}, r"an index of the keys .*, .*hyper-connections"),
        ({"architectures": ["MuseSparkForConditionalGeneration"]}, "norms of what each expert gives"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "an index of the keys .*, .*hyper-connections"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "later tokens of the prompt"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "opt"}},
            "text_config: model_type 'opt' is not supported; allowed: cohere2, ",
        ),
        (
            {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"model_type": "kimi_linear"}},
            "text_config: model_type 'kimi_linear' is not supported; allowed: deepseek_v3, kimi_k2",
        ),
        ({"architectures": ["OtherForConditionalGeneration"]}, "allowed: the text of AyaVision, "),
    ],
)
def test_other_wholes_are_refused_in_one_line(tmp_path, whole, reason):
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ModelFilesError, match=reason) as refused:
        read_model_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_tensor_of_the_text_that_is_missing_or_odd_is_named(tmp_path):
    make_whole(tmp_path, "mistral3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"language_model.model.layers.9.odd.weight": torch.ones(1)}, path)
    with pytest.raises(ModelFilesError, match=r"tensor language_model\.model\.layers\.9\.odd\.weight does not belong"):
        open_backend(tmp_path)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelFilesError, match=r"tensor language_model\.model\.norm\.weight is missing"):
        open_backend(tmp_path)


@pytest.mark.parametrize("named", ["model.language_model.", "language_model.model."])
def test_adapters_of_the_text_have_the_names_of_either_version(tmp_path, named):
    model = make_whole(tmp_path / "model", "mistral3")
    own = {"targets": ("q_proj", "o_proj", "up_proj"), "rank": 2}
    adapter = write_adapter(tmp_path / "adapter", model.model.language_model, seed=1, **own)
    path = adapter / "adapter_model.safetensors"
    front = "base_model.model."
    save_file({front + named + name.removeprefix(front): tensor for name, tensor in load_file(path).items()}, path)
    opened = open_backend(tmp_path / "model")
    plain, loaded = run(opened), load_adapter(opened[0], "one", str(adapter))
    got = run(opened, loaded.identity)
    of_modules = {name.replace(named, "model.language_model."): tensor for name, tensor in load_file(path).items()}
    save_file(of_modules, path)
    assert got == expected_of(merge_adapter(adapter, model)) != plain


@pytest.mark.parametrize("kind", ["gptq", "awq", "w4a16", "fp8-blocks", "nf4", "mlx", "w8a8"])
def test_quantised_weights_of_the_text_have_its_names(tmp_path, kind):
    make_whole(tmp_path / "model", "gemma3", hidden_size=64, head_dim=32)
    rename_tensors(
        tmp_path / "model", lambda name: name if name.startswith("language_model.") else name + "_of_pictures"
    )
    reference = quantise(tmp_path / "model", kind)
    for kernels in KERNELS:
        assert tokens(tmp_path / "model", options={"kernels": kernels}) == tokens(reference)


@pytest.mark.parametrize("name", ["ernie4_5_vl", "molmo2"])
def test_quantised_weights_may_be_stored_in_another_way(tmp_path, name):
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": [32, 32]} if name == "ernie4_5_vl" else {}
    make_whole(tmp_path / "model", name, **sizes, **experts)
    read = ("model.transformer.", "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    rename_tensors(tmp_path / "model", lambda stored: stored if stored.startswith(read) else stored + "_of_pictures")
    reference = quantise(tmp_path / "model", "awq")
    for kernels in KERNELS:
        assert tokens(tmp_path / "model", options={"kernels": kernels}) == tokens(reference)


def test_a_text_may_have_the_description_of_its_weights(tmp_path):
    make_whole(tmp_path / "model", "mistral3", hidden_size=64)
    rename_tensors(
        tmp_path / "model", lambda name: name if name.startswith("language_model.") else name + "_of_pictures"
    )
    reference = quantise(tmp_path / "model", "awq")

    def moved(config):
        described = {"quantization_config": config.pop("quantization_config")}
        return config | {"text_config": config["text_config"] | described}

    change_config(tmp_path / "model", moved)
    assert tokens(tmp_path / "model") == tokens(reference)


def test_a_context_is_no_longer_than_a_chunk_of_attention(tmp_path):
    expected = expected_of(make_whole(tmp_path, "llama4", attention_chunk_size=64))
    warnings = []
    opened = open_backend(tmp_path, warn=warnings.append)
    assert opened[1].max_model_len == 64
    assert warnings == [
        "attention is in chunks of 64 tokens, so the context has as many here, of the model's 256",
    ]
    assert run(opened) == expected
    with pytest.raises(BackendConfigError, match="max_model_len 65 is not allowed"):
        open_backend(tmp_path, max_model_len=65)


def test_adapters_of_experts_get_weighed_inputs_too(tmp_path):
    model = make_checkpoint(tmp_path / "model", "llama4")
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    experts = model.model.layers[1].feed_forward.experts
    with torch.no_grad():
        for number in (0, 2, 3):
            for name, outputs, inputs in (("gate_proj", 32, 48), ("up_proj", 32, 48), ("down_proj", 48, 32)):
                down, up = (torch.randn(size, generator=draw) * 0.2 for size in ((2, inputs), (outputs, 2)))
                module = f"base_model.model.model.layers.1.feed_forward.experts.{number}.{name}"
                tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
                stack = experts.down_proj if name == "down_proj" else experts.gate_up_proj
                start = 32 if name == "up_proj" else 0
                stack[number, :, start : start + outputs] += (up @ down).t()
    adapter = write_adapter(tmp_path / "adapter", model, seed=1, targets=("q_proj",), rank=2, lora_alpha=2)
    save_file(tensors, adapter / "adapter_model.safetensors")
    expected = expected_of(model)
    for kernels in KERNELS:
        opened = open_backend(tmp_path / "model", options={"kernels": kernels})
        loaded = load_adapter(opened[0], "one", str(adapter))
        assert run(opened, loaded.identity) == expected != run(opened)
