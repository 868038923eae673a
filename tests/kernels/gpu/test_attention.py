"""The attention kernels beside their oracle, and results that depend on neither company nor grid."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_batches import TOLERANCE, UNTOUCHED, Batch, Shape
from headway_kernels import kv_codes
from headway_kernels.gpu.attention import paged as attention
from headway_kernels.gpu.attention.paged import AttentionWorkspace, plan_attention
from headway_kernels.gpu.attention.tiles import MAX_SPLITS, cut_decode, start_of_share
from headway_kernels.gpu.attention.tuning import AttentionTuning, attention_tuning, tile_sizes


def check(shape, device):
    batch = Batch(shape, device)
    out = batch.attend()
    expected = batch.expected()
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=tolerance, atol=tolerance)
    assert (out[len(expected) :] == UNTOUCHED).all()


@st.composite
def rows_of(draw, longest):
    """Padding, decodes and chunks, some of them new; lengths are often multiples of blocks and tiles."""
    length = st.one_of(
        st.integers(1, longest), st.sampled_from([1, 8, 16, 32, 64, 65, 128]).filter(lambda n: n <= longest)
    )
    rows = []
    for kind in draw(st.lists(st.sampled_from(["padding", "decode", "chunk", "new"]), min_size=1, max_size=4)):
        positions = draw(length)
        tokens = {"padding": 0, "decode": 1, "new": positions}.get(kind)
        rows.append((draw(st.integers(1, min(positions, 40))) if tokens is None else tokens, positions))
    return tuple(rows)


@st.composite
def shapes(draw, head_dims, longest, max_kv_heads):
    soft_cap = draw(st.none() | st.sampled_from([2.0, 50.0]))
    return Shape(
        rows=draw(rows_of(longest)),
        head_dim=draw(st.sampled_from(head_dims)),
        num_kv_heads=draw(st.integers(1, max_kv_heads)),
        group=draw(st.integers(1, 8)),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        window=draw(st.none() | st.integers(1, longest)),
        soft_cap=soft_cap,
        has_sinks=draw(st.booleans()),
        alibi=draw(st.none() | st.sampled_from(["exact", "rounded"])) if soft_cap is None else None,
        query_tile=draw(st.sampled_from([16, 64])),
        key_tile=draw(st.sampled_from([32, 64])),
        has_codes=draw(st.booleans()),
        num_shared=draw(st.sampled_from([0, 0, 4, 16])),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=15)
@given(shape=shapes(head_dims=[8, 12, 16], longest=150, max_kv_heads=2))
def test_matches_reference_with_tiny_heads(shape, kernel_device):
    check(shape, kernel_device)


@settings(max_examples=8)
@given(shape=shapes(head_dims=[64, 80, 96, 128], longest=70, max_kv_heads=1))
def test_matches_reference_with_usual_heads(shape, kernel_device):
    check(shape, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_matches_reference_in_16_bits(dtype, soft_cap, kernel_device):
    rows = ((1, 5), (0, 0), (20, 70), (1, 300), (9, 9))
    check(Shape(rows, head_dim=80, num_kv_heads=1, group=3, dtype=dtype, soft_cap=soft_cap, window=270), kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_give_the_bits_of_the_numbers_that_they_stand_for(dtype, kernel_device):
    rows = ((1, 5), (0, 0), (20, 70), (1, 600), (9, 9))
    shape = Shape(rows, head_dim=24, num_kv_heads=2, group=3, dtype=dtype, window=300, has_sinks=True, has_codes=True)
    batch = Batch(shape, kernel_device)
    found = batch.attend()
    batch.pool = kv_codes.decoded(batch.pool, dtype)
    assert torch.equal(found, batch.attend())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_key_that_is_no_number_spoils_the_queries_that_see_it(kernel_device):
    """As it does where it is stored as it is: its row fails, and no other."""
    batch = Batch(Shape(((1, 40), (10, 30)), has_codes=True), kernel_device)
    usual, (_, exponents) = batch.attend(), kv_codes.parts(batch.pool)
    place = batch.rows.block_tables[batch.rows.rows[1], 25 // batch.shape.block_size]
    exponents[place.long(), 0, 25 % batch.shape.block_size] = 255
    spoilt = batch.attend()
    first_head = slice(0, batch.shape.group * batch.shape.head_dim)
    # The last of the tokens 20 to 29 see position 25.
    assert spoilt[6:11, first_head].isnan().all()
    assert torch.equal(spoilt[:6], usual[:6])
    assert torch.equal(spoilt[6:11, first_head.stop :], usual[6:11, first_head.stop :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_codes", [False, True])
def test_rows_of_latent_attention(dtype, has_codes, kernel_device):
    """In groups of heads that do not fill a tile, in splits, chunks and padding."""
    rows = ((1, 5), (0, 0), (20, 70), (1, 600), (9, 9))
    latent = {"head_dim": 48, "num_shared": 16, "num_kv_heads": 2, "group": 5}
    check(Shape(rows, **latent, dtype=dtype, has_codes=has_codes, key_tile=32), kernel_device)


def test_blocks_may_lie_apart(kernel_device):
    """As where layers of several sizes stand behind each other in a block."""
    shape = Shape(((1, 300), (20, 70), (9, 9), (0, 0)), window=250)
    assert torch.equal(Batch(replace(shape, apart=192), kernel_device).attend(), Batch(shape, kernel_device).attend())


@pytest.mark.parametrize("group", [9, 16, 20])
def test_large_groups(group, kernel_device):
    check(Shape(((1, 40), (6, 40)), num_kv_heads=1, group=group), kernel_device)


@pytest.mark.parametrize("window", [None, 1, 100, 300, 4000])
def test_decodes_of_many_splits(window, kernel_device):
    rows = ((1, 600), (1, 4097), (1, 256), (1, 257), (0, 0))
    check(Shape(rows, num_kv_heads=1, block_size=32, window=window, key_tile=128, has_sinks=window != 1), kernel_device)


def test_extreme_logits(kernel_device):
    """Weights that underflow and logits far from zero, in splits and tiles that do not agree on the maximum."""
    batch = Batch(Shape(((1, 600), (20, 150))), kernel_device)
    out, expected = batch.attend(scale=40.0), batch.expected(scale=40.0)
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alibi", ["exact", "rounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_fall_with_distance(alibi, dtype, kernel_device):
    """In decodes of several splits, in chunks, and where places have more digits than bfloat16."""
    rows = ((1, 1), (0, 0), (20, 350), (1, 600), (9, 9))
    check(Shape(rows, head_dim=16, num_kv_heads=2, group=2, alibi=alibi, dtype=dtype), kernel_device)


COMPANY = Shape(((1, 300), (0, 0), (17, 90), (1, 1), (1, 600), (20, 20), (2, 70)), num_kv_heads=1, window=280)


@pytest.mark.parametrize("num_shared", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_is_the_row_in_company(dtype, num_shared, kernel_device):
    batch = Batch(replace(COMPANY, dtype=dtype, num_shared=num_shared), kernel_device)
    together = batch.attend()
    for index in range(len(COMPANY.rows)):
        tokens, rows = batch.alone(index)
        alone = batch.attend(batch.query[tokens], rows)
        assert torch.equal(alone, together[tokens]), index


@pytest.mark.parametrize("window", [None, 700])
def test_the_number_of_items_changes_nothing(window, kernel_device, monkeypatch):
    """As in a step of many rows: an item then is several splits, or the whole row."""
    shape = Shape(((1, 1044), (1, 300), (1, 1537), (1, 513)), num_kv_heads=2, block_size=32, window=window)
    batch = Batch(shape, kernel_device)
    usual = batch.attend()
    assert batch.rows.splits_per_item.item() == 1
    assert batch.rows.split_ends.tolist() == [4, 5, 11, 13]
    for most, together in ((20, 2), (8, 4), (1, 13)):
        monkeypatch.setattr(attention, "MOST_ITEMS", most)
        assert torch.equal(batch.attend(), usual), most
        assert batch.rows.splits_per_item.item() == together


@pytest.mark.parametrize("first", [2, 13, 33, 64])
def test_where_a_chunk_is_cut_changes_nothing(first, kernel_device):
    shape = Shape(((70, 200),), head_dim=64, group=4, block_size=16, dtype=torch.bfloat16)
    batch = Batch(shape, kernel_device)
    whole, parts = batch.attend(), []
    for begin, end in ((0, first), (first, 70)):
        lengths = torch.tensor([0, end - begin]), torch.tensor([130 + end])
        parts.append(
            batch.attend(batch.query[begin:end], batch.with_rows(batch.rows.rows, *lengths, batch.rows.block_tables))
        )
    assert torch.equal(torch.cat(parts), whole[:70])


def test_padding_to_a_larger_batch_changes_nothing(kernel_device):
    """As a graph captured for more rows replays it: with another variant of each kernel, too."""
    batch = Batch(COMPANY, kernel_device)
    usual, rows = batch.attend(), batch.rows
    missing = 130 - len(COMPANY.rows)
    starts = torch.cat([rows.query_start, rows.query_start[-1:].repeat(missing)])
    padding = rows.rows.new_full((missing,), 2**30)
    lengths = torch.cat([rows.kv_length, padding])
    padded = batch.with_rows(torch.cat([rows.rows, padding]), starts, lengths, rows.block_tables)
    batch.workspace = AttentionWorkspace.allocate(
        len(lengths), COMPANY.group * COMPANY.num_kv_heads, COMPANY.head_dim, kernel_device
    )
    assert torch.equal(batch.attend(rows=padded), usual)


def test_the_number_of_programs_changes_nothing(kernel_device):
    batch = Batch(COMPANY, kernel_device)
    usual = batch.attend()
    for number in (1, 7):
        tuning = AttentionTuning(
            replace(COMPANY.tuning.decode, programs_per_multiprocessor=number),
            replace(COMPANY.tuning.chunk, programs_per_multiprocessor=number),
        )
        assert torch.equal(batch.attend(tuning=tuning), usual)


def test_only_the_kinds_that_the_step_has(kernel_device):
    batch = Batch(COMPANY, kernel_device)
    usual = batch.attend()
    starts = batch.rows.query_start.tolist()
    decodes = torch.zeros(len(usual), dtype=torch.bool)
    for low, (tokens, _) in zip(starts, COMPANY.rows, strict=False):
        decodes[low] |= tokens == 1
    decodes = decodes[:, None].to(kernel_device)
    untouched = torch.full_like(usual, UNTOUCHED)
    assert torch.equal(batch.attend(has_chunks=False), usual.where(decodes, untouched))
    assert torch.equal(batch.attend(has_decodes=False), usual.where(~decodes, untouched))


def test_plan_counts_splits_and_tiles(kernel_device, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (300,), generator=draw) * torch.randint(1, 30, (300,), generator=draw) // 2
    lengths = tokens + torch.randint(0, 200_000, (300,), generator=draw)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)])
    batch = Batch(Shape(((1, 1),)), kernel_device)
    rows = batch.with_rows(torch.arange(300), starts, lengths, torch.zeros((300, 1)))
    monkeypatch.setattr(attention, "MOST_ITEMS", 10**9)
    plan_attention(rows, 8)
    assert rows.splits_per_item.item() == 1
    tiles = torch.where(tokens > 1, -(-tokens // rows.tokens_per_tile), 0)
    assert rows.tile_ends.tolist() == tiles.cumsum(0).tolist()
    splits = rows.split_ends.diff(prepend=rows.split_ends.new_zeros(1)).cpu()
    assert (splits[tokens != 1] == 0).all()
    counts, lengths = splits[tokens == 1], lengths[tokens == 1]
    # Never more than allowed, never so many that they are short, and all that may be had of a long row.
    assert counts.min() >= 1
    assert counts.max() == MAX_SPLITS.value
    assert ((counts == 1) | (lengths >= 256 * counts)).all()
    assert (counts[lengths > 60_000] == MAX_SPLITS.value).all()


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_a_large_batch_has_no_more_items_than_fill_a_device(num_kv_heads, kernel_device):
    starts = torch.arange(257)
    rows = Batch(Shape(((1, 1),)), kernel_device).with_rows(
        torch.arange(256), starts, torch.full((256,), 4100), torch.zeros((256, 1))
    )
    plan_attention(rows, num_kv_heads)
    together = -(-256 * 16 * num_kv_heads // attention.MOST_ITEMS)
    assert rows.splits_per_item.item() == together
    assert rows.split_ends[-1].item() == 256 * -(-16 // together)


@triton.jit
def cuts_kernel(lengths, window, counts, starts, KEY_TILE: tl.constexpr, HAS_WINDOW: tl.constexpr):  # noqa: N803
    """The tiles and splits of each length, and where the first 32 splits begin."""
    place = tl.program_id(0)
    _, num_tiles, num_splits = cut_decode(tl.load(lengths + place), window, KEY_TILE, HAS_WINDOW)
    tl.store(counts + 2 * place, num_tiles)
    tl.store(counts + 2 * place + 1, num_splits)
    split = tl.arange(0, 32)
    tl.store(starts + 32 * place + split, start_of_share(split, num_tiles, num_splits))


@pytest.mark.parametrize(("window", "key_tile"), [(None, 64), (None, 128), (4096, 16), (300, 64)])
def test_splits_are_equal_but_for_a_tile(window, key_tile, kernel_device):
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, 200_000, (20,), generator=draw)
    lengths = torch.cat([torch.tensor([1, 255, 256, 511, 512, 1044, 4097]), drawn]).to(kernel_device, torch.int32)
    counts, starts = lengths.new_empty(len(lengths), 2), lengths.new_empty(len(lengths), 32)
    cuts_kernel[(len(lengths),)](lengths, window or 0, counts, starts, key_tile, window is not None)
    for length, (num_tiles, num_splits), begins in zip(lengths.tolist(), counts.tolist(), starts.tolist(), strict=True):
        seen = min(length, window or length)
        assert num_splits == max(1, min(seen // 256, MAX_SPLITS.value))
        assert begins[0] == 0
        assert begins[num_splits] == num_tiles
        sizes = [end - begin for begin, end in pairwise(begins[: num_splits + 1])]
        assert max(sizes) - min(sizes) <= 1 <= min(sizes)
    if key_tile == 64 and window is None:
        assert starts[5, :5].tolist() == [0, 4, 8, 12, 17]  # 1044 positions: three times 256, and 276


def test_the_devices_own_tuning(kernel_device):
    """As a backend calls it, with nothing said of tiles."""
    shape = Shape(((1, 300), (70, 150), (0, 0)), head_dim=64, num_kv_heads=1, block_size=16)
    tuning = attention_tuning(kernel_device, tile_sizes(shape.head_dim, shape.dtype))
    batch = Batch(replace(shape, query_tile=tuning.chunk.query_tile), kernel_device)
    out, expected = batch.attend(tuning=None), batch.expected()
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=3e-6, atol=3e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a pool of more elements than an int32 counts")
def test_blocks_past_two_to_the_31_elements(kernel_device):
    shape = Shape(((1, 300), (20, 40)), head_dim=128, block_size=16, num_kv_heads=8, dtype=torch.bfloat16)
    batch = Batch(shape, kernel_device)
    expected = batch.attend()
    small = batch.pool
    batch.pool = small.new_empty((2**31 // small[0].numel() + len(small), *small.shape[1:]))
    offset = len(batch.pool) - len(small)
    batch.pool[offset:] = small
    tables = batch.rows.block_tables
    batch.rows = replace(batch.rows, block_tables=torch.where(tables < len(small), tables + offset, tables))
    assert torch.equal(batch.attend(), expected)
