"""The torch backend against transformers: the same tokens, whatever the batch, the chunks and the blocks."""

import random
import statistics
from importlib import import_module

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitNetConfig, BitNetForCausalLM, BitNetQuantConfig, PreTrainedModel

from backend_driver import BackendDriver, Request
from checkpoints import (
    CONTEXT,
    FAMILIES,
    FURTHER,
    ON_OPERATORS,
    STATES,
    VOCAB_SIZE,
    change_head,
    make_checkpoint,
    randomise,
    small_sizes,
)
from decoder_driver import write_checkpoint
from headway_executor.backend import BackendConfig, BackendConfigError, ExecutorBackend, ModelFilesError, StepBatch
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.memory import kv_pool
from headway_executor.models.families import read_model_config
from headway_kernels.cpu.coded_weight import rounded_to_4_bits
from headway_kernels.cpu.library import load_library
from headway_proto.sampling import SamplingParams
from quantised_checkpoints import change_config, quantise
from step_columns import NO_PAIRS

LENGTHS = (1, 5, 16, 17, 40, 63)
NUM_OUTPUT = 32
GREEDY = SamplingParams(temperature=0.0)
GREEDY_WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)


def open_backend(directory, **settings):
    backend = TorchBackend()
    config = {"model": str(directory), "dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 160, "block_size": 8}
    info = backend.open(BackendConfig(**(config | settings)))
    return backend, info


def prompts(lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def reference(model: PreTrainedModel, prompt: list[int], num_output: int = NUM_OUTPUT):
    """Greedy tokens of ``generate`` and the log-softmax of its logits, one row per token."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_output,
        min_new_tokens=num_output,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = generated.sequences[0, len(prompt) :].tolist()
    return tokens, torch.log_softmax(torch.cat(generated.logits).float(), -1)


def round_to_8_bits(model: PreTrainedModel):
    """Let every product of ``model`` round its weights per output and its inputs per token, to 127 steps a side."""
    round_products(model, round_to_bytes, round_to_bytes)


def round_to_bytes(values):
    step = values.abs().amax(-1, keepdim=True) / 127
    return (values / step).round() * step


def round_blocks_to_bytes(values):
    blocks = round_to_bytes(functional.pad(values, (0, -values.shape[-1] % 32)).unflatten(-1, (-1, 32)))
    return blocks.nan_to_num().flatten(-2)[..., : values.shape[-1]]


def round_products(model: PreTrainedModel, of_weight, of_inputs):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(of_weight(module.weight.detach()), requires_grad=False)
            module.register_forward_pre_hook(lambda _, inputs: (of_inputs(inputs[0]), *inputs[1:]))


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """What each family's checkpoint is and gives: made once, for the cases of one family do not come in a row."""
    made = {}

    def of(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            shard = "40KB" if name in {"llama3", "qwen3-bias"} else "5GB"
            model = make_checkpoint(directory, name, max_shard_size=shard)
            model.generation_config.eos_token_id = None
            asked = prompts(LENGTHS[1::3] if name in FURTHER else LENGTHS)
            made[name] = directory, [(prompt, *reference(model, prompt)) for prompt in asked]
        return made[name]

    return of


@pytest.fixture
def family(request, families):
    return families(request.param)


KERNELS, STEPS = ("compiled", "eager"), ((8, 7), (8, 512), (16, 16), (16, 60))
ENOUGH = (("compiled", 8, 7), ("eager", 16, 60))
"""Settings that show whether a family's description is right."""


def cases(settings, enough):
    """Of every family, those that are not enough for ``FURTHER`` ones only in ``make deep``."""
    return [
        pytest.param(name, *case, marks=pytest.mark.deep if name in FURTHER and case not in enough else ())
        for name in FAMILIES
        for case in settings
    ]


@pytest.mark.parametrize(
    ("family", "kernels", "block_size", "budget"),
    [
        *cases([(kernels, *steps) for steps in STEPS for kernels in KERNELS], ENOUGH),
        *((name, "eager", *steps) for name in ON_OPERATORS for steps in STEPS),
    ],
    indirect=["family"],
)
def test_greedy_tokens_and_logprobs_equal_transformers(family, block_size, budget, kernels, request):
    directory, expected = family
    # The two ways of transformers through a state, token by token and in parts, differ by up to 4e-4.
    near = 1e-3 if request.node.callspec.params["family"] in STATES else 1e-4
    backend, info = open_backend(directory, block_size=block_size, options={"kernels": kernels})
    requests = [Request(prompt, NUM_OUTPUT, GREEDY_WITH_LOGPROBS) for prompt, _, _ in expected]
    BackendDriver(backend, info, seed=budget).run(requests, budget=budget)
    for asked, (_, tokens, logprobs) in zip(requests, expected, strict=True):
        assert asked.output == tokens
        for entry, row in zip(asked.logprobs, logprobs, strict=True):
            best = torch.topk(row, 2)
            assert entry.logprob == pytest.approx(float(best.values[0]), abs=near)
            assert list(entry.top_token_ids) == best.indices.tolist()
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=near)


@pytest.mark.parametrize("name", ON_OPERATORS)
def test_what_the_kernels_lack_is_said(tmp_path, name):
    make_checkpoint(tmp_path, name)
    warnings = []
    open_backend(tmp_path, warn=warnings.append)
    lacked = {"gemma3n": "several hidden states of a token (AltUp)"}
    lacked |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "an index of the keys that a query sees")
    usual = "experts between a compression and an expansion"
    assert [line.split(",")[0] for line in warnings] == [f"the CPU kernels lack {lacked.get(name, usual)}"]


def test_a_context_ends_where_the_table_of_positions_does(tmp_path):
    make_checkpoint(tmp_path, "gpt2")
    with pytest.raises(BackendConfigError, match=f"max_model_len {CONTEXT + 1} is not allowed"):
        open_backend(tmp_path, max_model_len=CONTEXT + 1)


def test_what_the_kernels_lack_runs_on_torch_operators_after_a_line_in_the_log(tmp_path):
    width = load_library().max_head_dim + 2
    write_checkpoint(tmp_path, head_dim=width, num_hidden_layers=1, vocab_size=VOCAB_SIZE)
    warnings = []
    opened = open_backend(tmp_path, max_model_len=32, warn=warnings.append)
    assert len(run(opened, prompts((5,))[0], 2).output) == 2
    assert [line.split(",")[0] for line in warnings] == [f"the CPU kernels lack heads of {width} channels"]
    with pytest.raises(
        BackendConfigError, match="kernels 'compiled' is not allowed with this model: the CPU kernels lack"
    ):
        open_backend(tmp_path, options={"kernels": "compiled"})
    with pytest.raises(BackendConfigError, match="quantization 'int8' is not allowed with this model"):
        open_backend(tmp_path, quantization="int8")


def test_a_norm_over_heads_that_the_kernels_pad_runs_on_torch_operators(tmp_path):
    model = randomise(BitNetForCausalLM(BitNetConfig(**small_sizes(hidden_size=40, num_hidden_layers=1))), "bitnet")
    model.save_pretrained(tmp_path)
    warnings = []
    opened = open_backend(tmp_path, warn=warnings.append)
    assert [line.split(",")[0] for line in warnings] == ["the CPU kernels lack a norm over heads of 10 channels"]
    model.generation_config.eos_token_id = None
    asked = prompts((17,))[0]
    assert run(opened, asked, 12).output == reference(model, asked, 12)[0]


@pytest.mark.parametrize("kind", ["other", "same", "alone", "bare"])
def test_a_tied_head_that_is_stored_is_what_it_is_to_transformers(tmp_path, kind):
    make_checkpoint(tmp_path, "qwen3-bias")
    change_head(tmp_path, kind)
    reread = AutoModelForCausalLM.from_pretrained(tmp_path)
    reread.generation_config.eos_token_id = None
    asked = prompts((5, 17))
    expected = [reference(reread, prompt, 12)[0] for prompt in asked]
    for settings in ({"kernels": "compiled"}, {"kernels": "eager"}):
        warnings = []
        opened = open_backend(tmp_path, options=settings, warn=warnings.append)
        assert [run(opened, prompt, 12).output for prompt in asked] == expected
        assert len(warnings) == (kind == "other")
        assert all(
            text.startswith("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight;")
            for text in warnings
        )


def test_a_norm_that_is_missing_is_named_as_the_others_are_stored(tmp_path):
    make_checkpoint(tmp_path, "qwen3-bias")
    change_head(tmp_path, "bare")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"tensor norm\.weight is missing"):
        open_backend(tmp_path)


