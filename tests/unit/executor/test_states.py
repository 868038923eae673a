"""Layers with a state: what their executor says, what it refuses, and states that never reach another request."""

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend_driver import BackendDriver, Request
from checkpoints import VOCAB_SIZE, make_checkpoint, make_model
from group_backend import InlineGroup
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_executor.models import state_memory
from headway_executor.models.config import RecurrenceConfig
from headway_executor.models.families import read_model_config
from headway_executor.models.part import part_of
from headway_executor.models.recurrence import RowStates, scan, state_bytes
from headway_executor.models.tensor_names import RecurrenceNames
from headway_executor.rank_place import RankPlace
from headway_kernels.cpu.library import load_library
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import NewRequest, SchedulerOutput
from step_columns import backend_info, encoded_pairs

GREEDY = SamplingParams(temperature=0.0)
SIZES = {"dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 64, "block_size": 8}
CONVOLUTION = RecurrenceConfig(
    kind="gated", taps=3, value_dim=48, names=RecurrenceNames(inputs=("i",), convolution=("c",), output="o")
)
needs_kernels = pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "qwen3_5")
    return directory


def open_backend(directory, **changes):
    backend = TorchBackend()
    return backend, backend.open(BackendConfig(model=str(directory), **SIZES | changes))


def prompts(*lengths):
    rng = np.random.default_rng(3)
    return [rng.integers(1, VOCAB_SIZE, size=length).tolist() for length in lengths]


def tokens_of(backend, info, prompt, budget=512):
    request = Request(prompt, 6, GREEDY)
    BackendDriver(backend, info).run([request], budget=budget)
    return request.output


def test_the_executor_says_that_blocks_are_not_all(model, tmp_path):
    _, info = open_backend(model, swap_space_mib=64)
    assert (info.keeps_states, info.num_host_blocks, info.max_num_rows) == (True, 0, 4)
    make_checkpoint(tmp_path, "llama2")
    _, info = open_backend(tmp_path, swap_space_mib=64)
    assert not info.keeps_states
    assert info.num_host_blocks > 0


@pytest.mark.parametrize("kernels", ["eager", pytest.param("compiled", marks=needs_kernels)])
def test_who_gets_a_row_begins_anew(model, kernels):
    """Requests follow each other on the same rows, after a longer one and after one that was given up in between."""
    options = {"options": {"kernels": kernels}}
    long, short = prompts(70, 9)
    expected = tokens_of(*open_backend(model, **options), short)
    backend, info = open_backend(model, **options)
    assert tokens_of(backend, info, long, budget=16) != expected
    assert tokens_of(backend, info, short) == expected
    BackendDriver(backend, info).run([Request(long, 1, GREEDY)], budget=16)
    assert tokens_of(backend, info, short, budget=4) == expected


def test_a_row_that_goes_on_where_it_has_not_ended_is_our_own_mistake():
    states = RowStates([CONVOLUTION], 3, torch.device("cpu"))
    column = lambda *numbers: np.array(numbers, dtype=np.int64)  # noqa: E731 - of one row or two
    states.advance(column(0, 2), column(0, 0), column(5, 7))
    states.advance(column(2), column(7), column(1))
    states.advance(column(0), column(0), column(4))  # begins anew
    with pytest.raises(AssertionError, match="went on elsewhere"):
        states.advance(column(2), column(7), column(1))
    with pytest.raises(AssertionError, match="went on elsewhere"):
        states.advance(column(1), column(3), column(1))


def test_a_new_row_with_computed_tokens_is_impossible():
    state = BatchState(backend_info(num_blocks=8, block_size=4, max_model_len=30, vocab_size=9, keeps_states=True))
    new = NewRequest(
        row=0,
        token_ids=encode_column(range(6)),
        num_prompt_tokens=6,
        block_ids=encode_column((1, 2)),
        num_computed_tokens=4,
        sampling=SamplingParams(),
    )
    step = SchedulerOutput(
        epoch=1,
        step=0,
        total_num_scheduled_tokens=2,
        scheduled_new_reqs=(new,),
        num_scheduled_tokens=encoded_pairs([(0, 2)]),
    )
    with pytest.raises(ImpossibleDiff, match="new row 0 has 4 computed tokens, and its state has none"):
        state.apply(step)


