"""Every variant of the CPU kernels that runs here: products, attention, and results that do not depend on the company."""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from checkpoints import CONTEXT, FAMILIES, VOCAB_SIZE, make_checkpoint
from decoder_driver import (
    Sequences,
    Span,
    compiled_decoder,
    compiled_model,
    compiled_pool,
    eager_model,
    states_of,
    write_checkpoint,
)
from headway_executor.models.compiled import kernels_lack
from headway_executor.models.compiled_loading import compiled_layout
from headway_executor.models.families import read_model_config
from headway_executor.models.part import whole
from headway_executor.rank_place import ALONE
from headway_kernels.cpu import build
from headway_kernels.cpu import library as library_module
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm, installed_variants, runs_here

TESTS = Path(__file__).resolve().parents[1]
VARIANTS = [path for path in installed_variants() if runs_here(path)]
BY_NAME = {path.stem.rpartition(".")[2]: path for path in VARIANTS}
pytestmark = [
    pytest.mark.skipif(not VARIANTS, reason="no CPU kernels that run here"),
]

OUTPUTS = (1, 2, 8, 16, 31, 32, 33, 63, 64, 70, 130)
INPUTS = (1, 2, 3, 4, 5, 15, 16, 17, 64, 97)
ROWS = (1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 24, 25, 40, 200)
WEIGHT_SCALE = 0.1
NORM_EPS = 1e-5


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda path: path.stem)
def library(request):
    return CpuLibrary(request.param)


@pytest.fixture(scope="module")
def team(library):
    return Team(library, 2)


def best_of_each_width():
    """Attention is compiled from the same code for registers of the same width."""
    by_width = {CpuLibrary(path).lanes: path for path in reversed(VARIANTS)}
    return list(by_width.values())


@pytest.fixture(scope="module", params=best_of_each_width(), ids=lambda path: path.stem)
def attending(request):
    return CpuLibrary(request.param)


# ---- products ---------------------------------------------------------------------------------------------------------


