"""The index of keys beside plain torch: scores, choices with ties, and lists that attention reads."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.models.attention_config import RopeConfig
from headway_executor.models.rope import rotations
from headway_kernels.gpu import key_index
from headway_kernels.gpu.key_index import (
    IndexedStep,
    SeenTokens,
    as_blocks_of_one,
    choose_keys,
    count_seen,
    num_splits,
    score_keys,
    store_index,
    weigh_heads,
)

CONTEXT = 200


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step_of(rows, block_size, padding, device, seed=0):
    """Of (tokens, positions after the step) of each row; and its tables, on the host."""
    draw = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for _, length in rows]
    ids = torch.randperm(sum(blocks) + 1, generator=draw)
    tables = torch.full((len(rows) + 1, max(blocks) + 1), 2**30)
    order = torch.randperm(len(rows) + 1, generator=draw)[: len(rows)]
    for row, first, count in zip(order, accumulate([0, *blocks[:-1]]), blocks, strict=True):
        tables[row, :count] = ids[first : first + count]
    starts = torch.tensor([0, *accumulate(tokens for tokens, _ in rows)])
    positions = [torch.arange(length - tokens, length) for tokens, length in rows]
    columns = (order, starts, tables, torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]))
    return IndexedStep(*(column.to(device, torch.int32) for column in columns)), tables[order], len(ids)


def expected_of(scores, num_chosen):
    """The positions: the largest scores, of equal ones the first, in order."""
    order = torch.sort(scores, descending=True, stable=True).indices[:num_chosen]
    return order.sort().values


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150)), min_size=1, max_size=4),
    num_chosen=st.sampled_from((1, 7, 40, 200)),
    block_size=st.sampled_from((1, 8, 16)),
    num_levels=st.sampled_from((2, 5, 10**6)),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_the_largest_scores_are_chosen_and_of_equal_ones_the_first(
    kernel_device, rows, num_chosen, block_size, num_levels, padding, seed
):
    rows = [(tokens, past + tokens) for tokens, past in rows]
    step, tables, num_blocks = step_of(rows, block_size, padding, kernel_device, seed)
    draw = torch.Generator().manual_seed(seed)
    num_tokens = len(step.positions)
    scores = (torch.randint(num_levels, (num_tokens, CONTEXT), generator=draw) - num_levels // 2) * 0.5
    scores = torch.where(scores == 0, torch.where(torch.rand(scores.shape, generator=draw) < 0.5, 0.0, -0.0), scores)
    pool = torch.zeros(num_blocks, 2, block_size, 8, device=kernel_device)
    chosen = torch.full((num_tokens, num_chosen), -1, dtype=torch.int32, device=kernel_device)
    sizes = (num_tokens, num_tokens + 1, 2 * len(rows), 2 * len(rows), 2 * len(rows) + 1)
    seen = SeenTokens(*(torch.full((size,), -1, dtype=torch.int32, device=kernel_device) for size in sizes))
    count_seen(step, seen, num_chosen)
    for first in range(0, num_tokens, 4):
        part = scores[first : first + 4].to(kernel_device)
        choose_keys(part, len(part), step, seen.lengths, chosen, first, pool)
    real = num_tokens - padding
    assert seen.starts.tolist() == [min(token, real) for token in range(num_tokens + 1)]
    assert seen.whole_rows.tolist() == step.rows.repeat_interleave(2).tolist()
    begins = step.query_start.tolist()
    wholes = [max(0, min(num_chosen - (length - count), count)) for count, length in rows]
    wholes = [whole if whole > 1 else 0 for whole in wholes]
    lengths = [(length - count + whole) * (whole > 0) for (count, length), whole in zip(rows, wholes, strict=True)]
    assert seen.whole_lengths.tolist() == [number for length in lengths for number in (length, 0)]
    cuts = [number for begin, whole in zip(begins, wholes, strict=False) for number in (begin, begin + whole)]
    assert seen.whole_starts.tolist() == [*cuts, real]
    token = 0
    for table, (count, length), whole in zip(tables, rows, wholes, strict=True):
        for place, position in enumerate(range(length - count, length)):
            if place < whole:
                assert seen.lengths[token] == 0
                assert (chosen[token] == -1).all()
                token += 1
                continue
            positions = expected_of(scores[token, : position + 1], num_chosen)
            vectors = table[positions // block_size] * 2 * block_size + positions % block_size
            assert seen.lengths[token] == len(positions)
            assert chosen[token, : len(positions)].tolist() == vectors.tolist()
            assert (chosen[token, len(positions) :] == -1).all()
            token += 1
    assert (chosen[token:] == -1).all()
    assert (seen.lengths[token:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim", "shared"), [(3, 12, 4), (40, 64, 8), (2, 8, 8)])
def test_scores_are_those_of_plain_operators(kernel_device, dtype, num_heads, head_dim, shared):
    """With keys that the kernel has stored, in chunks, decodes and padding; what a token does not need stays as it was."""
    block_size, width, num_chosen = 8, 80, 5
    rows = [(1, 90), (7, 30), (1, 3), (2, 2)]
    step, tables, num_blocks = step_of(rows, block_size, 2, kernel_device)
    pool = torch.full((num_blocks, 2, block_size, width), torch.nan, dtype=dtype, device=kernel_device)
    rotation = rotations(RopeConfig(kind="default", theta=100.0), shared, CONTEXT).to(kernel_device)
    tables_of_rope = (rotation.real.contiguous(), rotation.imag.contiguous())

    def rotated(heads, positions):
        pairs, turned = shared // 2, rotation[positions.long()]
        turned = turned.view(len(turned), *[1] * (heads.dim() - 2), pairs)
        first, second = heads[..., :pairs].float(), heads[..., pairs:shared].float()
        front = torch.cat([first * turned.real - second * turned.imag, first * turned.imag + second * turned.real], -1)
        return torch.cat([front.to(dtype), heads[..., shared:]], -1)

    keys_of_rows = []
    for number, (table, (_, length)) in enumerate(zip(tables, rows, strict=True)):
        keys, places = normal(number, length, head_dim, dtype=dtype).to(kernel_device), torch.arange(length)
        slots = (table[places // block_size] * block_size + places % block_size).to(kernel_device, torch.int32)
        positions = places.to(kernel_device, torch.int32)
        nothing = torch.zeros(length, num_heads, head_dim, dtype=dtype, device=kernel_device)
        store_index(nothing, keys, positions, slots, *tables_of_rope, pool)
        keys_of_rows.append(rotated(keys, positions))
    assert pool[:, 0].isnan().all()
    assert pool[..., head_dim:].isnan().all()
    num_tokens = len(step.positions)
    queries = normal(10, num_tokens, num_heads, head_dim, dtype=dtype).to(kernel_device)
    hidden, weight = normal(11, num_tokens, 2100, dtype=dtype), normal(13, num_heads, 2100) / 46
    splits = torch.full((num_splits(2100), num_tokens, num_heads), torch.nan, device=kernel_device)
    weigh_heads(hidden.to(kernel_device), weight.to(kernel_device), splits)
    weights = splits.sum(0)
    torch.testing.assert_close(weights.cpu(), (hidden.double() @ weight.double().t()).float(), rtol=1e-5, atol=1e-5)
    own = rotated(queries, step.positions)
    no_slots = torch.full_like(step.positions, -1)
    store_index(
        queries,
        normal(12, num_tokens, head_dim, dtype=dtype).to(kernel_device),
        step.positions,
        no_slots,
        *tables_of_rope,
        pool,
    )
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(queries, own, **tolerance)
    scores = torch.full((num_tokens, CONTEXT), torch.nan, device=kernel_device)
    for first in (0, 6):
        score_keys(queries, splits, pool, step, scores[first : first + 6 if first == 0 else None], first, num_chosen)
    token = 0
    for keys, (count, length) in zip(keys_of_rows, rows, strict=True):
        for position in range(length - count, length):
            met = torch.relu(queries[token].double() @ keys[: position + 1].double().t())
            expected = (met * weights[token, :, None].double()).sum(0)
            if position >= num_chosen:
                found = scores[token, : position + 1].double()
                torch.testing.assert_close(
                    found,
                    expected,
                    **({"rtol": 2**-5, "atol": 0.2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}),
                )
            else:
                assert scores[token].isnan().all()
            assert scores[token, position + 1 :].isnan().all()
            token += 1
    assert scores[token:].isnan().all()


def test_vectors_are_blocks_of_one():
    pool = torch.arange(3 * 2 * 4 * 5).view(3, 2, 4, 5)
    assert torch.equal(as_blocks_of_one(pool)[2 * 8 + 3, 0, 0], pool[2, 0, 3])
    assert key_index.pool_constants(pool)["BEFORE_KEYS"] == 20
