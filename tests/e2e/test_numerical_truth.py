"""Greedy tokens over gRPC equal those of ``transformers``, token for token, whatever the scheduler makes of the work.

For each family: 32 concurrent requests of mixed lengths, for small and large blocks, small and large budgets, an ample
pool and one so small that requests are preempted, with and without shared prefixes; and log probabilities agree.

Requests are drawn so that at none of their tokens transformers' two likeliest are within the rounding of float32.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from checkpoints import FURTHER, ON_OPERATORS, STATES, make_checkpoint, make_model
from headway import AsyncClient
from headway_executor.backend import BackendConfig, ExecutorBackend, StepBatch, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import RunningHeadway, running

NUM_REQUESTS = 32
SPARE_REQUESTS = 8
"""In the place of those with ties."""
MAX_MODEL_LEN = 128
VOCAB_SIZE = 320
TIE, TIE_OF_STATES = 1e-4, 2e-3
"""Logits that differ by less: in float32, transformers' are up to 3e-5 off, ours up to 2e-5. Through a state, transformers'
two ways are up to 4e-4 apart.
"""
LONGEST_DYNAMIC_PROMPT = 50
ALONE = ("llama-dynamic", "phi3-long", *STATES)
"""Rotated by the longest of a batch, as transformers has it; or padding would change the state that follows it."""
FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3")
VARIANTS = ("llama-tied", "llama-linear", "llama-dynamic", "llama-yarn", "llama-bias", "qwen2-window", "qwen3-bias")
DESCRIBED = (
    *("gemma2", "gemma3", "phi3", "phi3-long", "olmo2", "granite", "smollm3", "starcoder2"),
    *("gpt_neox", "gpt_neox-in-turn", "cohere2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
    *FURTHER,
    *ON_OPERATORS,
)
EVERY_SETTING = tuple(itertools.product((8, 16), (16, 512), (False, True), (False, True)))
TWO_SETTINGS = ((8, 16, True, True), (16, 512, False, False))
# Among these, any two settings have each pair of their values.
PAIRWISE = (
    (8, 16, False, False),
    (8, 512, True, True),
    (16, 16, True, True),
    (16, 512, False, True),
    (16, 512, True, False),
)
# "auto" is the CPU kernels wherever they are installed; eager operators are what runs elsewhere.
CASES = [
    *(
        pytest.param(*(family, *setting, "auto"), marks=() if setting in PAIRWISE else pytest.mark.deep)
        for family in FAMILIES
        for setting in EVERY_SETTING
    ),
    *((family, *setting, "auto") for family in VARIANTS for setting in TWO_SETTINGS),
    *((family, *setting, "eager") for family in ("mistral", "qwen3-bias") for setting in TWO_SETTINGS),
    # In the usual run, two families that have nearly every variant between them, a mixture, and states.
    *(
        pytest.param(*(family, *setting, "auto"), marks=() if quick else pytest.mark.deep)
        for family in DESCRIBED
        for setting in TWO_SETTINGS
        for quick in [family in ("gemma2", "gpt_neox", "mixtral", "qwen3_5") and setting == TWO_SETTINGS[0]]
    ),
]


@dataclass(frozen=True)
class Workload:
    """Requests, each a prompt and how many tokens to generate after it; ``tokens``: what transformers generates."""

    requests: tuple[tuple[tuple[int, ...], int], ...]
    tokens: tuple[tuple[int, ...], ...]

    def first(self, count: int) -> "Workload":
        return Workload(self.requests[:count], self.tokens[:count])


@cache
def workload(family: str, shared_prefixes: bool) -> Workload:
    """Requests for which another rounding changes no token: where two tokens tie, float32 decides by chance."""
    model = make_model(family)
    longest = LONGEST_DYNAMIC_PROMPT if "dynamic" in family else MAX_MODEL_LEN
    rng = np.random.default_rng(7)
    common = tuple(rng.integers(3, VOCAB_SIZE, size=40).tolist())
    drawn: list[tuple[tuple[int, ...], int]] = []
    for place in range(NUM_REQUESTS + SPARE_REQUESTS):
        own = tuple(rng.integers(3, VOCAB_SIZE, size=int(rng.integers(1, 60))).tolist())
        # Equal beginnings of different lengths, some of them no multiple of a block.
        beginning = common[: (16, 33, 40, 0)[place % 4]] if shared_prefixes else ()
        drawn.append(((beginning + own)[:longest], int(rng.integers(1, 24))))
    at_once, tie = 1 if family in ALONE else len(drawn), TIE_OF_STATES if family in STATES else TIE
    answers = itertools.chain.from_iterable(
        generated(model, drawn[first : first + at_once], tie) for first in range(0, len(drawn), at_once)
    )
    kept = [(request, answer) for request, answer in zip(drawn, answers, strict=True) if answer is not None]
    requests, tokens = zip(*kept[:NUM_REQUESTS], strict=True)
    assert len(requests) == NUM_REQUESTS
    return Workload(requests, tokens)


def generated(
    model: torch.nn.Module, requests: Sequence[tuple[tuple[int, ...], int]], tie: float
) -> Iterator[tuple[int, ...] | None]:
    """What transformers generates by itself; None where its two likeliest tokens were ever closer than ``tie``.

    In one batch, filled up on the left, which takes a tenth of the time.
    """
    longest = max(len(prompt) for prompt, _ in requests)
    # An end-of-sequence token does not end these: lengths are to be mixed as planned.
    output = model.generate(
        torch.tensor([(0,) * (longest - len(prompt)) + prompt for prompt, _ in requests]),
        attention_mask=torch.tensor([(0,) * (longest - len(prompt)) + (1,) * len(prompt) for prompt, _ in requests]),
        max_new_tokens=max(max_tokens for _, max_tokens in requests),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    likeliest = torch.stack(output.logits, 1).topk(2).values
    ties = likeliest[..., 0] - likeliest[..., 1] < tie
    for place, (_, max_tokens) in enumerate(requests):
        tokens = output.sequences[place, longest : longest + max_tokens].tolist()
        yield None if bool(ties[place, :max_tokens].any()) else tuple(tokens)


class Checkpoints(dict[str, Path]):
    """By family, each made when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def __missing__(self, family: str) -> Path:
        self[family] = self._directory / family
        make_checkpoint(self[family], family, max_shard_size="50KB")
        return self[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def settings_of(
    model: Path, block_size: int, budget: int, small_pool: bool, kernels: str = "auto"
) -> tuple[BackendConfig, SchedulerLimits]:
    # The small pool holds one longest request and a half: most of the 32 are preempted or wait.
    num_blocks = 3 * MAX_MODEL_LEN // (2 * block_size) if small_pool else NUM_REQUESTS * MAX_MODEL_LEN // block_size
    config = BackendConfig(
        model=str(model),
        dtype="float32",
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN if "dynamic" not in model.name else 80,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=budget,
        num_threads=1,
        options={"kernels": kernels},
    )
    return config, SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=NUM_REQUESTS)


