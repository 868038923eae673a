"""Adapters of the torch backend against transformers with merged weights: the same tokens, whatever shares the step."""

import functools
import itertools
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from backend_driver import BackendDriver, Request, load_adapter
from checkpoints import VOCAB_SIZE, change_head, make_checkpoint, make_model
from group_backend import InlineGroup
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.models import compiled
from headway_kernels.cpu.library import CpuLibrary, installed_variants, runs_here
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo
from lora_files import ALL_PROJECTIONS, merge_adapter, write_adapter
from quantised_checkpoints import quantise

NUM_OUTPUT = 12
LENGTHS = (1, 9, 17, 30)
KERNELS = ["compiled", "eager"]
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
# Of each fused projection some parts, all, or none.
ADAPTERS = {
    "all": {},
    "queries": {"targets": ("q_proj", "v_proj"), "rank": 8, "use_rslora": True},
    "back": {"targets": ("o_proj", "down_proj"), "rank": 1},
    "up": {"targets": ("up_proj", "k_proj"), "rank": 3},
    "narrow": {"dtype": torch.bfloat16},
}
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
APART = {
    "mixtral": tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w2", "w3")),
    "phimoe": tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3")),
    "granite_moe-shared": ("block_sparse_moe.experts.{}.up_proj", "block_sparse_moe.experts.{}.down_proj"),
    "cohere2_moe": ("mlp.experts.{}.gate_proj",),
    "olmoe": ("mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    "qwen2_moe": ("mlp.experts.{}.gate_proj",),
    "qwen3_moe": ("mlp.experts.{}.up_proj", "mlp.experts.{}.gate_proj"),
    "gpt_oss": (),
    "deepseek_v2-lite": ("mlp.experts.{}.gate_proj",),
    "deepseek_v3": ("mlp.experts.{}.up_proj", "mlp.experts.{}.gate_proj"),
    "deepseek_v3-halves": (),
}
"""Mixtures, and matrices of their experts in the layout of one pair for each."""
ROUTERS = {"gpt_oss", "phimoe", "granite_moe-shared"}
"""Where transformers calls it so."""
CHANGE_THE_BASE = ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training after which the model's weights are others."""
FUSED = {
    "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_4h_to_h"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "falcon-40b": ("query_key_value", "dense", "dense_h_to_4h"),
    "codegen": ("qkv_proj", "out_proj", "fc_in"),
    "afmoe": ("gate_proj", "k_proj", "o_proj"),
    "muse_glimmer": ("self_attn.gate_proj", "mlp.gate_proj", "down_proj"),
    "gemma4-keys": ("q_proj", "k_proj", "o_proj", "down_proj"),
    "gemma4-shared": ("q_proj", "v_proj", "o_proj", "gate_proj"),
    "gemma3n": ("q_proj", "o_proj", "gate_proj"),
    "laguna": ("q_proj", "g_proj", "o_proj"),
    "deepseek_v32": ("q_a_proj", "kv_b_proj", "o_proj"),
    "bitnet": ("q_proj", "o_proj", "down_proj"),
    "kolibri1": ("q_proj", "o_proj"),
    "modernbert_decoder": ("k_proj", "Wi", "attn.Wo", "mlp.Wo"),
    "mimo_v2": ("q_proj", "v_proj", "o_proj"),
    "lfm3": ("q_proj", "g_proj", "o_proj", "in_proj", "w1", "w2"),
    "mamba2": ("in_proj", "out_proj"),
    "recurrent_gemma": ("linear_x", "linear_y", "linear_out", "q_proj", "up_proj"),
    "minimax": ("qkv_proj", "output_gate", "out_proj", "v_proj"),
    "kimi_linear": ("q_proj", "kv_b_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "o_proj"),
    "bailing_hybrid": ("q_proj", "f_proj", "g_proj", "o_proj", "down_proj"),
    "falcon_mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "nemotron_h": ("in_proj", "q_proj", "mixer.up_proj", "mixer.down_proj"),
    "nemotron_h-latent": ("fc1_latent_proj", "fc2_latent_proj", "out_proj"),
    "falcon_h1": ("q_proj", "v_proj", "o_proj", "in_proj", "out_proj", "gate_proj", "down_proj"),
}


def adapters_of(family: str) -> dict[str, dict[str, object]]:
    """Of mixtures: of experts in either layout that PEFT has had, of routers and shared experts; and of attention alone."""
    if family not in APART:
        return ADAPTERS
    block = "block_sparse_moe" if family.startswith("granite") else "mlp"
    router = f"{block}.{'router' if family in ROUTERS else 'gate'}.weight"
    stacks = tuple(name.replace("mlp", block) for name in STACKS)
    back = {"targets": (*ALL_PROJECTIONS, "q_a_proj", "kv_b_proj", "input_linear"), "rank": 5, "use_rslora": True}
    return {
        "stacks": {"parameters": (*stacks, router), "targets": ("q_proj", "q_b_proj", "shared_expert_gate")},
        "gate_up": {"parameters": stacks[:1], "targets": ("v_proj", "kv_a_proj_with_mqa", "output_linear"), "rank": 2},
        "down": {"parameters": stacks[1:], **back},
        "apart": {"experts": APART[family], "targets": ("k_proj", "kv_b_proj"), "rank": 3},
        "attention": {"targets": ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj"), "rank": 2},
    }


def adapter_of(family: str, name: str | tuple[str, ...]) -> dict[str, object]:
    """An adapter by its name, or by what it changes."""
    return adapters_of(family)[name] if isinstance(name, str) else {"targets": name, "rank": 3}


def prompts():
    draw = random.Random(1)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def open_on(backend, directory, **settings) -> BackendInfo:
    config = {"model": str(directory), "dtype": "float32", "max_num_seqs": 24, "num_kv_blocks": 200, "block_size": 8}
    return backend.open(BackendConfig(**(config | settings)))


def open_backend(directory, **settings) -> tuple[TorchBackend, BackendInfo]:
    backend = TorchBackend()
    return backend, open_on(backend, directory, **settings)


def greedy(model, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_OUTPUT,
        min_new_tokens=NUM_OUTPUT,
        do_sample=False,
    )
    return tokens[0, len(prompt) :].tolist()


def merged_tokens(family: str, adapters: dict[str, Path]) -> dict[str, list[list[int]]]:
    """By adapter, and of none: the tokens for every prompt."""
    expected = {"": [greedy(make_model(family), prompt) for prompt in prompts()]}
    for name, directory in adapters.items():
        merged = merge_adapter(directory, make_model(family))
        expected[name] = [greedy(merged, prompt) for prompt in prompts()]
    assert len({str(tokens) for tokens in expected.values()}) == len(expected), "every adapter changes the tokens"
    return expected


@pytest.fixture(scope="module")
def adapted_model(tmp_path_factory):
    """Of a family: a model, its adapters by name, and the tokens of each (and of none) for every prompt."""

    @functools.cache
    def made(family: str) -> tuple[Path, dict[str, Path], dict[str, list[list[int]]]]:
        root: Path = tmp_path_factory.mktemp(family)
        model = make_checkpoint(root / "model", family)
        directories = {
            name: write_adapter(root / name, model, seed=number, **settings)
            for number, (name, settings) in enumerate(adapters_of(family).items())
        }
        return root / "model", directories, merged_tokens(family, directories)

    return made


@pytest.fixture(scope="module")
def adapted(adapted_model):
    return adapted_model("llama-bias")


def identities(info: BackendInfo) -> dict[str, str]:
    return {"": ""} | {adapter.name: adapter.identity for adapter in info.adapters}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", [5, 512])
def test_rows_of_different_adapters_in_one_step_have_the_tokens_of_merged_weights(adapted, kernels, budget):
    directory, adapters, expected = adapted
    settings = {"adapters": {name: str(path) for name, path in adapters.items()}, "options": {"kernels": kernels}}
    backend, info = open_backend(directory, **settings)
    names = [name for name in expected for _ in prompts()]
    requests = [
        Request(prompt, NUM_OUTPUT, adapter=identities(info)[name]) for name in expected for prompt in prompts()
    ]
    BackendDriver(backend, info).run(requests, budget=budget)
    wanted = [tokens for name in expected for tokens in expected[name]]
    for name, request, tokens in zip(names, requests, wanted, strict=True):
        assert (name, request.output) == (name, tokens)
    backend.close()


@pytest.mark.parametrize(
    "variant", [path for path in installed_variants() if runs_here(path)], ids=lambda path: path.stem
)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize(("family", "name"), [("llama-bias", "all"), ("qwen2_moe", "stacks"), ("gpt_oss", "down")])
def test_every_variant_of_the_kernels_has_them(adapted_model, family, name, variant, quantization, monkeypatch):
    """The tokens are the same in a crowd and alone; with float32 weights, those of merged weights."""
    directory, adapters, expected = adapted_model(family)
    monkeypatch.setattr(compiled, "load_library", lambda: CpuLibrary(variant))
    settings = {"options": {"kernels": "compiled"}, "quantization": quantization}
    backend, info = open_backend(directory, adapters={name: str(adapters[name])}, **settings)
    driver = BackendDriver(backend, info)
    crowd = [
        Request(prompt, NUM_OUTPUT, adapter=identity) for prompt in prompts() for identity in identities(info).values()
    ]
    driver.run(crowd, budget=30)
    alone = [Request(prompt, NUM_OUTPUT, adapter=identities(info)[name]) for prompt in prompts()]
    for request in alone:
        driver.run([request], budget=512)
    assert [request.output for request in crowd[1::2]] == [request.output for request in alone]
    if quantization == "none":
        assert [request.output for request in alone] == expected[name]
    backend.close()


@pytest.mark.parametrize(
    "variant", [path for path in installed_variants() if runs_here(path)], ids=lambda path: path.stem
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_adapters_leave_nothing_behind(tmp_path, variant, dtype, monkeypatch):
    """Activations of other steps lie where those of 48 columns end: a matrix unit reads 64."""
    torch.manual_seed(0)
    config = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=256, **config))
    model.save_pretrained(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, seed=0)
    monkeypatch.setattr(compiled, "load_library", lambda: CpuLibrary(variant))
    settings = {"options": {"kernels": "compiled"}, "dtype": dtype, "adapters": {"some": str(adapter)}}
    backend, info = open_backend(tmp_path / "model", **settings)
    long_prompts = [[(7 * i * i + 13 * number) % VOCAB_SIZE for i in range(60)] for number in range(8)]
    runs = []
    for name in ("", "some", ""):
        requests = [Request(prompt, NUM_OUTPUT, adapter=identities(info)[name]) for prompt in long_prompts]
        BackendDriver(backend, info).run(requests, budget=512)
        runs.append([request.output for request in requests])
    backend.close()
    assert runs[0] == runs[2] != runs[1]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *itertools.product(("llama-bias", "qwen2_moe"), ("compiled", "eager", "fast")),
        ("gpt_oss", "compiled"),
        *itertools.product(("deepseek_v3",), ("compiled", "fast")),
    ],
)
def test_ranks_have_their_parts_of_adapters(adapted_model, family, form):
    """On the kernels and in stages, with the bits of one rank."""
    directory, adapters, expected = adapted_model(family)
    options = {"kernels": "eager", "tensor_parallel_form": "fast"} if form == "fast" else {"kernels": form}
    settings = {"adapters": {name: str(path) for name, path in adapters.items()}, "options": options}
    answers = []
    backends = {"alone": TorchBackend(), "tensor": InlineGroup(tensor_parallel=2)}
    if form != "fast":
        backends["pipeline"] = InlineGroup(pipeline_parallel=2)
    for backend in backends.values():
        _, info = opened = backend, open_on(backend, directory, **settings)
        names = ("", *adapters)
        requests = [
            Request(prompt, NUM_OUTPUT, GREEDY, adapter=name and identities(info)[name])
            for prompt in prompts()
            for name in names
        ]
        BackendDriver(*opened).run(requests, budget=30)
        backend.close()
        assert [request.output for request in requests] == [
            expected[name][i] for i in range(len(LENGTHS)) for name in names
        ]
        answers.append([(request.output, [line.logprob for line in request.logprobs]) for request in requests])
    alone, together, *in_stages = answers
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    if form == "compiled":
        assert together == alone
    assert in_stages == [alone] * len(in_stages)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [*((family, "auto") for family in FUSED), ("falcon_h1", "eager"), ("bitnet", "eager")],
)
def test_an_adapter_of_fused_projections(tmp_path, family, kernels):
    model = make_checkpoint(tmp_path / "model", family)
    adapter = write_adapter(tmp_path / "adapter", model, seed=3, targets=FUSED[family])
    if family == "gpt2":  # As it was published first; adapters name all modules whole.
        change_head(tmp_path / "model", "bare")
    options = {"kernels": kernels}
    backend, info = open_backend(tmp_path / "model", adapters={"a": str(adapter)}, options=options)
    requests = [Request(prompt, NUM_OUTPUT, adapter=identities(info)["a"]) for prompt in prompts()]
    BackendDriver(backend, info).run(requests, budget=64)
    merged = merge_adapter(adapter, model)
    assert [request.output for request in requests] == [greedy(merged, prompt) for prompt in prompts()]
    backend.close()


