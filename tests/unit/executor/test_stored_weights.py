"""Published layouts of quantised weights: what they stand for, how they run, what is refused."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints import make_checkpoint
from decoder_driver import (
    Sequences,
    Span,
    compiled_decoder,
    compiled_model,
    compiled_pool,
    eager_model,
    write_checkpoint,
)
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.compiled import CompiledModel
from headway_executor.models.families import read_model_config
from headway_executor.models.model_settings import settings_of
from headway_executor.models.tensor_shapes import check_tensors
from headway_kernels.cpu.coded_weight import CodeForm, rounded_to_4_bits, rounded_to_8_bits
from headway_kernels.cpu.library import BlockForm, WeightForm, load_library
from quantised_checkpoints import KINDS, LINEAR, MIXED_KINDS, STACKS, change_config, quantise

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96}
_FORMS = dict.fromkeys(("gptq-8", "w8a16", "w6a16", "mlx-6", "mlx-8"), CodeForm.CODES8) | dict.fromkeys(
    [kind for kind in KINDS if kind.startswith(("w8a8", "bnb", "bitnet"))], CodeForm.CODES8
)


_MIXTURES = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "a shared expert": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
        "mlp_only_layers": [0],
    },
    "narrow values": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "head_dim": 24,
        "v_head_dim": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
}

WITH_STATES = {
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mlp_multipliers": [0.6, 0.8],
        "ssm_multipliers": [0.5, 0.7, 1.2, 1.5, 0.4],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "key_multiplier": 0.3,
    },
    "mamba": {
        "architectures": ["MambaForCausalLM"],
        "state_size": 32,
        "time_step_rank": 64,
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 1,
        "n_routed_experts": 4,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 160,
    },
}
"""Factors of projections are in the scales of codes."""

_STACKED = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "sliding_window": 20,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
_OF_MIXTURES = ("gptq-act-order", "awq", "w4a16-zeros", "w8a8", "fp8-blocks")


def written(directory, kind, **changes):
    write_checkpoint(directory, **_SIZES | changes)
    return quantise(directory, kind)


def rounded(directory, quantization):
    """A checkpoint of what the weights of another are rounded to."""
    reference = directory.with_name("reference")
    shutil.copytree(directory, reference)
    tensors = load_file(directory / "model.safetensors")
    change = {"int8": rounded_to_8_bits, "int4": rounded_to_4_bits}[quantization]
    for name in tensors:
        if name.endswith((*LINEAR, "lm_head.weight")):
            tensors[name] = change(tensors[name]).float()
    save_file(tensors, reference / "model.safetensors", metadata={"format": "pt"})
    return reference


def form_of(kind):
    if kind.startswith(("fp8", "float")):
        return CodeForm.FP8
    if kind.startswith(("fp4", "nf4")):
        return CodeForm.TABLE4
    return _FORMS.get(kind, CodeForm.CODES4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_weight_stands_for_its_reference(tmp_path, kind):
    reference = load_file(written(tmp_path / "model", kind) / "model.safetensors")
    with Checkpoint(tmp_path / "model") as checkpoint:
        check_tensors(read_model_config(tmp_path / "model"), checkpoint)
        for name, wide in reference.items():
            assert checkpoint.is_coded(name) == name.endswith(LINEAR)
            # The reference is rounded once; a product of scale and minimum may be rounded first.
            torch.testing.assert_close(checkpoint.read(name).float(), wide.float(), rtol=1e-6, atol=1e-7)
            some = checkpoint.read(name, range(5, 9))
            assert torch.equal(some, checkpoint.read(name)[5:9])
            if checkpoint.is_coded(name):
                assert checkpoint.read_codes(name).form is form_of(kind)
                assert torch.equal(checkpoint.read(name, range(3), range(4, 6)), checkpoint.read(name)[:3, 4:6])


@pytest.mark.parametrize("kind", MIXED_KINDS)
def test_weights_may_have_several_forms_or_none(tmp_path, kind):
    reference = load_file(written(tmp_path / "model", kind) / "model.safetensors")
    with Checkpoint(tmp_path / "model") as checkpoint:
        check_tensors(read_model_config(tmp_path / "model"), checkpoint)
        for name, wide in reference.items():
            torch.testing.assert_close(checkpoint.read(name).float(), wide.float(), rtol=1e-6, atol=1e-7)
        assert not checkpoint.is_coded("model.layers.1.self_attn.o_proj.weight")
        assert checkpoint.is_coded("model.layers.1.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [(sizes, kind) for sizes in ({}, _MIXTURES["qwen3-moe"]) for kind in KINDS if kind != "bitnet"]  # It rounds inputs.
    + [(sizes, kind) for sizes in ({}, _MIXTURES["qwen3-moe"]) for kind in MIXED_KINDS]
    + [(_STACKED, "mxfp4")]
    + [(_MIXTURES[sizes], kind) for sizes in ("mixtral", "a shared expert", "narrow values") for kind in _OF_MIXTURES]
    + [(sizes, kind) for sizes in WITH_STATES.values() for kind in _OF_MIXTURES],
)
def test_a_quantised_model_gives_the_logits_of_its_reference(tmp_path, sizes, kind):
    reference = written(tmp_path / "model", kind, **sizes)
    # Of seed 0, one model makes thousandths of what another processor rounds otherwise, in the logits of one token.
    sequences = Sequences(num_rows=3, length=20, vocab_size=96, block_size=8, seed=1)
    spans = [Span(row, 0, 20) for row in range(3)]
    library = load_library()
    exact = sequences.logits_of_all_tokens(eager_model(reference, sequences), spans)
    runs = [eager_model(tmp_path / "model", sequences)]
    if library is not None:
        runs.append(compiled_model(tmp_path / "model", library, sequences))
    for model in runs:
        found = sequences.logits_of_all_tokens(model, spans)
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
        assert torch.equal(found.argmax(-1), exact.argmax(-1))


_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 96,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
}


def turn(directory):
    """Store weights of layers the other way round."""
    tensors = load_file(directory / "model.safetensors")
    turned = {name: tensor.t().contiguous() if name.endswith(LINEAR) else tensor for name, tensor in tensors.items()}
    save_file(turned, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["awq", "w8a16", "gptq-act-order", "nf4"])
def test_codes_of_weights_have_outputs_first_even_of_a_model_that_has_inputs_first(tmp_path, kind):
    model = tmp_path / "model"
    write_checkpoint(model, **_GPT2)
    turn(model)
    reference = quantise(model, kind)
    turn(reference)
    sequences = Sequences(num_rows=2, length=20, vocab_size=96, block_size=8)
    spans = [Span(row, 0, 20) for row in range(2)]
    library = load_library()
    runs = [eager_model(directory, sequences) for directory in (reference, model)]
    if library is not None:
        runs.append(compiled_model(model, library, sequences))
    exact, *found = [sequences.logits_of_all_tokens(run, spans) for run in runs]
    for logits in found:
        torch.testing.assert_close(logits, exact, rtol=1e-3, atol=1e-3)


def test_weights_with_inputs_first_are_all_codes_or_none(tmp_path):
    model = tmp_path / "model"
    write_checkpoint(model, **_GPT2)
    turn(model)
    quantise(model, "nf4")
    tensors = load_file(model / "model.safetensors")
    base = "transformer.h.1.mlp.c_proj.weight"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(base)}
    save_file(kept | {base: torch.zeros(64, 96)}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelFilesError, match=rf"{base} is not quantised, though others are; allowed with GPT2LMHeadModel"
    ):
        eager_model(model, Sequences(num_rows=1, length=8, vocab_size=96, block_size=8))


@pytest.mark.skipif(load_library() is None, reason="no CPU kernels that run here")
@pytest.mark.parametrize(
    ("kind", "settings", "form"),
    [
        ("awq", {}, CodeForm.CODES4),
        ("w8a16", {}, CodeForm.CODES8),
        ("fp8-blocks", {}, CodeForm.FP8),
        ("awq", {"activations": "int8"}, BlockForm.CODES4),
        ("mxfp4", {}, CodeForm.TABLE4),
        ("mxfp4", {"activations": "int8"}, BlockForm.TABLE4),
        ("w8a8", {"activations": "int8"}, WeightForm.INT8),
        (None, {"quantization": "int8"}, WeightForm.INT8),
        (None, {"quantization": "int4"}, BlockForm.CODES4),
    ],
)
def test_experts_are_held_as_codes(tmp_path, kind, settings, form):
    """And are close to what they stand for, if their inputs are rounded."""
    if load_library().multiplies_digits and form in (CodeForm.CODES4, CodeForm.CODES8, CodeForm.TABLE4):
        form = BlockForm[form.name]
    sizes = _STACKED if kind == "mxfp4" else _MIXTURES["a shared expert"]
    directory = write_checkpoint(tmp_path / "model", **_SIZES | sizes)
    reference = rounded(directory, **settings) if kind is None else quantise(directory, kind)
    sequences = Sequences(num_rows=1, length=20, vocab_size=96, block_size=8)
    exact = sequences.logits_of_all_tokens(eager_model(reference, sequences), [Span(0, 0, 20)])
    decoder = compiled_decoder(directory, load_library(), block_size=8, **settings)
    experts = decoder._kept[1][1].feed_forward._kept[1]
    assert {product.form for pair in experts for product in pair} == {form}
    found = sequences.logits_of_all_tokens(
        CompiledModel(decoder, compiled_pool(directory, decoder, sequences)), [Span(0, 0, 20)]
    )
    assert float((found - exact).norm() / exact.norm()) < (0.5 if settings else 1e-4)


def test_a_stack_that_is_named_as_a_weight_has_no_codes(tmp_path):
    make_checkpoint(tmp_path, "granite_moe")
    path = tmp_path / "model.safetensors"
    codes = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items() if "input_linear" in name}
    save_file(load_file(path) | codes, path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelFilesError, match="a stack of weights in codes"):
        check_tensors(read_model_config(tmp_path), checkpoint)


def test_a_stack_of_mxfp4_is_what_transformers_makes_of_it(tmp_path):
    reference = load_file(written(tmp_path / "model", "mxfp4", **_STACKED) / "model.safetensors")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    with Checkpoint(tmp_path / "model") as checkpoint:
        check_tensors(read_model_config(tmp_path / "model"), checkpoint)
        for name in [name for name in reference if name.endswith(STACKS)]:
            theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
            assert torch.equal(checkpoint.read(name, range(4)), theirs)
            assert torch.equal(reference[name], theirs)
            some = checkpoint.read(name, range(1, 2), range(8, 24))
            assert torch.equal(some, theirs[1:2, :, 8:24])
            assert checkpoint.read_codes(name, range(2, 3)).shape == theirs[2].t().shape


@pytest.mark.skipif(load_library() is None, reason="no CPU kernels that run here")
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_the_kernels_round_inputs_of_w8a8_row_by_row_if_the_checkpoint_asks_for_that(tmp_path, is_dynamic):
    reference = written(tmp_path / "model", "w8a8")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": is_dynamic, "symmetric": True}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    change_config(tmp_path / "model", quantization_config=config)
    with Checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.read_codes("model.layers.0.self_attn.q_proj.weight").is_for_int8 == is_dynamic
    sequences = Sequences(num_rows=1, length=20, vocab_size=96, block_size=8)
    exact, found = (
        sequences.logits_of_all_tokens(compiled_model(path, load_library(), sequences), [Span(0, 0, 20)])
        for path in (reference, tmp_path / "model")
    )
    error = float((found - exact).norm() / exact.norm())
    assert (1e-3 < error < 0.05) if is_dynamic else error < 1e-5
    on_operators = sequences.logits_of_all_tokens(eager_model(tmp_path / "model", sequences), [Span(0, 0, 20)])
    # A number between two integers may become either.
    rows = (on_operators - found).norm(dim=-1) / found.norm(dim=-1)
    assert float(rows.median()) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "rounds"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, True),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, True),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, False),
        (None, False),
    ],
)
def test_floats_of_8_bits_are_meant_for_such_inputs_if_the_checkpoint_says_so(tmp_path, inputs, rounds):
    written(tmp_path / "model", "float-channel")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = inputs
    change_config(tmp_path / "model", quantization_config=config)
    with Checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.read_codes("model.layers.0.self_attn.q_proj.weight").rounds_inputs == rounds


@pytest.mark.skipif(load_library() is None, reason="no CPU kernels that run here")
@pytest.mark.parametrize(
    "kind", ["gptq", "gptq-8", "gptq-act-order", "awq", "w4a16-channel", "w8a16", "w8a8-zeros", "fp8-blocks"]
)
def test_activations_are_rounded_if_that_is_asked_for_and_the_format_lets_them(tmp_path, kind):
    reference = written(tmp_path / "model", kind)
    sequences = Sequences(num_rows=1, length=20, vocab_size=96, block_size=8)
    exact, widened, rounded = (
        sequences.logits_of_all_tokens(
            compiled_model(path, load_library(), sequences, activations=activations), [Span(0, 0, 20)]
        )
        for path, activations in (
            (reference, "auto"),
            (tmp_path / "model", "exact"),
            (tmp_path / "model", "int8"),
        )
    )
    stays_exact = kind in ("gptq-act-order", "fp8-blocks")
    torch.testing.assert_close(widened, exact, rtol=1e-3, atol=1e-3)
    assert torch.equal(rounded, widened) == stays_exact
    assert float((rounded - exact).norm() / exact.norm()) < 0.5


@pytest.mark.skipif(load_library() is None, reason="no CPU kernels that run here")
@pytest.mark.parametrize("changes", [{"head_dim": 8}, {"head_dim": 24}, {"num_key_value_heads": 4}])
def test_heads_that_the_kernels_pad_are_right_too(tmp_path, changes):
    reference = written(tmp_path / "model", "awq", **{"num_attention_heads": 4} | changes)
    sequences = Sequences(num_rows=1, length=20, vocab_size=96, block_size=8)
    whole = [Span(0, 0, 20)]
    exact, coded = (
        sequences.logits_of_all_tokens(compiled_model(path, load_library(), sequences), whole)
        for path in (reference, tmp_path / "model")
    )
    torch.testing.assert_close(coded, exact, rtol=1e-3, atol=1e-3)


_REFUSED = {
    "gptq": [
        (
            {"quant_method": "hqq"},
            "quant_method 'hqq' is not supported; allowed: auto-round, awq, bitnet, bitsandbytes, compressed",
        ),
        ({"quant_method": ["gptq"]}, "quant_method ['gptq'] is not supported"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format ['gptq']"),
        ({"bits": 4.5}, "bits 4.5 is not supported"),
        ({"bits": 5}, "bits 5 is not supported; allowed: 2, 3, 4, 8"),
        ({"group_size": 20}, "group_size 20 is not supported"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({"dynamic": {"+:.*": {"bits": 5}}}, "dynamic: '+:.*': bits 5 is not supported; allowed: 2, 3, 4, 8"),
        ({"dynamic": {".*": {"format": "marlin"}}}, "dynamic: '.*': format 'marlin' is not supported"),
        ({"dynamic": {".*": 4}}, "dynamic: .* 4 is not supported; allowed: an object"),
        ({"dynamic": {"-:(.*)*": {}}}, "dynamic: pattern '(.*)*' could take too long"),
        ({"dynamic": ["-:.*"]}, "dynamic ['-:.*'] is not supported; allowed: an object"),
        ({"adapter": {"path": "x"}}, "adapter {'path': 'x'} is not supported; allowed: none"),
        ({"pack_dtype": "int8"}, "pack_dtype"),
        ({"format": "marlin"}, "format 'marlin' is not supported; allowed: gptq or gptq_v2"),
        ({"is_marlin_format": True}, "is_marlin_format True is not supported; allowed: false"),
    ],
    "awq": [
        ({"version": "gemv"}, "version 'gemv' is not supported; allowed: gemm"),
        ({"version": None, "checkpoint_format": "gemv_fast"}, "checkpoint_format 'gemv_fast' is not supported"),
        ({"version": None, "format": "llm-awq"}, "format 'llm-awq' is not supported; allowed: gemm"),
        ({"bits": 8}, "bits 8"),
    ],
    "auto-round": [
        (
            {"packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported",
        ),
        ({"packing_format": None}, "packing_format None is not supported; allowed: auto_round, auto_round:auto_awq"),
        ({"act_bits": 8}, "act_bits 8 is not supported; allowed: 16"),
        ({"data_type": "nv_fp"}, "data_type 'nv_fp' is not supported; allowed: int"),
        (
            {"extra_config": {"k_proj": {"bits": 5}}},
            "extra_config: k_proj: bits 5 is not supported; allowed: 2, 3, 4, 8",
        ),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, "could take too long"),
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
    ],
    "fp8-blocks": [
        ({"weight_block_size": [5, 5]}, "weight_block_size"),
        ({"activation_scheme": "odd"}, "activation_scheme 'odd'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; allowed: e4m3"),
        ({"scale_fmt": "e5m2"}, "scale_fmt 'e5m2' is not supported; allowed: float or ue8m0"),
    ],
    "fp4-modelopt": [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported; allowed: FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        ({"quant_algo": None}, "quant_algo None is not supported"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16_AWQ"}}},
            "quantized_layers: a: quant_algo 'W4A16_AWQ' is not supported",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}},
            "quantized_layers: a 'FP8' is not supported; allowed: an object",
        ),
    ],
    "fp4-quark": [
        ({"global_quant_config": None}, "global_quant_config None is not supported; allowed: an object with weight"),
        (
            {"global_quant_config": {"weight": {"dtype": "int4"}}},
            "weight: dtype 'int4' is not supported; allowed: fp8_e4m3",
        ),
        ({"global_quant_config": {"weight": [{"dtype": "fp4"}]}}, "weight [{'dtype': 'fp4'}] is not supported"),
        (
            {"global_quant_config": {"weight": {"dtype": "fp4"}}},
            "weight: qscheme None is not supported; allowed: per_group",
        ),
        (
            {"layer_quant_config": {"*k_proj": {"weight": {"dtype": "fp8_e5m2"}}}},
            "layer_quant_config: *k_proj: weight: dtype 'fp8_e5m2' is not supported",
        ),
    ],
    "fp4-nv": [
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}},
            "config_groups: a: weights: type 'int' is not supported; allowed: float",
        ),
        (
            {
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}
                }
            },
            "weights: group_size 32 is not supported; allowed: 16",
        ),
    ],
    "bitnet": [
        ({"linear_class": "linear"}, "linear_class 'linear' is not supported; allowed: bitlinear, autobitlinear"),
        ({"quantization_mode": None}, "quantization_mode None is not supported; allowed: offline, online"),
        ({"use_rms_norm": True}, "use_rms_norm True is not supported; allowed: false"),
        (
            {"linear_class": "autobitlinear", "quantization_mode": "online", "modules_to_not_convert": ["o_proj"]},
            "modules_to_not_convert ['o_proj'] is not supported",
        ),
    ],
    "nf4": [
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16' is not supported; allowed: uint8"),
    ],
    "w4a16": [
        ({"format": "marlin-24"}, "format 'marlin-24' is not supported; allowed: pack-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": {"weights": {}}}}, "config_groups: a: targets None is not supported"),
        ({"config_groups": {"a": ["Linear"]}}, "config_groups: a ['Linear'] is not supported; allowed: an object"),
        ({"config_groups": {"a": {"targets": ["Linear"]}}}, "config_groups: a: weights None is not supported"),
        (
            {"format": "mixed-precision"},
            "config_groups: group_0: format None is not supported; allowed: pack-quantized",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "said"), [(kind, *case) for kind, cases in _REFUSED.items() for case in cases]
)
def test_a_variant_that_cannot_be_read_is_refused_by_name(tmp_path, kind, changes, said):
    written(tmp_path / "model", kind)
    described = (KINDS | MIXED_KINDS)[kind][0]
    change_config(tmp_path / "model", quantization_config=copy.deepcopy(described) | changes)
    with pytest.raises(ModelFilesError) as refused:
        Checkpoint(tmp_path / "model")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_bits": 9}, "num_bits 9"),
        ({"type": "float"}, "type 'float' is not supported; allowed: int"),
        ({"strategy": "block"}, "strategy 'block'"),
        ({"dynamic": True}, "dynamic True"),
        ({"strategy": "group", "group_size": None}, "group_size None"),
    ],
)
def test_weights_of_other_kinds_are_refused_by_name(tmp_path, changes, said):
    written(tmp_path / "model", "w4a16")
    described = copy.deepcopy(KINDS["w4a16"][0])
    described["config_groups"]["group_0"]["weights"] |= changes
    change_config(tmp_path / "model", quantization_config=described)
    with pytest.raises(ModelFilesError, match=said):
        Checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "tensor", "changes"),
    [
        ("gptq", "g_idx", {"desc_act": True}),
        ("w4a16", "weight_g_idx", {"actorder": "group"}),
        ("w4a16", "weight_g_idx", {"actorder": "static"}),
    ],
)
def test_groups_of_their_own_need_the_tensor_that_names_them(tmp_path, kind, tensor, changes):
    written(tmp_path / "model", kind)
    described = copy.deepcopy(KINDS[kind][0])
    (described if kind == "gptq" else described["config_groups"]["group_0"]["weights"]).update(changes)
    change_config(tmp_path / "model", quantization_config=described)
    base = "model.layers.0.self_attn.q_proj"
    damaged(tmp_path / "model", lambda tensors: tensors.pop(f"{base}.{tensor}", None))
    if "static" in changes.values():
        read_checked(tmp_path / "model", f"{base}.weight")
    else:
        with pytest.raises(ModelFilesError, match=f"{tensor} is missing"):
            read_checked(tmp_path / "model", f"{base}.weight")


@pytest.mark.parametrize(("kind", "ones"), [("gptq-2", 0x55555555), ("gptq", 0x11111111), ("gptq-8", 0x01010101)])
def test_a_zero_of_0_borrows_from_its_neighbour(tmp_path, kind, ones):
    """GPTQModel takes one from each zero by one subtraction of words, and adds it so."""
    written(tmp_path / "model", kind)
    base = "model.layers.0.self_attn.q_proj"
    name, zeros = f"{base}.qzeros", torch.tensor([0x04030200, 0x70605040, 0x00000001, 0x10F0E0D0]).int()

    def change(tensors):
        shape = tensors[name].shape
        tensors[name] = (zeros.repeat(shape[0], shape[1] // 4) - ones).contiguous()

    damaged(tmp_path / "model", change)
    first = read_checked(tmp_path / "model", f"{base}.weight")
    change_config(tmp_path / "model", quantization_config=KINDS[kind][0] | {"checkpoint_format": "gptq_v2"})
    damaged(tmp_path / "model", lambda tensors: tensors[name].add_(ones))
    assert torch.equal(first, read_checked(tmp_path / "model", f"{base}.weight"))


@pytest.mark.parametrize(
    ("kind", "file", "described"),
    [
        ("gptq-act-order", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}),
    ],
)
def test_a_format_may_be_described_in_a_file_of_its_own(tmp_path, kind, file, described):
    """As before config.json did, which goes before it."""
    reference = load_file(written(tmp_path / "model", kind) / "model.safetensors")
    change_config(tmp_path / "model", quantization_config=None)
    (tmp_path / "model" / file).write_text(json.dumps(described))
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(read_checked(tmp_path / "model", name), reference[name], rtol=1e-6, atol=1e-7)
    bits = {"w_bit", "bits"} & described.keys()
    (tmp_path / "model" / file).write_text(json.dumps(described | dict.fromkeys(bits, 5)))
    with pytest.raises(ModelFilesError, match=f"{file}: bits .* is not supported"):
        Checkpoint(tmp_path / "model")
    change_config(tmp_path / "model", quantization_config=KINDS[kind][0])
    read_checked(tmp_path / "model", name)


def test_biases_of_zeros_that_the_model_has_not_are_passed_over(tmp_path):
    """AutoGPTQ's early files have them."""
    written(tmp_path / "model", "gptq")
    base = "model.layers.1.mlp.down_proj"
    bias = torch.zeros(64, dtype=torch.float16)
    damaged(tmp_path / "model", lambda tensors: tensors.update({f"{base}.bias": bias}))
    read_checked(tmp_path / "model", f"{base}.weight")
    bias[3] = 0.5
    damaged(tmp_path / "model", lambda tensors: tensors.update({f"{base}.bias": bias}))
    with pytest.raises(ModelFilesError, match=f"{base}.bias does not belong to this model"):
        read_checked(tmp_path / "model", f"{base}.weight")


