"""A library for the attention of long chunks: when it is used, what it computes, and that it is refused by name."""

import json

import pytest
import torch

from backend_driver import BackendDriver, Request
from checkpoints import VOCAB_SIZE, make_checkpoint
from decoder_driver import write_checkpoint
from fake_flash_attention import FakeFlash
from fake_flash_infer import FakeFlashInfer
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import chunk_library as module
from headway_executor.gpu.chunk_library import LIBRARIES, LibraryChoice
from headway_executor.gpu.preparation import try_largest_step
from headway_executor.models.families import read_model_config
from headway_kernels.gpu.attention.tuning import attention_tuning, tile_sizes
from headway_proto.sampling import SamplingParams

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with what stands in for the library"),
]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
FAKES = {"flash": FakeFlash, "flashinfer": FakeFlashInfer}
LONG = 5
"""Tokens of a chunk that is long here."""


@pytest.fixture
def hopper(monkeypatch):
    """As if this were a Hopper; the comparison is a small one."""
    monkeypatch.setattr(module, "_capability_of", lambda device: (9, 0))
    monkeypatch.setattr(module, "MOST_OWN_TOKENS", LONG - 1)
    monkeypatch.setattr(module, "_ROWS", ((1, 9), (5, 20), (7, 7)))


@pytest.fixture(params=FAKES)
def name(request):
    return request.param


@pytest.fixture
def library(name, hopper, monkeypatch):
    return FAKES[name]().install(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, hidden_size=64, intermediate_size=96, head_dim=64, vocab_size=VOCAB_SIZE)
    return directory


def open_backend(directory, asked, **settings):
    backend = TritonBackend()
    config = {"dtype": "bfloat16", "max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64}
    config |= {"max_num_batched_tokens": 64, "options": {"chunk_attention": asked}}
    return backend, backend.open(BackendConfig(model=str(directory), **(config | settings)))


def run(directory, asked):
    backend, info = open_backend(directory, asked)
    requests = [Request(list(range(3, 3 + length)), 3, GREEDY) for length in (17, 2, 9)]
    BackendDriver(backend, info).run(requests, budget=12)
    return requests


def test_long_chunks_are_the_librarys(name, library, model):
    found = run(model, name)
    # The comparison: together, then each alone.
    calls = library.calls[3:]
    assert library.calls[:3] == [12, 5, 7]
    layers = read_model_config(model).num_layers
    assert calls == [count for count in calls[::layers] for _ in range(layers)]
    # Of 17 tokens 12; the other 5 with 5 of 9, a short chunk between them. The last 4 and decodes are our kernel's.
    assert calls[::layers] == [12, 10]
    expected = run(model, "triton")
    assert library.calls[3:] == calls
    assert [request.output for request in found] == [request.output for request in expected]
    for request, other in zip(found, expected, strict=True):
        own, others = ([entry.logprob for entry in one.logprobs] for one in (request, other))
        assert own == pytest.approx(others, abs=0.2)


def test_the_longest_chunk_is_tried_with_the_largest_step(name, library, model):
    backend, _ = open_backend(model, name, max_num_batched_tokens=32)
    library.calls.clear()
    with torch.inference_mode():
        try_largest_step(backend._model.parts)
    # First one row of all tokens; the largest step has 8 of each of its rows.
    assert {*library.calls} == {32}


def test_no_recorded_step_has_a_long_chunk():
    assert module.MOST_OWN_TOKENS >= module.MAX_MIXED_TOKENS


LACKS = {
    "gemma2": "windows",
    "gpt_oss": "windows",
    "deepseek_v3": "latent attention",
    "llama3": "heads of 12 channels",
    "granite": "heads of",
}


@pytest.mark.parametrize("family", LACKS)
def test_a_model_with_what_it_lacks_is_refused_by_name(family, name, library, tmp_path):
    make_checkpoint(tmp_path, family)
    with pytest.raises(BackendConfigError) as caught:
        open_backend(tmp_path, name)
    assert f"backend_options chunk_attention {name!r} is not allowed; it does not run" in str(caught.value)
    assert LACKS[family] in str(caught.value)
    warned = []
    open_backend(tmp_path, "auto", warn=warned.append)
    assert library.calls == []
    assert [LACKS[family] in line for line in warned] == [True, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "it does not run dtype float32"),
        ({"kv_cache_dtype": "fp8"}, "it does not run a KV cache of 8 bits"),
        (
            {"max_num_batched_tokens": LONG - 1},
            "it computes chunks of more than 4 tokens, and max_num_batched_tokens is 4",
        ),
    ],
)
def test_settings_that_it_lacks_are_refused_by_name(settings, message, name, library, model):
    with pytest.raises(BackendConfigError, match=message):
        open_backend(model, name, **settings)


def test_a_value_that_there_is_not_is_refused(model):
    with pytest.raises(BackendConfigError, match="'fastest' is not allowed; allowed: triton, flash, flashinfer, auto"):
        open_backend(model, "fastest")