def test_as_many_rows_as_a_quarter_of_the_free_memory_holds(model, monkeypatch):
    recurrences = read_model_config(model).recurrences(range(3))
    of_one = state_bytes(recurrences)
    assert of_one == 4 * 2 * (3 * (2 * 2 * 12 + 4 * 20) + 4 * 12 * 20)
    warnings = []
    monkeypatch.setattr(state_memory, "free_bytes", lambda _device: 4 * (2 * of_one + 9))
    _, info = open_backend(model, warn=warnings.append)
    assert info.max_num_rows == 2
    assert any("so 2 fit in a quarter of the free memory, and not max_num_seqs 4" in line for line in warnings)
    monkeypatch.setattr(state_memory, "free_bytes", lambda _device: of_one)
    with pytest.raises(BackendConfigError, match="the model's state of one request, 0 MiB, does not fit in 0 MiB"):
        open_backend(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": "ngram"}, "speculation 'ngram' is not allowed with this model, which has layers with a state"),
        ({"speculation": "draft", "draft_model": "same"}, "speculation 'draft' is not allowed with this model"),
    ],
)
def test_no_speculation_with_states(model, changes, message):
    named = {name: str(model) if value == "same" else value for name, value in changes.items()}
    with pytest.raises(BackendConfigError, match=message):
        open_backend(model, **named)


def test_a_draft_model_may_have_none_either(model, tmp_path):
    make_checkpoint(tmp_path, "llama2")
    with pytest.raises(BackendConfigError, match=r"draft_model .* is not allowed; it has layers with a state"):
        open_backend(tmp_path, speculation="draft", draft_model=str(model))


def test_ranks_share_no_layer_with_a_state(model):
    place = RankPlace(rank=0, tensor_parallel=2, pipeline_parallel=1, rendezvous="x")
    with pytest.raises(BackendConfigError, match=r"tensor_parallel 2 is not allowed; .* so allowed: 1"):
        part_of(read_model_config(model), place)


@needs_kernels
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize(
    "name", ["lfm2", "granitehybrid", "nemotron_h", "falcon_h1", "mamba2", "falcon_mamba", "kimi_linear"]
)
def test_stages_have_the_states_of_their_own_layers(tmp_path, name, kernels):
    """The second of three stages has no state, the others no attention, or only some."""
    make_checkpoint(tmp_path, name)
    prompt = prompts(37)[0]
    alone = tokens_of(*open_backend(tmp_path, options={"kernels": kernels}), prompt, budget=16)
    group = InlineGroup(pipeline_parallel=3)
    info = group.open(BackendConfig(model=str(tmp_path), options={"kernels": kernels}, num_threads=1, **SIZES))
    assert tokens_of(group, info, prompt, budget=16) == alone
    group.close()


