"""A library for the attention of large steps: when it is used, what it computes, and that it is refused by name."""

import json

import pytest
import torch

from backend_driver import BackendDriver, Request
from checkpoints import VOCAB_SIZE, make_checkpoint
from decoder_driver import write_checkpoint
from fake_flash_attention import FakeFlash
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import chunk_library as module
from headway_executor.gpu.chunk_library import chunk_library
from headway_executor.models.families import read_model_config
from headway_kernels.gpu.attention_tuning import attention_tuning
from headway_proto.sampling import SamplingParams

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread", "triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with what stands in for the library"),
]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, logprobs=2)


@pytest.fixture
def flash(monkeypatch):
    """As if this were a Hopper with the library; the comparison is a small one."""
    monkeypatch.setattr(module, "_is_of_capability", lambda device: True)
    monkeypatch.setattr(module, "_ROWS", ((5, 20), (1, 9), (7, 7)))
    return FakeFlash().install(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hidden_size=64, intermediate_size=96, head_dim=64, vocab_size=VOCAB_SIZE)
    return directory


def open_backend(directory, **settings):
    backend = TritonBackend()
    config = {"dtype": "bfloat16", "max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64}
    config |= {"max_num_batched_tokens": 64, "options": {"chunk_attention": "flash"}}
    return backend, backend.open(BackendConfig(model=str(directory), **(config | settings)))


def run(directory, **settings):
    backend, info = open_backend(directory, **settings)
    requests = [Request(list(range(3, 3 + length)), 3, GREEDY) for length in (17, 2, 9)]
    BackendDriver(backend, info).run(requests, budget=12)
    return requests


def test_chunks_of_a_step_without_a_graph_are_the_librarys(flash, model):
    found = run(model)
    compared, *calls = flash.calls
    assert compared == 13
    # Three steps have chunks, in each of the layers; decodes have none.
    layers = read_model_config(model).num_layers
    assert calls == [count for count in calls[::layers] for _ in range(layers)]
    assert sum(calls[::layers]) >= 17 + 2 + 9
    expected = run(model, options={})
    assert len(flash.calls) == 1 + len(calls)
    assert [request.output for request in found] == [request.output for request in expected]
    for request, other in zip(found, expected, strict=True):
        own, others = ([entry.logprob for entry in one.logprobs] for one in (request, other))
        assert own == pytest.approx(others, abs=0.2)


def test_a_size_that_is_recorded_keeps_our_kernel(flash, model):
    backend, info = open_backend(model)
    target = backend._model._target
    target.sizes = target.step_sizes(recorded=True)
    target._recorded = frozenset(target.sizes.recorded())
    flash.calls.clear()
    BackendDriver(backend, info).run([Request(list(range(9)), 2, GREEDY)], budget=12)
    assert flash.calls == []


LACKS = {
    "gemma2": "windows",
    "gpt_oss": "windows",
    "deepseek_v3": "latent attention",
    "llama3": "heads of 12 channels",
    "granite": "heads of",
}


@pytest.mark.parametrize("family", LACKS)
def test_a_model_with_what_it_lacks_is_refused_by_name(family, flash, tmp_path):
    make_checkpoint(tmp_path, family)
    with pytest.raises(BackendConfigError) as caught:
        open_backend(tmp_path)
    assert "backend_options chunk_attention 'flash' is not allowed; it does not run" in str(caught.value)
    assert LACKS[family] in str(caught.value)
    open_backend(tmp_path, options={"chunk_attention": "auto"})
    assert flash.calls == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "it does not run dtype float32"),
        ({"kv_cache_dtype": "fp8"}, "it does not run a KV cache of 8 bits"),
        ({"options": {"chunk_attention": "fastest"}}, "'fastest' is not allowed; allowed: triton, flash, auto"),
    ],
)
def test_settings_that_it_lacks_are_refused_by_name(settings, message, flash, model):
    with pytest.raises(BackendConfigError, match=message):
        open_backend(model, **settings)


def test_soft_caps_and_sinks_are_refused_where_there_are_no_windows(flash, tmp_path):
    for family, fields, message in (
        ("gemma2", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "soft caps"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "attention sinks"),
    ):
        directory = tmp_path / family
        directory.mkdir()
        make_checkpoint(directory, family)
        config = json.loads((directory / "config.json").read_text())
        config["num_hidden_layers"] = 3
        (directory / "config.json").write_text(json.dumps(config | fields))
        found = read_model_config(directory)
        assert module.lacking(found, torch.bfloat16, CPU, is_coded=False) == message


def test_a_processor_of_another_kind_is_refused_by_name(model):
    with pytest.raises(BackendConfigError, match=r"does not run device cpu, which is not of compute capability 9.x"):
        open_backend(model)


def choose(model, asked, *, seconds=None):
    warned = []
    tuning = attention_tuning(CPU, 64, torch.bfloat16)
    sizes = (read_model_config(model), torch.bfloat16, tuning, CPU)
    return chunk_library(asked, *sizes, is_coded=False, warn=warned.append, seconds=seconds), warned


def test_a_library_that_gives_something_else_is_never_used(flash, model):
    flash.spoils = True
    reason = "on this device it gives something else than our kernel"
    with pytest.raises(BackendConfigError, match=reason):
        choose(model, "flash")
    assert choose(model, "auto") == (None, [f"FlashAttention is installed and not used: {reason}"])


def test_a_library_that_fails_is_never_used(flash, model, monkeypatch):
    def fails(**named):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("headway_kernels.gpu.flash_attention.FlashAttention.__call__", lambda self, *_, **__: fails())
    assert choose(model, "auto")[1] == [
        "FlashAttention is installed and not used: it fails: no kernel image is available"
    ]


@pytest.mark.parametrize(("times", "is_used"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_the_faster_of_the_two_is_taken(times, is_used, flash, model):
    clock = iter(times)
    found, warned = choose(model, "auto", seconds=lambda launch: (launch(), next(clock))[1])
    assert (found is not None) == is_used
    assert warned == []
