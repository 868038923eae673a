"""Sampling: each step against a definition written out, the draw against exact probabilities, and independence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.sampling.philox import philox_4x32, uniforms
from headway_executor.sampling.sampler import SampledTokens, Sampler
from headway_proto.sampling import SamplingParams
from headway_proto.step import ERRORED_ROW

CPU = torch.device("cpu")
VOCAB = 37


def make_sampler(*params: SamplingParams, vocab_size: int = VOCAB, num_prompt_tokens: int = 2) -> Sampler:
    sampler = Sampler(vocab_size=vocab_size, max_num_rows=max(8, len(params)), device=CPU)
    for row, sampling in enumerate(params):
        sampler.add_row(row, sampling, num_prompt_tokens)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, *, rows=None, positions=None, tokens=None) -> SampledTokens:
    n = len(logits)
    rows = torch.arange(n) if rows is None else torch.tensor(rows)
    positions = torch.full((n,), 2) if positions is None else torch.tensor(positions)
    tokens = torch.zeros(max(8, n), 16, dtype=torch.int32) if tokens is None else tokens
    return sampler.sample(logits, rows, positions, tokens)


def frequencies(sampling: SamplingParams, logits: torch.Tensor, num_draws: int) -> np.ndarray:
    """How often each token is drawn over many positions of one row."""
    sampler = make_sampler(sampling, vocab_size=logits.shape[-1])
    counts = np.zeros(logits.shape[-1], dtype=np.int64)
    batch = 2000
    for start in range(0, num_draws, batch):
        positions = list(range(start, start + batch))
        drawn = sampler.sample(
            logits.expand(batch, -1),
            torch.zeros(batch, dtype=torch.int64),
            torch.tensor(positions),
            torch.zeros(8, 1, dtype=torch.int32).expand(8, num_draws),
        )
        counts += np.bincount(drawn.token_ids.numpy(), minlength=logits.shape[-1])
    return counts


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic in standard deviations from its mean (normal approximation)."""
    assert counts[probabilities == 0].sum() == 0
    held = probabilities > 0
    expected = probabilities[held] * counts.sum()
    degrees = held.sum() - 1
    return (((counts[held] - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees)


def exact_probabilities(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p by definition, in float64 with a full sort."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    words = philox_4x32(
        tuple(np.array([word], dtype=np.uint64) for word in key),
        tuple(np.array([word], dtype=np.uint64) for word in counter),
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_uniforms_are_in_the_unit_interval_and_spread_evenly():
    numbers = uniforms(np.full(100_000, (1 << 64) - 1, dtype=np.uint64), np.arange(100_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(100, 0.01))) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest_logits(dtype):
    logits = torch.randn(5, VOCAB).to(dtype)
    logits[2, [7, 30]] = 9.0
    drawn = draw(make_sampler(*[SamplingParams(temperature=0.0)] * 5), logits)
    assert drawn.token_ids.tolist() == [int(np.argmax(row)) for row in logits.float().numpy()]
    assert drawn.token_ids[2] == 7
    assert drawn.logprobs == drawn.errors == ()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.6),
        SamplingParams(seed=13, top_k=5),
        SamplingParams(seed=14, top_p=0.7),
        SamplingParams(seed=15, min_p=0.2),
        SamplingParams(seed=16, temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(seed=(1 << 64) - 1, top_k=VOCAB + 100, top_p=0.999),
    ],
    ids=lambda sampling: f"t{sampling.temperature}-k{sampling.top_k}-p{sampling.top_p}-m{sampling.min_p}",
)
def test_draws_follow_the_exact_distribution(sampling):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    counts = frequencies(sampling, logits, 40_000)
    assert chi_square(counts, exact_probabilities(logits.numpy(), sampling)) < 4


def test_top_p_settles_where_the_best_tokens_are_not_enough():
    """A flat distribution needs most of the vocabulary: the search for candidates has to widen to all of it."""
    flat = torch.zeros(1200)
    counts = frequencies(SamplingParams(top_p=0.5, seed=3), flat, 12_000)
    assert counts[600:].sum() == 0, "equal weights are ordered by token id"
    assert abs(chi_square(counts[:600], np.full(600, 1 / 600))) < 4


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert np.flatnonzero(frequencies(SamplingParams(top_p=0.6), logits, 2000)).tolist() == [0, 1]
    assert np.flatnonzero(frequencies(SamplingParams(top_p=0.01), logits, 2000)).tolist() == [0]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(seed=5), SamplingParams(seed=5, top_k=3), SamplingParams(seed=5, top_p=0.97)]
)
def test_a_draw_goes_through_the_kept_tokens_in_the_order_of_their_ids(sampling):
    """Whether a row is truncated or not: the tokens' ranks decide what is kept and nothing else."""
    weights = torch.tensor([0.2, 0.01, 0.5, 0.29])
    kept = torch.tensor([0.2, 0.0 if sampling.top_k or sampling.top_p < 1 else 0.01, 0.5, 0.29])
    edges = (kept.cumsum(0) / kept.sum()).numpy()
    positions = np.arange(2, 60)
    sampler = make_sampler(sampling, vocab_size=4)
    drawn = draw(sampler, weights.log().expand(58, -1), rows=[0] * 58, positions=positions.tolist())
    numbers = uniforms(np.full(58, 5, dtype=np.uint64), positions)
    assert drawn.token_ids.tolist() == np.searchsorted(edges, numbers, side="right").tolist()