@pytest.mark.parametrize(
    ("has_strengths", "has_channels"), [(False, False), (True, False), (True, True)], ids=["selective", "delta", "kimi"]
)
@pytest.mark.parametrize("length", [1, 64, 150])
def test_tokens_together_are_tokens_one_by_one(length, has_strengths, has_channels):
    draw = torch.Generator().manual_seed(length)
    queries, keys, values = (torch.randn(2, 3, length, width, generator=draw) for width in (8, 8, 5))
    keys = torch.nn.functional.normalize(keys, dim=-1)
    decays = -torch.rand(2, 3, length, *([8] if has_channels else []), generator=draw)
    strengths = torch.rand(2, 3, length, generator=draw) if has_strengths else None
    state = torch.randn(2, 3, 8, 5, generator=draw)
    results, after = scan(queries, keys, values, decays, strengths, state)
    for place in range(length):
        key, value = keys[:, :, place], values[:, :, place]
        kept = decays[:, :, place].exp()
        state = state * (kept[..., None] if has_channels else kept[..., None, None])
        if strengths is not None:
            value = (value - torch.einsum("nhk,nhkv->nhv", key, state)) * strengths[:, :, place, None]
        state = state + key[..., :, None] * value[..., None, :]
        expected = torch.einsum("nhk,nhkv->nhv", queries[:, :, place], state)
        assert torch.allclose(results[:, :, place], expected, atol=1e-4)
    assert torch.allclose(after, state, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("lfm2", "full_attn_idxs", 3),
        ("lfm2", "full_attn_idxs", [7]),
        ("lfm2", "conv_L_cache", 1),
        ("lfm2", "layer_types", ["conv", "full_attention", "sliding_attention"]),
        ("lfm3", "attention_bias", True),
        ("lfm3", "sliding_window", None),
        ("lfm3", "layer_types", ["conv", "full_attention", "chunked_attention"]),
        ("granitehybrid", "position_embedding_type", "alibi"),
        ("granitehybrid", "time_step_limit", [0.0, 0.1]),
        ("granitehybrid", "mamba_d_head", 7),
        ("granitehybrid", "mamba_n_heads", 5),
        ("falcon_h1", "attention_bias", True),
        ("falcon_h1", "projectors_bias", True),
        ("falcon_h1", "mlp_multipliers", [1.0]),
        ("falcon_h1", "ssm_multipliers", [1.0, 1.0, "1", 1.0, 1.0]),
        ("falcon_h1", "mamba_n_heads", 7),
        ("falcon_h1", "time_step_limit", [0.1, 0.2]),
        ("bamba", "attn_rotary_emb", 4),
        ("olmo_hybrid", "hidden_act", "gelu"),
        ("olmo_hybrid", "linear_num_value_heads", 3),
        ("olmo_hybrid", "layer_types", ["conv"] * 3),
        ("bamba", "partial_rotary_factor", 1.0),
        ("bamba", "attn_layer_indices", [9]),
        ("mamba2", "num_heads", 6),
        ("mamba2", "hidden_act", "gelu"),
        ("mamba2", "n_groups", 3),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "hidden_act", "gelu"),
        ("bailing_hybrid", "q_lora_rank", 16),
        ("bailing_hybrid", "kda_lower_bound", 0.5),
        ("bailing_hybrid", "attention_bias", True),
        ("recurrent_gemma", "block_types", ["recurrent", "conv"]),
        ("recurrent_gemma", "lru_width", 50),
        ("recurrent_gemma", "hidden_activation", "gelu"),
        ("minimax", "mlp_alpha_factor", 2.0),
        ("minimax", "hidden_act", "gelu"),
        ("minimax", "rotary_dim", 6),
        ("jamba", "attn_layer_offset", 3),
        ("jamba", "expert_layer_period", 1),
        ("jamba", "sliding_window", 16),
        ("mamba", "hidden_act", "gelu"),
        ("mamba", "time_step_rank", 0),
        ("falcon_mamba", "conv_kernel", 1),
        ("nemotron_h", "layers_block_type", ["mlp", "conv"]),
        ("nemotron_h", "moe_latent_size", -16),
        ("nemotron_h", "mlp_bias", True),
        ("nemotron_h", "mamba_proj_bias", True),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "mamba_dt_limit", [0.001, 0.1]),
        ("nemotron_h", "n_groups", 4),
        ("nemotron_h", "mamba_hidden_act", "relu"),
        ("qwen3_5", "linear_num_value_heads", 3),
        ("qwen3_5", "hidden_act", "gelu"),
    ],
)
def test_what_no_state_is_made_of_is_refused_by_name(tmp_path, name, field, value):
    make_model(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelFilesError, match=field):
        read_model_config(tmp_path)


def test_the_first_files_of_lfm2_name_their_layers_with_attention(tmp_path):
    make_model("lfm2").save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["layer_types"]
    path.write_text(json.dumps(values | {"full_attn_idxs": [1], "tie_embedding": True}))
    assert read_model_config(tmp_path) == expected


