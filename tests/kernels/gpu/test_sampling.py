"""The sampling kernels against the rule written out, against the torch sampler, and against themselves in other company."""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.sampling.philox import uniforms
from headway_executor.sampling.sampler import Sampler
from headway_executor.sampling.sampling_columns import SamplingColumns as HostColumns
from headway_executor.sampling.sampling_columns import SamplingEntriesError, SamplingNeeds
from headway_kernels import reference
from headway_kernels.gpu.sampling.logprobs import row_logprobs, top_logprobs
from headway_kernels.gpu.sampling.memory import SamplingColumns, SamplingWorkspace
from headway_kernels.gpu.sampling.sample import sample
from headway_proto.sampling import SamplingParams

PROMPT = 3
CHUNK = 256
VARIANTS = ("greedy", "random", "truncated")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Then a truncated row takes a tenth of a second; a device can afford many more examples."""


@dataclass
class Batch:
    """Rows 0 .. n - 1 with their parameters on host and device."""

    device: torch.device
    logits: torch.Tensor
    params: list[SamplingParams]
    positions: list[int]
    tokens: torch.Tensor
    chunk: int = CHUNK
    host: HostColumns = field(init=False)
    columns: SamplingColumns = field(init=False)
    workspace: SamplingWorkspace = field(init=False)

    def __post_init__(self):
        n, vocab_size = self.logits.shape
        self.host = HostColumns(vocab_size=vocab_size, max_num_rows=n, entry_capacity=64 * n)
        self.columns = SamplingColumns.allocate(num_rows=n + 1, entry_capacity=64 * n, device=self.device)
        for row, params in enumerate(self.params):
            entries = self.host.set_row(row, params, PROMPT)
            if entries is not None:
                self.columns.write_entries(
                    entries.first, torch.from_numpy(entries.token_ids), torch.from_numpy(entries.biases)
                )
        everyone = np.arange(n + 1)
        words = torch.from_numpy(self.host.pack(everyone)).to(self.device)
        self.columns.write_rows(torch.from_numpy(everyone).to(self.device), words)

    def draw(self, places=None, *, variant=None, adjusted=None):
        """The tokens and statuses of the rows at ``places`` (-1 pads), in one batch."""
        places = list(range(len(self.logits))) if places is None else places
        needs = self.host.needs(np.array([place for place in places if place >= 0]))
        logits = self.logits[places].to(self.device)
        workspace = self.workspace = SamplingWorkspace.allocate(
            max_batch=len(places), vocab_size=logits.shape[1], device=self.device, chunk=self.chunk
        )
        out = torch.full((2, len(places)), 77, dtype=torch.int32, device=self.device)
        sample(
            logits,
            torch.tensor(places, dtype=torch.int32, device=self.device),
            torch.tensor([self.positions[place] for place in places], dtype=torch.int32, device=self.device),
            self.columns,
            self.tokens.to(self.device),
            workspace,
            out[0],
            out[1],
            variant=variant or needs.variant,
            adjusted=needs.adjusted if adjusted is None else adjusted,
        )
        return out.tolist()

    def expected(self, row):
        """All tokens that rounding could lead to: usually one."""
        params, position = self.params[row], self.positions[row]
        history = self.tokens[row, :position].tolist()
        uniform = uniforms(np.array([params.seed], dtype=np.uint64), np.array([position]))[0]
        bias = {}
        for token_id, value in params.logit_bias:
            bias[token_id] = bias.get(token_id, 0.0) + value
        return {
            reference.sample(
                self.logits[row],
                min(max(uniform + shift, 0.0), 1.0),
                temperature=0.0 if params.top_k == 1 else params.temperature,
                top_k=params.top_k,
                top_p=min(params.top_p * (1 + stretch), 1.0),
                min_p=params.min_p,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                prompt=history[:PROMPT],
                generated=history[PROMPT:],
                bias=bias,
                excluded=params.stop_token_ids if position - PROMPT < params.min_tokens else (),
            )
            for shift in (0.0, -1e-6, 1e-6)
            for stretch in ((0.0, -1e-6, 1e-6) if params.top_p < 1.0 else (0.0,))
        }


def make_batch(device, logits, params, *, position=PROMPT + 5, chunk=CHUNK):
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, logits.shape[1], (len(logits), position + 4 + len(logits)), generator=generator)
    return Batch(
        device, logits, params, [position + row for row in range(len(logits))], tokens.to(torch.int32), chunk=chunk
    )


def make_logits(seed, n, vocab_size, *, spread=4.0, grid=0.5):
    """Logits on a grid: equal ones abound, and those that differ do so by more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, vocab_size, generator=generator) * spread / grid).round() * grid


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 4, 30, 700]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.8, 0.99, 0.9999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, -0.5]),
    logit_bias=st.sampled_from([(), (), ((3, 4.5), (4, -100.0), (3, 0.5))]),
    min_tokens=st.sampled_from([0, 7]),
    stop_token_ids=st.sampled_from([(), (2, 3)]),
    seed=st.integers(0, (1 << 64) - 1),
)
logits_of = st.builds(
    make_logits,
    st.integers(0, 1 << 30),
    st.just(3),
    st.sampled_from([5, 37, 300, 1100]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    grid=st.sampled_from([0.5, 0.03125]),
)


@settings(max_examples=30 if INTERPRETED else 300, derandomize=True)
@given(logits_of, st.lists(sampling_params, min_size=3, max_size=3), st.sampled_from(["", "nan", "inf", "excluded"]))
def test_kernels_follow_the_rule_and_the_torch_sampler(kernel_device, logits, params, damage):
    logits[2, 1] = {"nan": torch.nan, "inf": torch.inf}.get(damage, -torch.inf)
    if damage == "excluded":
        logits[2] = -torch.inf
    batch = make_batch(kernel_device, logits, params)
    token_ids, status = batch.draw()
    expected = [batch.expected(row) for row in range(3)]
    assert all(token_id in tokens for token_id, tokens in zip(token_ids, expected, strict=True)), (token_ids, expected)
    assert status == [int(token_id == -1) for token_id in token_ids]
    if any(len(tokens) > 1 for tokens in expected):
        return
    sampler = Sampler(vocab_size=logits.shape[1], max_num_rows=3, device=torch.device("cpu"))
    for row, sampling in enumerate(params):
        sampler.add_row(row, sampling, PROMPT)
    drawn = sampler.sample(logits, torch.arange(3), torch.tensor(batch.positions), batch.tokens)
    assert drawn.token_ids.tolist() == token_ids


@settings(max_examples=4 if INTERPRETED else 100, derandomize=True)
@given(logits_of, st.lists(sampling_params, min_size=3, max_size=3))
def test_a_row_draws_the_same_in_any_company_and_variant(kernel_device, logits, params):
    batch = make_batch(kernel_device, logits, params)
    together = batch.draw([2, -1, 0, 1])[0]
    assert together[1] == -1
    for row, token_id in ((2, together[0]), (0, together[2]), (1, together[3])):
        needs = batch.host.needs(np.array([row]))
        for variant in VARIANTS[VARIANTS.index(needs.variant) :]:
            assert batch.draw([row], variant=variant)[0] == [token_id]
        assert batch.draw([row], adjusted=True)[0] == [token_id]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_draw_as_their_values_in_float32(kernel_device, dtype):
    logits = make_logits(3, 4, 700, grid=0.03125).to(dtype)
    params = [SamplingParams(seed=row, top_p=(1.0, 0.9)[row % 2], top_k=(0, 0, 50, 0)[row]) for row in range(4)]
    assert make_batch(kernel_device, logits, params).draw() == make_batch(kernel_device, logits.float(), params).draw()


def test_greedy_takes_the_first_of_the_largest_and_pads(kernel_device):
    logits = make_logits(1, 3, 1100)
    logits[0, [700, 900]] = 50.0
    logits[2] = -torch.inf
    token_ids, status = make_batch(kernel_device, logits, [SamplingParams(temperature=0.0)] * 3).draw([0, -1, 1, 2])
    assert token_ids == [700, -1, int(logits[1].numpy().argmax()), -1]
    assert status == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("params", "num_kept"),
    [
        (SamplingParams(seed=1), 12),
        (SamplingParams(seed=2, temperature=0.7, top_k=8, top_p=0.9, min_p=0.1), 5),
    ],
    ids=["all", "truncated"],
)
def test_draws_follow_the_distribution(kernel_device, params, num_kept):
    """Chi-square, where logits rise with the id, so that what is kept are the last ids."""
    n = (150 if num_kept == 12 else 45) if INTERPRETED else 20_000
    row = torch.linspace(-2, 2, 12)
    counts = np.bincount(make_batch(kernel_device, row.expand(n, -1).clone(), [params] * n, chunk=16).draw()[0])
    p = torch.softmax(row.double() / params.temperature, 0).numpy()
    weights = p[::-1][: params.top_k or None]
    enough = params.top_p * (weights.sum() if params.top_k else 1.0)
    number = int((np.cumsum(weights) - weights < enough).sum())
    assert min(number, int((p >= params.min_p * p.max()).sum())) == num_kept
    kept = slice(12 - num_kept, 12)
    assert counts[: kept.start].sum() == 0
    expected = p[kept] / p[kept].sum() * n
    degrees = num_kept - 1
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    assert abs(statistic - degrees) < 4 * np.sqrt(2 * degrees)


