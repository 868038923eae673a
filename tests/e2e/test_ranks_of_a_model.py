"""Real models on executors of several ranks, over gRPC: greedy tokens of ``transformers``, and all others of one rank.

Small blocks, small pools and small budgets: chunks, shared beginnings, preemption and swapping on all ranks.
"""

import asyncio
import itertools
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import headway
from checkpoints import make_checkpoint
from e2e.running_server import eventually
from e2e.test_numerical_truth import MAX_MODEL_LEN, workload
from e2e.test_ranks import num_joined, ranks_of, serving
from headway.client import AsyncClient, InvalidRequestError
from lora_files import write_adapter
from speculative_engine import write_first_layers

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
SIZES = ("--block-size", "8", "--num-threads", "1", "--max-num-batched-tokens", "16", "--swap-space-mib", "4")
SMALL_POOL = (
    "--num-kv-blocks",
    str(3 * MAX_MODEL_LEN // 16),
    "--max-model-len",
    str(MAX_MODEL_LEN),
    "--reserve",
    "none",
)
TORCH = ("--backend", "torch")
DEGREES = {
    "tensor": ("--tensor-parallel", "2"),
    "tensor of four": ("--tensor-parallel", "4"),
    "pipeline": ("--pipeline-parallel", "2"),
    "both": ("--tensor-parallel", "2", "--pipeline-parallel", "2"),
}
DRAFTING = ("--speculation", "draft")
OPENING_S = 240.0
QUICK = (("tensor", "swap", "qwen3"), ("pipeline", "recompute", "llama3"))
FAMILIES = (
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2-lite",
    "deepseek_v3",
    "phi",
    "hunyuan_moe",
    "granite_moe-shared",
    "ernie4_5_moe",
    "glm4_moe",
    "afmoe",
    "cohere2_moe",
)


def with_draft_model(flags: tuple[str, ...], model: Path, directory: Path) -> tuple[str, ...]:
    """The first layer of ``model``, if there is to be one."""
    if flags != DRAFTING:
        return flags
    return (*flags, "--draft-model", str(write_first_layers(model, directory / "draft", 1)))


async def greedy(client: AsyncClient, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], int]:
    stream = client.generate(list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    (completion,) = (await stream.result()).completions
    return tuple(completion.token_ids), completion.timings.preemptions


@pytest.mark.parametrize(
    ("degrees", "preemption", "family"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.deep)
        for case in itertools.product(DEGREES, ("swap", "recompute"), FAMILIES)
    ],
)
async def test_greedy_tokens_are_those_of_transformers(
    degrees: str, preemption: str, family: str, tmp_path: Path
) -> None:
    load = workload(family, True)
    model = tmp_path / "model"
    make_checkpoint(model, family)
    flags = (*TORCH, *DEGREES[degrees], *SIZES, *SMALL_POOL, "--preemption", preemption, "--model", str(model))
    with serving(tmp_path, *flags) as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, OPENING_S)) as client:
            answers = await asyncio.gather(*(greedy(client, *request) for request in load.requests))
    assert [tokens for tokens, _ in answers] == list(load.tokens)
    assert sum(preemptions for _, preemptions in answers) > 0


