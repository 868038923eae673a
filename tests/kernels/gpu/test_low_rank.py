"""Low-rank additions beside float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from device_weights import normal
from headway_kernels.gpu.experts.grouped import ExpertPairs, sort_pairs
from headway_kernels.gpu.experts.low_rank import add_low_rank_of_pairs
from headway_kernels.gpu.linear.low_rank import (
    ENTRY,
    TILE,
    add_low_rank,
    add_low_rank_of_heads,
    most_tiles,
    workspace_size,
)
from headway_kernels.routing import Routing

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
MOST_RANK = 40
SITES = 3


def adapter(seed, rank, num_inputs, num_outputs, device):
    """Matrices of the middle site, and a table that has them there alone."""
    down = normal(seed, rank, num_inputs, device=device) * num_inputs**-0.5
    up = normal(seed + 1, num_outputs, rank, device=device)
    table = torch.zeros(SITES, ENTRY, dtype=torch.int64)
    table[1] = torch.tensor([down.data_ptr(), up.data_ptr(), rank])
    return down, up, table.to(device)


def tiles_of(adapters, of_tokens, num_tiles, device):
    tables, tokens = torch.zeros(num_tiles, dtype=torch.int64), torch.full((num_tiles, TILE), -1, dtype=torch.int32)
    number = 0
    for place, (_, _, table) in enumerate(adapters):
        own = [token for token, chosen in enumerate(of_tokens) if chosen == place]
        for first in range(0, len(own), TILE):
            part = own[first : first + TILE]
            tables[number] = table.data_ptr()
            tokens[number, : len(part)] = torch.tensor(part, dtype=torch.int32)
            number += 1
    return tables.to(device), tokens.to(device)


def added(x, out, adapters, of_tokens, site=1):
    """The sum, in the middle of NaNs."""
    wide = torch.full((len(out) + 1, out.shape[1] + 3), torch.nan, dtype=out.dtype, device=out.device)
    wide[:-1, : out.shape[1]] = out
    tables, tokens = tiles_of(adapters, of_tokens, most_tiles(len(x), len(adapters)), x.device)
    workspace = torch.full((workspace_size(*x.shape, MOST_RANK),), torch.nan, device=x.device)
    add_low_rank(x, wide[:-1, : out.shape[1]], tables, tokens, workspace, site=site, most_rank=MOST_RANK)
    assert wide[-1].isnan().all()
    assert wide[:, out.shape[1] :].isnan().all()
    return wide[:-1, : out.shape[1]]


@settings(max_examples=20)
@given(
    of_tokens=st.lists(st.sampled_from((-1, 0, 1, 2)), min_size=1, max_size=40),
    ranks=st.tuples(*[st.integers(1, MOST_RANK)] * 3),
    num_inputs=st.integers(1, 200) | st.sampled_from((1024, 2100)),
    num_outputs=st.integers(1, 300),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    seed=st.integers(0, 2**31),
)
@example(of_tokens=[-1, 2, -1], ranks=(1, 1, 9), num_inputs=2100, num_outputs=211, dtype=torch.bfloat16, seed=741)
def test_equals_float64(kernel_device, of_tokens, ranks, num_inputs, num_outputs, dtype, seed):
    adapters = [adapter(seed + 2 * i, rank, num_inputs, num_outputs, kernel_device) for i, rank in enumerate(ranks)]
    x = normal(seed + 9, len(of_tokens), num_inputs, dtype=dtype, device=kernel_device)
    before = normal(seed + 10, len(of_tokens), num_outputs, dtype=dtype, device=kernel_device)
    expected = before.double()
    for place, (down, up, _) in enumerate(adapters):
        own = torch.tensor([chosen == place for chosen in of_tokens], device=kernel_device)
        expected[own] += x[own].double() @ down.double().t() @ up.double().t()
    found = added(x, before, adapters, of_tokens)
    # Beside the exact numbers: rounded, one in the middle of two may be the other one, a whole step away.
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2e-4)


def test_a_token_does_not_depend_on_its_company(kernel_device):
    adapters = [adapter(2 * i, 9 + i, 1500, 150, kernel_device) for i in range(3)]
    x, before = normal(7, 40, 1500, device=kernel_device), normal(8, 40, 150, device=kernel_device)
    of_tokens = [token % 4 - 1 for token in range(40)]
    together = added(x, before, adapters, of_tokens)
    for token in (0, 1, 17, 39):
        alone = added(x[token : token + 1], before[token : token + 1], adapters, of_tokens[token : token + 1])
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("own_downs", [True, False])
@pytest.mark.parametrize("dtype", sorted(TOLERANCE, key=str))
def test_heads_equal_float64(kernel_device, own_downs, dtype):
    """Of two adapters and of none; heads are parts of wider rows, as in latent attention."""
    num_heads, num_inputs, num_outputs, of_tokens = 3, 1100, 150, [0, -1, 1, 1, 0] * 5
    adapters, matrices = [], []
    for seed, rank in enumerate((3, 17)):
        down = normal(seed, *[num_heads] * own_downs, rank, num_inputs, device=kernel_device) / 33
        up = normal(seed + 5, *[num_heads] * (not own_downs), num_outputs, rank, device=kernel_device)
        table = torch.tensor([[0] * ENTRY, [down.data_ptr(), up.data_ptr(), rank]], device=kernel_device)
        matrices.append((down, up))
        adapters.append((None, None, table))
    tables, tokens = tiles_of(adapters, of_tokens, most_tiles(len(of_tokens), 2), kernel_device)
    shape = (len(of_tokens), num_heads)
    x = normal(7, *shape, num_inputs + 4, dtype=dtype, device=kernel_device)[..., 4:]
    wide = normal(8, *shape, num_outputs + 3, dtype=dtype, device=kernel_device)
    found, before = wide[..., 3:], wide.clone()
    expected = found.double()
    for token, chosen in enumerate(of_tokens):
        for head in range(num_heads) if chosen >= 0 else ():
            down, up = (each[head] if each.dim() == 3 else each for each in matrices[chosen])
            expected[token, head] += up.double() @ (down.double() @ x[token, head].double())
    workspace = torch.full((workspace_size(x[..., 0].numel(), num_inputs, 17),), torch.nan, device=kernel_device)
    place = {"site": 1, "most_rank": 17}
    add_low_rank_of_heads(x, found, tables, tokens, workspace, **place, own_downs=own_downs)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=2e-4)
    assert torch.equal(wide[..., :3], before[..., :3])


@pytest.mark.parametrize("gathers", [True, False])
def test_pairs_of_tokens_and_experts_equal_float64(kernel_device, gathers):
    """Of two adapters, of none, and of padding; the inputs have two splits, and the workspace has not all pairs."""
    routing, num_tokens, (num_inputs, num_outputs) = Routing(num_experts=5, num_chosen=2), 9, (1100, 150)
    matrices = [
        (
            normal(i, 5, rank, num_inputs, device=kernel_device) / 33,
            normal(i, 5, num_outputs, rank, device=kernel_device),
        )
        for i, rank in enumerate((3, 17))
    ]
    entries = [[[0] * 3, [down.data_ptr(), up.data_ptr(), up.shape[2]]] for down, up in matrices]
    tables = torch.tensor(entries, dtype=torch.int64, device=kernel_device)
    of_tokens = [-1 if token % 3 == 2 else token % 3 for token in range(num_tokens)]
    addresses = torch.tensor([0 if own < 0 else tables[own].data_ptr() for own in of_tokens], device=kernel_device)
    pairs = ExpertPairs.allocate(num_tokens, routing, kernel_device)
    pairs.chosen.copy_(torch.tensor([[token % 4, 4] for token in range(num_tokens)]))
    pairs.chosen[3] = 5  # padding
    sort_pairs(pairs)
    rows = num_tokens if gathers else 2 * num_tokens
    x, before = normal(7, rows, num_inputs, device=kernel_device), normal(8, 18, num_outputs, device=kernel_device)
    expected, found = before.double(), before.clone()
    for place, pair in enumerate(pairs.order[: int(pairs.ends[-1])].tolist()):
        token, expert = pair // 2, int(pairs.chosen.flatten()[pair])
        if of_tokens[token] >= 0:
            down, up = (both[expert].double() for both in matrices[of_tokens[token]])
            expected[place if gathers else pair] += up @ (down @ x[token if gathers else place].double())
    workspace = torch.full((workspace_size(7, num_inputs, MOST_RANK),), torch.nan, device=kernel_device)
    add_low_rank_of_pairs(x, found, addresses, pairs, workspace, site=1, most_rank=MOST_RANK, gathers=gathers)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=2e-4)


def test_a_site_without_an_addition_stays_as_it_is(kernel_device):
    adapters = [adapter(0, 4, 30, 20, kernel_device)]
    x, before = normal(1, 5, 30, device=kernel_device), normal(2, 5, 20, device=kernel_device)
    assert torch.equal(added(x, before, adapters, [0] * 5, site=2), before)
