"""Log probabilities of prompts, echo, and the best of several outputs, over gRPC: the numbers are those of ``transformers``."""

import asyncio
import itertools
from functools import cache
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest
import torch

import headway
import headway_executor.sampling.prompt_logprobs
from checkpoints import make_checkpoint, make_model
from headway.client import AsyncClient, GenerationResult, InvalidRequestError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

DEMO = Path(headway.__file__).parent / "demo_model"
VOCAB_SIZE = 320
MAX_MODEL_LEN = 128
BLOCK_SIZE = 8
NUM_REQUESTS = 16
FAMILIES = ("llama3", "qwen3")


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Some alone, some with a beginning that others have; every second one wants log probabilities."""
    rng = np.random.default_rng(11)
    common = tuple(rng.integers(3, VOCAB_SIZE, size=40).tolist())
    return tuple(
        common[: (0, 17, 40, 40)[number % 4]] + tuple(rng.integers(3, VOCAB_SIZE, size=rng.integers(1, 50)).tolist())
        for number in range(NUM_REQUESTS)
    )


@cache
def distributions(family: str) -> tuple[torch.Tensor, ...]:
    """The log probabilities that transformers gives behind each token of each prompt, shape ``[tokens, vocab]``."""
    model = make_model(family)
    with torch.no_grad():
        return tuple(model(torch.tensor([prompt])).logits[0].float().log_softmax(-1) for prompt in prompts())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(directory / family, family)
    return {family: directory / family for family in FAMILIES}


CASES = [
    *itertools.product(FAMILIES, (16, 512), ("ample", "recompute", "swap"), ("auto",)),
    ("qwen3", 16, "recompute", "eager"),
]


@pytest.mark.parametrize(("family", "budget", "pool", "kernels"), CASES)
async def test_they_equal_those_of_transformers(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    budget: int,
    pool: str,
    kernels: str,
) -> None:
    """Whatever the chunks and preemptions: each position once, and each request's own tokens as without."""
    monkeypatch.setattr(headway_executor.sampling.prompt_logprobs, "MOST_LOGITS_BYTES", 7 * 4 * VOCAB_SIZE)
    config = BackendConfig(
        model=str(checkpoints[family]),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_kv_blocks=(1 if pool != "ample" else NUM_REQUESTS) * MAX_MODEL_LEN // BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        num_threads=1,
        options={"kernels": kernels},
    )
    limits = SchedulerLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=NUM_REQUESTS,
        reserve="none",
        preemption="swap" if pool == "swap" else "recompute",
    )
    with running(tmp_path, checkpoints[family], TorchBackend(), config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            # So that the cache has what others begin with, however they arrive.
            await client.generate(list(prompts()[2]), max_tokens=1, temperature=0.0, ignore_eos=True).result()
            results = await asyncio.gather(
                *(
                    client.generate(list(prompt), max_tokens=12, temperature=0.0, ignore_eos=True, **options).result()
                    for number, prompt in enumerate(prompts())
                    for options in ({"prompt_logprobs": number % 7} if number % 2 else {},)
                )
            )
        core = server.core_when_quiet()
        assert core.pool.num_free == core.pool.num_blocks
        assert (core.counters.num_preemptions > 0) == (pool != "ample")
        assert core.counters.num_prefix_hit_tokens > 0
    for number, (prompt, result) in enumerate(zip(prompts(), results, strict=True)):
        check(number, prompt, result, distributions(family)[number])


def check(number: int, prompt: tuple[int, ...], result: GenerationResult, reference: torch.Tensor) -> None:
    assert result.token_ids[0] == int(reference[-1].argmax())
    assert len(result.token_ids) == 12
    told = result.prompt
    if not number % 2:
        assert (told.token_ids, told.logprobs, told.text) == ([], [], "")
        return
    assert result.cached_tokens == 0
    assert tuple(told.token_ids) == prompt
    assert [entry.token_id for entry in told.logprobs] == list(prompt[1:])
    expected = reference[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None]).squeeze(1)
    assert [entry.logprob for entry in told.logprobs] == pytest.approx(expected.tolist(), abs=1e-4)
    best = reference[:-1].topk(number % 7).values.tolist() if number % 7 else [[]] * (len(prompt) - 1)
    for place, entry in enumerate(told.logprobs):
        assert [value for _, value in entry.top] == pytest.approx(best[place], abs=1e-4)
        for token_id, value in entry.top:
            assert value == pytest.approx(float(reference[place, token_id]), abs=1e-4)


SIMULATED = BackendConfig(
    model=str(DEMO), block_size=4, num_kv_blocks=512, max_num_seqs=16, options={"real_time": "false"}
)


