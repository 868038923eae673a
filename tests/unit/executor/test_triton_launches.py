"""What the triton backend launches: a recorded step allocates nothing and passes the same memory; serving compiles nothing.

Both are properties of the host's code, so no device is needed; see ``launch_log``.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

import gpu_parts
from backend_driver import BackendDriver, Request, load_adapter
from checkpoints import VOCAB_SIZE, make_checkpoint
from headway_executor.backend import BackendConfig, StepBatch
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu.feed_forward import ExpertFeedForward
from headway_executor.gpu.graphs import LaunchSize
from headway_executor.gpu.latent import LatentAttention
from headway_executor.gpu.preparation import try_every_size, try_largest_step
from headway_executor.gpu.step_columns import shape_of
from headway_kernels.gpu.dependence import dependent_launch
from headway_proto.sampling import SamplingParams
from launch_log import logged
from lora_files import write_adapter
from speculative_engine import SpeculativeEngine
from step_columns import NO_PAIRS
from unit.executor.test_adapters import STACKS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are written down where they would be interpreted"),
]
MOST_TOKENS = 2048
SETTINGS = {"max_num_seqs": 40, "num_kv_blocks": 400, "block_size": 8, "max_model_len": 64}
PARAMETERS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=2, top_k=5),
    SamplingParams(temperature=0.0, logit_bias=((5, 3.0),), min_tokens=2, stop_token_ids=(5,)),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, prompt_logprobs=3),
)


USUAL = (
    ("llama3", "none", "bfloat16"),
    ("mixtral", "none", "float32"),
    ("llama3", "int8", "bfloat16"),
    ("qwen3_5", "none", "bfloat16"),
)
MODELS = (
    *USUAL,
    *[
        pytest.param(model, marks=pytest.mark.deep)
        for model in (
            ("llama3", "none", "float32"),
            ("gemma2", "none", "bfloat16"),
            ("gemma4-shared", "none", "bfloat16"),
            ("gemma4-experts", "none", "bfloat16"),
            ("laguna", "none", "bfloat16"),
            ("mixtral", "none", "bfloat16"),
            ("deepseek_v3", "none", "bfloat16"),
            ("glm_moe_dsa", "none", "bfloat16"),
            ("llama3", "int8", "float32"),
            ("llama3", "int4", "bfloat16"),
            ("llama3", "fp8", "bfloat16"),
            ("lfm2", "none", "bfloat16"),
            ("kimi_linear", "none", "bfloat16"),
            ("falcon_h1", "none", "bfloat16"),
            ("nemotron_h", "none", "bfloat16"),
            ("falcon_mamba", "none", "bfloat16"),
            ("recurrent_gemma", "none", "bfloat16"),
        )
    ],
)


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def model(request, tmp_path_factory):
    """An open model that launches steps in the sizes of graphs, and its backend."""
    family, quantization, dtype = request.param
    directory = tmp_path_factory.mktemp(family)
    make_checkpoint(directory, family)
    backend = TritonBackend()
    config = {"dtype": dtype, "quantization": quantization, "max_num_batched_tokens": MOST_TOKENS, **SETTINGS}
    info = backend.open(BackendConfig(model=str(directory), **config))
    opened = backend._model
    opened.parts.target.sizes = opened.parts.target.step_sizes(recorded=True)
    with torch.inference_mode():
        opened.parts.target.decoder._space.token_ids.zero_()  # No kernel will fill them.
    return opened, backend, info


def send(opened, counts, computed):
    """Send a step of as many rows as ``counts``, without launching it; return its launch's size."""
    batch = StepBatch(
        step=0,
        finished_rows=np.empty(0, dtype=np.int32),
        new_rows=(),
        new_blocks=NO_PAIRS,
        rows=np.arange(len(counts), dtype=np.int32),
        num_scheduled_tokens=np.array(counts, dtype=np.int32),
        num_computed_tokens=np.full(len(counts), computed, dtype=np.int32),
        samples=np.ones(len(counts), dtype=np.int32),
        block_table=np.empty((0, 0), dtype=np.int32),
    )
    shape = shape_of(batch)
    size = opened.parts.target.size_of(shape)
    opened.parts.upload.send(batch, shape, size.num_rows)
    return size