def test_extreme_temperatures():
    logits = torch.randn(3, VOCAB) * 50
    params = [SamplingParams(temperature=value, seed=1) for value in (1e-300, 1e-4, 100.0)]
    drawn = draw(make_sampler(*params), logits)
    assert drawn.token_ids[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert drawn.errors == ()


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 4, 30, 70]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.8, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    logit_bias=st.sampled_from([(), (), ((3, 5.0), (4, -100.0))]),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    logprobs=st.sampled_from([-1, -1, 0, 3]),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=60)
@given(st.lists(sampling_params, min_size=2, max_size=9), st.integers(0, 1 << 30), st.sampled_from([37, 1031]))
def test_a_row_draws_the_same_whatever_shares_its_batch(params, logits_seed, vocab_size):
    """Bit for bit: the token, the log probabilities and the alternatives, also at tied logits."""
    generator = torch.Generator().manual_seed(logits_seed)
    logits = (torch.randn(len(params), vocab_size, generator=generator) * 4).round() / 2
    logits[0, 0] = torch.nan
    tokens = torch.randint(0, vocab_size, (len(params), 40), generator=generator, dtype=torch.int32)
    positions = [5 + 3 * row for row in range(len(params))]
    sampler = Sampler(vocab_size=vocab_size, max_num_rows=len(params), device=CPU)
    for row, sampling in enumerate(params):
        sampler.add_row(row, sampling, 3)
    together = draw(sampler, logits, positions=positions, tokens=tokens)
    for row in range(len(params)):
        alone = draw(sampler, logits[row : row + 1], rows=[row], positions=[positions[row]], tokens=tokens)
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert alone.logprobs == tuple(entry for entry in together.logprobs if entry.row == row)
        assert alone.errors == tuple(entry for entry in together.errors if entry.row == row)


def test_the_same_seed_and_position_repeat_and_others_differ():
    logits = torch.zeros(1, 1000)
    sampler = make_sampler(SamplingParams(seed=1), SamplingParams(seed=2), vocab_size=1000)

    def one(row: int, position: int) -> int:
        return draw(sampler, logits, rows=[row], positions=[position]).token_ids.item()

    assert one(0, 10) == one(0, 10)
    assert len({one(row, position) for row in (0, 1) for position in range(10)}) > 15


def one_logit_row_after(
    sampling: SamplingParams, logits: torch.Tensor, history: list[int], prompt: int
) -> torch.Tensor:
    """The adjusted logits, read back through the argmax: which token wins, with each token raised in turn."""
    sampler = Sampler(vocab_size=len(logits), max_num_rows=1, device=CPU)
    sampler.add_row(0, sampling, prompt)
    working = logits[None].clone()
    tokens = torch.tensor([history + [0] * 4], dtype=torch.int32)
    sampler._adjust(working, sampler._columns["flags"][:1], np.array([0]), np.array([len(history)]), tokens)
    return working[0]


def test_penalties_follow_their_definitions():
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5, 3.0])
    history, prompt = [0, 1, 2, 3, 2, 2], 2
    repeated = one_logit_row_after(SamplingParams(temperature=0, repetition_penalty=2.0), logits, history, prompt)
    torch.testing.assert_close(repeated, torch.tensor([1.0, -4.0, 0.5, -2.0, 0.5, 3.0]))
    presence = one_logit_row_after(SamplingParams(temperature=0, presence_penalty=0.5), logits, history, prompt)
    torch.testing.assert_close(presence, torch.tensor([2.0, -2.0, 0.5, -1.5, 0.5, 3.0]))
    frequency = one_logit_row_after(SamplingParams(temperature=0, frequency_penalty=0.5), logits, history, prompt)
    torch.testing.assert_close(frequency, torch.tensor([2.0, -2.0, -0.5, -1.5, 0.5, 3.0]))


