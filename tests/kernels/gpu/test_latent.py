"""Products of heads and rows of latent attention, beside plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.rope import rotations
from headway_kernels import kv_codes, reference
from headway_kernels.gpu.latent import store_latent
from headway_kernels.gpu.linear.heads import multiply_heads

EPS = 1e-6
CONTEXT = 50
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}
DTYPES = st.sampled_from(sorted(TOLERANCE, key=str))


def normal(seed, *shape, dtype, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@settings(max_examples=25)
@given(
    num_tokens=st.integers(1, 20) | st.sampled_from((64, 65, 130)),
    num_heads=st.integers(1, 3),
    num_inputs=st.sampled_from((8, 12, 64, 128, 200)),
    num_outputs=st.sampled_from((8, 24, 64, 100)),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_products_of_heads_equal_float64(kernel_device, num_tokens, num_heads, num_inputs, num_outputs, dtype, seed):
    options = {"dtype": dtype, "device": kernel_device}
    x = normal(seed, num_tokens, num_heads, num_inputs + 4, **options)[..., 4:]
    weight = normal(seed + 1, num_heads, num_outputs, num_inputs, **options) * num_inputs**-0.5
    wide = torch.full((num_tokens + 1, num_heads, num_outputs + 3), torch.nan, **options)
    multiply_heads(x, weight, wide[:-1, :, 3:])
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    torch.testing.assert_close(wide[:-1, :, 3:].double(), expected, **TOLERANCE[dtype])
    assert wide[-1].isnan().all()
    assert wide[..., :3].isnan().all()


@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_a_token_does_not_depend_on_its_company(kernel_device, dtype):
    options = {"dtype": dtype, "device": kernel_device}
    x, weight = normal(0, 150, 2, 300, **options), normal(1, 2, 70, 300, **options)
    together = torch.empty(150, 2, 70, **options)
    multiply_heads(x, weight, together)
    for first, end in ((0, 1), (140, 150), (3, 60)):
        alone = torch.empty(end - first, 2, 70, **options)
        multiply_heads(x[first:end], weight, alone)
        assert torch.equal(alone, together[first:end])


def rotated(heads, rotation):
    """``[tokens, ..., shared]`` in the order of halves."""
    first, second = heads.float().chunk(2, -1)
    cosine, sine = (part[:, None] if heads.dim() == 3 else part for part in (rotation.real, rotation.imag))
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


@settings(max_examples=30)
@given(
    num_tokens=st.integers(0, 4),
    num_heads=st.sampled_from((1, 3, 5, 40)),
    rank=st.sampled_from((8, 24, 64)),
    shared=st.sampled_from((4, 8, 12)),
    plain=st.sampled_from((8, 12, 100)),
    block_size=st.sampled_from((1, 4, 16)),
    dtype=DTYPES,
    has_codes=st.booleans(),
    grows=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_and_queries_are_those_of_plain_operators(
    kernel_device, num_tokens, num_heads, rank, shared, plain, block_size, dtype, has_codes, grows, seed
):
    draw, options = torch.Generator().manual_seed(seed), {"dtype": dtype, "device": kernel_device}
    compressed = normal(seed, num_tokens, 5 + rank + shared, **options)[:, 5:]
    norm, queries = (
        normal(seed + 1, rank, **options),
        normal(seed + 2, num_tokens, num_heads, shared + plain, **options),
    )
    rotation = rotations(RopeConfig(kind="default", theta=10000.0), shared, CONTEXT).to(kernel_device)
    positions = torch.randint(CONTEXT, (num_tokens,), generator=draw)
    slots = torch.randperm(3 * block_size, generator=draw)[:num_tokens]
    slots = torch.cat([slots, slots.new_full((num_tokens - len(slots),), -1)])
    if num_tokens > 1:
        slots[1] = -1
    factors = torch.rand(CONTEXT, generator=draw).to(kernel_device) + 0.5
    pool = torch.zeros(3, 1, block_size, rank + shared, **options)
    if has_codes:
        pool = kv_codes.encoded(pool)
    wide = torch.full((num_tokens, num_heads, shared + rank), torch.nan, **options)
    given_queries, expected_pool = queries.clone(), pool.clone()
    store_latent(
        compressed,
        norm,
        queries,
        wide,
        positions.to(kernel_device, torch.int32),
        slots.to(kernel_device, torch.int32),
        rotation.real.contiguous(),
        rotation.imag.contiguous(),
        pool,
        eps=EPS,
        query_factors=factors if grows else None,
    )
    turned = rotation[positions.to(kernel_device)]
    growth = factors[positions.to(kernel_device), None, None] if grows else 1
    grown = given_queries.float() * growth
    torch.testing.assert_close(wide[..., :shared].float(), rotated(grown[..., :shared], turned), **TOLERANCE[dtype])
    assert wide[..., shared:].isnan().all()
    assert torch.equal(queries[..., shared:], grown[..., shared:].to(dtype))
    latent = torch.empty_like(compressed[:, :rank])
    reference.add_rms_norm(compressed[:, :rank].clone(), None, norm, latent, eps=EPS)
    rows = torch.cat([rotated(compressed[:, rank:], turned).to(dtype), latent], 1)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = (slice(slot // block_size, slot // block_size + 1), 0, slot % block_size)
            if has_codes:
                for target, source in zip(kv_codes.parts(expected_pool), kv_codes.encode(rows[token]), strict=True):
                    target[place] = source
            else:
                expected_pool[place] = rows[token]
    if has_codes:
        found, expected = (kv_codes.decoded(blocks, torch.float32) for blocks in (pool, expected_pool))
        # A number may fall on the other side of a rounding, an eighth of it away.
        torch.testing.assert_close(found, expected, rtol=2**-3 + 2**-6, atol=2**-6)
    else:
        torch.testing.assert_close(pool.float(), expected_pool.float(), **TOLERANCE[dtype])