def test_uniforms_are_those_of_the_torch_sampler(kernel_device):
    """Bit for bit, read off through the draw: among 2^10 equal tokens, the token is the uniform's first 10 bits."""
    seeds = [0, 1, (1 << 64) - 1, 0x123456789ABCDEF0]
    params = [SamplingParams(seed=seed) for seed in seeds]
    batch = make_batch(kernel_device, torch.zeros(4, 1024), params)
    numbers = uniforms(np.array(seeds, dtype=np.uint64), np.array(batch.positions))
    assert batch.draw()[0] == (numbers * 1024).astype(int).tolist()


@pytest.mark.parametrize(
    "params", [SamplingParams(top_p=0.5), SamplingParams(top_k=600), SamplingParams(top_p=0.99999)]
)
def test_ties_at_the_threshold_are_kept_by_lower_id(kernel_device, params):
    """Over several chunks, and far below every surveyed probability."""
    logits = torch.zeros(4, 1200)
    logits[2:, 1:] = -20.0 + torch.arange(1199) % 2
    params = [SamplingParams(top_k=params.top_k, top_p=params.top_p, seed=row) for row in range(4)]
    batch = make_batch(kernel_device, logits, params)
    assert all(token in batch.expected(row) for row, token in enumerate(batch.draw()[0]))