def test_penalties_read_only_the_tokens_before_the_position():
    """Rows of different lengths share a batch, and the store holds leftovers behind each row's end."""
    sampling = SamplingParams(temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    logits = torch.tensor([[1.0, 1.9, 1.5, 1.2], [1.0, 1.9, 1.5, 1.2]])
    tokens = torch.tensor([[1, 2, 3, 0], [1, 2, 2, 0]], dtype=torch.int32)
    drawn = draw(
        make_sampler(sampling, sampling, vocab_size=4, num_prompt_tokens=1), logits, positions=[1, 3], tokens=tokens
    )
    assert drawn.token_ids.tolist() == [2, 3]


def test_an_errored_token_in_the_history_harms_nobody():
    sampling = SamplingParams(temperature=0, repetition_penalty=1.1)
    tokens = torch.tensor([[1, ERRORED_ROW], [1, 2]], dtype=torch.int32)
    logits = torch.tensor([[0.0, 0.0, 5.0], [0.0, 5.0, 0.0]])
    drawn = draw(make_sampler(sampling, sampling, vocab_size=3, num_prompt_tokens=1), logits, tokens=tokens)
    assert drawn.token_ids.tolist() == [2, 1]


def test_logit_bias_moves_the_choice():
    logits = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [1.0, 2.0, 0.0]])
    forced, banned = ((2, 100.0),), ((1, -100.0), (2, 0.5))
    drawn = draw(
        make_sampler(
            SamplingParams(temperature=0, logit_bias=forced),
            SamplingParams(temperature=0, logit_bias=banned),
            SamplingParams(temperature=0),
            vocab_size=3,
        ),
        logits,
    )
    assert drawn.token_ids.tolist() == [2, 0, 1]


def test_min_tokens_masks_stop_tokens_until_it_is_reached():
    sampling = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(1, 2))
    sampler = make_sampler(sampling, vocab_size=4, num_prompt_tokens=2)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert [draw(sampler, logits, positions=[position]).token_ids.item() for position in (2, 3, 4, 5, 6)] == [
        3,
        3,
        3,
        1,
        1,
    ]


def test_logprobs_are_those_of_the_raw_distribution():
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.5, logit_bias=((9, 30.0),), logprobs=4),
    ]
    logits = torch.randn(3, VOCAB)
    drawn = draw(make_sampler(*params), logits)
    exact = logits.double().log_softmax(-1)
    own, alternatives = drawn.logprobs
    assert (own.row, own.top_token_ids, own.top_logprobs) == (0, (), ())
    assert own.logprob == pytest.approx(exact[0].max().item(), abs=1e-5)
    assert drawn.token_ids[2] == 9
    assert alternatives.row == 2
    assert alternatives.logprob == pytest.approx(exact[2, 9].item(), abs=1e-5)
    assert list(alternatives.top_token_ids) == exact[2].topk(4).indices.tolist()
    assert list(alternatives.top_logprobs) == pytest.approx(exact[2].topk(4).values.tolist(), abs=1e-5)


def test_logprobs_of_a_vocabulary_smaller_than_the_maximum():
    drawn = draw(make_sampler(SamplingParams(temperature=0, logprobs=20), vocab_size=5), torch.randn(1, 5))
    assert len(drawn.logprobs[0].top_token_ids) == 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3, logprobs=2)]
)
def test_unusable_logits_fail_their_row_alone(bad, sampling):
    logits = torch.randn(4, VOCAB)
    sampler = make_sampler(*[sampling] * 4)
    clean = draw(sampler, logits)
    damaged = logits.clone()
    damaged[2, 11] = bad
    drawn = draw(sampler, damaged)
    assert [error.row for error in drawn.errors] == [2]
    assert "NaN" in drawn.errors[0].message
    assert drawn.token_ids.tolist() == [*clean.token_ids[:2].tolist(), ERRORED_ROW, clean.token_ids[3].item()]
    assert [entry.row for entry in drawn.logprobs] == [entry.row for entry in clean.logprobs if entry.row != 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_excluded_fails_alone(temperature):
    logits = torch.randn(2, VOCAB)
    logits[0] = -torch.inf
    drawn = draw(make_sampler(*[SamplingParams(temperature=temperature)] * 2), logits)
    assert [error.row for error in drawn.errors] == [0]
    assert drawn.token_ids[1] != ERRORED_ROW


def test_a_row_that_is_used_again_forgets_its_former_request():
    sampler = make_sampler(
        SamplingParams(temperature=0, logit_bias=((2, 50.0),), logprobs=2, min_tokens=9, stop_token_ids=(0,)),
        vocab_size=3,
    )
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    assert draw(sampler, logits).token_ids.item() == 2
    sampler.add_row(0, SamplingParams(temperature=0), 2)
    drawn = draw(sampler, logits)
    assert drawn.token_ids.item() == 0
    assert drawn.logprobs == ()


def test_the_logits_are_not_modified():
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    draw(make_sampler(SamplingParams(logit_bias=((1, 3.0),)), SamplingParams(top_p=0.5)), logits)
    assert torch.equal(logits, before)
