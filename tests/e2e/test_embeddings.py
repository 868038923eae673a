"""Embeddings and scores over gRPC: the numbers are those of ``transformers``, whatever shares the steps."""

import asyncio
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

import headway
from checkpoints import make_checkpoint, make_model
from e2e.running_server import command, finished, wait_until
from headway.client import AsyncClient, Client, OverloadedError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto import generation_pb2 as api
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

VOCAB_SIZE = 320
MAX_MODEL_LEN = 128
BLOCK_SIZE = 8
NUM_REQUESTS = 12
FAMILY = "qwen3"
POOLINGS = ("last", "mean", "cls")
TOLERANCE = 1e-5
"""What a number of a normalized vector may differ by, from eager operators and from the CPU kernels."""

DEMO = Path(headway.__file__).parent / "demo_model"


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Some alone, some with a beginning that others have."""
    rng = np.random.default_rng(5)
    common = tuple(rng.integers(3, VOCAB_SIZE, size=40).tolist())
    return tuple(
        common[: (0, 17, 40, 40)[number % 4]] + tuple(rng.integers(3, VOCAB_SIZE, size=rng.integers(1, 50)).tolist())
        for number in range(NUM_REQUESTS)
    )


@cache
def hidden_states() -> tuple[torch.Tensor, ...]:
    """What transformers gives behind the final norm, float64, ``[tokens, hidden]`` for each prompt."""
    model = make_model(FAMILY).model
    with torch.no_grad():
        return tuple(model(torch.tensor([prompt])).last_hidden_state[0].double() for prompt in prompts())


@cache
def outputs() -> tuple[tuple[int, ...], ...]:
    """The greedy tokens of transformers behind each prompt."""
    model = make_model(FAMILY)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        return tuple(
            tuple(model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist())
            for prompt in prompts()
        )


def expected(number: int, pooling: str, dimensions: int = 0) -> np.ndarray:
    states = hidden_states()[number]
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling].numpy()
    vector = vector[: dimensions or len(vector)]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / FAMILY
    make_checkpoint(directory, FAMILY)
    return directory


def config_of(checkpoint: Path, num_pools: int, kernels: str = "auto") -> BackendConfig:
    return BackendConfig(
        model=str(checkpoint),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_pools * MAX_MODEL_LEN // BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        num_threads=1,
        options={"kernels": kernels},
    )


CASES = [
    *itertools.product((16, 512), ("ample", "recompute", "swap"), ("auto",)),
    (16, "recompute", "eager"),
]


@pytest.mark.parametrize(("budget", "pool", "kernels"), CASES)
async def test_vectors_equal_those_of_transformers(
    checkpoint: Path, tmp_path: Path, budget: int, pool: str, kernels: str
) -> None:
    """Whatever the chunks, prefixes and preemptions; and the streams beside them have the tokens that they always have."""
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=NUM_REQUESTS,
        reserve="none",
        preemption="swap" if pool == "swap" else "recompute",
    )
    config = config_of(checkpoint, NUM_REQUESTS if pool == "ample" else 1, kernels)
    with running(tmp_path, checkpoint, TorchBackend(), config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            streams = [
                client.generate(list(prompt), max_tokens=8, temperature=0.0, ignore_eos=True) for prompt in prompts()
            ]
            batches = [
                client.embed([list(prompt) for prompt in prompts()], pooling=pooling, dimensions=dimensions)
                for pooling, dimensions in zip(POOLINGS, (0, 20, 0), strict=True)
            ]
            *results, last, mean, cls = await asyncio.gather(*(stream.result() for stream in streams), *batches)
        core = server.core_when_quiet()
        assert core.pool.num_free == core.pool.num_blocks
        assert (core.counters.num_preemptions > 0) == (pool != "ample")
        assert core.counters.num_prefix_hit_tokens > 0
    for number, result in enumerate(results):
        assert tuple(result.token_ids) == outputs()[number]
    for pooling, dimensions, response in zip(POOLINGS, (0, 20, 0), (last, mean, cls), strict=True):
        assert len(response.embeddings) == NUM_REQUESTS
        for number, embedding in enumerate(response.embeddings):
            assert embedding.prompt_tokens == len(prompts()[number])
            assert list(embedding.values) == pytest.approx(expected(number, pooling, dimensions), abs=TOLERANCE)
    assert not any(embedding.cached_tokens for response in (mean, cls) for embedding in response.embeddings)


async def test_scores_equal_those_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """Each continuation's own tokens, and their sum; the prompt may come from the cache."""
    model = make_model(FAMILY)
    prompt, continuations = list(prompts()[3]), [list(each[:9]) for each in prompts()]
    with running(tmp_path, checkpoint, TorchBackend(), config_of(checkpoint, 4), SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            await client.score(prompt, continuations[:1])
            response = await client.score(prompt, continuations)
            text = await client.score("the scheduler", [" decides", " knows rows"])
            plain = [await client.tokenize(each) for each in ("the scheduler", " decides", " knows rows")]
            single = await client.score([5], [[6]])
    assert response.prompt_tokens == len(prompt)
    for continuation, score in zip(continuations, response.scores, strict=True):
        with torch.no_grad():
            told = model(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)
        values = [float(told[len(prompt) - 1 + place, token]) for place, token in enumerate(continuation)]
        assert [entry.token_id for entry in score.tokens] == continuation
        assert [entry.logprob for entry in score.tokens] == pytest.approx(values, abs=1e-4)
        assert score.logprob == pytest.approx(sum(values), abs=1e-3)
        assert score.cached_tokens >= (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert text.prompt_tokens == len(plain[0])
    assert [[entry.token_id for entry in score.tokens] for score in text.scores] == plain[1:]
    assert len(single.scores[0].tokens) == 1


async def test_texts_defaults_and_an_unnormalized_vector(checkpoint: Path, tmp_path: Path) -> None:
    with running(tmp_path, checkpoint, TorchBackend(), config_of(checkpoint, 4), SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            model = await client.model()
            text = "a block holds sixteen positions"
            token_ids = await client.tokenize(text)
            response = await client.embed([text, token_ids], normalize=False, request_id="mine")
    assert (model.embedding_size, model.default_pooling, model.is_encoder) == (48, api.POOLING_LAST, False)
    assert response.request_id == "mine"
    with torch.no_grad():
        states = make_model(FAMILY).model(torch.tensor([token_ids])).last_hidden_state[0]
    for embedding in response.embeddings:
        assert embedding.prompt_tokens == len(token_ids)
        assert list(embedding.values) == pytest.approx(states[-1].tolist(), abs=1e-4)


async def test_many_tenants_inputs_are_limited_like_prompts(tmp_path: Path) -> None:
    """A queue that is full refuses the call with a time to wait, and what it had queued is gone."""
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=100, max_num_seqs=8)
    limits = SchedulerLimits(max_num_seqs=1, max_num_waiting=4)
    with running(tmp_path, DEMO, SimulatedBackend(), config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            with pytest.raises(OverloadedError) as refused:
                await client.embed([[5, number] for number in range(3, 60)])
            assert refused.value.retry_after_s > 0
            assert server.core_when_quiet().num_unfinished == 0
            assert len((await client.embed([[5, 6], [7]])).embeddings) == 2


def test_a_killed_executor_loses_no_vector(tmp_path: Path) -> None:
    """kill -9 in the middle of many embeddings and a stream: all complete, with the vectors of transformers.

    What was recorded of it replays to the byte.
    """
    rng = np.random.default_rng(8)
    inputs = [rng.integers(3, 4000, size=rng.integers(60, 120)).tolist() for _ in range(96)]
    flags = ("--model", str(DEMO), "--dtype", "float32", "--max-num-batched-tokens", "64", "--num-kv-blocks", "80")
    flags += ("--grpc-address", "127.0.0.1:0", "--log-level", "warning", "--flight-log", str(tmp_path / "log"))
    with command("serve", *flags) as server:
        address = server.wait_for_ready()
        with Client(address) as client, ThreadPoolExecutor(8) as threads:
            client.wait_ready(20)
            jobs = [
                threads.submit(client.embed, inputs[first : first + 32], pooling="mean") for first in range(0, 96, 32)
            ]
            stream = threads.submit(client.generate([5, 6, 7], max_tokens=60, seed=1, ignore_eos=True).result)
            wait_until(lambda: client.status().num_running > 1, 20, "running requests")
            assert not all(job.done() for job in jobs)
            server.children()["executor"].kill()
            vectors = [list(embedding.values) for job in jobs for embedding in job.result(60).embeddings]
            assert len(stream.result(60).token_ids) == 60
        replayed = finished("replay", address)
        assert replayed.process.returncode == 0, replayed.err
        assert "".join(replayed.out).endswith(": byte-identical\n")
    model = AutoModel.from_pretrained(DEMO, dtype=torch.float32)
    for token_ids, vector in zip(inputs[::7], vectors[::7], strict=True):
        with torch.no_grad():
            mean = model(torch.tensor([token_ids])).last_hidden_state[0].double().mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=TOLERANCE)