def test_a_tied_head_that_differs_is_the_one_that_is_quantised(tmp_path):
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    make_checkpoint(tied, "llama-tied")
    change_head(tied, "other")
    AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=False).save_pretrained(untied)
    outputs = [run(open_backend(at, quantization="int8"), prompts((9,))[0], 12).output for at in (tied, untied)]
    assert outputs[0] == outputs[1]


def test_a_draft_models_odd_head_is_told_as_well(tmp_path):
    make_checkpoint(tmp_path, "llama-tied")
    change_head(tmp_path, "other")
    warnings = []
    open_backend(tmp_path, speculation="draft", draft_model=str(tmp_path), warn=warnings.append)
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("max_model_len", "expected"), [(80, []), (0, ["max_model_len 240 is beyond"]), (81, ["81 is"])]
)
def test_dynamic_rope_beyond_the_models_own_context_is_reported(tmp_path, max_model_len, expected):
    make_checkpoint(tmp_path, "llama-dynamic")
    warnings = []
    open_backend(tmp_path, max_model_len=max_model_len, warn=warnings.append)
    assert len(warnings) == len(expected)
    for text, words in zip(warnings, expected, strict=True):
        assert text.startswith("rope_type dynamic: ")
        assert words in text
        assert "context, 80;" in text


def test_torch_operators_say_that_they_widen_quantised_weights(tmp_path):
    write_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    quantise(tmp_path / "model", "nf4")
    warnings = []
    for kernels, count in (("compiled", 0), ("eager", 1)):
        open_backend(tmp_path / "model", options={"kernels": kernels}, warn=warnings.append)
        assert sum("(bitsandbytes) are widened to float32" in line for line in warnings) == count