@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        ([1], [1], LaunchSize(1, 1, has_decodes=True, has_chunks=False)),
        ([1] * 33, [1] * 40, LaunchSize(40, 40, has_decodes=True, has_chunks=False)),
        ([70], [1, 1, 100], LaunchSize(128, 40, has_decodes=True, has_chunks=True)),
    ],
)
def test_a_recorded_step_allocates_nothing_and_passes_the_same_memory(model, one, other, size):
    """Whatever the step holds: else its graph would read what the recorded step had."""
    opened, _, _ = model
    logs = []
    with torch.inference_mode():
        for counts, computed in ((one, 0), (other, 9)):
            assert send(opened, counts, computed) == size
            with logged() as log:
                opened.parts.target.forward(size)
            logs.append(log)
    assert logs[0].allocations == logs[1].allocations == []
    assert [launch.passed for launch in logs[0].launches] == [launch.passed for launch in logs[1].launches]
    assert len(logs[0].launches) > 5
    assert {launch.kernel for launch in logs[0].launches if not launch.may_overlap} == set()


def test_nothing_is_compiled_while_serving(model):
    """Everything is launched once before the first request, in every variant that any request can ask for."""
    opened, backend, info = model
    with torch.inference_mode(), logged() as opening:
        try_largest_step(opened.parts)
        for size in opened.parts.target.sizes.recorded():
            opened.parts.target.forward(size)
    with logged() as serving:
        driver = BackendDriver(backend, info)
        for number, sampling in enumerate(PARAMETERS):
            driver.run([Request(prompt(11 + number), 3, sampling)], budget=MOST_TOKENS)
        several = [Request(prompt(1 + 7 * i % 50), 3 + i % 9, PARAMETERS[i % len(PARAMETERS)]) for i in range(60)]
        driver.run(several, budget=MOST_TOKENS)
        with torch.inference_mode():
            # Beyond the recorded sizes, each step is launched in its own.
            for num_tokens in range(16, MOST_TOKENS + 1, 112):
                opened.parts.target.forward(LaunchSize(num_tokens, 40, has_decodes=True, has_chunks=True))
    assert serving.keys - opening.keys == set()
    assert len(serving.launches) > 500


def test_kernels_overlap_unless_that_is_switched_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert dependent_launch.__wrapped__(device) == {"PDL": True, "launch_pdl": True}
    monkeypatch.setenv("HEADWAY_KERNEL_OVERLAP", "off")
    assert dependent_launch.__wrapped__(device) == {"PDL": False}


def test_float32_is_float32_whatever_the_environment_asks_for(tmp_path):
    make_checkpoint(tmp_path, "llama3")
    program = f"""
import torch
from headway_executor.backend import BackendConfig
from headway_executor.backends.{{0}}_backend import {{1}}
assert torch.get_float32_matmul_precision() == "high"
{{1}}().open(BackendConfig(model={str(tmp_path)!r}, dtype="float32", max_num_batched_tokens=64, max_num_seqs=4, num_kv_blocks=40))
matmul = torch.backends.cuda.matmul
assert torch.get_float32_matmul_precision() == "highest"
assert not torch.backends.cudnn.allow_tf32
assert not (matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction)
"""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "TRITON_INTERPRET": "1"}
    for module, name in (("torch", "TorchBackend"), ("triton", "TritonBackend")):
        subprocess.run([sys.executable, "-c", program.format(module, name)], env=environment, check=True, timeout=120)


SIXTEEN_EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def keys_of_sizes(directory, sizes, num_rows, **settings):
    """What opening compiles, and what steps of these numbers of tokens do."""
    backend = TritonBackend()
    backend.open(
        BackendConfig(model=str(directory), dtype="bfloat16", **SETTINGS | {"max_num_seqs": num_rows}, **settings)
    )
    parts = backend._model.parts
    with torch.inference_mode():
        parts.target.decoder._space.token_ids.zero_()  # No kernel will fill them.
        with logged() as opening:
            try_largest_step(parts)
            for size in parts.target.step_sizes(recorded=True).recorded():
                parts.target.forward(size)
        with logged() as serving:
            for num_tokens in sizes:
                parts.target.forward(
                    LaunchSize(num_tokens, min(num_rows, num_tokens), has_decodes=True, has_chunks=True)
                )
    return opening.keys, serving.keys


def test_steps_of_which_experts_have_neither_few_pairs_nor_many_compile_nothing(tmp_path):
    """Two of sixteen experts: recorded steps have too few pairs to be rounded, and the largest has other tiles."""
    (tmp_path / "config.json").write_text(json.dumps(SIXTEEN_EXPERTS))
    options = {"weights": "random"}
    settings = {"max_num_batched_tokens": 4096, "quantization": "fp8", "options": options}
    opening, serving = keys_of_sizes(tmp_path, (528, 1024, 2048, 2064, 4096), 40, **settings)
    assert len({key for key in serving if key[0] == "_float8_pairs"}) > 2
    assert serving - opening == set()