class Gate:
    """A backend that runs no step before it is opened: all requests have arrived by then, so they compete for the pool."""

    def __init__(self, backend: ExecutorBackend) -> None:
        self._backend = backend
        self._is_open = threading.Event()
        self.open, self.move_blocks, self.close = backend.open, backend.move_blocks, backend.close
        self.reads_block_table = getattr(backend, "reads_block_table", True)

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        self._is_open.wait(60)
        return self._backend.execute(batch)

    async def open_when_all_are_there(self, headway: RunningHeadway, num_requests: int) -> None:
        async with asyncio.timeout(60):
            while headway.engine.num_unfinished < num_requests:  # noqa: ASYNC110 (it happens in another thread)
                await asyncio.sleep(0.001)
        self._is_open.set()


@pytest.mark.parametrize(("family", "block_size", "budget", "small_pool", "shared_prefixes", "kernels"), CASES)
async def test_greedy_tokens_equal_transformers(
    checkpoints: Checkpoints,
    tmp_path: Path,
    family: str,
    block_size: int,
    budget: int,
    small_pool: bool,
    shared_prefixes: bool,
    kernels: str,
) -> None:
    model = checkpoints[family]
    load = workload(family, shared_prefixes)
    config, limits = settings_of(model, block_size, budget, small_pool, kernels)
    gate = Gate(TorchBackend())
    with running(tmp_path, model, ThreadedBackend(gate), config, limits) as headway:
        got = await generate_all(headway, load.requests, gate)
        core = headway.core_when_quiet()
        assert core.pool.num_free == core.pool.num_blocks
        if small_pool and budget == 512:
            assert core.counters.num_preemptions > 0
        if family in STATES:
            assert core.counters.num_prefix_hit_tokens == 0, "blocks alone are no beginning"
        else:
            assert (core.counters.num_prefix_hit_tokens > 0) >= shared_prefixes
    assert got == load.tokens