@pytest.mark.parametrize(
    ("kind", "mode"), [("autobitlinear", "offline"), ("bitlinear", "offline"), ("autobitlinear", "online")]
)
def test_weights_of_three_values_give_the_tokens_of_transformers_products(tmp_path, monkeypatch, kind, mode):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # Its compiler takes seconds to import.
    theirs = import_module("transformers.integrations.bitnet")
    model = make_checkpoint(tmp_path, "bitnet")
    model.generation_config.eos_token_id = None
    described = BitNetQuantConfig(linear_class=kind, quantization_mode=mode)
    tensors, stored = model.state_dict(), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        scale = weight.abs().mean().reshape(1)
        codes = (weight / scale).round().clamp(-1, 1)
        packed = theirs.pack_weights(codes.clone())
        if mode == "offline":
            stored[name], tensors[name] = packed, packed if kind == "bitlinear" else codes
            tensors[f"{name}_scale"] = 1 / scale if kind == "bitlinear" else scale
    theirs.replace_with_bitnet_linear(model, ["lm_head"], described)
    model.load_state_dict(tensors, assign=True)
    save_file(tensors | stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, quantization_config=described.to_dict() | {"quant_method": "bitnet"})
    expected = [reference(model, prompt) for prompt in prompts(LENGTHS[::2])]
    for kernels in KERNELS:
        backend, info = open_backend(tmp_path, options={"kernels": kernels})
        requests = [Request(prompt, NUM_OUTPUT, GREEDY_WITH_LOGPROBS) for prompt in prompts(LENGTHS[::2])]
        BackendDriver(backend, info, seed=7).run(requests, budget=16)
        for asked, (tokens, logprobs) in zip(requests, expected, strict=True):
            assert asked.output == tokens
            apart = [abs(entry.logprob - float(row.max())) for entry, row in zip(asked.logprobs, logprobs, strict=True)]
            # Where an activation lies between two of its 256 values, the last bit of a sum decides which it becomes.
            assert max(apart) < 5e-2
            assert statistics.median(apart) < 1e-3


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    make_checkpoint(tmp_path, "deepseek_v3")
    expected = run(open_backend(tmp_path), prompts((9,))[0]).output
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert run(open_backend(tmp_path), prompts((9,))[0]).output == expected
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"tensor model\.layers\.4\.eh_proj\.weight does not belong"):
        open_backend(tmp_path)


def apart_from(expected, directory, **settings):
    """Of each prompt's first token, how far its log probability is from the expected one, and that from the best."""
    backend, info = open_backend(directory, **settings)
    requests = [Request(prompt, 1, GREEDY_WITH_LOGPROBS) for prompt, _, _ in expected]
    BackendDriver(backend, info).run(requests, budget=16)
    found = []
    for request, (_, _, logprobs) in zip(requests, expected, strict=True):
        theirs = float(logprobs[0, request.output[0]])
        found.append(max(abs(request.logprobs[0].logprob - theirs), float(logprobs[0].max()) - theirs))
    return found


