"""The triton backend, its kernels interpreted: the same tokens as transformers, and one-line refusals.

On a device, only the comparison with transformers runs; the conformance suite runs the rest there.
"""

import gc
import json
import weakref
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from triton.runtime.interpreter import GridExecutor

from backend_driver import BackendDriver, Request, load_adapter
from checkpoints import CONTEXT, FAMILIES, ON_OPERATORS, VOCAB_SIZE, change_head, make_checkpoint
from decoder_driver import write_checkpoint
from device_weights import rounded
from headway_executor.backend import BackendConfig, BackendConfigError, ExecutorBackend, StepOutOfMemoryError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import device_model, graphs, key_index, linear, preparation
from headway_executor.gpu.linear import CodedLinear
from headway_executor.models import state_memory
from headway_executor.models.families import read_model_config
from headway_executor.models.recurrence import state_bytes
from headway_kernels.gpu.experts.grouped import multiply_pairs
from headway_proto.sampling import Constraint, SamplingParams
from headway_scheduler.core.state.limits import SchedulerLimits
from kept_graphs import KeptGraphs
from lora_files import write_adapter
from model_core import ModelCore
from quantised_checkpoints import KINDS, change_config, quantise
from unit.executor.test_adapters import FUSED, adapter_of
from unit.executor.test_stored_weights import WITH_STATES
from wholes import make_whole

pytestmark = pytest.mark.usefixtures("triton_interpreter")
ALSO_ON_A_DEVICE = ("test_greedy_tokens_and_logprobs_equal_transformers",)


@pytest.fixture(autouse=True)
def interpreted(request):
    """Nothing here but the comparison with transformers is meant for a device."""
    if torch.cuda.is_available() and request.node.originalname not in ALSO_ON_A_DEVICE:
        pytest.skip("interpreted; on a device, the conformance suite runs")


GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64}


def open_backend(directory, kind=TritonBackend, **settings):
    backend = kind()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {"model": str(directory), "device": device, "max_num_batched_tokens": 64} | SETTINGS
    return backend, backend.open(BackendConfig(**(config | settings)))


USUAL = (
    "llama3",
    "qwen2",
    "qwen3-bias",
    "mistral",
    "ministral3",
    "gemma2",
    "olmo2",
    "granite",
    "smollm3",
    "phi3",
    "starcoder2",
    "gpt_neox",
    "cohere2",
    "persimmon",
    "bitnet",
    "gpt_oss",
    "llama4",
    "deepseek_v3",
    "glm_moe_dsa",
    "afmoe",
    "apertus",
    "phimoe",
    "kolibri1",
    "falcon-40b",
    "mpt",
    "opt-350m",
    "modernbert_decoder",
    "codegen",
    "nanochat",
    "gpt2",
    "xglm",
    "gemma4-shared",
    "gemma4-experts",
    "laguna",
    "lfm2",
    "falcon_mamba",
    "nemotron_h-latent",
)
"""Of all families, what each part of a description takes."""