def test_biases_that_the_model_has_are_not_read_to_check_them(tmp_path):
    write_checkpoint(tmp_path / "model", **_SIZES, architectures=["Qwen2ForCausalLM"])
    quantise(tmp_path / "model", "gptq")
    read = []
    with Checkpoint(tmp_path / "model", report=lambda *seen: read.append(seen)) as checkpoint:
        check_tensors(read_model_config(tmp_path / "model"), checkpoint)
        assert "model.layers.0.self_attn.q_proj.bias" in checkpoint
    assert read == []


def test_scales_that_are_powers_of_two_may_be_floats(tmp_path):
    """As DeepSeek V3.1 has them; those that are exponents are among the layouts."""
    reference = load_file(written(tmp_path / "model", "fp8-blocks") / "model.safetensors")
    change_config(tmp_path / "model", quantization_config=KINDS["fp8-blocks"][0] | {"scale_fmt": "ue8m0"})
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(read_checked(tmp_path / "model", name), reference[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("beside", [None, {"group_size": 32, "bits": 4}])
def test_mlx_describes_weights_in_a_field_of_its_own(tmp_path, beside):
    """Some with other fields, some as not quantised; embeddings are quantised as well."""
    write_checkpoint(tmp_path / "model", **_SIZES)
    shutil.copytree(tmp_path / "model", tmp_path / "eight")
    of_4, of_8 = (
        load_file(quantise(tmp_path / name, kind) / "model.safetensors")
        for name, kind in (("model", "mlx"), ("eight", "mlx-8"))
    )
    value, down, gate = (
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
    )
    wide = of_4 | {f"{value}.weight": of_8[f"{value}.weight"], "model.embed_tokens.weight": of_4[f"{gate}.weight"]}
    tensors, bytes_ = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "eight"))
    for end in ("weight", "scales", "biases"):
        tensors[f"{value}.{end}"] = bytes_[f"{value}.{end}"]
        tensors[f"model.embed_tokens.{end}"] = tensors[f"{gate}.{end}"].clone()
        del tensors[f"{down}.{end}"]
    tensors[f"{down}.weight"] = wide[f"{down}.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    described = {"group_size": 32, "bits": 4, value: {"group_size": 32, "bits": 8}, down: False}
    change_config(tmp_path / "model", quantization=described, quantization_config=beside)
    with Checkpoint(tmp_path / "model") as checkpoint:
        check_tensors(read_model_config(tmp_path / "model"), checkpoint)
        for name, weight in wide.items():
            torch.testing.assert_close(checkpoint.read(name).float(), weight.float(), rtol=1e-6, atol=1e-7)
    for changes, said in (
        (
            {value: {"group_size": 32, "bits": 7}},
            f"config.json: quantization: {value}: bits 7 is not supported; allowed: 2",
        ),
        ({"mode": "mxfp4"}, "config.json: quantization: mode 'mxfp4' is not supported; allowed: affine"),
        ({"group_size": 0}, "config.json: quantization: group_size 0 is not supported; allowed: 16, 32"),
    ):
        change_config(tmp_path / "model", quantization=described | changes)
        with pytest.raises(ModelFilesError, match=said):
            Checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    "described",
    [
        {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8},
        },
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    ],
)
def test_keys_and_values_alone_may_be_meant_to_be_quantised(tmp_path, described):
    write_checkpoint(tmp_path / "model", **_SIZES)
    change_config(tmp_path / "model", quantization_config=described)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(tmp_path / "model" / "model.safetensors")[name]
    damaged(tmp_path / "model", lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    assert torch.equal(read_checked(tmp_path / "model", name), stored)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, None),
        (
            {"quant_algo": "NVFP4_AWQ"},
            "quant_algo 'NVFP4_AWQ' is not supported; allowed: FP8, FP8_PER_CHANNEL_PER_TOKEN,",
        ),
    ],
)
def test_model_optimizer_may_describe_weights_in_a_file_of_its_own(tmp_path, described, said):
    reference = load_file(written(tmp_path / "model", "fp8-modelopt") / "model.safetensors")
    change_config(tmp_path / "model", quantization_config=None)
    file = tmp_path / "model" / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": described}))
    name = "model.layers.0.self_attn.q_proj.weight"
    if said is None:
        torch.testing.assert_close(read_checked(tmp_path / "model", name), reference[name], rtol=1e-6, atol=1e-7)
    else:
        with pytest.raises(ModelFilesError, match=f"hf_quant_config.json: quantization: {said}"):
            read_checked(tmp_path / "model", name)