@pytest.mark.usefixtures("hopper")
def test_what_libraries_lack_is_refused_where_there_are_no_windows(tmp_path):
    kinds = ["full_attention"] * 3
    for family, fields, message in (
        (
            "gemma4",
            {"layer_types": kinds, "per_layer_config": {"1": {"head_dim": 32}}},
            "layers that differ in their heads",
        ),
        ("gemma2", {"sliding_window": None, "layer_types": kinds}, "soft caps"),
        ("gpt_oss", {"sliding_window": None, "layer_types": kinds}, "attention sinks"),
        ("mpt", {}, "scores that fall with distance"),
    ):
        directory = tmp_path / family
        directory.mkdir()
        make_checkpoint(directory, family)
        config = json.loads((directory / "config.json").read_text())
        config["num_hidden_layers"] = 3
        (directory / "config.json").write_text(json.dumps(config | fields))
        found = read_model_config(directory)
        for library in LIBRARIES.values():
            assert module.lacking(library, found, torch.bfloat16, CPU, is_coded=False) == message


@pytest.mark.parametrize(
    ("asked", "capabilities"),
    [("flash", "compute capability 9.x"), ("flashinfer", "compute capability 8.0 or above")],
)
def test_a_processor_of_another_kind_is_refused_by_name(asked, capabilities, model):
    with pytest.raises(BackendConfigError, match=f"does not run device cpu, which is not of {capabilities}"):
        open_backend(model, asked, max_num_batched_tokens=1024)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((7, 5), set()), ((8, 9), {"flashinfer"}), ((9, 0), {"flash", "flashinfer"}), ((10, 0), {"flashinfer"})],
)
def test_each_library_has_its_processors(capability, runs, monkeypatch):
    monkeypatch.setattr(module, "_capability_of", lambda device: capability)
    assert {name for name, library in LIBRARIES.items() if library.runs_on(CPU)} == runs


def choose(model, asked, *, seconds=None):
    warned = []
    tuning = attention_tuning(CPU, tile_sizes(64, torch.bfloat16))
    sizes = (read_model_config(model), torch.bfloat16, tuning, CPU)
    choice = LibraryChoice(*sizes, block_size=8, is_coded=False, said=warned.append, seconds=seconds)
    return choice.of(asked, 64), warned


REFUSED = [
    ({"spoils": True}, "on this device it gives something else than our kernel"),
    ({"mixes": True}, "on this device its result depends on what else is in the step"),
]


@pytest.mark.parametrize(("kind", "reason"), REFUSED)
@pytest.mark.parametrize("name", ["flashinfer"])
def test_a_library_that_gives_something_else_is_never_used(kind, reason, name, hopper, model, monkeypatch):
    FAKES[name](**kind).install(monkeypatch)
    with pytest.raises(BackendConfigError, match=reason):
        choose(model, name)
    found, warned = choose(model, "auto")
    assert found is None
    assert f"{LIBRARIES[name].said} does not compute the attention of prompts: {reason}" in warned


def test_a_library_that_fails_is_never_used(name, library, model, monkeypatch):
    def fails(self, *_, **__):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("headway_kernels.gpu.attention.flash_attention.FlashAttention.plan", fails)
    monkeypatch.setattr("headway_kernels.gpu.attention.flash_infer.FlashInfer.plan", fails)
    with pytest.raises(BackendConfigError, match="it fails: no kernel image is available"):
        choose(model, name)
    assert (
        f"{LIBRARIES[name].said} does not compute the attention of prompts: it fails: no kernel image is available"
        in (choose(model, "auto")[1])
    )


def test_a_library_that_writes_nothing_gives_something_else(hopper, model, monkeypatch):
    FakeFlashInfer().install(monkeypatch)
    monkeypatch.setattr("headway_kernels.gpu.attention.flash_infer.FlashInfer._attend", lambda *_: None)
    with pytest.raises(BackendConfigError, match="gives something else"):
        choose(model, "flashinfer")


@pytest.mark.parametrize(
    ("times", "fastest"), [((1.0, 2.0, 3.0), None), ((2.0, 1.0, 1.5), "flash"), ((2.0, 3.0, 1.0), "flashinfer")]
)
def test_the_fastest_is_taken(times, fastest, hopper, model, monkeypatch):
    fakes = {name: fake().install(monkeypatch) for name, fake in FAKES.items()}
    clock = iter(times)
    found, warned = choose(model, "auto", seconds=lambda launch: (launch(), next(clock))[1])
    assert (None if found is None else type(found._library).__name__) == {
        None: None, "flash": "FlashAttention", "flashinfer": "FlashInfer"
    }[fastest]  # fmt: skip
    # Compared together and alone, then timed.
    assert [len(fake.calls) for fake in fakes.values()] == [4, 4]
    assert warned == []


@pytest.mark.usefixtures("hopper")
def test_what_is_not_installed_is_said_and_refused_by_name(name, model, monkeypatch):
    monkeypatch.setattr("headway_kernels.gpu.attention.flash_attention.MODULE", "no_such_module")
    monkeypatch.setattr("headway_kernels.gpu.attention.flash_infer.MODULE", "no_such_module")
    found, warned = choose(model, "auto")
    assert found is None
    assert [("No module named 'no_such_module'" in line) for line in warned] == [True, True]
    with pytest.raises(
        BackendConfigError, match=f"{name}' is not allowed; no_such_module.* allowed here: triton, auto"
    ):
        choose(model, name)