@pytest.mark.parametrize(
    ("degrees", "flags"),
    [
        ("pipeline", ()),
        *(
            pytest.param(degrees, flags, marks=pytest.mark.deep)
            for degrees, flags in (
                ("tensor", ()),
                ("both", ()),
                *((each, ("--speculation", "ngram")) for each in ("pipeline", "tensor", "both")),
                *((each, DRAFTING) for each in ("pipeline", "both")),
            )
        ),
    ],
)
async def test_ranks_of_the_triton_backend_draw_the_tokens_of_transformers_also_when_one_dies(
    degrees: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Interpreted: each rank would have a GPU."""
    load = workload("llama3", True).first(4)
    make_checkpoint(tmp_path / "model", "llama3")
    flags = with_draft_model(flags, tmp_path / "model", tmp_path)
    triton = ("--backend", "triton", "--dtype", "float32", "--model", str(tmp_path / "model"), *flags)
    with serving(tmp_path, *triton, *DEGREES[degrees], *SIZES, *SMALL_POOL, TRITON_INTERPRET="1") as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, OPENING_S)) as client:
            joined = num_joined(server)
            answering = asyncio.gather(*(greedy(client, *request) for request in load.requests))
            await asyncio.sleep(1.0)
            ranks_of(server)[1].send_signal(signal.SIGKILL)
            assert [tokens for tokens, _ in await answering] == list(load.tokens)
            await eventually(lambda: num_joined(server) > joined, OPENING_S)


async def of_adapters(client: AsyncClient, directory: Path) -> list[Any]:
    """Tokens, vectors and scores with an adapter from the start, with one that is loaded, and without any."""
    prompt = list(range(3, 40))
    await client.load_adapter("loaded", str(directory / "loaded"))
    with pytest.raises(InvalidRequestError, match="no such directory"):
        await client.load_adapter("missing", str(directory / "missing"))
    found: list[Any] = []
    for name in ("", "first", "loaded"):
        stream = client.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True, adapter=name)
        found.append(tuple((await stream.result()).completions[0].token_ids))
        for pooling in ("last", "mean"):
            (embedding,) = (await client.embed([prompt], pooling=pooling, adapter=name)).embeddings
            found.append(tuple(embedding.values))
        found.append((await client.score(prompt[:-5], [prompt[-5:]], adapter=name)).scores[0].logprob)
    await client.unload_adapter("loaded")
    assert [adapter.name for adapter in await client.adapters()] == ["first"]
    return found


@pytest.mark.deep
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("degrees", ["tensor", "pipeline"])
async def test_adapters_vectors_and_scores_are_those_of_one_rank(degrees: str, transport: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama3")
    for seed, name in enumerate(("first", "loaded")):
        write_adapter(tmp_path / name, model, seed=seed)
    flags = (*TORCH, *SIZES, "--model", str(tmp_path / "model"), "--adapter", f"first={tmp_path / 'first'}")
    answers = []
    for more in ((), (*DEGREES[degrees], "--backend-option", f"rank_transport={transport}")):
        with serving(tmp_path, *flags, *more) as server:
            async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, OPENING_S)) as client:
                answers.append(await of_adapters(client, tmp_path))
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(answers[0])


REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "The first law of robotics says", "temperature": 1.0, "seed": 1, "ignore_eos": True},
    {"prompt": "The first law of robotics says that", "temperature": 0.7, "seed": 2, "top_p": 0.9, "logprobs": 3},
    {"prompt": "A number:", "temperature": 1.0, "seed": 3, "regex": "[0-9]{3}-[0-9]{4}"},
    {"prompt": "Yes or no?", "temperature": 1.0, "seed": 4, "choice": ["yes", "no", "perhaps"]},
    {"prompt": "As JSON:", "temperature": 1.0, "seed": 5, "json_schema": '{"type": "object", "properties": {}}'},
    {"prompt": "Again and again and again and", "temperature": 0.0, "ignore_eos": True, "frequency_penalty": 0.5},
)


async def answers_of(client: AsyncClient) -> list[tuple[str, tuple[int, ...]]]:
    results = await asyncio.gather(*(client.generate(max_tokens=40, **request).result() for request in REQUESTS))
    return [(result.completions[0].text, tuple(result.completions[0].token_ids)) for result in results]


@pytest.mark.parametrize(
    ("degrees", "flags"),
    [
        ("tensor", ("--quantization", "int8")),
        pytest.param("both", ("--quantization", "int8"), marks=pytest.mark.deep),
        pytest.param("pipeline", ("--quantization", "int8"), marks=pytest.mark.deep),
        pytest.param("tensor", ("--speculation", "ngram"), marks=pytest.mark.deep),
        pytest.param("both", ("--speculation", "ngram"), marks=pytest.mark.deep),
        pytest.param("tensor", DRAFTING, marks=pytest.mark.deep),
        pytest.param("pipeline", DRAFTING, marks=pytest.mark.deep),
        pytest.param("tensor", ("--backend-option", "rank_transport=gloo"), marks=pytest.mark.deep),
        pytest.param("both", ("--backend-option", "rank_transport=zmq"), marks=pytest.mark.deep),
        pytest.param("pipeline", ("--backend-option", "kernels=eager"), marks=pytest.mark.deep),
    ],
)
async def test_sampled_and_constrained_answers_are_those_of_one_rank_also_when_a_rank_dies(
    degrees: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    shared = (*TORCH, *SIZES, *with_draft_model(flags, DEMO_MODEL, tmp_path))
    of_one_rank = tuple(flag for flag in shared if not flag.startswith("rank_transport"))
    if len(of_one_rank) < len(shared):
        of_one_rank = tuple(flag for flag in of_one_rank if flag != "--backend-option")
    with serving(tmp_path, *of_one_rank) as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, OPENING_S)) as client:
            expected = await answers_of(client)
    draw = random.Random(degrees)
    with serving(tmp_path, *shared, *DEGREES[degrees], fails_steps=of_one_rank != shared) as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready, OPENING_S)) as client:
            assert await answers_of(client) == expected
            assert await answers_of(client) == expected, "with what is cached"
            for number in (signal.SIGKILL, signal.SIGSTOP)[: 1 if degrees == "tensor" else 2]:
                joined, answering = num_joined(server), asyncio.create_task(answers_of(client))
                await asyncio.sleep(draw.uniform(0.0, 0.2))
                ranks_of(server)[1].send_signal(number)
                assert await answering == expected
                await eventually(lambda joined=joined: num_joined(server) > joined, OPENING_S)