@pytest.mark.parametrize(("family", "dtype"), cases([("bfloat16",), ("float16",)], []), indirect=["family"])
def test_half_precision_is_close(family, dtype):
    directory, expected = family
    tolerance = 0.5 if dtype == "bfloat16" else 0.06
    has_experts = any(layer.feed_forward.experts for layer in read_model_config(directory).layers)
    if has_experts:
        tolerance *= 2
    apart = apart_from(expected, directory, dtype=dtype)
    if max(apart) < tolerance:
        return
    # Rounding may choose other experts. Then it does so with torch operators, too, and not for each prompt.
    assert has_experts
    assert min(apart) < tolerance
    on_operators = apart_from(expected, directory, dtype=dtype, options={"kernels": "eager"})
    assert all(one < tolerance or other > tolerance for one, other in zip(apart, on_operators, strict=True))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    model = make_checkpoint(directory, "llama3")
    model.generation_config.eos_token_id = None
    return directory, model


def run(backend_and_info, prompt, num_output=8, *, budget=64, **fields):
    request = Request(prompt, num_output, **fields)
    BackendDriver(*backend_and_info).run([request], budget=budget)
    return request


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_prefix_gives_the_same_tokens(llama, dtype):
    backend, info = open_backend(llama[0], dtype=dtype)
    driver = BackendDriver(backend, info)
    (prefix, tail) = prompts((32, 9))
    first = Request(prefix + tail, 12)
    driver.run([first], budget=64)
    again = Request(prefix + tail, 12, shared_blocks=first.blocks[:4])
    neighbour = Request(prefix + tail[::-1], 12, shared_blocks=first.blocks[:4])
    driver.run([again, neighbour], budget=64)
    assert again.output == first.output
    if dtype == "float32":
        assert neighbour.output == reference(llama[1], neighbour.prompt, 12)[0]


def test_blocks_can_be_copied_and_swapped(llama):
    backend, info = open_backend(llama[0])
    prefix, tail = prompts((32, 5))
    first = run((backend, info), prefix + tail)
    moved = np.array([first.blocks[:4], [150, 151, 152, 153]], dtype=np.int32)
    backend.move_blocks(copies=moved, swap_out=NO_PAIRS, swap_in=NO_PAIRS)
    assert run((backend, info), prefix + tail, shared_blocks=moved[1].tolist()).output == first.output
    out = np.array([[150, 151, 152, 153], [7, 5, 6, 4]], dtype=np.int32)
    back = np.array([[7, 5, 6, 4], [140, 141, 142, 143]], dtype=np.int32)
    backend.move_blocks(copies=NO_PAIRS, swap_out=out, swap_in=NO_PAIRS)
    backend.move_blocks(copies=NO_PAIRS, swap_out=NO_PAIRS, swap_in=back)
    assert run((backend, info), prefix + tail, shared_blocks=back[1].tolist()).output == first.output


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.4, seed=5, logprobs=8)


@pytest.mark.parametrize("kernels", ["compiled", "eager"])
@pytest.mark.parametrize("sampling", [msgspec.structs.replace(GREEDY_WITH_LOGPROBS, logprobs=8), SAMPLED])
@pytest.mark.parametrize("steps_before", [1, 2, 9])
def test_a_swapped_request_goes_on_with_the_same_bits(llama, kernels, sampling, steps_before):
    """Swapped out in the middle of its prompt, at its end, or among its output; others overwrite its blocks meanwhile."""
    backend, info = open_backend(llama[0], options={"kernels": kernels}, num_kv_blocks=32, max_num_seqs=4)
    prompt, *others = prompts((45, 60, 33, 50))

    def generate(*, swapped: bool) -> Request:
        driver, victim = BackendDriver(backend, info, seed=int(swapped)), Request(prompt, 24, sampling)
        running = driver.step([driver._admit(victim)], [victim], budget=24)
        for _ in range(steps_before - 1):
            running = driver.step(running, [], budget=24)
        if swapped:
            old_blocks = set(victim.blocks)
            driver.swap_out(victim)
            thieves = [driver._admit(Request(other, 12)) for other in others]
            crowd = driver.step(thieves, thieves, budget=256)
            assert old_blocks <= {block for thief in thieves for block in thief.blocks}
            while crowd:
                crowd = driver.step(crowd, [], budget=256)
            driver._free_blocks += [block for thief in thieves for block in thief.blocks]
            running = driver.step([driver.swap_in(victim)], [victim], budget=24)
            assert set(victim.blocks) != old_blocks
        while running:
            running = driver.step(running, [], budget=24)
        return victim

    alone, swapped = generate(swapped=False), generate(swapped=True)
    assert swapped.output == alone.output
    assert [entry.logprob for entry in swapped.logprobs] == [entry.logprob for entry in alone.logprobs]
    assert [entry.top_logprobs for entry in swapped.logprobs] == [entry.top_logprobs for entry in alone.logprobs]