@pytest.mark.parametrize(
    ("family", "others", "target"),
    [("gemma4-shared", "q_proj", "per_layer_input_gate"), ("deepseek_v32", "kv_b_proj", "wq_b")],
)
def test_an_adapter_of_what_adapters_do_not_reach_is_refused(tmp_path, family, others, target):
    model = make_checkpoint(tmp_path / "model", family)
    adapter = write_adapter(tmp_path / "adapter", model, seed=3, targets=(others, target))
    with pytest.raises(ModelFilesError, match=rf"tensor .*{target}.* is not supported"):
        open_backend(tmp_path / "model", adapters={"own": str(adapter)})


@pytest.mark.parametrize(("family", "name"), [("llama-bias", "all"), ("qwen2_moe", "down"), ("qwen2_moe", "attention")])
def test_a_row_has_the_same_bits_alone_and_in_company(adapted_model, family, name):
    """As of the kernels without adapters."""
    directory, adapters, _ = adapted_model(family)
    settings = {"adapters": {name: str(path) for name, path in adapters.items()}, "options": {"kernels": "compiled"}}
    found = []
    for others in (False, True):
        backend, info = open_backend(directory, **settings)
        known = identities(info)
        requests = [Request(prompts()[2], NUM_OUTPUT, GREEDY, adapter=known[name])]
        if others:
            requests += [Request(prompt, NUM_OUTPUT, adapter=other) for prompt in prompts() for other in known.values()]
        BackendDriver(backend, info).run(requests, budget=40 if others else 512)
        found.append([entry.logprob for entry in requests[0].logprobs])
        backend.close()
    assert found[0] == found[1]