def test_olmo_hybrid_as_it_is_published(tmp_path):
    """transformers writes equal parts of its convolutions, and one norm of layers with attention under another name."""
    make_checkpoint(tmp_path, "olmo_hybrid")
    prompt = prompts(20)[0]
    expected = tokens_of(*open_backend(tmp_path), prompt)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in ("model.layers.0.", "model.layers.2."):
        names = [f"{layer}linear_attn.{part}_conv1d.weight" for part in "qkv"]
        parts = torch.split(torch.cat([tensors[name] for name in names]), [24, 24, 96])
        assert len(tensors[names[0]]) != len(parts[0])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    norm = tensors.pop("model.layers.1.feedforward_layer_norm.weight")
    tensors["model.layers.1.post_attention_layernorm.weight"] = norm
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(*open_backend(tmp_path), prompt) == expected


def test_kimi_linear_as_it_is_published(tmp_path):
    """Lists number layers from 1 on; transformers writes the first feed-forward where experts are."""
    make_checkpoint(tmp_path, "kimi_linear")
    prompt = prompts(20)[0]
    expected = tokens_of(*open_backend(tmp_path), prompt)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    section = {"kda_layers": [1, 3], "full_attn_layers": [2], "short_conv_kernel_size": 4}
    section |= {"head_dim": values.pop("linear_head_dim"), "num_heads": values.pop("linear_num_heads")}
    for field in ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim", "qk_head_dim"):
        del values[field]
    code = {"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"}
    path.write_text(json.dumps(values | {"linear_attn_config": section, "auto_map": code, "first_k_dense_replace": 1}))
    tensors = load_file(tmp_path / "model.safetensors")
    dense = "model.layers.0.block_sparse_moe."
    renamed = {name.replace(dense, "model.layers.0.mlp."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert tokens_of(*open_backend(tmp_path), prompt) == expected
    path.write_text(json.dumps(values | {"linear_attn_config": section | {"kda_layers": [1, 2]}}))
    with pytest.raises(ModelFilesError, match="kda_layers"):
        read_model_config(tmp_path)


def test_minimax_as_it_was_published_first(tmp_path):
    make_model("minimax-factors").save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["layer_types"]
    for kind in ("full_attn", "linear_attn", "mlp"):
        for part in ("alpha", "beta"):
            first = f"layernorm_{kind.replace('attn', 'attention')}_{part}"
            values[first] = values.pop(f"{kind}_{part}_factor")
    values |= {"architectures": ["MiniMaxText01ForCausalLM"], "attn_type_list": [0, 1, 0], "rotary_dim": 12}
    path.write_text(json.dumps(values))
    assert msgspec.structs.replace(read_model_config(tmp_path), architecture=expected.architecture) == expected
    for field, value in (("rotary_dim", 14), ("attn_type_list", [0, 2, 0]), ("postnorm", False)):
        path.write_text(json.dumps(values | {field: value}))
        with pytest.raises(ModelFilesError, match=field):
            read_model_config(tmp_path)


def test_blocks_without_keys_and_values_are_not_as_many_as_memory_would_hold(tmp_path):
    make_checkpoint(tmp_path, "mamba2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 1 << 20}))
    _, info = open_backend(tmp_path, num_kv_blocks=0, max_num_seqs=64)
    assert info.num_blocks == 1 << 18
    _, info = open_backend(tmp_path, num_kv_blocks=0, block_size=2)
    assert info.num_blocks == 1 << 19, "a longest request"


def test_letters_name_the_kinds_of_layers_too(tmp_path):
    """As Nemotron-H is published."""
    make_model("nemotron_h").save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["layers_block_type"]
    path.write_text(json.dumps(values | {"hybrid_override_pattern": "EM*-M--", "num_hidden_layers": 7}))
    assert read_model_config(tmp_path) == expected
    path.write_text(json.dumps(values | {"hybrid_override_pattern": "EMX"}))
    with pytest.raises(ModelFilesError, match="hybrid_override_pattern"):
        read_model_config(tmp_path)


def test_the_published_names_of_layers_are_read_too(tmp_path):
    """Files that are older than transformers 5 say mamba and attention."""
    model = make_model("granitehybrid")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    expected = read_model_config(tmp_path)
    path.write_text(text.replace('"linear_attention"', '"mamba"').replace('"full_attention"', '"attention"'))
    assert read_model_config(tmp_path) == expected