def test_the_time_of_moves_is_reported_with_their_step(llama):
    backend, _ = open_backend(llama[0])
    out = np.tile(np.arange(100, dtype=np.int32), (2, 1))
    backend.move_blocks(copies=NO_PAIRS, swap_out=out, swap_in=NO_PAIRS)
    empty = np.empty(0, dtype=np.int32)
    batch = StepBatch(
        step=0,
        finished_rows=empty,
        new_rows=(),
        new_blocks=NO_PAIRS,
        rows=empty,
        num_scheduled_tokens=empty,
        num_computed_tokens=empty,
        samples=empty,
        block_table=np.zeros((8, 33), dtype=np.int32),
    )
    assert backend.execute(batch).move_time_us > 0
    assert backend.execute(batch).move_time_us == 0


def test_swap_space_is_automatic_none_or_what_was_asked_for(llama):
    automatic = open_backend(llama[0])[1]
    assert automatic.num_host_blocks == automatic.num_blocks
    assert 0 < automatic.swap_us_per_block < 10_000
    none = open_backend(llama[0], swap_space_mib=0)[1]
    assert (none.num_host_blocks, none.swap_us_per_block) == (0, 0.0)
    eager = {"kernels": "eager"}
    block_bytes = 3 * 2 * 2 * 8 * 12 * 4
    assert open_backend(llama[0], swap_space_mib=1, options=eager)[1].num_host_blocks == (1 << 20) // block_bytes


def test_a_row_with_impossible_tokens_fails_alone(llama):
    backend, info = open_backend(llama[0])
    good = Request(prompts((20,))[0], 8)
    bad = Request([1, VOCAB_SIZE, 2], 8)
    BackendDriver(backend, info).run([good, bad], budget=64)
    assert good.output == reference(llama[1], good.prompt, 8)[0]
    assert bad.output == [-1]
    assert "token id 320 is not allowed; allowed: 0 to 319" in bad.errors[0].message


def test_nan_in_one_row_stays_there(llama):
    backend, info = open_backend(llama[0])
    driver = BackendDriver(backend, info)
    good, bad = (Request(prompt, 8) for prompt in prompts((20, 21)))
    running = driver.step([driver._admit(good), driver._admit(bad)], [good, bad], budget=64)
    with torch.inference_mode():
        backend._model.forward.pool.layers[1, bad.blocks[0]] = float("nan")
    while running:
        running = driver.step(running, [], budget=64)
    assert good.output == reference(llama[1], good.prompt, 8)[0]
    assert bad.output[1:] == [-1]
    assert len(bad.errors) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 12}, "block_size 12 is not allowed; allowed: a power of two"),
        ({"block_size": 0}, "block_size 0"),
        ({"num_kv_blocks": 31}, "num_kv_blocks 31 is not allowed; .* allowed: 32 or more"),
        ({"num_kv_blocks": -1}, "num_kv_blocks -1"),
        (
            {"swap_space_mib": 1, "block_size": 4096},
            "swap_space_mib 1 is not allowed; one block takes 3145728 .* 3 or more",
        ),
        ({"swap_space_mib": 1 << 34}, r"swap_space_mib \d+ is not allowed; .*; allowed: less, or 0 \(no"),
        ({"max_model_len": CONTEXT + 1}, f"max_model_len {CONTEXT + 1} is not allowed; .*{CONTEXT}"),
        ({"max_model_len": -1}, "max_model_len -1"),
        ({"device": "tpu"}, "device 'tpu' is not allowed; allowed: cpu, cuda"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not allowed"),
        ({"dtype": "float8"}, "dtype 'float8' is not allowed; allowed: auto, float32"),
        ({"quantization": "int3"}, "quantization 'int3' is not allowed; allowed: none, int8, int4"),
        ({"num_threads": -2}, "num_threads -2"),
        ({"max_num_seqs": 0}, "max_num_seqs 0 is not allowed; allowed: 1 or more"),
        ({"options": {"kernel": "eager"}}, "backend_options 'kernel' is not allowed; allowed: kernels"),
        (
            {"options": {"kernels": "fast"}},
            "backend_options kernels 'fast' is not allowed; allowed: auto, compiled, eager",
        ),
        ({"options": {"kernels": "eager"}, "quantization": "int8"}, "quantization 'int8' needs the CPU kernels"),
        ({"options": {"kernels": "compiled"}, "dtype": "float16"}, "kernels 'compiled' needs the CPU kernels"),
        (
            {"options": {"kernels": "eager", "activations": "int8"}},
            "activations 'int8' needs the CPU kernels: .*; allowed here: auto, exact",
        ),
        (
            {"options": {"kernels": "eager", "activations": "bfloat16"}},
            "activations 'bfloat16' needs the CPU kernels: .*; allowed here: auto, exact",
        ),
        (
            {"options": {"activations": "int4"}},
            "activations 'int4' is not allowed; allowed: auto, bfloat16, exact, int8",
        ),
    ],
)
def test_impossible_settings_are_refused_in_one_line(llama, settings, message):
    with pytest.raises(BackendConfigError, match=message) as caught:
        open_backend(llama[0], **settings)
    assert "\n" not in str(caught.value)