def test_parts_of_columns_are_aligned_with_any_number_of_rows_and_compile_nothing(tmp_path):
    make_checkpoint(tmp_path, "glm_moe_dsa")
    sizes = (528, 592, 608, 704, 720, 736, 928, 1520, MOST_TOKENS)
    opening, serving = keys_of_sizes(tmp_path, sizes, 201, max_num_batched_tokens=MOST_TOKENS)
    assert len({key for key in serving if key[0] == "decode_kernel"}) > 1
    assert serving - opening == set()


def test_without_graphs_nothing_is_compiled_while_serving_either(tmp_path):
    make_checkpoint(tmp_path, "llama3")
    backend = TritonBackend()
    config = {"dtype": "bfloat16", "max_num_batched_tokens": MOST_TOKENS, **SETTINGS}
    info = backend.open(BackendConfig(model=str(tmp_path), **config))
    opened = backend._model
    with torch.inference_mode(), logged() as opening:
        opened.parts.target.decoder._space.token_ids.zero_()  # No kernel will fill them.
        try_largest_step(opened.parts)
        try_every_size(opened.parts)
    with logged() as serving:
        requests = [Request(prompt(1 + 7 * i % 50), 3 + i % 9, PARAMETERS[i % len(PARAMETERS)]) for i in range(60)]
        BackendDriver(backend, info).run(requests, budget=MOST_TOKENS)
    assert serving.keys - opening.keys == set()


@pytest.fixture(scope="module", params=["llama3", "qwen2_moe", "deepseek_v2-lite"])
def adapted(request, tmp_path_factory):
    """An open model with adapters, as it is before the first one comes, and what opening launched."""
    directory = tmp_path_factory.mktemp("adapted")
    model = make_checkpoint(directory / "model", request.param)
    of_experts = {"parameters": STACKS} if request.param == "qwen2_moe" else {}
    adapters = [
        write_adapter(directory / str(seed), model, seed=seed, rank=2 + 20 * seed, **of_experts) for seed in (1, 2)
    ]
    backend = TritonBackend()
    # With an odd number of rows, what is packed behind their tiles is less aligned.
    config = {"dtype": "bfloat16", "max_num_batched_tokens": MOST_TOKENS, **SETTINGS, "max_num_seqs": 41}
    info = backend.open(BackendConfig(model=str(directory / "model"), **config))
    opened = backend._model
    with torch.inference_mode(), logged() as opening:
        opened.parts.target.decoder._space.token_ids.zero_()  # No kernel will fill them.
        try_largest_step(opened.parts)
        opened.parts.target.sizes = opened.parts.target.step_sizes(recorded=True)
        for size in opened.parts.target.sizes.recorded():
            opened.parts.target.forward(size)
    return backend, info, opening, adapters


def test_adapters_launch_nothing_new(adapted):
    """They come after the start, and their rows run beside others."""
    backend, info, opening, adapters = adapted
    name = load_adapter(backend, "late", str(adapters[0])).identity
    with logged() as serving:
        requests = [Request(prompt(3 + 20 * i), 3, adapter=name if i % 2 else "") for i in range(3)]
        driver = BackendDriver(backend, info)
        driver.run(requests, budget=MOST_TOKENS)
        driver.run([Request(prompt(5), 2, adapter=name)], budget=MOST_TOKENS)
        # Beyond the recorded sizes.
        driver.run([Request(prompt(50), 2, adapter=name) for _ in range(20)], budget=MOST_TOKENS)
    assert serving.keys - opening.keys == set()
    assert {launch.kernel for launch in serving.launches} >= {"skinny_kernel", "_activate_and_multiply", "_shrink"}


