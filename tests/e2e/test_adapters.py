"""Adapters over the real sockets: named by requests, loaded and unloaded by Admin while requests run."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from checkpoints import VOCAB_SIZE, make_checkpoint, make_model
from group_backend import GroupBackend
from headway.client import AsyncClient, AsyncGenerationStream, InvalidRequestError, NotFoundError
from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from lora_files import merge_adapter, write_adapter
from threaded_headway import RunningHeadway, running

NUM_TOKENS = 16
NAMES = ("first", "second", "third")
# A common beginning of several blocks: what an adapter computed of it is of no use to another.
PROMPTS = [[*range(3, 40), *random.Random(number).choices(range(3, VOCAB_SIZE), k=5)] for number in range(3)]
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


def greedy(model, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    return tokens[0, len(prompt) :].tolist()


def vectors_and_score(model, prompt: list[int]) -> tuple[list[float], list[float], float]:
    """The last hidden state and the mean, divided by their lengths, and the log probability of the last 5 tokens."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
        logprobs = model.lm_head(hidden).log_softmax(-1)
    chosen = [logprobs[place - 1, prompt[place]].item() for place in range(len(prompt) - 5, len(prompt))]
    last, mean = (vector / vector.norm() for vector in (hidden[-1], hidden.mean(0)))
    return last.tolist(), mean.tolist(), sum(chosen)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, dict[str, list[list[int]]]]:
    """The model and its adapters in one directory, and what is expected of each adapter, and of none."""
    root = tmp_path_factory.mktemp("adapters")
    model = make_checkpoint(root / "model", "llama3")
    expected = {"": [greedy(model, prompt) for prompt in PROMPTS]}
    for number, name in enumerate(NAMES):
        directory = write_adapter(root / name, model, seed=number)
        merged = merge_adapter(directory, make_model("llama3"))
        expected[name] = [greedy(merged, prompt) for prompt in PROMPTS]
    return root, expected


@pytest.fixture(
    params=[(1, 1, 1), (16, 1, 1), (16, 2, 1), (16, 1, 2)], ids=["one at once", "many at once", "ranks", "stages"]
)
def headway(request, files, tmp_path) -> AsyncIterator[RunningHeadway]:
    root, _ = files
    max_adapters, *degrees = request.param
    config = BackendConfig(
        model=str(root / "model"),
        dtype="float32",
        max_num_seqs=16,
        num_kv_blocks=200,
        block_size=8,
        adapters={name: str(root / name) for name in NAMES[:2]},
    )
    limits = SchedulerLimits(max_adapters=max_adapters)
    backend = ThreadedBackend(TorchBackend())
    if degrees != [1, 1]:
        backend = GroupBackend(tensor_parallel=degrees[0], pipeline_parallel=degrees[1])
    with running(tmp_path, root / "model", backend, config, limits) as up:
        yield up


async def tokens_of(client: AsyncClient, prompt: list[int], **options: object) -> list[int]:
    return await gathered(client.generate(prompt, **GREEDY, **options))


async def gathered(stream: AsyncGenerationStream) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def test_requests_name_adapters_that_come_and_go(headway, files):
    root, expected = files
    async with AsyncClient(headway.address) as client:
        for numbers in ((0,), range(1, len(PROMPTS))):  # the first ones bring the blocks that the others share
            wanted = [(name, number) for number in numbers for name in ("", *NAMES[:2])]
            found = await asyncio.gather(*(tokens_of(client, PROMPTS[number], adapter=name) for name, number in wanted))
            for (name, number), tokens in zip(wanted, found, strict=True):
                assert tokens == expected[name][number], (name, number)
        core = headway.core_when_quiet()
        assert core.counters.num_prefix_hit_tokens > 0, "requests with the same adapter share blocks"
        with pytest.raises(NotFoundError, match=r"adapter: 'third' is not loaded; loaded: first, second"):
            await tokens_of(client, PROMPTS[0], adapter="third")
        await client.load_adapter("third", str(root / "third"))
        assert [adapter.name for adapter in await client.adapters()] == sorted(NAMES)
        assert await tokens_of(client, PROMPTS[0], adapter="third") == expected["third"][0]
        assert await tokens_of(client, PROMPTS[0], model="third") == expected["third"][0], "a model's name will do"
        await client.unload_adapter("first")
        with pytest.raises(NotFoundError, match="'first' is not loaded"):
            await tokens_of(client, PROMPTS[0], adapter="first")
        # Another adapter under the same name does not get the blocks of the one before.
        await client.load_adapter("first", str(root / "second"))
        assert await tokens_of(client, PROMPTS[0], adapter="first") == expected["second"][0]


async def test_vectors_and_scores_are_those_of_the_adapter(headway, files):
    """Beside each other, beside tokens, and behind blocks that another adapter must not use."""
    root, expected = files
    prompt, names = PROMPTS[0], ("", *NAMES[:2])
    async with AsyncClient(headway.address) as client:
        found = await asyncio.gather(
            *(client.embed([prompt], pooling="last", adapter=name) for name in names),
            *(client.score(prompt[:-5], [prompt[-5:]], adapter=name) for name in names),
            *(tokens_of(client, prompt, adapter=name) for name in names),
            *(client.embed([prompt], pooling="mean", model=name) for name in names),
        )
        with pytest.raises(NotFoundError, match="adapter: 'third' is not loaded"):
            await client.embed([prompt], adapter="third")
        with pytest.raises(InvalidRequestError, match="adapter: '@' is not allowed"):
            await client.score(prompt, [prompt], adapter="@")
    for number, name in enumerate(names):
        model = make_model("llama3")
        last, mean, score = vectors_and_score(merge_adapter(root / name, model) if name else model, prompt)
        assert list(found[number].embeddings[0].values) == pytest.approx(last, abs=1e-4), name
        assert found[3 + number].scores[0].logprob == pytest.approx(score, abs=1e-3), name
        assert found[6 + number] == expected[name][0]
        assert list(found[9 + number].embeddings[0].values) == pytest.approx(mean, abs=1e-4), name


async def test_what_cannot_be_done_is_said_in_one_line(headway, files):
    root, expected = files
    async with AsyncClient(headway.address) as client:
        with pytest.raises(InvalidRequestError, match=r"name: 'first' is loaded from .*; unload it first"):
            await client.load_adapter("first", str(root / "second"))
        with pytest.raises(InvalidRequestError, match=r"no such directory; allowed: one with adapter_config\.json"):
            await client.load_adapter("third", str(root / "nowhere"))
        with pytest.raises(InvalidRequestError, match=r"name: 'a=b' is not allowed; allowed: 1 to 64 letters"):
            await client.load_adapter("a=b", str(root / "third"))
        with pytest.raises(NotFoundError, match="name: 'third' is not loaded"):
            await client.unload_adapter("third")
        with pytest.raises(InvalidRequestError, match="adapter: '@' is not allowed"):
            await tokens_of(client, PROMPTS[0], adapter="@")
        stream = client.generate(PROMPTS[0], temperature=0.0, max_tokens=150, ignore_eos=True, adapter="first")
        begun = list((await anext(aiter(stream))).token_ids)
        with pytest.raises(InvalidRequestError, match="name: 1 requests with 'first' have not ended"):
            await client.unload_adapter("first")
        assert (begun + await gathered(stream))[:NUM_TOKENS] == expected["first"][0]
        await client.unload_adapter("first")
        assert [adapter.name for adapter in await client.adapters()] == ["second"]