def test_int8_weights_take_an_adapter_in_full_precision(adapted):
    """Quantised weights stay as they are: an adapter of zeros changes no bit, another one changes the tokens."""
    directory, adapters, _ = adapted
    zeros = load_file(adapters["all"] / "adapter_model.safetensors")
    save_file({name: tensor * 0 for name, tensor in zeros.items()}, adapters["all"].parent / "zeros.safetensors")
    nothing = adapters["all"].parent / "nothing"
    nothing.mkdir(exist_ok=True)
    (nothing / "adapter_config.json").write_text((adapters["all"] / "adapter_config.json").read_text())
    (adapters["all"].parent / "zeros.safetensors").rename(nothing / "adapter_model.safetensors")
    backend, info = open_backend(
        directory, quantization="int8", adapters={"nothing": str(nothing), "all": str(adapters["all"])}
    )
    requests = [
        Request(prompts()[2], NUM_OUTPUT, GREEDY, adapter=identities(info)[name]) for name in ("", "nothing", "all")
    ]
    BackendDriver(backend, info).run(requests, budget=64)
    plain, same, other = ([entry.logprob for entry in request.logprobs] for request in requests)
    assert plain == same
    assert plain != other
    backend.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "kind",
    [
        "w4a16-channel",
        "gptq-own-orders",
        "fp8-blocks",
        *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("w8a8", "awq", "gptq", "w4a16-zeros", "w8a16")),
    ],
)
def test_quantised_checkpoints_take_adapters(tmp_path, kind, kernels):
    """They are added to what the codes stand for: the log probabilities are those of the wide weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB_SIZE, num_attention_heads=4, max_position_embeddings=256, **sizes)
    )
    model.save_pretrained(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, seed=5)
    found = []
    for directory in (quantise(tmp_path / "model", kind), tmp_path / "model"):
        backend, info = open_backend(directory, adapters={"a": str(adapter)}, options={"kernels": kernels})
        requests = [
            Request(prompt, 1, GREEDY, adapter=identities(info)[name]) for prompt in prompts() for name in ("", "a")
        ]
        BackendDriver(backend, info).run(requests, budget=64)
        found.append([request.logprobs[0].logprob for request in requests])
        backend.close()
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert found[0][::2] != pytest.approx(found[0][1::2], abs=1e-2), "the adapter changes them"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", APART)
def test_experts_have_adapters_too(adapted_model, family, kernels):
    """Rows of all adapters, and of none, in the same steps."""
    directory, adapters, expected = adapted_model(family)
    settings = {"adapters": {name: str(path) for name, path in adapters.items()}, "options": {"kernels": kernels}}
    backend, info = open_backend(directory, **settings)
    requests = [
        Request(prompt, NUM_OUTPUT, adapter=identities(info)[name]) for name in expected for prompt in prompts()
    ]
    BackendDriver(backend, info).run(requests, budget=64)
    assert [request.output for request in requests] == [tokens for name in expected for tokens in expected[name]]
    backend.close()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (
            "llama-bias",
            {
                "rank_pattern": {r"^model.layers.0.mlp.up_proj": 9, r".*layers\.1\..*_proj": 3, "q_proj": 2},
                "alpha_pattern": {"self_attn.k_proj": 3, r"layers.(0|1).self_attn.(k|v)_proj": 24, "none": 5},
                "use_rslora": True,
            },
        ),
        (
            "qwen3_moe",
            {
                "targets": ("q_proj",),
                "parameters": (*STACKS, "mlp.gate.weight"),
                # The first is what PEFT writes for an adapter that it brought into this layout.
                "rank_pattern": {r".*\.gate_up_proj": 8, "mlp.gate.weight": 3},
                "alpha_pattern": {r".*\.gate_up_proj": 16, "experts.down_proj": 5, "mlp.gate": 90},
            },
        ),
    ],
)
def test_ranks_and_alphas_of_some_modules(tmp_path, family, settings):
    """The first pattern that a whole name fits, or its end behind a dot."""
    model = make_checkpoint(tmp_path / "model", family)
    adapter = write_adapter(tmp_path / "adapter", model, seed=7, **settings)
    backend, info = open_backend(tmp_path / "model", adapters={"a": str(adapter)})
    requests = [Request(prompt, NUM_OUTPUT, adapter=identities(info)["a"]) for prompt in prompts()]
    BackendDriver(backend, info).run(requests, budget=64)
    merged = merge_adapter(adapter, model)
    assert [request.output for request in requests] == [greedy(merged, prompt) for prompt in prompts()]
    backend.close()


def test_a_stack_needs_the_name_of_its_parameter(tmp_path):
    """PEFT saves one parameter's matrices under its module's name."""
    model = make_checkpoint(tmp_path / "model", "mixtral")
    adapter = write_adapter(
        tmp_path / "adapter", model, seed=0, targets=(), parameters=STACKS[1:], target_parameters=None
    )
    assert "model.layers.0.mlp.experts.lora_A.weight is not supported" in refusal(tmp_path / "model", adapter)


def test_an_encoder_refuses_adapters(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 32, "hidden_size": 16}
            | {"num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}
        )
    )
    with pytest.raises(BackendConfigError, match="adapter 'a' is not allowed for an encoder; allowed: none"):
        open_backend(tmp_path, adapters={"a": "somewhere"})


@pytest.mark.parametrize("kernels", KERNELS)
def test_adapters_come_and_go_while_it_runs(adapted, kernels):
    directory, adapters, expected = adapted
    backend, info = open_backend(directory, options={"kernels": kernels})
    assert info.supports_adapters
    driver = BackendDriver(backend, info)

    def tokens_of(identity: str) -> Request:
        request = Request(prompts()[1], NUM_OUTPUT, adapter=identity)
        driver.run([request], budget=64)
        return request

    loaded = load_adapter(backend, "mine", str(adapters["all"]))
    assert load_adapter(backend, "mine", str(adapters["all"])) == loaded
    assert tokens_of(loaded.identity).output == expected["all"][1]
    running = [Request(prompts()[1], NUM_OUTPUT, adapter=loaded.identity), Request(prompts()[1], NUM_OUTPUT)]
    going = driver.step([driver._admit(request) for request in running], running, budget=64)
    backend.unload_adapter("mine")
    while going:
        going = driver.step(going, [], budget=64)
    assert [request.output for request in running] == [expected["all"][1], expected[""][1]]
    refused = tokens_of(loaded.identity)
    assert [error.message for error in refused.errors] == [
        f"adapter '{loaded.identity}' is not loaded on this executor"
    ]
    other = load_adapter(backend, "mine", str(adapters["up"]))
    assert other.identity != loaded.identity
    assert tokens_of(other.identity).output == expected["up"][1]
    backend.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; allowed: LORA"),
        ({"use_dora": True}, "use_dora True is not supported; allowed: nothing"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head'] is not supported; allowed: nothing"),
        ({"bias": "all"}, "bias 'all' is not supported; allowed: none"),
        (
            {"rank_pattern": {"q_proj": 2}},
            "q_proj.lora_A.weight has shape [4, 48]; the model and its rank ask for [2, 48]",
        ),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj 0 is not supported; allowed: an integer from 1 to 512"),
        ({"rank_pattern": [4]}, "rank_pattern [4] is not supported; allowed: an object"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: q_proj 'x' is not supported; allowed: a number above 0"),
        ({"alpha_pattern": {"q_(proj": 1}}, "is not a regular expression (missing ), unterminated subpattern"),
        (
            {"alpha_pattern": {"(.+)+x": 1}},
            "alpha_pattern: pattern '(.*\\\\.)?((.+)+x)$' could take too long; allowed: at most",
        ),
        *(({"init_lora_weights": way}, f"init_lora_weights '{way}' is not supported") for way in CHANGE_THE_BASE),
        *(({field: True}, f"{field} True is not supported; allowed: nothing") for field in ("lora_bias", "use_qalora")),
        ({"trainable_token_indices": [1]}, "trainable_token_indices [1] is not supported; allowed: nothing"),
        ({"layer_replication": [[0, 1]]}, "layer_replication [[0, 1]] is not supported; allowed: nothing"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow 1 is not supported; allowed: nothing"),
        ({"r": 0}, "r 0 is not supported; allowed: an integer from 1 to 512"),
        ({"r": 5}, "has shape [4, 96]; the model and its rank ask for [5, 96]"),
        ({"lora_alpha": "much"}, "lora_alpha 'much' is not supported; allowed: a number above 0"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported; allowed: CAUSAL_LM"),
        ({"task_type": []}, "task_type [] is not supported; allowed: CAUSAL_LM"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, adapted, changes, message):
    directory, adapters, _ = adapted
    config = json.loads((adapters["all"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapters["all"] / "adapter_model.safetensors").read_bytes())
    assert message in refusal(directory, tmp_path)


def refusal(directory: Path, adapter: Path) -> str:
    with pytest.raises(ModelFilesError) as refused:
        open_backend(directory, adapters={"a": str(adapter)})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_wrong_files_are_refused(tmp_path, adapted):
    directory, adapters, _ = adapted
    assert "no such directory" in refusal(directory, tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text((adapters["all"] / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    assert "adapter_model.bin is a pickle file, which is never loaded" in refusal(directory, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"nonsense")
    assert "damaged or not a safetensors file" in refusal(directory, tmp_path)
    elsewhere = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(adapters["all"], elsewhere)
    assert "the path is not UTF-8, which the library needs; allowed: one that is" in refusal(directory, elsewhere)
    tensors = load_file(adapters["all"] / "adapter_model.safetensors")
    first = next(name for name in tensors if ".lora_A." in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, weights)
    assert "has lora_B alone; allowed: lora_A and lora_B" in refusal(directory, tmp_path)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, weights)
    assert "tensor base_model.model.lm_head.lora_A.weight is not supported" in refusal(directory, tmp_path)
    save_file(tensors | {first: tensors[first].to(torch.float64)}, weights)
    assert "has dtype F64; allowed: F32, BF16, F16" in refusal(directory, tmp_path)
    for value in (torch.nan, torch.inf):
        wrong = tensors[first].clone()
        wrong[1, 2] = value
        save_file(tensors | {first: wrong}, weights)
        assert f"tensor {first} holds a value that is not finite; allowed: finite numbers" in refusal(
            directory, tmp_path
        )
    for name in (first.removeprefix("base_model.model."), first.replace(".weight", ".default.weight")):
        save_file({name: tensors[first]}, weights)
        said = refusal(directory, tmp_path)
        assert f"tensor {name} is not supported; allowed: base_model.model.NAME.lora_A.weight and lora_B" in said
        assert "with a NAME such as model.layers.0.self_attn.q_proj that ends with down_proj, gate_proj" in said