async def test_one_of_many_that_arrive_together_computes_what_they_share(tmp_path: Path) -> None:
    prompt = [(7 * place) % 3000 + 3 for place in range(803)]
    with running(tmp_path, DEMO, SimulatedBackend(), SIMULATED, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            result = await client.generate(prompt, max_tokens=4, n=16, seed=3).result()
        core = server.core_when_quiet()
        assert core.counters.num_prefix_hit_tokens == 15 * 800
    assert len({tuple(completion.token_ids) for completion in result.completions}) == 16


async def test_the_best_are_those_of_the_likeliest_tokens(tmp_path: Path) -> None:
    prompt = list(range(100, 140))
    options = {"max_tokens": 6, "seed": 5, "ignore_eos": True, "temperature": 1.0}
    with running(tmp_path, DEMO, SimulatedBackend(), SIMULATED, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            every = (await client.generate(prompt, n=5, logprobs=1, **options).result()).completions
            stream = client.generate(prompt, n=2, best_of=5, echo=True, prompt_logprobs=2, **options)
            deltas = [delta async for delta in stream]
            best = await stream.result()
            shown = await client.generate(prompt, best_of=5, logprobs=1, **options).result()
            same = await client.generate(prompt, best_of=2, n=2, **options).result()
    means = {one.index: sum(entry.logprob for entry in one.logprobs) / 6 for one in every}
    order = sorted(means, key=means.__getitem__, reverse=True)
    assert [completion.token_ids for completion in best.completions] == [every[place].token_ids for place in order[:2]]
    assert [completion.text for completion in best.completions] == [every[place].text for place in order[:2]]
    assert [completion.seed for completion in best.completions] == [5 + place for place in order[:2]]
    assert [completion.mean_logprob for completion in best.completions] == pytest.approx(
        [means[place] for place in order[:2]]
    )
    assert [(delta.index, len(delta.token_ids)) for delta in deltas] == [(0, 6), (1, 6)]
    assert not any(completion.logprobs for completion in best.completions)
    assert best.prompt.token_ids == prompt
    assert len(best.prompt.logprobs) == 39
    assert shown.completions[0].logprobs == every[order[0]].logprobs
    assert [one.token_ids for one in same.completions] == [one.token_ids for one in every[:2]]
    assert same.completions[0].mean_logprob is None


async def test_the_prompt_is_told_before_the_output_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    prompt = [place % 4000 + 1 for place in range(1000)]
    with running(tmp_path, DEMO, SimulatedBackend(), SIMULATED, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
            await client.wait_ready(20)
            sampling = api.SamplingParams(max_tokens=2, prompt_logprobs=20)
            request = api.GenerateRequest(token_ids=api.TokenIds(ids=prompt), sampling=sampling, echo=True)
            events = [event async for event in api_grpc.GenerationStub(channel).Generate(request)]
            echoed = await client.generate("A dictionary is", echo=True, max_tokens=1).result()
            single = await client.generate([9], prompt_logprobs=3, max_tokens=1).result()
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    pieces = [event.prompt for event in events if event.HasField("prompt")]
    assert kinds.index("delta") == 1 + len(pieces)
    assert max(piece.ByteSize() for piece in pieces) < 1 << 19
    assert len(pieces) > 1
    assert [token_id for piece in pieces for token_id in piece.token_ids] == prompt
    assert [entry.token_id for piece in pieces for entry in piece.logprobs] == prompt[1:]
    assert (echoed.prompt.text, echoed.prompt.logprobs) == ("A dictionary is", [])
    assert len(echoed.prompt.token_ids) == echoed.prompt_tokens
    assert (single.prompt.token_ids, single.prompt.logprobs) == ([9], [])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        ({"best_of": 17}, "sampling.best_of"),
        ({"n": 3, "best_of": 2}, "sampling.best_of"),
    ],
)
async def test_what_is_out_of_range_is_named(tmp_path: Path, options: dict[str, int], field: str) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), SIMULATED, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            with pytest.raises(InvalidRequestError) as refusal:
                await client.generate([1, 2], **options).result()
    assert [name for name, _ in refusal.value.violations] == [field]


class WithoutReports(SimulatedBackend):
    def open(self, config):
        return msgspec.structs.replace(super().open(config), supports_prompt_logprobs=False)


async def test_a_backend_without_them_is_not_asked(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, WithoutReports(), SIMULATED, SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            with pytest.raises(InvalidRequestError, match=r"sampling.prompt_logprobs: the backend simulated does not"):
                await client.generate([1, 2], prompt_logprobs=0).result()
            assert len((await client.generate([1, 2], max_tokens=2, echo=True).result()).token_ids) == 2
