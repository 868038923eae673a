"""Lookups, gathers and scatters beside the oracle; what is not named must stay as it is, or not be read."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import reference
from headway_kernels.gpu.rows import (
    CHANNELS_PER_PROGRAM,
    ENTRIES_PER_PROGRAM,
    apply_edits,
    expand_rows,
    gather_rows,
    store_sampled,
)

MAX_ROWS = 7
MAX_BLOCKS = 40
COUNTS = st.lists(st.integers(0, 5), max_size=MAX_ROWS) | st.lists(
    st.sampled_from((0, 1, ENTRIES_PER_PROGRAM)), max_size=3
)


def column(values, device):
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def starts_of(counts):
    return list(itertools.accumulate(counts, initial=0))


def stores(device, block_size):
    """A token store and block tables in which every entry is different from every other."""
    width = MAX_BLOCKS * block_size
    token_store = torch.arange(MAX_ROWS * width, dtype=torch.int32, device=device).view(MAX_ROWS, width)
    tables = torch.arange(MAX_ROWS * MAX_BLOCKS, dtype=torch.int32, device=device).view(MAX_ROWS, MAX_BLOCKS)
    return token_store, tables


@settings(max_examples=15)
@given(
    index=st.lists(st.integers(-1, 4), max_size=4),
    width=st.integers(1, 40) | st.integers(CHANNELS_PER_PROGRAM - 1, CHANNELS_PER_PROGRAM + 1),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.int32)),
)
def test_gather_rows(kernel_device, index, width, dtype):
    source = torch.arange(5 * (width + 1), device=kernel_device).view(5, -1).to(dtype)[:, :width]
    out = torch.full((len(index), width), 77, device=kernel_device, dtype=dtype)
    expected = out.clone()
    reference.gather_rows(source, column(index, kernel_device), expected)
    gather_rows(source, column(index, kernel_device), out)
    assert torch.equal(out, expected)


@settings(max_examples=40)
@given(
    data=st.data(),
    counts=COUNTS,
    block_size=st.sampled_from((1, 5, 16)),
    padding_entries=st.integers(0, 3),
    padding_tokens=st.sampled_from((0, 1, 9, ENTRIES_PER_PROGRAM)),
)
def test_expand_rows(kernel_device, data, counts, block_size, padding_entries, padding_tokens):
    token_store, tables = stores(kernel_device, block_size)
    rows = data.draw(st.permutations(range(MAX_ROWS)))[: len(counts)]
    firsts = [data.draw(st.integers(0, MAX_BLOCKS * block_size)) for _ in counts]
    firsts = [max(min(first, MAX_BLOCKS * block_size - count), 0) for first, count in zip(firsts, counts, strict=True)]
    counts = [min(count, MAX_BLOCKS * block_size) for count in counts] + [0] * padding_entries
    rows, firsts = rows + [-1] * padding_entries, firsts + [2**31 - 1] * padding_entries
    num_tokens = sum(counts) + padding_tokens
    columns = [column(values, kernel_device) for values in (rows, starts_of(counts), firsts)]
    outputs = [torch.full((num_tokens,), 99, dtype=torch.int32, device=kernel_device) for _ in range(3)]
    expected = [output.clone() for output in outputs]
    reference.expand_rows(*columns, token_store, tables, *expected, block_size=block_size)
    expand_rows(*columns, token_store, tables, *outputs, block_size=block_size)
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


@settings(max_examples=30)
@given(data=st.data(), counts=COUNTS, padding_tokens=st.integers(0, 3))
def test_apply_edits(kernel_device, data, counts, padding_tokens):
    token_store, tables = stores(kernel_device, 5)
    rows = data.draw(st.permutations(range(MAX_ROWS)))[: len(counts)]
    rows = [row if data.draw(st.booleans()) else -1 for row in rows]
    places = st.tuples(st.integers(0, MAX_ROWS - 1), st.integers(0, MAX_BLOCKS - 1))
    edits = data.draw(st.lists(places, unique=True, max_size=6))
    edits += [(-1, 2**31 - 1)] * data.draw(st.integers(0, 2))
    columns = {
        "edit_rows": column((row for row, _ in edits), kernel_device),
        "edit_places": column((place for _, place in edits), kernel_device),
        "edit_blocks": column(range(1000, 1000 + len(edits)), kernel_device),
        "token_rows": column(rows, kernel_device),
        "token_starts": column(starts_of(counts), kernel_device),
        "tokens": column(range(5000, 5000 + sum(counts) + padding_tokens), kernel_device),
    }
    expected = token_store.clone(), tables.clone()
    reference.apply_edits(*expected, **columns)
    apply_edits(token_store, tables, **columns)
    assert torch.equal(token_store, expected[0])
    assert torch.equal(tables, expected[1])


@settings(max_examples=15)
@given(
    places=st.lists(st.tuples(st.integers(-1, MAX_ROWS - 1), st.integers(0, 19)), unique=True, max_size=6),
    data=st.data(),
)
def test_store_sampled(kernel_device, places, data):
    token_store, _ = stores(kernel_device, 1)
    sampled = column((data.draw(st.integers(-1, 100)) for _ in places), kernel_device)
    rows, positions = (column((place[axis] for place in places), kernel_device) for axis in (0, 1))
    expected = token_store.clone()
    reference.store_sampled(sampled, rows, positions, expected)
    store_sampled(sampled, rows, positions, token_store)
    assert torch.equal(token_store, expected)