def test_pool_is_sized_from_free_memory_and_never_beyond_use(llama, monkeypatch):
    backend, info = open_backend(llama[0], num_kv_blocks=0)
    assert info.num_blocks == 8 * CONTEXT // 8
    backend.close()
    monkeypatch.setattr(kv_pool, "free_host_bytes", lambda: 1 << 18)
    with pytest.raises(BackendConfigError, match=r"max_model_len 256 is not allowed; the free memory holds"):
        open_backend(llama[0], num_kv_blocks=0)


def test_info_describes_the_model_and_close_may_be_called_twice(llama):
    backend, info = open_backend(llama[0], dtype="auto")
    assert isinstance(backend, ExecutorBackend)
    assert (info.backend, info.device, info.dtype) == ("torch", "cpu", "float32")
    assert (info.model_name, info.eos_token_ids, info.vocab_size) == (llama[0].name, (0,), VOCAB_SIZE)
    assert (info.max_model_len, info.block_size, info.max_num_rows) == (CONTEXT, 8, 8)
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="not open"):
        run((backend, info), [1, 2, 3])


@pytest.mark.parametrize(
    ("name", "activations", "limit"),
    [("qwen3", "exact", 1e-3), ("mistral", "exact", 1e-3), ("qwen3", "auto", 0.1), ("mistral", "auto", 0.1)],
)
def test_int4_is_what_rounding_gives_and_does_not_depend_on_the_batch(tmp_path, name, activations, limit):
    model = make_checkpoint(tmp_path, name)
    of_inputs = round_blocks_to_bytes if activations == "auto" else torch.Tensor.contiguous
    round_products(model, lambda weight: rounded_to_4_bits(weight).float(), of_inputs)
    model.generation_config.eos_token_id = None
    settings = {"quantization": "int4", "dtype": "float32", "options": {"activations": activations}}
    together = [Request(prompt, 6, GREEDY_WITH_LOGPROBS) for prompt in prompts()]
    BackendDriver(*open_backend(tmp_path, **settings)).run(together, budget=32)
    for request in together:
        alone = run(open_backend(tmp_path, **settings), request.prompt, 6, sampling=GREEDY_WITH_LOGPROBS)
        assert alone.output == request.output
        expected = reference(model, request.prompt, 1)[1][0]
        assert request.logprobs[0].logprob == pytest.approx(float(expected[request.output[0]]), abs=limit)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3-bias", "mistral", "gemma2", "gemma4-keys", "gpt_neox"])
def test_int8_is_what_rounding_weights_and_inputs_gives_and_does_not_depend_on_the_batch(tmp_path, name):
    model = make_checkpoint(tmp_path, name)
    round_to_8_bits(model)
    model.generation_config.eos_token_id = None
    settings = {"quantization": "int8", "dtype": "float32"}
    together = [Request(prompt, 6, GREEDY_WITH_LOGPROBS) for prompt in prompts()]
    BackendDriver(*open_backend(tmp_path, **settings)).run(together, budget=32)
    for request in together:
        alone = run(open_backend(tmp_path, **settings), request.prompt, 6, sampling=GREEDY_WITH_LOGPROBS)
        assert alone.output == request.output
        expected = reference(model, request.prompt, 1)[1][0]
        # A last bit in float32 can tip a code over to the next integer, so not closer than this.
        assert request.logprobs[0].logprob == pytest.approx(float(expected[request.output[0]]), abs=0.05)
