"""The text is the same with and without speculation: prompt lookup and draft models on the demo model."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

import headway
from headway_conformance.checkpoints import LLAMA, write_checkpoint
from headway_conformance.sizes import SMALL
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto.sampling import SamplingParams
from speculative_engine import GREEDY, SpeculativeEngine, write_first_layers

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
NUM_PROMPTS = 200
STOPS = tuple(range(200))


def prompts(count: int, vocab_size: int = 4096) -> list[list[int]]:
    """Half of them repeat themselves."""
    rng = np.random.default_rng(7)
    found = []
    for number in range(count):
        own = rng.integers(3, vocab_size, size=int(rng.integers(4, 12))).tolist()
        found.append(own * 3 + own[: len(own) // 2] if number % 2 else own)
    return found


def config(speculation: str, draft: Path | None = None, **changes: object) -> BackendConfig:
    base = BackendConfig(
        model=str(DEMO_MODEL),
        max_num_seqs=32,
        max_model_len=256,
        num_kv_blocks=1024,
        speculation=speculation,
        draft_model="" if draft is None else str(draft),
        num_speculative_tokens=6,
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture(scope="module")
def ngram() -> SpeculativeEngine:
    return SpeculativeEngine(config("ngram"), clock=lambda: 0.0, always=True)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeEngine:
    directory = write_first_layers(DEMO_MODEL, tmp_path_factory.mktemp("draft"), 3)
    return SpeculativeEngine(config("draft", directory, num_speculative_tokens=3), clock=lambda: 0.0, always=True)


@pytest.mark.parametrize("who", ["ngram", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_hundred_prompts_give_the_same_text(who: str, temperature: float, request: pytest.FixtureRequest) -> None:
    engine: SpeculativeEngine = request.getfixturevalue(who)
    before = engine.counters().num_accepted_tokens

    def sampling(place: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=place)

    asked = prompts(NUM_PROMPTS)
    alone = engine.run(asked, 16, speculates=False, sampling=sampling)
    assert engine.run(asked, 16, speculates=True, sampling=sampling) == alone
    assert engine.counters().num_accepted_tokens > before


def varied(place: int) -> SamplingParams:
    """Everything that looks at the tokens before, or tells of each token."""
    return (
        GREEDY,
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2),
        SamplingParams(temperature=0.6, seed=5, presence_penalty=0.5, top_k=20, top_p=0.9),
        SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=STOPS, logprobs=0),
        SamplingParams(temperature=0.0, logit_bias=((77, 4.0), (78, -4.0)), logprobs=5),
    )[place % 5]


@pytest.mark.parametrize("who", ["ngram", "draft"])
def test_penalties_limits_and_log_probabilities_are_the_same(who: str, request: pytest.FixtureRequest) -> None:
    engine: SpeculativeEngine = request.getfixturevalue(who)
    asked, stops = prompts(60), frozenset(STOPS)
    before = engine.counters().num_accepted_tokens
    alone = engine.run(asked, 24, speculates=False, sampling=varied, stop_token_ids=stops)
    told = [
        [values[1:] for values in map(msgspec.structs.astuple, engine.logprobs.get(place, []))] for place in range(60)
    ]
    assert engine.run(asked, 24, speculates=True, sampling=varied, stop_token_ids=stops) == alone
    again = [
        [values[1:] for values in map(msgspec.structs.astuple, engine.logprobs.get(place, []))] for place in range(60)
    ]
    assert again == told
    assert [len(entries) for entries in again[1::5]] == [len(tokens) for tokens in alone[1::5]]
    assert engine.counters().num_accepted_tokens > before


@pytest.fixture(scope="module")
def itself() -> SpeculativeEngine:
    return SpeculativeEngine(config("draft", DEMO_MODEL, block_size=4), clock=lambda: 0.0, always=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_model_itself_is_always_right(itself: SpeculativeEngine, temperature: float) -> None:
    """So its own keys and values are complete, whatever was verified before, and it draws with the same numbers."""
    asked = prompts(24)

    def sampling(place: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=place)

    alone = itself.run(asked, 30, speculates=False, sampling=sampling)
    assert itself.run(asked, 30, speculates=True, sampling=sampling) == alone
    counters = itself.counters()
    assert counters.num_draft_tokens == counters.num_accepted_tokens > 300


def test_a_draft_needs_the_same_tokens(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, LLAMA, SMALL)
    with pytest.raises(BackendConfigError, match=r"draft_model .* its vocabulary is another"):
        TorchBackend().open(config("draft", other))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"speculation": "guess"}, "speculation 'guess' is not allowed; allowed: off, ngram, draft"),
        ({"speculation": "draft"}, "draft_model '' is not allowed"),
        ({"speculation": "ngram", "draft_model": "somewhere"}, "draft_model 'somewhere' is not allowed"),
        ({"speculation": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens 0 is not allowed"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BackendConfigError, match=complaint):
        TorchBackend().open(msgspec.structs.replace(config("off"), **changes))