def on_triton(config: BackendConfig) -> BackendConfig:
    """The same on the device there is, or on a CPU with kernels interpreted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return msgspec.structs.replace(config, device=device, max_num_seqs=8, options={})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="interpreted, this would take minutes")
@pytest.mark.parametrize(
    ("family", "block_size", "budget", "small_pool", "shared_prefixes"),
    [(family, *setting) for family in (*FAMILIES, "llama-yarn", "qwen3-bias") for setting in TWO_SETTINGS],
)
async def test_the_triton_backend_equals_transformers_on_a_device(
    checkpoints: Checkpoints,
    tmp_path: Path,
    family: str,
    block_size: int,
    budget: int,
    small_pool: bool,
    shared_prefixes: bool,
) -> None:
    config, limits = settings_of(checkpoints[family], block_size, budget, small_pool)
    gate = Gate(TritonBackend())
    with running(tmp_path, checkpoints[family], ThreadedBackend(gate), on_triton(config), limits) as headway:
        got = await generate_all(headway, workload(family, shared_prefixes).requests, gate)
    assert got == workload(family, shared_prefixes).tokens


@pytest.mark.usefixtures("triton_interpreter")
async def test_the_triton_backend_equals_transformers_over_grpc(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A few requests, in chunks, with preemption and shared prefixes: interpreted where there is no device."""
    config, limits = settings_of(checkpoints["llama3"], 8, 64, small_pool=True)
    config = msgspec.structs.replace(config, num_kv_blocks=MAX_MODEL_LEN // config.block_size)
    limits = msgspec.structs.replace(limits, reserve="none")
    load = workload("llama3", True).first(6)
    gate = Gate(TritonBackend())
    with running(tmp_path, checkpoints["llama3"], ThreadedBackend(gate), on_triton(config), limits) as headway:
        got = await generate_all(headway, load.requests, gate)
        core = headway.core_when_quiet()
        assert core.counters.num_preemptions > 0
        assert core.pool.num_free == core.pool.num_blocks
    assert got == load.tokens


@pytest.mark.parametrize(
    "family",
    [
        "llama3",
        "qwen3",
        "lfm2",
        *(pytest.param(family, marks=pytest.mark.deep) for family in DESCRIBED if family != "lfm2"),
    ],
)
async def test_swapped_requests_go_on_as_if_nothing_had_been(
    checkpoints: Checkpoints, tmp_path: Path, family: str
) -> None:
    """A pool for one longest request, large budgets, and no prefix cache that could bring back what a swap lost.

    What has a state in some layers is computed again.
    """
    config, limits = settings_of(checkpoints[family], 8, 512, small_pool=True)
    config = msgspec.structs.replace(config, num_kv_blocks=MAX_MODEL_LEN // config.block_size)
    limits = msgspec.structs.replace(limits, preemption="swap", reserve="none", enable_prefix_caching=False)
    load = workload(family, False)
    gate = Gate(TorchBackend())
    with running(tmp_path, checkpoints[family], ThreadedBackend(gate), config, limits) as headway:
        got = await generate_all(headway, load.requests, gate)
        core = headway.core_when_quiet()
        assert (core.counters.num_swapped_out_blocks > 0) == (family not in STATES)
        assert core.counters.num_preemptions > 0
        assert core.pool.num_free == core.pool.num_blocks
    assert got == load.tokens


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_classes_objectives_and_prefix_aware_starts_change_no_token(
    checkpoints: Checkpoints, tmp_path: Path, preemption: str
) -> None:
    config, limits = settings_of(checkpoints["llama2"], 8, 64, small_pool=True)
    # For one longest request: with more, it depends on the times of steps whether any is preempted.
    config = msgspec.structs.replace(config, num_kv_blocks=MAX_MODEL_LEN // config.block_size)
    limits = msgspec.structs.replace(
        limits,
        order="priority",
        budget="slo",
        preemption=preemption,
        reserve="none",
        prefix_aware=True,
        aging_s=0.05,
        default_itl_slo_ms=5,
        default_ttft_slo_ms=500,
        max_num_seqs=8,
    )
    gate = Gate(TorchBackend())
    with running(tmp_path, checkpoints["llama2"], ThreadedBackend(gate), config, limits) as headway:
        got = await generate_all(headway, workload("llama2", True).requests, gate, mixed=True)
        core = headway.core_when_quiet()
        assert core.counters.num_preemptions > 0
        assert core.counters.num_prefix_hit_tokens > 0
        assert core.pool.num_free == core.pool.num_blocks
    assert got == workload("llama2", True).tokens


async def generate_all(
    headway: RunningHeadway, requests: tuple[tuple[tuple[int, ...], int], ...], gate: Gate, *, mixed: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The greedy tokens of all requests, sent at once; ``mixed``: of every class and with different objectives."""
    classes = ("low", "normal", "realtime", "high")
    async with AsyncClient(headway.address) as client:
        await client.wait_ready(20)
        results, _ = await asyncio.gather(
            asyncio.gather(
                *(
                    client.generate(
                        list(prompt),
                        max_tokens=max_tokens,
                        temperature=0.0,
                        ignore_eos=True,
                        priority=classes[number % 4] if mixed else "normal",
                        itl_slo_ms=(0, 1, 200)[number % 3] if mixed else 0,
                    ).result()
                    for number, (prompt, max_tokens) in enumerate(requests)
                )
            ),
            gate.open_when_all_are_there(headway, len(requests)),
        )
    return tuple(tuple(result.token_ids) for result in results)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_agree_with_transformers(checkpoints: Checkpoints, tmp_path: Path, family: str) -> None:
    config, limits = settings_of(checkpoints[family], 8, 48, small_pool=False)
    requests = workload(family, False).requests[:12]
    with running(tmp_path, checkpoints[family], TorchBackend(), config, limits) as headway:
        async with AsyncClient(headway.address) as client:
            await client.wait_ready(20)
            results = await asyncio.gather(
                *(
                    client.generate(
                        list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=5
                    ).result()
                    for prompt, max_tokens in requests
                )
            )
    model = make_model(family)
    for (prompt, _), result in zip(requests, results, strict=True):
        tokens = [*prompt, *result.token_ids]
        with torch.no_grad():
            reference = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        logprobs = result.completions[0].logprobs
        assert len(logprobs) == len(result.token_ids)
        for place, entry in enumerate(logprobs):
            row = reference[len(prompt) + place - 1]
            assert entry.token_id == result.token_ids[place]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            best = row.topk(5)
            assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