_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("float-channel", {"kv_cache_scheme": _SCHEME}),
        ("fp8-tensors", {"kv_cache_scheme": "static"}),
        ("fp8-modelopt", {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}),
        ("fp8-quark", {"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}),
    ],
)
def test_keys_and_values_that_are_meant_to_be_quantised_are_not_and_the_log_says_so(
    tmp_path, kind, changes, kv_cache_dtype
):
    reference = load_file(written(tmp_path / "model", kind) / "model.safetensors")
    change_config(tmp_path / "model", quantization_config=KINDS[kind][0] | changes)
    ends = ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale", "self_attn.kv_scale")
    scales = {f"model.layers.{layer}.{end}": torch.tensor(0.5) for layer in range(2) for end in ends}
    damaged(tmp_path / "model", lambda tensors: tensors.update(scales))
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(read_checked(tmp_path / "model", name), reference[name], rtol=1e-6, atol=1e-7)
    said = []
    config = BackendConfig(model=str(tmp_path / "model"), kv_cache_dtype=kv_cache_dtype, warn=said.append)
    settings_of(config, torch.device("cpu"))
    assert len(said) == (kv_cache_dtype == "auto")
    assert all("keys and values" in line and "float32" in line for line in said)


def test_quantised_weights_are_not_quantised_again(tmp_path):
    written(tmp_path / "model", "awq")
    config = read_model_config(tmp_path / "model")
    said = r"quantization 'int8' is not allowed with this model, whose weights are quantised \(awq\); allowed: none"
    with Checkpoint(tmp_path / "model") as checkpoint, pytest.raises(BackendConfigError, match=said):
        check_tensors(config, checkpoint, "int8")


