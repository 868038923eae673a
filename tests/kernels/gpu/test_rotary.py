"""Rotating queries and keys, and storing keys and values, beside the oracle and the executor's operators."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.decoder import HeadLayerNorms, RmsNorm
from headway_executor.models.rope import interleaved, rotate_, rotations
from headway_kernels import kv_codes, reference
from headway_kernels.gpu.rotary import rotate_and_store

EPS = 1e-6
CONTEXT = 50
NUM_BLOCKS = 3
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-7},
    torch.float16: {"rtol": 2**-9, "atol": 2**-10},
}
# A normalised channel may fall on the other side of a rounding, and the difference of two then cancel.
NORMALISED_TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-3},
    torch.float16: {"rtol": 2**-9, "atol": 2**-6},
}
NORMS = (None, "rms", "layer", "layer with biases")
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))


def normal(seed, *shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norms_of(kind, seed, num_heads, num_kv_heads, head_dim, options):
    """Of heads, as ``rotate_and_store`` takes them."""
    if kind == "rms":
        return {name: normal(seed + i, head_dim, **options) for i, name in enumerate(("q_norm", "k_norm"), 1)}
    names = {"layer": ("head_weights",), "layer with biases": ("head_weights", "head_biases")}.get(kind, ())
    wide = {"dtype": torch.float32, "device": options["device"]}
    return {name: normal(seed + i, num_heads + num_kv_heads, head_dim, **wide) for i, name in enumerate(names, 1)}


def column(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(head_dim, device):
    rotation = rotations(RopeConfig(kind="default", theta=10000.0), head_dim, CONTEXT).to(device)
    return rotation, rotation.real.contiguous(), rotation.imag.contiguous()


@settings(max_examples=30)
@given(
    data=st.data(),
    num_tokens=st.integers(0, 4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from((4, 8, 12, 64, 80, 96, 128, 256)),
    block_size=st.sampled_from((1, 5, 16)),
    dtype=DTYPES,
    norm=st.sampled_from(NORMS),
    norms_rotated=st.booleans(),
    norms_values=st.booleans(),
    has_codes=st.booleans(),
    grows=st.booleans(),
    has_keys=st.booleans(),
    spare=st.sampled_from((0, 3)),
)
def test_equals_the_oracle(
    kernel_device,
    data,
    num_tokens,
    num_kv_heads,
    group,
    head_dim,
    block_size,
    dtype,
    norm,
    has_codes,
    grows,
    norms_rotated,
    norms_values,
    has_keys,
    spare,
):
    tolerance = (NORMALISED_TOLERANCE if norm else TOLERANCE)[dtype]
    num_heads, num_stored = num_kv_heads * group, num_kv_heads
    norms_values &= norm == "rms" and not norms_rotated
    if not has_keys:  # They are those of a layer before.
        num_kv_heads = 0
    width = (num_heads + 2 * num_kv_heads) * head_dim
    seed = data.draw(st.integers(0, 2**31))
    positions = data.draw(st.lists(st.integers(0, CONTEXT - 1), min_size=num_tokens, max_size=num_tokens))
    places = data.draw(st.permutations(range(NUM_BLOCKS * block_size)))
    slots = [place if data.draw(st.booleans()) else -1 for place in places[:num_tokens]]
    slots += [-1] * (num_tokens - len(slots))
    options = {"dtype": dtype, "device": kernel_device}
    norms = {
        **norms_of(norm, seed, num_heads, num_kv_heads, head_dim, options),
        "norms_rotated": norms_rotated,
        "norms_values": norms_values,
    }
    _, cosines, sines = tables(head_dim, kernel_device)
    factors = torch.linspace(1.0, 1.5, CONTEXT, device=kernel_device) if grows else None
    whole = torch.full((num_tokens, width + spare), torch.nan, **options)
    whole[:, :width] = normal(seed, num_tokens, width, **options)
    # Blocks lie apart, as where layers stand behind each other in them.
    block = (2 * num_stored, block_size, head_dim)
    whole_pool = torch.full((NUM_BLOCKS, math.prod(block) + 64 * spare), torch.nan, **options)
    pool = whole_pool[:, : math.prod(block)].unflatten(1, block)
    if has_codes:
        pool = torch.full((*pool.shape[:3], head_dim + 1), 255, dtype=torch.uint8, device=kernel_device)
    expected, expected_pool = whole[:, :width].clone(), pool.clone()
    columns = (column(positions, kernel_device), column(slots, kernel_device), cosines, sines)
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "eps": EPS}
    shape["query_factors"] = factors
    reference.rotate_and_store(expected, *columns, expected_pool, **shape, **norms)
    rotate_and_store(whole[:, :width], *columns, pool, **shape, **norms)
    torch.testing.assert_close(whole[:, :width], expected, **tolerance)
    assert torch.equal(whole[:, num_heads * head_dim : width], expected[:, num_heads * head_dim :])
    assert whole[:, width:].isnan().all()
    if has_codes:
        for found, wanted in zip(kv_codes.parts(pool), kv_codes.parts(expected_pool), strict=True):
            assert norms_values or torch.equal(found[:, num_kv_heads:], wanted[:, num_kv_heads:])
        # A rotated channel may fall on the other side of a rounding to a code, and the largest beyond a power of two.
        tolerance = {"rtol": tolerance["rtol"] + 2**-3, "atol": tolerance["atol"] + 2**-5}
        pool, expected_pool = (kv_codes.decoded(codes, torch.float32) for codes in (pool, expected_pool))
    torch.testing.assert_close(pool, expected_pool, equal_nan=True, **tolerance)
    assert whole_pool[:, math.prod(block) :].isnan().all()
    if not norms_values:
        assert torch.equal(pool[:, num_kv_heads:].nan_to_num(7), expected_pool[:, num_kv_heads:].nan_to_num(7))


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
@pytest.mark.parametrize("norm", NORMS)
def test_is_what_the_executor_computes(kernel_device, dtype, norm):
    num_heads, num_kv_heads, head_dim, num_tokens = 4, 2, 80, 3
    num_rotated = num_heads + num_kv_heads
    tolerance = (NORMALISED_TOLERANCE if norm else TOLERANCE)[dtype]
    options = {"dtype": dtype, "device": kernel_device}
    qkv = normal(0, num_tokens, (num_rotated + num_kv_heads) * head_dim, **options)
    norms = norms_of(norm, 0, num_heads, num_kv_heads, head_dim, options)
    positions = column([0, 7, CONTEXT - 1], kernel_device)
    rotation, cosines, sines = tables(head_dim, kernel_device)

    # The executor rotates neighbouring channels; its weights are permuted at load.
    order = interleaved(head_dim).to(kernel_device)
    heads = qkv.view(num_tokens, -1, head_dim)[:, :num_rotated, order]
    if norm == "rms":
        counts = (num_heads, num_kv_heads)
        weight = torch.cat([one.expand(count, -1) for one, count in zip(norms.values(), counts, strict=True)])
        heads.copy_(RmsNorm(weight[:, order], EPS)(heads))
    elif norm is not None:
        biases = norms.get("head_biases")
        weights = norms["head_weights"][:, order]
        heads.copy_(HeadLayerNorms(weights, None if biases is None else biases[:, order], EPS)(heads))
    rotate_(heads, rotation[positions.long()].unsqueeze(1))
    expected = heads[..., torch.argsort(order)]
    values = qkv.view(num_tokens, -1, head_dim)[:, num_rotated:].clone()

    pool = torch.zeros(1, 2 * num_kv_heads, num_tokens, head_dim, **options)
    rotate_and_store(
        qkv,
        positions,
        column(range(num_tokens), kernel_device),
        cosines,
        sines,
        pool,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        **norms,
        eps=EPS,
    )
    queries = qkv.view(num_tokens, -1, head_dim)[:, :num_heads]
    torch.testing.assert_close(queries, expected[:, :num_heads], **tolerance)
    torch.testing.assert_close(pool[0, :num_kv_heads].transpose(0, 1), expected[:, num_heads:], **tolerance)
    assert torch.equal(pool[0, num_kv_heads:].transpose(0, 1), values)


@pytest.mark.parametrize("power", [-110, -20, 0, 60])
def test_values_between_codes_are_rounded_as_the_oracle_rounds_them(power, kernel_device):
    """Ties, the smallest codes, and magnitudes far from 1."""
    codes = torch.arange(0x78, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([codes[:-1] + codes[1:], torch.tensor([480.0])]) / 2
    magnitudes = torch.stack([codes, middles, middles * (1 + 2**-7), middles * (1 - 2**-7)]).reshape(8, -1)
    head_dim = 2 * magnitudes.shape[1]
    qkv = torch.zeros(len(magnitudes), 3 * head_dim)
    qkv[:, 2 * head_dim :] = torch.cat([magnitudes, -magnitudes], 1) * 2.0**power
    pool = torch.zeros(1, 2, len(qkv), head_dim + 1, dtype=torch.uint8, device=kernel_device)
    expected = pool.clone()
    columns = (column([0] * len(qkv), kernel_device), column(range(len(qkv)), kernel_device))
    table = torch.ones(1, head_dim // 2, device=kernel_device)
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
    for store, target in ((reference.rotate_and_store, expected), (rotate_and_store, pool)):
        store(qkv.to(kernel_device), *columns, table, table, target, **shape)
    assert torch.equal(pool, expected)
    assert len(kv_codes.parts(pool)[0].unique()) > 100


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_values_pass_untouched_whatever_they_are(kernel_device):
    head_dim = 8
    qkv = torch.ones(1, 3 * head_dim, device=kernel_device)
    qkv[0, 2 * head_dim :] = torch.inf
    pool = torch.zeros(1, 2, 1, head_dim, device=kernel_device)
    _, cosines, sines = tables(head_dim, kernel_device)
    zero = column([0], kernel_device)
    shape = {"num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
    rotate_and_store(qkv, zero, zero, cosines, sines, pool, **shape)
    assert pool[0, 1].isinf().all()
    assert pool[0, 0].isfinite().all()