def test_an_errored_token_in_the_history_stays_inside(kernel_device):
    batch = make_batch(kernel_device, make_logits(2, 1, 50), [SamplingParams(temperature=0.0, repetition_penalty=1.5)])
    batch.tokens[0, 4] = -1
    drawn = batch.draw()
    batch.tokens[0, 4] = 0
    assert drawn == batch.draw()


def flat_logits(kind):
    """400 tokens that a top-p cannot leave to a short list."""
    noise = torch.rand(400, generator=torch.Generator().manual_seed(1))
    return {
        "spread": noise * 3,
        "even": noise * 1e-3,
        "equal": torch.zeros(400),
        "few values": (noise * 4).round(),
        # Too many tokens for a short list share what the rounds make of the range.
        "bunched": torch.cat([torch.tensor([9.0]), noise[:-2] * 1e-3, torch.tensor([-2.0])]),
    }[kind]


@pytest.mark.parametrize("kind", ["spread", "even", "equal", "few values", "bunched"])
def test_the_threshold_of_a_long_list_is_exact(kind, kernel_device):
    logits = flat_logits(kind).expand(2, -1)
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=1) for top_p in (0.97, 0.5)]
    batch = make_batch(kernel_device, logits, params, chunk=64)
    batch.draw()
    work = batch.workspace
    lengths, thresholds, ties = (column.tolist() for column in (work.list_length, work.threshold, work.ties_kept))
    assert max(lengths) > 64
    if kind == "bunched":
        assert (work.short_length > 64).any()
    for row, asked in enumerate(params):
        bits = np.sort(work.words[row, : lengths[row]].cpu().numpy())[::-1]
        weights = [int(float(p) * 2.0**52) for p in bits.view(np.float32).astype(np.float64)]
        need = asked.top_p * 2.0**52
        kept = next(count for count in range(1, len(weights) + 1) if sum(weights[:count]) >= need)
        at = bits[kept - 1]
        assert thresholds[row] == at
        assert ties[row] == kept - int((bits > at).sum())