def damaged(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


_STATE = "weight.quant_state.bitsandbytes__nf4"


def _bytes_of(state):
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def read_checked(directory, name):
    with Checkpoint(directory) as checkpoint:
        check_tensors(read_model_config(directory), checkpoint)
        return checkpoint.read(name)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gptq", lambda t, base: t.pop(f"{base}.scales"), "q_proj.scales is missing"),
        ("gptq", lambda t, base: t.update({f"{base}.scales": t[f"{base}.scales"][:1].clone()}), r"asks for \[2, 64\]"),
        ("gptq", lambda t, base: t.update({f"{base}.qweight": t[f"{base}.qweight"].long()}), "dtype I64; allowed: I32"),
        ("gptq", lambda t, base: t.update({f"{base}.extra": torch.zeros(1)}), "does not belong"),
        ("gptq", lambda t, base: t[f"{base}.g_idx"].fill_(9), "g_idx names a group that does not exist"),
        ("gptq", lambda t, base: t[f"{base}.scales"][1, 3:].fill_(torch.inf), "a scale or zero is not finite"),
        ("fp8-blocks", lambda t, base: t[f"{base}.weight_scale_inv"][0].fill_(torch.nan), "q_proj.weight: a scale or"),
        ("fp8-tensors", lambda t, base: t.pop(f"{base}.weight_scale"), "q_proj: 0 tensors of scales; allowed: one of"),
        ("fp8-blocks", lambda t, base: t[f"{base}.weight"].view(torch.uint8).fill_(0xFF), "not a number"),
        ("fp8-mx", lambda t, base: t[f"{base}.weight_scale"].fill_(0xFF), "a scale or zero is not finite"),
        ("fp4-mx", lambda t, base: t[f"{base}.weight_scale"].fill_(0xFF), "a scale or zero is not finite"),
        ("fp4-nv", lambda t, base: t[f"{base}.weight_global_scale"].fill_(0), "a scale or zero is not finite"),
        ("fp4-modelopt", lambda t, base: t.pop(f"{base}.weight_scale_2"), "q_proj.weight_scale_2 is missing"),
        ("nf4", lambda t, base: t.pop(f"{base}.{_STATE}"), "q_proj: 0 tensors with its shape; allowed: one of"),
        ("nf4", lambda t, base: t[f"{base}.{_STATE}"].fill_(34), "nf4: not valid JSON; allowed: an object"),
        (
            "nf4",
            lambda t, base: t.update({f"{base}.{_STATE}": _bytes_of({"shape": [2, 2]})}),
            r"shape \[2, 2\] is not",
        ),
        ("nf4", lambda t, base: t[f"{base}.weight.quant_map"].fill_(torch.nan), "a scale or zero is not finite"),
        ("bnb-int8", lambda t, base: t[f"{base}.weight_format"].fill_(1), "q_proj.weight_format does not belong"),
        ("bitnet", lambda t, base: t[f"{base}.weight_scale"].fill_(0), "a scale or zero is not finite"),
        ("bitnet", lambda t, base: t.update({f"{base}.weight": t[f"{base}.weight"].float()}), "dtype F32; allowed: U8"),
    ],
)
def test_a_damaged_weight_is_refused_by_name(tmp_path, kind, change, said):
    written(tmp_path / "model", kind)
    base = "model.layers.0.self_attn.q_proj"
    damaged(tmp_path / "model", lambda tensors: change(tensors, base))
    with pytest.raises(ModelFilesError, match=said):
        read_checked(tmp_path / "model", f"{base}.weight")
