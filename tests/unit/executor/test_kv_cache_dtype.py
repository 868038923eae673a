"""A KV cache of 8 bits: the same on both backends, whole wherever it goes, and never taken for another."""

import numpy as np
import pytest
import torch

from backend_driver import BackendDriver, Request
from checkpoints import VOCAB_SIZE, make_checkpoint
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.block_store.shm_transport import ShmTransport
from headway_executor.block_store.store import BlockStore
from headway_proto.sampling import SamplingParams

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted"),
]
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64}
HEAD_DIM = 12
BACKENDS = {"torch": TorchBackend, "triton": TritonBackend}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make_checkpoint(directory, "llama3")
    return directory


def open_backend(directory, kind="torch", **settings):
    backend = BACKENDS[kind]()
    config = {"model": str(directory), "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"} | SETTINGS | settings
    return backend, backend.open(BackendConfig(**config))


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def run(directory, kind, budget=24, lengths=(1, 8, 21), **settings):
    requests = [Request(prompt(length, seed=length), 4, GREEDY) for length in lengths]
    BackendDriver(*open_backend(directory, kind, **settings)).run(requests, budget=budget)
    return requests


def logprobs_of(requests):
    return [entry.logprob for request in requests for entry in request.logprobs]


@pytest.mark.parametrize(
    "family", ["llama3", *[pytest.param(name, marks=pytest.mark.deep) for name in ("gemma2", "gpt_oss", "deepseek_v3")]]
)
def test_both_backends_store_and_read_the_same(family, tmp_path):
    make_checkpoint(tmp_path, family)
    found, expected = run(tmp_path, "triton"), run(tmp_path, "torch")
    assert [request.output for request in found] == [request.output for request in expected]
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=2e-3)
    # It is another computation than without codes, and not a worse one by much.
    exact = run(tmp_path, "torch", kv_cache_dtype="auto", options={"kernels": "eager"})
    firsts, exact_firsts = ([request.logprobs[0].logprob for request in requests] for requests in (found, exact))
    assert firsts != exact_firsts
    assert firsts == pytest.approx(exact_firsts, abs=0.5)


def test_keys_of_an_index_are_codes_too(tmp_path):
    make_checkpoint(tmp_path, "deepseek_v32")
    eager = {"options": {"kernels": "eager"}}
    exact, coded = (run(tmp_path, "torch", kv_cache_dtype=kind, **eager) for kind in ("auto", "fp8"))
    assert logprobs_of(coded) != logprobs_of(exact)
    firsts = [[request.logprobs[0].logprob for request in requests] for requests in (coded, exact)]
    # Some queries see other keys; most see the same.
    assert np.median(np.abs(np.subtract(*firsts))) < 0.2, firsts


@pytest.mark.parametrize("kind", BACKENDS)
def test_layers_with_heads_of_several_sizes_have_no_codes(kind, tmp_path):
    make_checkpoint(tmp_path, "gemma4")
    options = {"kernels": "eager"} if kind == "torch" else {}
    with pytest.raises(BackendConfigError, match="kv_cache_dtype 'fp8' is not allowed with this model, whose layers"):
        open_backend(tmp_path, kind, kv_cache_dtype="fp8", options=options)


@pytest.mark.parametrize("kind", ["torch", pytest.param("triton", marks=pytest.mark.deep)])
def test_how_a_prompt_is_cut_changes_no_token(kind, llama):
    """A chunk attends to what is stored of itself too, so that it is the same whether it comes in one step or in several."""
    whole, cut = run(llama, kind, budget=64), run(llama, kind, budget=5)
    assert [request.output for request in whole] == [request.output for request in cut]
    assert logprobs_of(whole) == pytest.approx(logprobs_of(cut), abs=1e-4)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_request_that_was_swapped_out_goes_on(kind, llama):
    backend, info = open_backend(llama, kind, swap_space_mib=1)
    driver, request = BackendDriver(backend, info), Request(prompt(21, seed=21), 4, GREEDY)
    driver.step(driver.step([driver._admit(request)], [request], budget=64), [], budget=64)
    driver.swap_out(request)
    driver.run([Request(prompt(30), 1, GREEDY)], budget=64)
    running = driver.step([driver.swap_in(request)], [request], budget=64)
    while running:
        running = driver.step(running, [], budget=64)
    assert request.output == run(llama, kind, lengths=(21,))[0].output


@pytest.mark.parametrize("kind", BACKENDS)
def test_blocks_take_half_of_those_of_16_bits(kind, llama):
    def block_bytes(kv_cache_dtype):
        asked = []
        settings = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "swap_space_mib": 1}
        settings["options"] = {"kernels": "eager"} if kind == "torch" else {}  # the compiled ones fill up their heads
        open_backend(llama, kind, **settings, host_memory=lambda *question: asked.append(question))
        return asked[-1][1]

    assert block_bytes("fp8") * 2 * HEAD_DIM == block_bytes("auto") * (HEAD_DIM + 1)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_pool_of_another_dtype_is_not_taken_over(kind, llama, tmp_path):
    """The executor that died had blocks of other numbers: what they hold means nothing to this one."""
    names = []
    for kv_cache_dtype in ("fp8", "fp8", "auto", "fp8"):
        shm = ShmTransport()
        shm._directory = tmp_path
        store = BlockStore({"shm": shm}, place="here", directory=tmp_path)
        _, info = open_backend(
            llama, kind, kv_cache_dtype=kv_cache_dtype, swap_space_mib=1, host_memory=store.host_memory
        )
        names.append(store.open(info).host_pool)
        # As if it were killed: the kernel lets go of the file, which stays.
        store._file.close(remove=False)
    assert names[0] == names[1]
    assert len({*names}) == 3
    assert names[0].rpartition("-")[2] == names[3].rpartition("-")[2] != names[2].rpartition("-")[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype 'int8' is not allowed; allowed: auto, fp8"),
        (
            {"options": {"kernels": "compiled"}},
            "kv_cache_dtype 'fp8' is not allowed with kernels compiled, which needs the CPU kernels; allowed: auto",
        ),
        (
            {"quantization": "int8"},
            "kv_cache_dtype 'fp8' is not allowed with quantization int8, which needs the CPU kernels; allowed: auto",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings, message, llama):
    with pytest.raises(BackendConfigError, match=message):
        open_backend(llama, **settings)


def test_a_model_of_the_cpu_kernels_runs_on_operators_instead_and_says_so(llama):
    warnings = []
    open_backend(llama, warn=warnings.append)
    assert warnings == [
        "the CPU kernels have no KV cache of 8 bits; the model runs on torch operators, which are slower"
    ]