def test_logprobs_are_those_of_the_raw_distribution(kernel_device):
    logits = make_logits(5, 3, 700, grid=0.03125).to(torch.bfloat16)
    workspace = SamplingWorkspace.allocate(max_batch=3, vocab_size=700, device=kernel_device, chunk=CHUNK)
    token_ids = torch.tensor([5, -1, 699], dtype=torch.int32, device=kernel_device)
    out = torch.empty(2, 3, device=kernel_device)
    row_logprobs(logits.to(kernel_device), token_ids, workspace, out[0], out[1])
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        out[0].cpu().double(), torch.tensor([exact[0, 5], 0.0, exact[2, 699]]), rtol=0, atol=1e-5
    )
    ids, values = top_logprobs(logits.to(kernel_device), 4, out[1])
    torch.testing.assert_close(values[2].cpu().double(), exact[2].topk(4).values, rtol=0, atol=1e-5)
    assert exact[2, ids[2].cpu()].tolist() == exact[2].topk(4).values.tolist()


def test_a_batch_needs_what_some_row_of_it_asks_for():
    host = HostColumns(vocab_size=50, max_num_rows=6, entry_capacity=4)
    host.set_row(0, SamplingParams(temperature=0.0, top_p=0.5), PROMPT)
    host.set_row(1, SamplingParams(top_k=50, min_p=0.1, logprobs=0), PROMPT)
    host.set_row(2, SamplingParams(top_k=49, min_tokens=1 << 40), PROMPT)
    host.set_row(3, SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(1,)), PROMPT)
    assert host.needs(np.array([], dtype=np.int64)) == SamplingNeeds("greedy", False, -1)
    assert host.needs(np.array([0])) == SamplingNeeds("greedy", False, -1)
    assert host.needs(np.array([0, 1])) == SamplingNeeds("random", False, 0)
    assert host.needs(np.array([0, 2])) == SamplingNeeds("truncated", False, -1)
    assert host.needs(np.array([3, 1])) == SamplingNeeds("random", True, 0)
    host.clear_row(3)
    assert not host.needs(np.array([3])).adjusted


def test_entries_share_a_pool_and_take_each_others_places():
    host = HostColumns(vocab_size=50, max_num_rows=6, entry_capacity=5)
    biased = SamplingParams(logit_bias=((7, 1.0), (8, 2.0), (7, 0.5)), min_tokens=3, stop_token_ids=(8, 9))
    first, token_ids, biases = host.set_row(0, biased, PROMPT)
    assert (first, token_ids.tolist(), biases.tolist()) == (0, [7, ~8, ~9], [1.5, 2.0, 0.0])
    assert host.set_row(1, SamplingParams(logit_bias=((1, 1.0),)), PROMPT).first == 3
    with pytest.raises(SamplingEntriesError, match="place for 5"):
        host.set_row(2, biased, PROMPT)
    assert not host.needs(np.array([2])).adjusted
    host.clear_row(0)
    assert host.set_row(2, biased, PROMPT).first == 0
    assert host.set_row(1, SamplingParams(logit_bias=((1, 1.0), (2, 1.0))), PROMPT).first == 3