REFUSED = {
    "gemma3n": r"several hidden states of a token \(AltUp\), sparse activations",
}
"""What the kernels lack."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in USUAL else pytest.mark.deep)
        for name in (*FAMILIES, *ON_OPERATORS)
        if name not in REFUSED
    ],
)
def family(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_checkpoint(directory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_checkpoint(directory, "llama3")


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_parts_the_kernels_lack_is_refused_by_their_names(tmp_path, name):
    make_checkpoint(tmp_path, name)
    with pytest.raises(BackendConfigError, match=f"which has {REFUSED[name]}; allowed: backend torch"):
        TritonBackend().open(BackendConfig(model=str(tmp_path), device="cpu", dtype="float32"))


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def expected(model, tokens, num_output):
    output = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    return output.sequences[0, len(tokens) :].tolist(), torch.log_softmax(torch.cat(output.logits).float(), -1)


def test_greedy_tokens_and_logprobs_equal_transformers(family):
    directory, model = family
    requests = [Request(prompt(length, seed=length), 4, GREEDY) for length in (1, 8, 21)]
    BackendDriver(*open_backend(directory)).run(requests, budget=16)
    for request in requests:
        tokens, logprobs = expected(model, request.prompt, 4)
        assert request.output == tokens
        for entry, row in zip(request.logprobs, logprobs, strict=True):
            best = torch.topk(row, 2)
            assert entry.logprob == pytest.approx(float(best.values[0]), abs=1e-4)
            assert list(entry.top_token_ids) == best.indices.tolist()
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_vl_moe", {"num_hidden_layers": 1}),
        ("step3p7", {}),
        pytest.param("gemma4_unified", {}, marks=pytest.mark.deep),
    ],
)
def test_the_text_of_a_whole_has_its_tokens(tmp_path, name, sizes):
    model = make_whole(tmp_path, name, **sizes)
    request = Request(prompt(25), 3)
    BackendDriver(*open_backend(tmp_path)).run([request], budget=16)
    assert request.output == expected(model, request.prompt, 3)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 520}, "LlamaForCausalLM, which has heads of 520 channels; allowed: backend torch"),
        ({"architectures": ["BertModel"]}, "backend 'triton' is not allowed with an encoder; allowed: backend torch"),
    ],
)
def test_a_model_with_what_the_kernels_lack_is_refused_by_name(tmp_path, changes, message):
    make_checkpoint(tmp_path, "llama3")
    change_config(tmp_path, **changes)
    with pytest.raises(BackendConfigError, match=message):
        open_backend(tmp_path)


def test_keys_of_an_index_have_no_codes(tmp_path):
    make_checkpoint(tmp_path, "deepseek_v32")
    message = "kv_cache_dtype 'fp8' is not allowed with backend 'triton' and DeepseekV32ForCausalLM, which has an index of the"
    with pytest.raises(BackendConfigError, match=message):
        open_backend(tmp_path, kv_cache_dtype="fp8")


def test_what_tokens_see_is_the_same_in_parts_and_in_company(tmp_path, monkeypatch):
    """Of few scores at a time, of tokens that are attended with one after the other, and beside other rows."""
    make_checkpoint(tmp_path, "deepseek_v32")

    def run(lengths, **settings):
        requests = [Request(prompt(length, seed=length), 4, GREEDY) for length in lengths]
        BackendDriver(*open_backend(tmp_path, dtype="bfloat16", **settings)).run(requests, budget=24)
        return [[(entry.logprob, entry.top_token_ids) for entry in request.logprobs] for request in requests]

    alone, several = run([21]), run([5, 21, 30])
    assert several[1] == alone[0]
    monkeypatch.setattr(key_index, "_MOST_SCORES", 3 * 64)
    assert run([5, 21, 30], max_num_seqs=3) == several


ONE_LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
}
QUANTISED = ("gptq-act-order", "w4a16-zeros", "w8a8-zeros", "fp8-blocks", "fp4-modelopt", "nf4")
QUANTISED_SIZES = {
    "dense": {},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "stacked": {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "uneven": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "v_head_dim": 8,
        "partial_rotary_factor": 0.5,
        "sliding_window": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        *(pytest.param("dense", kind, marks=() if kind in QUANTISED else pytest.mark.deep) for kind in KINDS),
        ("experts", "awq"),
        pytest.param("experts", "fp8-blocks", marks=pytest.mark.deep),
        pytest.param("experts", "gptq-own-orders", marks=pytest.mark.deep),
        pytest.param("latent", "fp8-blocks", marks=pytest.mark.deep),
        pytest.param("uneven", "fp8-blocks", marks=pytest.mark.deep),
        pytest.param("falcon-h1", "w4a16-zeros", marks=pytest.mark.deep),
        pytest.param("mamba", "w8a8", marks=pytest.mark.deep),
        pytest.param("nemotron-h", "gptq-act-order", marks=pytest.mark.deep),
        ("stacked", "mxfp4"),
        ("dense", "gptq-rules"),
        ("experts", "compressed-formats"),
    ],
)
def test_quantised_checkpoints_give_what_they_stand_for_and_stay_codes(tmp_path, sizes, kind):
    write_checkpoint(
        tmp_path / "model",
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        vocab_size=VOCAB_SIZE,
        **(QUANTISED_SIZES | WITH_STATES)[sizes],
    )
    reference = quantise(tmp_path / "model", kind)

    def run(directory, backend, **options):
        requests = [Request(prompt(length, seed=length), 2, GREEDY) for length in (1, 9)]
        opened = open_backend(directory, backend, options=options, warn=said.append)
        BackendDriver(*opened).run(requests, budget=16)
        return opened[0], requests

    said = []
    backend, found = run(tmp_path / "model", TritonBackend)
    _, exact = run(reference, TorchBackend, kernels="eager")
    assert [request.output for request in found] == [request.output for request in exact]
    for request, other in zip(found, exact, strict=True):
        assert [entry.logprob for entry in request.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-3
        )
    has_numbers = kind in ("nf4", "nf4-nested")
    assert sum("widened to float32" in line for line in said) == has_numbers
    if sizes not in ("latent", "stacked", *WITH_STATES) and kind != "gptq-own-orders" and not has_numbers:
        qkv = backend._model.parts.target.decoder._weights.layers[0].mixing.qkv
        assert isinstance(
            getattr(qkv, "_product", qkv), CodedLinear
        )  # Where there may be adapters, they are around it.


@pytest.mark.parametrize(
    ("kind", "is_meant", "may_be"),
    [
        ("fp8-tensors", True, True),
        pytest.param("float-channel", False, True, marks=pytest.mark.deep),
        ("fp8-blocks", True, False),
        pytest.param("w8a16", False, False, marks=pytest.mark.deep),
    ],
)
def test_inputs_of_many_tokens_are_rounded_if_the_checkpoint_or_an_option_says_so(tmp_path, kind, is_meant, may_be):
    """And if a kernel multiplies weights in this form so: blocks of 32 inputs are too small."""
    write_checkpoint(tmp_path / "model", **ONE_LAYER)
    quantise(tmp_path / "model", kind)

    def logprobs(activations, budget):
        request = Request(prompt(70), 1, GREEDY)
        settings = {"max_model_len": 80, "max_num_batched_tokens": 80, "options": {"activations": activations}}
        BackendDriver(*open_backend(tmp_path / "model", **settings)).run([request], budget=budget)
        return request.logprobs[0].top_logprobs

    exact, found, rounded = (logprobs(activations, 70) for activations in ("exact", "auto", "fp8"))
    assert found == (rounded if is_meant else exact)
    assert (rounded != exact) == may_be
    # Steps of few tokens compute with inputs as they are.
    assert logprobs("fp8", 35) == logprobs("exact", 35)


def test_weights_that_are_quantised_while_loading_are_meant_for_rounded_inputs(tmp_path):
    directory = write_checkpoint(tmp_path / "model", **ONE_LAYER)

    def output(**settings):
        request = Request(prompt(70), 1, GREEDY)
        limits = {"max_model_len": 80, "max_num_batched_tokens": 80, "quantization": "fp8"}
        BackendDriver(*open_backend(directory, **limits, **settings)).run([request], budget=70)
        return request.logprobs[0].top_logprobs

    rounded, exact = output(), output(options={"activations": "exact"})
    assert rounded == output(options={"activations": "fp8"})
    assert rounded != exact


@pytest.mark.parametrize(("num_tokens", "are_rounded"), [(97, True), pytest.param(96, False, marks=pytest.mark.deep)])
def test_inputs_of_experts_are_rounded_if_an_expert_has_many_pairs(num_tokens, are_rounded, tmp_path, monkeypatch):
    """Of three experts, each token chooses two; 64 pairs are few."""
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    write_checkpoint(tmp_path / "model", **ONE_LAYER, **mixture)

    def logprobs():
        request = Request(prompt(num_tokens), 1, GREEDY)
        settings = {"max_model_len": 104, "max_num_batched_tokens": 100, "quantization": "fp8"}
        BackendDriver(*open_backend(tmp_path / "model", **settings)).run([request], budget=num_tokens)
        return request.logprobs[0].top_logprobs

    found = logprobs()
    calls = []

    def with_rounded_numbers(x, weight, bias, out, pairs, workspace, *, gathers, tilings):
        calls.append(gathers)
        multiply_pairs(rounded(x).to(x), weight, bias, out, pairs, gathers=gathers)

    monkeypatch.setattr(linear, "multiply_rounded_pairs", with_rounded_numbers)
    assert found == pytest.approx(logprobs(), abs=1e-4)
    assert set(calls) == ({True, False} if are_rounded else set())


@pytest.mark.parametrize(
    ("family", "names", "most_recorded"),
    [
        ("llama-bias", ("all", "back"), 512),
        ("llama-bias", ("all", "back"), 8),
        ("qwen2_moe", ("stacks", "down"), 512),
        ("gpt_oss", ("down", "gate_up"), 8),
        ("deepseek_v3", ("down", "stacks"), 512),
        pytest.param("deepseek_v2-lite", ("stacks", "apart"), 8, marks=pytest.mark.deep),
        pytest.param("mixtral", ("apart", "gate_up"), 512, marks=pytest.mark.deep),
        *(
            pytest.param(family, targets, most, marks=pytest.mark.deep)
            for family, targets, most in (
                ("lfm3", (FUSED["lfm3"], ("out_proj",)), 512),
                ("kimi_linear", (FUSED["kimi_linear"], ("v_proj",)), 512),
                ("bailing_hybrid", (FUSED["bailing_hybrid"], ("o_proj",)), 8),
                ("falcon_mamba", (FUSED["falcon_mamba"], ("x_proj",)), 8),
            )
        ),
    ],
)
def test_rows_with_adapters_draw_what_they_draw_on_the_torch_backend(
    tmp_path, monkeypatch, family, names, most_recorded
):
    """Beside a row without; one adapter comes while it runs, and goes. Steps beyond recorded sizes compute in another way."""
    monkeypatch.setattr(graphs, "MAX_MIXED_TOKENS", most_recorded)
    model = make_checkpoint(tmp_path / "model", family)
    first, second = (
        write_adapter(tmp_path / str(seed), model, seed=seed, **adapter_of(family, name))
        for seed, name in enumerate(names)
    )
    outputs = []
    for kind in (TritonBackend, TorchBackend):
        backend, info = open_backend(tmp_path / "model", kind, adapters={"first": str(first)})
        assert info.supports_adapters
        names = ["", info.adapters[0].identity, load_adapter(backend, "second", str(second)).identity]
        requests = [Request(prompt(5 + i, seed=i), 3, GREEDY, adapter=name) for i, name in enumerate(names)]
        driver = BackendDriver(backend, info)
        driver.run(requests, budget=24)
        backend.unload_adapter("second")
        gone = Request(prompt(3), 1, adapter=names[2])
        driver.run([gone], budget=24)
        assert gone.errors[0].message == f"adapter '{names[2]}' is not loaded on this executor"
        outputs.append([request.output for request in requests])
        backend.close()
    assert outputs[0] == outputs[1]
    assert len({str(tokens) for tokens in outputs[0]}) == 3


def test_steps_with_adapters_are_recorded_when_the_first_one_comes_while_others_run(tmp_path):
    adapter = write_adapter(tmp_path / "adapter", make_checkpoint(tmp_path / "model", "llama3"), seed=1)
    outputs = []
    for has_graphs in (True, False):
        backend, info = open_backend(tmp_path / "model", max_num_batched_tokens=8)
        opened = backend._model
        kept = KeptGraphs()
        if has_graphs:
            opened.parts.target._graphs = kept
            with torch.inference_mode():
                opened.parts.upload.clear()
                opened.parts.target.record(lambda *_: None)
        driver, plain = BackendDriver(backend, info), backend.execute

        def execute(batch, backend=backend, plain=plain):
            if batch.step == 3:
                load_adapter(backend, "late", str(adapter))
            return plain(batch)

        backend.execute = execute
        first = [Request(prompt(3 + i, seed=i), 5, GREEDY) for i in range(2)]
        driver.run(first, budget=8)
        assert {size.is_adapted for size in kept.recorded} == ({True, False} if has_graphs else set())
        name = load_adapter(backend, "late", str(adapter)).identity
        kept.launched.clear()
        second = [Request(prompt(1), 3, GREEDY, adapter=name), Request(prompt(1), 6, GREEDY)]
        driver.run(second, budget=8)
        # A step of decodes is launched as it was recorded, with adapters as long as one has one.
        assert {size.is_adapted for size in kept.launched} == ({True, False} if has_graphs else set())
        assert second[0].output != second[1].output[:3]
        outputs.append([request.output for request in (*first, *second)])
    assert outputs[0] == outputs[1]


def test_it_draws_what_the_torch_backend_draws(llama):
    """With these seeds no draw lies so near the border of two tokens that the last bits of the logits decide."""
    parameters = (
        SamplingParams(temperature=0.8, seed=4),
        SamplingParams(temperature=1.2, top_k=9, top_p=0.8, seed=2, logprobs=0),
        SamplingParams(temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.2, seed=3),
        SamplingParams(temperature=0.0, logit_bias=((5, 3.0), (6, -2.0)), min_tokens=3, stop_token_ids=(5,)),
    )

    def outputs(kind):
        requests = [Request(prompt(9 + i, seed=i), 5, sampling) for i, sampling in enumerate(parameters)]
        BackendDriver(*open_backend(llama[0], kind)).run(requests, budget=24)
        return [request.output for request in requests]

    assert outputs(TritonBackend) == outputs(TorchBackend)


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.3), ("int4", 2.0), ("fp8", 1.0)])
def test_quantised_weights_are_close(llama, quantization, tolerance):
    request = Request(prompt(12), 1, GREEDY)
    BackendDriver(*open_backend(llama[0], quantization=quantization)).run([request], budget=16)
    _, logprobs = expected(llama[1], request.prompt, 1)
    assert request.logprobs[0].logprob == pytest.approx(float(logprobs[0, request.output[0]]), abs=tolerance)


def test_half_precision_runs(llama):
    request = Request(prompt(12), 2, GREEDY)
    _, info = opened = open_backend(llama[0], dtype="bfloat16")
    BackendDriver(*opened).run([request], budget=16)
    assert info.dtype == "bfloat16"
    _, logprobs = expected(llama[1], request.prompt, 1)
    assert request.logprobs[0].logprob == pytest.approx(float(logprobs[0, request.output[0]]), abs=0.5)


def test_random_weights_need_no_checkpoint_and_follow_the_seed(llama, tmp_path):
    config = json.loads((llama[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))

    def output(seed):
        opened = open_backend(tmp_path, options={"weights": "random", "step_log": str(tmp_path / "steps")}, seed=seed)
        request = Request(prompt(6), 3, GREEDY)
        BackendDriver(*opened).run([request], budget=16)
        opened[0].close()
        return request.output, opened[1].model_fingerprint

    assert output(1) == output(1)
    assert output(1)[1] != output(2)[1]
    lines = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert [(line["num_rows"], line["num_tokens"]) for line in lines] == [(1, 6), (1, 1), (1, 1)]
    assert lines[0]["idle_us"] is None
    assert lines[1]["idle_us"] >= 0


def test_a_step_beyond_memory_says_how_many_tokens_it_had(llama, monkeypatch):
    backend, info = open_backend(llama[0])

    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    monkeypatch.setattr(backend._model.parts.target.decoder, "run", exhausted)
    with pytest.raises(
        StepOutOfMemoryError, match=r"out of memory with 7 tokens: CUDA out of memory\. Tried"
    ) as caught:
        BackendDriver(backend, info).run([Request(prompt(7), 1)], budget=16)
    assert caught.value.num_tokens == 7


def test_a_step_beyond_what_was_announced_is_refused_as_a_whole(llama):
    backend, info = open_backend(llama[0], max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="a step of 17 tokens; this backend was opened for 16"):
        BackendDriver(backend, info).run([Request(prompt(17), 1)], budget=20)


def test_a_row_with_impossible_tokens_fails_alone(llama):
    good, bad = Request(prompt(9), 3), Request([1, VOCAB_SIZE, 2], 3)
    BackendDriver(*open_backend(llama[0])).run([good, bad], budget=64)
    assert good.output == expected(llama[1], good.prompt, 3)[0]
    assert bad.output == [-1]
    assert "token id 320 is not allowed; allowed: 0 to 319" in bad.errors[0].message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 12}, "block_size 12 is not allowed; allowed: a power of two"),
        ({"num_kv_blocks": 7}, "num_kv_blocks 7 is not allowed; .* allowed: 8 or more"),
        ({"max_num_seqs": 65536}, "max_num_seqs 65536 is not allowed with this backend; allowed: 1 to 65535"),
        ({"max_model_len": CONTEXT + 1}, f"max_model_len {CONTEXT + 1} is not allowed; .*{CONTEXT}"),
        ({"device": "tpu"}, "device 'tpu' is not allowed; allowed: cpu, cuda"),
        ({"device": "cuda"}, "device 'cuda' is not allowed; this host has 0 CUDA devices"),
        ({"quantization": "int2"}, "quantization 'int2' is not allowed; allowed: none, int8, int4, fp8"),
        (
            {"options": {"graph": "off"}},
            "backend_options 'graph' is not allowed; allowed: activations, chunk_attention, graphs, rank_transport",
        ),
        ({"options": {"graphs": "on"}}, "backend_options graphs 'on' is not allowed; allowed: auto, off"),
        (
            {"options": {"weights": "none"}},
            "backend_options weights 'none' is not allowed; allowed: checkpoint, random",
        ),
        ({"options": {"step_log": "/proc/none/x"}}, "backend_options step_log '/proc/none/x' is not allowed; No such"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(llama, settings, message):
    with pytest.raises(BackendConfigError, match=message) as caught:
        open_backend(llama[0], **settings)
    assert "\n" not in str(caught.value)


def test_a_cpu_is_refused_unless_kernels_are_interpreted(llama, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendConfigError, match="device 'cpu' is not allowed for backend 'triton'; allowed: cuda"):
        open_backend(llama[0])


def test_info_describes_the_model_and_close_may_be_called_twice(llama):
    backend, info = open_backend(llama[0], swap_space_mib=1)
    assert isinstance(backend, ExecutorBackend)
    assert (info.backend, info.device, info.num_blocks, info.max_num_batched_tokens) == ("triton", "cpu", 40, 64)
    assert (info.max_model_len, info.block_size, info.max_num_rows, info.vocab_size) == (64, 8, 4, VOCAB_SIZE)
    assert info.num_host_blocks > 0
    assert info.swap_us_per_block > 0
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="not open"):
        BackendDriver(backend, info).run([Request(prompt(3), 1)], budget=8)


def test_the_largest_step_can_be_tried_and_leaves_nothing_behind(llama):
    opened = open_backend(llama[0], max_num_batched_tokens=20)
    with torch.inference_mode():
        preparation.try_largest_step(opened[0]._model.parts)
    request = Request(prompt(9), 2)
    BackendDriver(*opened).run([request], budget=20)
    assert request.output == expected(llama[1], request.prompt, 2)[0]


class NoGraphs:
    """Graphs that record nothing."""

    said: ClassVar[list[str]] = []

    def __init__(self, runtime):
        pass

    def record(self, forward, sizes, progress):
        self.said.append("recorded")

    def launch(self, size):
        return False


@pytest.mark.parametrize("fits", [True, False])
def test_behind_its_graphs_a_model_takes_the_memory_of_the_largest_step_again(llama, monkeypatch, fits):
    """Entering a graph has given it back: else the first steps allocate while they serve."""
    warned = []

    def largest(parts):
        NoGraphs.said.append("largest")
        if not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NoGraphs, "said", [])
    monkeypatch.setattr(device_model, "StepGraphs", NoGraphs)
    monkeypatch.setattr(preparation, "try_largest_step", largest)
    backend, _ = open_backend(llama[0], warn=warned.append)
    with torch.inference_mode():
        preparation.record_graphs(backend._model.parts)
    assert NoGraphs.said == ["recorded", "largest"]
    assert len(warned) == (not fits)


def test_closing_gives_the_pool_back_at_once(llama):
    """On a device it is nearly all memory, and the next model may be opened before Python looks for circles."""
    backend, info = open_backend(llama[0])
    BackendDriver(backend, info).run([Request(prompt(3), 2)], budget=8)
    held = [weakref.ref(backend._model), weakref.ref(backend._model.parts.target.pool)]
    gc.disable()
    try:
        backend.close()
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def test_steps_padded_to_the_sizes_of_graphs_draw_the_same(llama):
    backend, info = open_backend(llama[0], max_num_batched_tokens=64)
    model = backend._model
    model.parts.target.sizes = model.parts.target.step_sizes(recorded=True)
    requests = [Request(prompt(length, seed=length), 3, GREEDY) for length in (5, 11, 2)]
    BackendDriver(backend, info).run(requests, budget=12)
    for request in requests:
        assert request.output == expected(llama[1], request.prompt, 3)[0]


@pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.deep) for name in ("lfm3", "bamba", "falcon_mamba"))]
)
def test_rows_with_states_begin_anew_also_in_steps_padded_to_the_sizes_of_graphs(tmp_path, name):
    """Padding names row 0, which has a state of its own."""
    model = make_checkpoint(tmp_path, name)
    backend, info = open_backend(tmp_path, swap_space_mib=1)
    assert (info.keeps_states, info.num_host_blocks, info.max_num_rows) == (True, 0, 4)
    backend._model.parts.target.sizes = backend._model.parts.target.step_sizes(recorded=True)
    for lengths in ((7, 2), (3,)):
        requests = [Request(prompt(length, seed=length), 2, GREEDY) for length in lengths]
        BackendDriver(backend, info).run(requests, budget=6)
        for request in requests:
            assert request.output == expected(model, request.prompt, 2)[0]


def test_the_room_for_states_decides_how_many_rows_run(tmp_path, monkeypatch):
    """And none of the steps that are tried at start uses another."""
    make_checkpoint(tmp_path, "lfm2")
    of_one = state_bytes(read_model_config(tmp_path).recurrences(range(3)))
    monkeypatch.setattr(state_memory, "free_bytes", lambda _device: 4 * (2 * of_one + 9))
    opened = open_backend(tmp_path, max_num_batched_tokens=9)
    assert opened[1].max_num_rows == 2
    with torch.inference_mode():
        preparation.try_largest_step(opened[0]._model.parts)
    with pytest.raises(
        BackendConfigError, match="speculation 'ngram' is not allowed with this model, which has layers"
    ):
        open_backend(tmp_path, speculation="ngram")


def test_steps_of_greedy_rows_draw_in_the_same_launch(llama, monkeypatch):
    """Also padded; with a row that wants more, or a chunk, the draw comes after."""
    backend, info = open_backend(llama[0])
    model, sizes = backend._model, []
    model.parts.target.sizes = model.parts.target.step_sizes(recorded=True)
    launch = model.parts.target._graphs.launch
    monkeypatch.setattr(model.parts.target._graphs, "launch", lambda size: sizes.append(size) or launch(size))
    plain = SamplingParams(temperature=0.0)
    requests = [Request(prompt(length, seed=length), 3, plain) for length in (5, 2)]
    requests.append(Request(prompt(4), 2, GREEDY))
    BackendDriver(backend, info).run(requests, budget=64)
    for request in requests:
        assert request.output == expected(llama[1], request.prompt, len(request.output))[0]
    assert [(size.num_rows, size.draws) for size in sizes] == [(4, False), (4, False), (2, True)]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_layer_of_a_greedy_step_is_eight_launches(llama, monkeypatch, quantization):
    backend, info = open_backend(llama[0], dtype="bfloat16", quantization=quantization)
    driver, launched = BackendDriver(backend, info), []
    launch = GridExecutor.__call__
    monkeypatch.setattr(
        GridExecutor,
        "__call__",
        lambda self, *arguments, **named: (launched.append(self.fn.__name__), launch(self, *arguments, **named)),
    )
    run = backend._model.parts.target.decoder.run
    monkeypatch.setattr(
        backend._model.parts.target.decoder, "run", lambda *sizes, **kinds: (launched.clear(), run(*sizes, **kinds))
    )
    driver.run([Request(prompt(5), 3, SamplingParams(temperature=0.0))], budget=16)
    layer = ["_add_rms_norm", "skinny_kernel", "_rotate_and_store", "decode_kernel", "skinny_kernel"]
    layer += ["_add_rms_norm", "skinny_kernel", "skinny_kernel"]
    last = ["_add_rms_norm", "_gather_rows", "skinny_kernel", "statistics_kernel", "_merge_kernel", "_store_sampled"]
    assert launched == ["_expand_rows", "plan_kernel", "_gather_rows", *layer * 3, *last]


def test_a_row_in_16_bits_is_the_same_alone_and_in_company(llama):
    """To the bit: the steps have other sizes, and other rows beside it."""
    found = []
    for lengths in ((6,), (6, 3, 9)):
        requests = [Request(prompt(length, seed=length), 2, GREEDY) for length in lengths]
        BackendDriver(*open_backend(llama[0], dtype="bfloat16")).run(requests, budget=64)
        found.append([(entry.logprob, entry.top_token_ids, entry.top_logprobs) for entry in requests[0].logprobs])
    assert found[0] == found[1]


def test_opening_tells_how_far_it_is(llama):
    heard = []
    backend = TritonBackend()
    config = BackendConfig(model=str(llama[0]), max_num_batched_tokens=16, **SETTINGS)
    backend.open(msgspec.structs.replace(config, progress=lambda *news: heard.append(news)))
    assert heard == [
        ("loading layers", 0, 3),
        ("loading layers", 1, 3),
        ("loading layers", 2, 3),
    ]


@pytest.mark.parametrize("kind", ["other", "alone", "bare"])
def test_a_tied_head_that_is_stored_is_what_it_is_to_transformers(tmp_path, kind):
    make_checkpoint(tmp_path, "llama-tied")
    change_head(tmp_path, kind)
    warnings = []
    opened = open_backend(tmp_path, warn=warnings.append)
    request = Request(prompt(9), 4)
    BackendDriver(*opened).run([request], budget=20)
    assert request.output == expected(AutoModelForCausalLM.from_pretrained(tmp_path), request.prompt, 4)[0]
    assert len(warnings) == (kind == "other")


def test_constrained_rows_draw_what_they_draw_on_the_torch_backend(llama):
    """With steps in flight: the mask of a step needs the token of the one before, whose launch is not waited for."""
    directory, _ = llama
    digits, choice = Constraint("regex", "[0-9]{3}"), Constraint("choice", '["the scheduler", "a block"]')
    outputs = []
    for kind in (TorchBackend, TritonBackend):
        config = BackendConfig(model=str(directory), max_num_batched_tokens=64, **SETTINGS)
        core = ModelCore(kind(), config, SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=4))
        assert core.info.supports_constraints
        core.add(prompt(5), 12, SamplingParams(temperature=0.0, constraint=digits, logprobs=1))
        core.add(prompt(7), 6, SamplingParams(temperature=0.0))
        core.add(prompt(3), 12, SamplingParams(seed=3, constraint=choice))
        core.add(prompt(3), 12, SamplingParams(temperature=0.0, constraint=digits), held=(1,))
        core.run()
        core.close()
        assert core.ends[3].error.startswith("the output does not follow its constraint")
        outputs.append([core.tokens[handle] for handle in range(3)])
    assert outputs[0] == outputs[1]
    decoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert decoder.decode(outputs[0][0]).isdigit()
    assert decoder.decode(outputs[0][2]) in {"the scheduler", "a block"}