@pytest.mark.parametrize("counts", [[1] * 8, [70, 1, 57]])
def test_a_recorded_step_with_adapters_allocates_nothing_and_passes_the_same_memory(adapted, counts):
    """Whichever adapters its rows have, of whatever rank: its graph finds them in memory."""
    backend, _, _, adapters = adapted
    opened = backend._model
    names = [load_adapter(backend, str(seed), str(path)).identity for seed, path in enumerate(adapters)]
    logs = []
    for chosen in ((names[0], ""), (names[1], names[0], names[1])):
        for row in range(len(counts)):
            opened.parts.adapters.adapters.enter(row, chosen[row % len(chosen)])
        with torch.inference_mode():
            size = send(opened, counts, 3)._replace(is_adapted=True)
            opened.parts.adapters.begin(np.repeat(np.arange(len(counts)), counts), size.num_tokens)
            assert opened.parts.adapters.are_any
            with logged() as log:
                opened.parts.target.forward(size)
        logs.append(log)
    opened.parts.adapters.adapters.leave(np.arange(len(counts)))
    assert logs[0].allocations == logs[1].allocations == []
    assert [launch.passed for launch in logs[0].launches] == [launch.passed for launch in logs[1].launches]
    assert {launch.kernel for launch in logs[0].launches if not launch.may_overlap} == set()
    layers = opened.parts.target.decoder._weights.layers
    num_of_experts = sum(isinstance(layer.feed_forward, ExpertFeedForward) for layer in layers)
    launched = Counter(launch.kernel for launch in logs[0].launches)
    # Of attention; then gates and ups, and back: of all tokens, or of the router with a shared expert and perhaps its gate, and
    # of pairs.
    is_latent = isinstance(layers[0].mixing, LatentAttention)
    assert launched["_shrink"] == (7 if is_latent else 4) * len(layers) + (1 if is_latent else 2) * num_of_experts
    assert launched["_shrink_pairs"] == 2 * num_of_experts


def test_adapters_of_a_step_that_is_padded_beyond_the_recorded_sizes_are_computed_as_in_larger_ones(adapted):
    """Else its products would look for them where nobody has put them."""
    backend, _, _, adapters = adapted
    step = backend._model.parts.adapters
    step.adapters.enter(0, load_adapter(backend, "late", str(adapters[0])).identity)
    for num_tokens in (step.most_tokens, step.most_tokens + 8):
        with torch.inference_mode():
            step.clear()
            step._large.groups = []
            step.begin(np.zeros(step.most_tokens, dtype=np.int32), num_tokens)
        assert bool(step._addresses.any()) == (num_tokens <= step.most_tokens)
        assert bool(step._large.groups) == (num_tokens > step.most_tokens)
    step.adapters.leave(np.zeros(1, dtype=np.int32))


@pytest.mark.parametrize(("speculation", "most_tokens"), [("ngram", 64), ("draft", 64), ("ngram", 61)])
def test_speculation_launches_nothing_new(speculation, most_tokens, tmp_path):
    """Of fewer tokens than those of any recorded step with chunks, the largest step has as many rows, and no chunk."""
    make_checkpoint(tmp_path, "llama3")
    backend = TritonBackend()
    draft = {"speculation": speculation, "draft_model": str(tmp_path) if speculation == "draft" else ""}
    config = BackendConfig(
        model=str(tmp_path),
        dtype="bfloat16",
        max_num_batched_tokens=most_tokens,
        num_speculative_tokens=4,
        **SETTINGS,
        **draft,
    )
    engine = SpeculativeEngine(config, backend=backend, clock=lambda: 0.0, always=True)
    opened = backend._model
    with torch.inference_mode(), logged() as opening:
        for model in opened.parts.models:
            model.decoder._space.token_ids.zero_()  # No kernel will fill them.
        try_largest_step(opened.parts)
        for model in opened.parts.models:
            model.sizes = model.step_sizes(recorded=True)
            for size in model.sizes.recorded():
                model.forward(size)
    with logged() as serving, torch.inference_mode():
        prompts = [prompt(3 + 9 * i % 20) * 2 for i in range(24)]
        engine.run(prompts, 9, speculates=True, sampling=lambda place: PARAMETERS[place % len(PARAMETERS)])
    assert engine.counters().num_draft_tokens > 20
    assert serving.keys - opening.keys == set()
    assert len(serving.launches) > 500


def test_the_parts_of_a_step_that_are_timed_alone_are_the_whole_step(model):
    opened, _, _ = model
    size = LaunchSize(8, 8, has_decodes=True, has_chunks=False)
    with torch.inference_mode():
        assert send(opened, [1] * 8, 3) == size
        with logged() as whole, gpu_parts.written_down(opened.parts.target.decoder) as calls:
            opened.parts.target.forward(size)
        with logged() as again:
            for works in calls.values():
                for work in works:
                    work()
        with logged() as after:
            opened.parts.target.forward(size)
    assert Counter(launch.passed for launch in again.launches) == Counter(launch.passed for launch in whole.launches)
    layers = opened.parts.settings.model_config.layers
    for kind, are_there in (
        ("compress" if "compress" in calls else "qkv", [layer.attends for layer in layers]),
        ("recurrence", [layer.recurrence is not None for layer in layers]),
        ("feed_forward", [layer.has_feed_forward for layer in layers]),
    ):
        assert len(calls.get(kind, ())) == sum(are_there)
    assert after.launches == whole.launches


def prompt(length):
    return np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()