def shapes(seed):
    """(outputs, inputs, rows), all of each at least once."""
    draw = random.Random(seed)
    plain = list(itertools.product(OUTPUTS, INPUTS))
    chosen = [(outputs, inputs, draw.choice(ROWS)) for outputs, inputs in draw.sample(plain, 40)]
    chosen += [(draw.choice(OUTPUTS), draw.choice(INPUTS), rows) for rows in (*range(1, 41), 200)]
    return [(1, 1, 1), *chosen]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def normalised(inputs, norm):
    """RMS normalisation in float64."""
    wide = inputs.double()
    return wide * (wide.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * norm.double()


def rounded_inputs(inputs, norm):
    """8-bit codes per token, float32 as the kernels compute them; the factor of a norm is on the scale, not the codes."""
    weighted = inputs if norm is None else inputs * norm
    largest = weighted.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    codes = (weighted * (127.0 / largest)).round()
    scale = (largest / 127.0).double()
    if norm is not None:
        scale = scale * (inputs.double().square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    return codes.double(), scale


def rounded_weights(weight):
    scale = (weight.abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-30)
    return (weight / scale).round().double(), scale.double()


def expected_product(form, weight, bias, inputs, norm, gated):
    """Float64 result, and how large the sums behind each output are (for the tolerance)."""
    if form is WeightForm.INT8:
        input_codes, input_scale = rounded_inputs(inputs, norm)
        weight_codes, weight_scale = rounded_weights(weight)
        sums = (input_codes @ weight_codes.t()) * input_scale * weight_scale.t()
        sizes = sums.abs()
    else:
        wide = inputs.double() if norm is None else normalised(inputs, norm)
        if form is WeightForm.PAIRS:
            wide = wide.bfloat16().double()
        sums = wide @ weight.double().t()
        sizes = wide.abs() @ weight.double().abs().t()
    if bias is not None:
        sums, sizes = sums + bias.double(), sizes + bias.double().abs()
    if not gated:
        return sums, sizes
    gates, ups = sums.chunk(2, dim=-1)
    gate_sizes, up_sizes = sizes.chunk(2, dim=-1)
    return functional.silu(gates) * ups, gate_sizes * up_sizes + gate_sizes + up_sizes


def skip_what_the_processor_lacks(library, form):
    """Without an instruction for pairs, narrow registers take two steps; wide ones are not asked."""
    if form is WeightForm.PAIRS and library.lanes == 16 and not library.multiplies_pairs:
        pytest.skip("needs a processor that multiplies pairs of bfloat16s")


@pytest.mark.parametrize("form", WeightForm)
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_is_what_float64_gives(library, team, form, gated):
    skip_what_the_processor_lacks(library, form)
    for number, (outputs, inputs, rows) in enumerate(shapes(int(form))):
        weight = drawn((1 + gated) * outputs, inputs) * WEIGHT_SCALE
        if form in (WeightForm.BFLOAT16, WeightForm.PAIRS):
            weight = weight.bfloat16().float()
        bias = drawn(len(weight), seed=1) if number % 2 else None
        norm = 0.5 + drawn(inputs, seed=2).abs() if number % 3 else None
        from_rows = drawn(rows, inputs, seed=3)
        expected, sizes = expected_product(form, weight, bias, from_rows, norm, gated)
        product = PackedLinear(library, weight, bias, form, gated=gated)(team, from_rows, norm, NORM_EPS)
        assert product.shape == expected.shape
        # Float32 rounds at most once per addition; 8-bit sums are exact, and only their scales are rounded.
        relative = 2e-7 * (6 if form is WeightForm.INT8 else inputs + 6)
        if form is WeightForm.PAIRS and norm is not None:
            relative += 2**-8  # What is normalised in float32 may be rounded to the neighbour.
        limit = relative * (sizes + 1e-6)
        worst = ((product - expected).abs() / limit).max()
        assert worst <= 1, (outputs, inputs, rows)


def test_bfloat16_weights_give_the_same_bits_as_float32(library, team):
    for gated, (outputs, inputs, rows) in itertools.product((False, True), shapes(7)):
        weight = (drawn((1 + gated) * outputs, inputs) * WEIGHT_SCALE).bfloat16()
        bias = drawn(len(weight), seed=1)
        from_rows = drawn(rows, inputs, seed=3)
        wide, narrow = (
            PackedLinear(library, weight, bias, form, gated=gated)(team, from_rows)
            for form in (WeightForm.FLOAT32, WeightForm.BFLOAT16)
        )
        assert torch.equal(wide, narrow)


@pytest.mark.parametrize("form", WeightForm)
@pytest.mark.parametrize("gated", [False, True])
def test_a_weight_may_be_stored_in_any_way(library, team, form, gated):
    skip_what_the_processor_lacks(library, form)
    for outputs, inputs, rows in (*shapes(5), (70, 300, 3)):
        weight = (drawn((1 + gated) * outputs, inputs) * WEIGHT_SCALE).bfloat16()
        wider = torch.full((len(weight), inputs + 3), float("nan"), dtype=torch.bfloat16)
        wider[:, 2:-1] = weight
        stored = (weight, weight.float(), weight.t().contiguous().t(), wider[:, 2:-1], wider.float()[:, 2:-1])
        first, *others = (PackedLinear(library, one, None, form, gated=gated) for one in stored)
        from_rows = drawn(rows, inputs, seed=3)
        assert all(torch.equal(first(team, from_rows), other(team, from_rows)) for other in others)


@pytest.mark.parametrize("form", WeightForm)
def test_a_row_of_a_product_does_not_depend_on_the_others(library, team, form):
    skip_what_the_processor_lacks(library, form)
    weight = (drawn(70, 97) * WEIGHT_SCALE).bfloat16()
    norm = 0.5 + drawn(97, seed=2).abs()
    for gated in (False, True):
        product = PackedLinear(library, weight, None, form, gated=gated)
        inputs = drawn(200, 97, seed=3)
        together = product(team, inputs, norm, NORM_EPS)
        for rows in (*range(1, 41), 199):
            assert torch.equal(product(team, inputs[:rows], norm, NORM_EPS), together[:rows])


def roundings(library, inputs):
    """How often an output of a product is rounded at most, and what else is lost, in units of 2^-24 of its terms' sum."""
    if library.variant != "amx":
        return inputs + 1
    # Six additions to the sum every 32 inputs, of chains of 17; and products below 2^-22 that are left out.
    return 6 * -(-inputs // 32) + 17 + 2 + 4


@settings(max_examples=60)
@given(
    outputs=st.integers(1, 100),
    inputs=st.one_of(st.integers(1, 100), st.integers(500, 1600)),
    rows=st.integers(1, 70),
    spread=st.sampled_from([0.0, 3.0]),
    positive=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_float32_product_loses_no_more_than_its_roundings(
    library, team, outputs, inputs, rows, spread, positive, seed
):
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        found = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
        return found.abs() if positive else found

    weight, from_rows = values(outputs, inputs), values(rows, inputs)
    product = PackedLinear(library, weight, None, WeightForm.FLOAT32)(team, from_rows)
    expected, sizes = expected_product(WeightForm.FLOAT32, weight, None, from_rows, None, gated=False)
    lost = (product.double() - expected).abs() / sizes
    assert float(lost.max()) <= 1.01 * roundings(library, inputs) * 2**-24


needs_matrix_unit = pytest.mark.skipif(not {"amx", "avx512"} <= set(BY_NAME), reason="needs a processor with AMX")


@needs_matrix_unit
@pytest.mark.parametrize("inputs", [64, 576, 1536])
def test_a_matrix_unit_is_at_least_as_exact_as_the_vector_unit(inputs):
    weight, from_rows = drawn(256, inputs), drawn(40, inputs, seed=3)
    expected, sizes = expected_product(WeightForm.FLOAT32, weight, None, from_rows, None, gated=False)
    lost = {}
    for name in ("amx", "avx512"):
        library = CpuLibrary(BY_NAME[name])
        product = PackedLinear(library, weight, None, WeightForm.FLOAT32)(Team(library, 1), from_rows)
        lost[name] = float(((product.double() - expected).abs() / sizes).max())
    assert lost["amx"] < lost["avx512"] < 2**-21


@needs_matrix_unit
@pytest.mark.parametrize("gated", [False, True])
def test_a_matrix_unit_gives_the_same_8_bit_products_as_the_vector_unit(gated):
    libraries = [CpuLibrary(BY_NAME[name]) for name in ("amx", "avx512")]
    for outputs, inputs, rows in shapes(11):
        weight, norm = drawn((1 + gated) * outputs, inputs) * WEIGHT_SCALE, 0.5 + drawn(inputs, seed=2).abs()
        bias, from_rows = drawn(len(weight), seed=1), drawn(rows, inputs, seed=3)
        first, second = (
            PackedLinear(library, weight, bias, WeightForm.INT8, gated=gated)(
                Team(library, 1), from_rows, norm, NORM_EPS
            )
            for library in libraries
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("form", WeightForm)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_infinity_is_no_number_afterwards_and_stays_in_its_row(library, team, form, value):
    skip_what_the_processor_lacks(library, form)
    weight = (drawn(70, 97) * WEIGHT_SCALE).bfloat16()
    inputs = drawn(40, 97, seed=3)
    product = PackedLinear(library, weight, None, form)
    clean = product(team, inputs)
    inputs[7, 50] = value
    poisoned = product(team, inputs)
    assert not poisoned[7].isfinite().any()
    others = [row for row in range(40) if row != 7]
    assert torch.equal(poisoned[others], clean[others])


def test_the_largest_and_the_smallest_numbers_are_multiplied(library, team):
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    weight = torch.tensor([[largest, 0.0], [0.0, smallest], [smallest / 8, 0.0]])
    inputs = torch.tensor([[0.5, 4.0], [2.0**-126, 1.0]])
    product = PackedLinear(library, weight, None, WeightForm.FLOAT32)(team, inputs)
    expected = inputs.double() @ weight.double().t()
    # A processor's matrix unit takes what is too small for a normal number as zero.
    assert ((product.double() - expected).abs() <= 1e-6 * expected.abs() + 2 * smallest).all()


def test_zeros_and_extreme_values_are_products_too(library, team):
    weight = drawn(33, 21) * WEIGHT_SCALE
    weight[3] = 0.0
    inputs = drawn(5, 21, seed=3)
    inputs[1], inputs[2], inputs[3] = 0.0, inputs[2] * 1e18, inputs[3] * 1e-18
    for form in (WeightForm.FLOAT32, WeightForm.INT8):
        product = PackedLinear(library, weight, None, form)(team, inputs)
        expected, sizes = expected_product(form, weight, None, inputs, None, gated=False)
        assert ((product - expected).abs() <= 5e-6 * sizes + 1e-30).all()


# ---- attention, in whole decoders -------------------------------------------------------------------------------------


def cut_at_random(length, draw, most):
    """Spans of one row, in order: (first position, number of tokens)."""
    cuts = [0]
    while cuts[-1] < length:
        cuts.append(min(length, cuts[-1] + draw.choice((1, 1, 2, 3, 7, 16, 40, most))))
    return [(start, end - start) for start, end in itertools.pairwise(cuts)]


def steps_of(lengths, seed, most):
    """Steps that run all rows to their lengths in random pieces; not every row runs in every step."""
    draw = random.Random(seed)
    left = {row: cut_at_random(length, draw, most) for row, length in enumerate(lengths)}
    while left:
        rows = draw.sample(sorted(left), draw.randint(1, len(left)))
        yield [Span(row, *left[row].pop(0)) for row in rows]
        left = {row: pieces for row, pieces in left.items() if pieces}


def assert_equals_eager(
    directory, library, *, lengths, block_size, vocab_size, seed=0, dtype=torch.float32, tolerance=2e-4
):
    sequences = Sequences(
        num_rows=len(lengths), length=max(lengths), vocab_size=vocab_size, block_size=block_size, seed=seed
    )
    compiled = compiled_model(directory, library, sequences, num_threads=2, dtype=dtype)
    eager = eager_model(directory, sequences)
    for step in steps_of(lengths, seed, max(lengths)):
        expected = sequences.last_logits(eager, step)
        got = sequences.last_logits(compiled, step)
        assert float((got - expected).abs().max()) < tolerance * float(expected.abs().max()), step
    # Rows of a step may ask for the logits of all their tokens, in whatever order attention takes the rows.
    step = [Span(row, 0, length) for row, length in enumerate(lengths)]
    expected = sequences.logits_of_all_tokens(eager, step)
    got = sequences.logits_of_all_tokens(compiled, step)
    assert float((got - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    make_checkpoint(directory, request.param)
    return directory


def tolerance_of(family):
    """Of the largest logit. In models with a delta rule, what a token reads of its state may be almost nothing, and is
    normalised then: embeddings that differ by 2e-7 change what eager operators give by 1e-3."""
    has_delta_rule = any(family.name.startswith(name) for name in ("qwen3_next", "qwen3_5"))
    return 2e-3 if has_delta_rule else 2e-4


def test_every_family_gives_what_eager_operators_give(family, library):
    longest = min(CONTEXT, read_model_config(family).context)
    options = {"lengths": (1, 17, 64, longest), "vocab_size": VOCAB_SIZE, "tolerance": tolerance_of(family)}
    for block_size in (1, 16):
        assert_equals_eager(family, library, block_size=block_size, **options)


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [
        (16, 1, 8, None),
        (13, 1, 20, 100),
        (26, 2, 6, None),
        (5, 1, 34, 129),
        (7, 7, 16, 1),
        (8, 4, 40, 128),
        (9, 3, 64, None),
    ],
)
def test_every_shape_of_attention_gives_what_eager_operators_give(
    tmp_path, attending, heads, kv_heads, head_dim, window, block_size
):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    directory = write_checkpoint(tmp_path, sliding_window=window, **sizes)
    assert_equals_eager(
        directory, attending, lengths=(3, 150, 390), block_size=block_size, vocab_size=90, seed=heads + block_size
    )


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(13, 1, 20, 100), (5, 1, 34, 129), (7, 7, 16, 1), (9, 3, 64, None)]
)
def test_attention_in_bfloat16_is_close_to_eager_operators(
    tmp_path, attending, heads, kv_heads, head_dim, window, block_size
):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    directory = write_checkpoint(tmp_path, sliding_window=window, dtype=torch.bfloat16, **sizes)
    options = {"vocab_size": 90, "seed": heads + block_size, "dtype": torch.bfloat16, "tolerance": 0.05}
    assert_equals_eager(directory, attending, lengths=(3, 150, 390), block_size=block_size, **options)


def test_the_widest_head_gives_what_eager_operators_give(tmp_path, attending):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": attending.max_head_dim}
    directory = write_checkpoint(tmp_path, num_hidden_layers=1, **sizes)
    assert_equals_eager(directory, attending, lengths=(3, 150), block_size=16, vocab_size=90)


AS_PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 14,
    "num_key_value_heads": 14,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 20,
}
"""Rows of the size that DeepSeek and Kimi have."""


# Sums of 512 large numbers: expanded keys in bfloat16 differ as much.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 0.1)])
def test_latent_attention_of_published_sizes_gives_what_eager_operators_give(tmp_path, attending, dtype, tolerance):
    directory = write_checkpoint(tmp_path, dtype=dtype, **AS_PUBLISHED)
    options = {"vocab_size": 90, "dtype": dtype, "tolerance": tolerance}
    assert_equals_eager(directory, attending, lengths=(3, 150), block_size=16, **options)


def test_a_token_of_latent_attention_has_one_row_for_all_heads(tmp_path, library):
    config = read_model_config(write_checkpoint(tmp_path, **AS_PUBLISHED))
    layout = compiled_layout(config, whole(config), library, 16, torch.bfloat16)
    assert layout.block_bytes == 2 * 16 * 2 * (512 + 64) * 2  # layers, tokens, a key and a value, bytes


@pytest.mark.parametrize(
    ("changes", "widest"), [({"kv_lora_rank": 544}, 608), ({"kv_lora_rank": 24, "qk_nope_head_dim": 576}, 640)]
)
def test_rows_and_heads_that_are_too_wide_are_left_to_torch_operators(tmp_path, library, changes, widest):
    config = read_model_config(write_checkpoint(tmp_path, **AS_PUBLISHED | changes))
    assert kernels_lack(library, config, ALONE) == f"heads of {widest} channels"


# ---- the same to the last bit -----------------------------------------------------------------------------------------


LENGTH = 300
NUM_OTHERS = 33
MIXTURE = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2}
FORMS = {
    "float32": (torch.float32, "none", {}, torch.float32),
    "bfloat16": (torch.bfloat16, "none", {}, torch.float32),
    "in-bfloat16": (torch.bfloat16, "none", {}, torch.bfloat16),
    "int8": (torch.float32, "int8", {}, torch.float32),
    "mixture": (torch.float32, "none", MIXTURE, torch.float32),
    "mixture-int8": (torch.float32, "int8", MIXTURE, torch.float32),
}


class Watched:
    """Row 0 of 34 sequences, whose logits are watched, on one decoder with a fresh pool for each run."""

    def __init__(self, directory, library, quantization, dtype):
        self._directory, self._library = directory, library
        self._settings = {"quantization": quantization, "dtype": dtype}
        self._sequences = Sequences(num_rows=NUM_OTHERS + 1, length=LENGTH, vocab_size=90, block_size=8)
        self._decoder = self.decoder(num_threads=2)

    def decoder(self, *, num_threads):
        return compiled_decoder(self._directory, self._library, block_size=8, num_threads=num_threads, **self._settings)

    def logits(self, steps, decoder=None, stale=0.0):
        """All logits of row 0 over ``steps``, lists of spans, in the order of its tokens."""
        decoder = decoder or self._decoder
        pool = compiled_pool(self._directory, decoder, self._sequences, stale=stale)
        found = []
        for spans in steps:
            by_span = self._sequences.all_logits(decoder, pool, spans)
            found += [logits for span, logits in zip(spans, by_span, strict=True) if span.row == 0]
        return torch.cat(found)


@pytest.fixture(scope="module", params=FORMS)
def watched(request, library, tmp_path_factory):
    stored, quantization, changes, dtype = FORMS[request.param]
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20} | changes
    directory = write_checkpoint(tmp_path_factory.mktemp(request.param), dtype=stored, sliding_window=150, **sizes)
    return Watched(directory, library, quantization, dtype)


@pytest.fixture(scope="module")
def alone(watched):
    """All at once, nothing beside it, one thread."""
    return watched.logits([[Span(0, 0, LENGTH)]], watched.decoder(num_threads=1))


def test_logits_of_every_family_are_the_same_in_chunks_and_in_a_crowd(family):
    sequences = Sequences(num_rows=3, length=70, vocab_size=VOCAB_SIZE, block_size=8)

    def logits(steps):
        decoder = compiled_decoder(family, library_module.load_library(), block_size=8)
        pool = compiled_pool(family, decoder, sequences)
        states = states_of(read_model_config(family), sequences)
        if states is not None:
            decoder.keep_states(states.past, states.heads)
        return torch.cat([sequences.all_logits(decoder, pool, spans)[0] for spans in steps])

    alone = logits([[Span(0, 0, 70)]])
    crowd = [[Span(0, 0, 33), Span(1, 0, 5)], [Span(0, 33, 1), Span(1, 5, 40)], [Span(0, 34, 36), Span(2, 0, 9)]]
    assert torch.equal(logits(crowd), alone)


def in_chunks(size):
    return [[Span(0, start, min(size, LENGTH - start))] for start in range(0, LENGTH, size)]


@pytest.mark.parametrize("size", [1, 3, 17, 64, 250])
def test_logits_are_the_same_in_chunks(watched, alone, size):
    assert torch.equal(watched.logits(in_chunks(size)), alone)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_logits_are_the_same_with_any_number_of_threads(watched, alone, num_threads):
    decoder = watched.decoder(num_threads=num_threads)
    assert torch.equal(watched.logits(in_chunks(100), decoder), alone)


def test_logits_are_the_same_in_a_crowd(watched, alone):
    draw = random.Random(3)
    computed = dict.fromkeys(range(1, NUM_OTHERS + 1), 0)

    def others():
        """Prefill chunks and decodes of the other rows; one that reaches its end starts again."""
        spans = []
        for row, done in computed.items():
            count = min(draw.choice((1, 1, 1, 2, 5, 30)), LENGTH - done)
            spans.append(Span(row, done, count))
            computed[row] = (done + count) % LENGTH
        return spans

    def step(start, end):
        spans = [*others(), Span(0, start, end - start)]
        draw.shuffle(spans)
        return spans

    cuts = [0, 120, 121, 122, 123, 200, 217, 298, 299, 300]
    assert torch.equal(watched.logits([step(*cut) for cut in itertools.pairwise(cuts)]), alone)


# ---- numbers that must not spread -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [float("nan"), float("inf")])
def test_what_an_earlier_owner_left_in_the_pool_reaches_nobody(watched, alone, stale):
    assert torch.equal(watched.logits([[Span(0, 0, LENGTH)]], stale=stale), alone)
    assert torch.equal(watched.logits(in_chunks(37), stale=stale), alone)


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_nan_in_the_keys_or_values_of_a_row_poisons_that_row_only(tmp_path, library, quantization, half):
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    sequences = Sequences(num_rows=9, length=40, vocab_size=90, block_size=8)
    decoder = compiled_decoder(directory, library, block_size=8, quantization=quantization, num_threads=2)
    prompts, decodes = ([Span(row, *span) for row in range(9)] for span in ((0, 38), (38, 1)))
    outcomes = []
    for damaged in (False, True):
        pool = compiled_pool(directory, decoder, sequences)
        sequences.all_logits(decoder, pool, prompts)
        if damaged:
            # A block of one layer and head is its keys, then its values; the first number of each is in use.
            halves = pool.layers.view(*pool.layers.shape[:2], config.num_kv_heads, 2, -1)
            halves[:, sequences.tables[4, 1], :, half, 0] = float("nan")
        outcomes.append(torch.cat(sequences.all_logits(decoder, pool, decodes)))
    clean, poisoned = outcomes
    assert poisoned[4].isnan().all()
    untouched = [row for row in range(9) if row != 4]
    assert torch.equal(poisoned[untouched], clean[untouched])


# ---- threads ----------------------------------------------------------------------------------------------------------


def threads_of_this_process():
    return {path.name for path in Path("/proc/self/task").iterdir()}


def assert_new_threads(before, expected):
    """A thread that was joined stays listed for a moment."""
    deadline = time.monotonic() + 5
    while len(threads_of_this_process() - before) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(threads_of_this_process() - before) == expected


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4, 16])
def test_hundreds_of_short_runs_finish_and_are_right(library, num_threads):
    weight, inputs = drawn(200, 33), drawn(20, 33)
    product = PackedLinear(library, weight, None, WeightForm.FLOAT32)
    expected = product(Team(library, 1), inputs)
    team = Team(library, num_threads)
    for number in range(400):
        rows = number % 20 + 1
        assert torch.equal(product(team, inputs[:rows]), expected[:rows])


