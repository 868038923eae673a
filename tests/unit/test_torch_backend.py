"""The torch backend against transformers: the same tokens, whatever the batch, the chunks and the blocks."""

import random

import pytest
import torch
from transformers import PreTrainedModel

from backend_driver import BackendDriver, Request
from checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto.sampling import SamplingParams

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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products gain nothing from a second thread, and lose a lot where another process holds its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    shard = "40KB" if request.param in {"llama3", "qwen3-bias"} else "5GB"
    model = make_checkpoint(directory, request.param, max_shard_size=shard)
    model.generation_config.eos_token_id = None
    return directory, [(prompt, *reference(model, prompt)) for prompt in prompts()]


@pytest.mark.parametrize(("block_size", "budget"), [(8, 7), (8, 512), (16, 16), (16, 60)])
def test_greedy_tokens_and_logprobs_equal_transformers(family, block_size, budget):
    directory, expected = family
    backend, info = open_backend(directory, block_size=block_size)
    requests = [Request(prompt, NUM_OUTPUT, GREEDY_WITH_LOGPROBS) for prompt, _, _ in expected]
    BackendDriver(backend, info, seed=budget).run(requests, budget=budget)
    for request, (_, tokens, logprobs) in zip(requests, expected, strict=True):
        assert request.output == tokens
        for entry, row in zip(request.logprobs, logprobs, strict=True):
            best = torch.topk(row, 2)
            assert entry.logprob == pytest.approx(float(best.values[0]), abs=1e-4)
            assert list(entry.top_token_ids) == best.indices.tolist()
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(family, dtype):
    directory, expected = family
    backend, info = open_backend(directory, dtype=dtype)
    requests = [Request(prompt, 1, GREEDY_WITH_LOGPROBS) for prompt, _, _ in expected]
    BackendDriver(backend, info).run(requests, budget=16)
    tolerance = 0.5 if dtype == "bfloat16" else 0.06
    for request, (_, _, logprobs) in zip(requests, expected, strict=True):
        (entry,) = request.logprobs
        assert entry.logprob == pytest.approx(float(logprobs[0, request.output[0]]), abs=tolerance)
        assert float(logprobs[0].max() - logprobs[0, request.output[0]]) < tolerance