def test_teams_of_several_callers_do_not_disturb_each_other(library):
    weight, inputs = drawn(200, 33), drawn(20, 33)
    product = PackedLinear(library, weight, None, WeightForm.FLOAT32)
    expected = product(Team(library, 1), inputs)
    wrong = []

    def call():
        team = Team(library, 3)
        wrong.extend(1 for _ in range(100) if not torch.equal(product(team, inputs), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


@needs_proc
def test_a_team_that_goes_takes_its_threads_along(library):
    product = PackedLinear(library, drawn(40, 8), None, WeightForm.FLOAT32)
    inputs = drawn(3, 8)
    before = threads_of_this_process()
    for number in range(150):
        team = Team(library, number % 5 + 1)
        assert_new_threads(before, number % 5)
        if number % 2:
            product(team, inputs)
        del team
        assert_new_threads(before, 0)


# ---- nothing undefined ------------------------------------------------------------------------------------------------


EXPERTS = {
    "rope_parameters": {"rope_type": "default"},
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}


@pytest.mark.deep  # `make sanitize` looks at more
def test_nothing_undefined_happens(tmp_path):
    """A library that stops the process at undefined behaviour, quick to compile and slow to run, runs to its end."""
    pytest.importorskip("ziglang")
    variant = next(variant for variant in build.variants_here() if variant.name != "avx512")
    if not runs_here(Path(variant.library)):
        pytest.skip("needs a processor that runs the variant")
    target = [option for option in variant.options if option.startswith("-mcpu")]
    watched = replace(variant, options=(*target, "-O0", "-fsanitize=undefined", "-fsanitize-trap=undefined"))
    (workplace := tmp_path / "work").mkdir()
    build.compile_library(build.read_sources(build.SOURCES), watched, "", tmp_path, workplace)
    library = tmp_path / variant.library
    kinds = {"Mistral": 20, "Gemma2": 20, "Olmo2": 20, "Starcoder2": None, "GPTNeoX": None, "GPT2": None}
    mixtures = {"Mixtral": 20, "Qwen2Moe": None, "GptOss": 20, "DeepseekV2": None, "DeepseekV3": None}
    kinds |= mixtures | {"Bloom": None}
    directories = [
        write_checkpoint(
            tmp_path / kind,
            architectures=[f"{kind}ForCausalLM"],
            sliding_window=60,
            head_dim=head_dim,
            hidden_size=40,
            num_key_value_heads=4 if kind.startswith(("GPT", "Bloom", "Deepseek")) else 2,
            rotary_pct=0.4,
            **(EXPERTS if kind in mixtures else {}),
        )
        for kind, head_dim in kinds.items()
    ]
    code = (
        "import sys; from pathlib import Path; from decoder_driver import exercise; exercise(*map(Path, sys.argv[1:]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(library), *map(str, directories)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=True,
    )


# ---- which variant ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif("amx" not in BY_NAME, reason="needs a processor with AMX")
def test_where_the_system_refuses_the_matrix_unit_the_next_variant_runs(monkeypatch):
    real = library_module._declared

    def refused(functions):
        declared = real(functions)
        if Path(functions._name) == BY_NAME["amx"]:
            declared.headway_permitted = lambda: 0
        return declared

    monkeypatch.setattr(library_module, "_declared", refused)
    monkeypatch.setattr(library_module, "load_library", library_module.load_library.__wrapped__)
    with pytest.raises(PermissionError, match="does not let this process use the processor's amx"):
        CpuLibrary(BY_NAME["amx"])
    assert not runs_here(BY_NAME["amx"])
    assert library_module.load_library().variant == "avx512"
