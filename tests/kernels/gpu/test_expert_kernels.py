"""The kernels of experts beside their oracles: the choice, the sorted pairs, the product, the sum."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import reference
from headway_kernels.cpu.coded_weight import CodedWeight, rounded_to_4_bits
from headway_kernels.experts import choose_experts
from headway_kernels.gpu.experts.grouped import (
    ExpertPairs,
    add_pairs,
    choose,
    multiply_pairs,
    sort_pairs,
    weigh_pairs,
)
from headway_kernels.gpu.linear.weights import coded, dense, quantized, stacked
from headway_kernels.routing import Routing, Scoring

TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7}}
ROUTINGS = {
    "mixtral": Routing(num_experts=8, num_chosen=2, is_normalised=True),
    "qwen": Routing(num_experts=6, num_chosen=4),
    "all": Routing(num_experts=5, num_chosen=5, is_normalised=True),
    "phimoe": Routing(num_experts=6, num_chosen=2, scoring=Scoring.NEAR, tolerance=0.4),
    "one": Routing(num_experts=7, num_chosen=1),
    "kolibri": Routing(num_experts=9, num_chosen=3, scoring=Scoring.SIGMOID, corrects_outputs=True),
    "deepseek-v2": Routing(num_experts=20, num_chosen=3, num_groups=4, num_open_groups=2, scaling=1.5),
    "deepseek-v3": Routing(
        num_experts=24,
        num_chosen=3,
        scoring=Scoring.SIGMOID,
        num_groups=3,
        num_open_groups=2,
        scores_per_group=2,
        is_normalised=True,
        scaling=2.5,
    ),
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slots_of(num_tokens, padding=()):
    slots = torch.arange(num_tokens, dtype=torch.int32)
    slots[list(padding)] = -1
    return slots


@dataclass
class Chosen:
    """What a step's tokens chose, on a device."""

    device: torch.device
    routing: Routing
    logits: torch.Tensor
    correction: torch.Tensor | None = None
    padding: tuple[int, ...] = ()
    factors: torch.Tensor | None = None

    def pairs(self):
        found = ExpertPairs.allocate(len(self.logits) + 3, self.routing, self.device).of(len(self.logits))
        correction = None if self.correction is None else self.correction.to(self.device)
        slots = slots_of(len(self.logits), self.padding).to(self.device)
        factors = None if self.factors is None else self.factors.to(self.device)
        choose(self.logits.to(self.device), slots, correction, found, self.routing, factors)
        sort_pairs(found)
        return found


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_that_of_plain_torch(kernel_device, routing, dtype):
    # A column more than experts, for a shared expert's gate; steps that round to no tie.
    logits = drawn(11, routing.num_experts + 1, seed=1).mul_(3).to(dtype)
    logits += torch.arange(routing.num_experts + 1).to(dtype) * 2**-5
    correction = drawn(routing.num_experts, seed=2) * 0.3 if routing.scoring is Scoring.SIGMOID else None
    factors = 1 + drawn(routing.num_experts, seed=3).square() if dtype == torch.float32 else None
    pairs = Chosen(kernel_device, routing, logits, correction, factors=factors).pairs()
    chosen, weights = choose_experts(routing, logits[:, :-1], correction)
    weights = weights if factors is None else weights * factors[chosen]
    assert pairs.chosen.tolist() == chosen.tolist()
    torch.testing.assert_close(pairs.weights.cpu(), weights, rtol=1e-5, atol=1e-6)


def test_equal_scores_and_what_is_no_number_choose_the_lowest(kernel_device):
    routing = ROUTINGS["mixtral"]
    logits = torch.zeros(4, 8)
    logits[1, 5:] = 1.0
    logits[2] = torch.nan
    logits[3, 4] = torch.inf
    pairs = Chosen(kernel_device, routing, logits).pairs()
    assert pairs.chosen.tolist() == [[0, 1], [5, 6], [0, 1], [0, 4]]
    assert pairs.weights.isfinite().all()


def test_pairs_are_sorted_by_expert_and_padding_belongs_to_none(kernel_device, monkeypatch):
    monkeypatch.setattr("headway_kernels.gpu.experts.grouped.PAIRS_PER_TURN", 16)  # several turns, the last one short
    routing = ROUTINGS["qwen"]
    pairs = Chosen(kernel_device, routing, drawn(19, 6), padding=(3, 18)).pairs()
    chosen = pairs.chosen.flatten().cpu()
    assert (chosen.view(19, 4)[[3, 18]] == 6).all()
    order = chosen.argsort(stable=True)[: 17 * 4]
    assert pairs.order[: len(order)].tolist() == order.tolist()
    assert pairs.ends.tolist() == chosen.bincount(minlength=7)[:6].cumsum(0).tolist()


def weights_of(kind, num_experts, outputs, inputs, device):
    """Weights of experts, and the numbers that they stand for."""
    numbers = [drawn(outputs, inputs, seed=i).to(device) * inputs**-0.5 for i in range(num_experts)]
    if kind == "dense":
        return dense(torch.stack(numbers)), torch.stack(numbers).cpu()
    if kind == "int4":
        codes = [rounded_to_4_bits(some) for some in numbers]
    else:
        order = torch.arange(inputs).flip(0).to(torch.int32) // 32
        codes = [
            CodedWeight(
                form=some.form,
                codes=some.codes,
                scales=some.scales,
                group=32,
                minima=some.scales * -some.scales.abs().sqrt(),
                group_of=order if inputs % 32 == 0 else None,
            )
            for some in map(rounded_to_4_bits, numbers)
        ]
    found = stacked([coded(some) for some in codes])
    return found, torch.stack([some.float() for some in codes]).cpu()


def product(device, kind, dtype, *, num_tokens=40, routing=ROUTINGS["mixtral"], outputs=70, inputs=96, bias=False):
    """The pairs' results beside the oracle's, of both directions; the experts of the last pairs have no tokens."""
    weight, numbers = weights_of(kind, routing.num_experts, outputs, inputs, device)
    numbers = numbers.to(dtype) if kind == "dense" else numbers
    if kind == "dense":
        weight = dense(weight.values.to(dtype))
    logits = drawn(num_tokens, routing.num_experts, seed=5)
    logits[:, -2:] -= 50
    pairs = Chosen(device, routing, logits, padding=(1,)).pairs()
    added = drawn(routing.num_experts, outputs, seed=7).to(dtype) if bias else None
    there = None if added is None else added.to(device)
    x = drawn(num_tokens, inputs, seed=8).to(dtype)
    real = pairs.order[: pairs.ends[-1]].long().cpu()
    expected = reference.multiply_pairs(x, numbers, added, pairs.chosen.cpu().clamp(max=routing.num_experts - 1))
    found = torch.full((len(pairs.order), outputs + 3), torch.nan, dtype=dtype, device=device)
    multiply_pairs(x.to(device), weight, there, found[:, :outputs], pairs, gathers=True)
    assert found[:, outputs:].isnan().all()
    assert found[len(real) :].isnan().all()
    torch.testing.assert_close(
        found[: len(real), :outputs].cpu(), expected.flatten(0, 1)[real].to(dtype), **TOLERANCE[dtype]
    )
    by_pair = drawn(len(pairs.order), inputs, seed=9).to(dtype)
    expected = reference.multiply_pairs(
        by_pair.view(num_tokens, -1, inputs), numbers, added, pairs.chosen.cpu().clamp(max=routing.num_experts - 1)
    )
    sorted_rows = torch.zeros_like(by_pair)
    sorted_rows[: len(real)] = by_pair[real]
    back = torch.full((len(pairs.order), outputs), torch.nan, dtype=dtype, device=device)
    multiply_pairs(sorted_rows.to(device), weight, there, back, pairs, gathers=False)
    torch.testing.assert_close(back[real].cpu(), expected.flatten(0, 1)[real].to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("kind", "dtype", "bias"),
    [
        ("dense", torch.float32, True),
        ("dense", torch.bfloat16, False),
        ("int4", torch.float32, False),
        ("int4-minima", torch.float32, True),
        ("int4-minima", torch.bfloat16, False),
    ],
)
def test_each_pair_meets_its_expert(kernel_device, kind, dtype, bias):
    product(kernel_device, kind, dtype, bias=bias)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_experts(kernel_device, kind):
    numbers = [drawn(20, 50, seed=i) for i in range(5)]
    weight = stacked([quantized(some.to(kernel_device), kind) for some in numbers])
    pairs = Chosen(kernel_device, ROUTINGS["all"], drawn(3, 5)).pairs()
    found = torch.empty(15, 20, device=kernel_device)
    x = drawn(3, 50)
    multiply_pairs(x.to(kernel_device), weight, None, found, pairs, gathers=True)
    expected = reference.multiply_pairs(x, torch.stack(numbers), None, pairs.chosen.cpu()).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0.1, atol=0.5)


@settings(max_examples=8)
@given(num_tokens=st.sampled_from((1, 2, 33, 90)), name=st.sampled_from(("mixtral", "all", "one")), bias=st.booleans())
@pytest.mark.deep
def test_any_number_of_tokens(kernel_device, num_tokens, name, bias):
    if num_tokens > 1:
        product(kernel_device, "dense", torch.float32, num_tokens=num_tokens, routing=ROUTINGS[name], bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("has_shared", "has_gate"), [(False, False), (True, False), (True, True)])
def test_pairs_are_added_in_their_order(kernel_device, dtype, has_shared, has_gate):
    routing = ROUTINGS["qwen"]
    pairs = Chosen(kernel_device, routing, drawn(5, 6), padding=(2,)).pairs()
    given_rows = drawn(20, 70, seed=3).to(dtype)
    given_rows[8:12] = torch.nan
    shared = drawn(5, 70, seed=4).to(dtype) if has_shared else None
    gates = drawn(5, seed=5).to(dtype) if has_gate else None
    there = [None if some is None else some.to(kernel_device) for some in (shared, gates)]
    out = torch.full((5, 70), torch.nan, dtype=dtype, device=kernel_device)
    add_pairs(given_rows.to(kernel_device), pairs, out, shared=there[0], gates=there[1])
    given_rows[8:12] = 0
    expected = reference.add_pairs(given_rows.view(5, 4, 70), pairs.weights.cpu(), shared=shared, gates=gates)
    torch.testing.assert_close(out.cpu(), expected.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighed_pairs_are_added_without_weights(kernel_device, dtype):
    routing = ROUTINGS["qwen"]
    pairs = Chosen(kernel_device, routing, drawn(5, 6), padding=(2,)).pairs()
    by_pair = drawn(20, 70, seed=3).to(dtype)
    order = pairs.order[:16].long().cpu()
    rows = torch.full((20, 73), torch.nan, dtype=dtype, device=kernel_device)
    rows[:16, :70] = by_pair[order].to(kernel_device)
    weigh_pairs(rows[:, :70], pairs)
    weights = pairs.weights.cpu().flatten()
    expected = by_pair.double() * weights.double()[:, None]
    torch.testing.assert_close(rows[:16, :70].cpu(), expected[order].to(dtype), **TOLERANCE[dtype])
    assert rows[:, 70:].isnan().all()
    out = torch.empty(5, 70, dtype=dtype, device=kernel_device)
    add_pairs(by_pair.to(kernel_device), pairs, out, shared=None, gates=None, weighs=False)
    sums = by_pair.double().view(5, 4, 70).sum(1)
    sums[2] = 0
    torch.testing.assert_close(out.cpu(), sums.to(dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_a_token_alone_is_the_token_in_company(kernel_device, kind):
    routing = ROUTINGS["mixtral"]
    weight, _ = weights_of(kind, 8, 70, 96, kernel_device)
    logits, x = drawn(70, 8, seed=1), drawn(70, 96, seed=2).to(kernel_device)

    def results(tokens):
        pairs = Chosen(kernel_device, routing, logits[tokens]).pairs()
        found = torch.empty(len(pairs.order), 70, device=kernel_device)
        multiply_pairs(x[tokens], weight, None, found, pairs, gathers=True)
        back = torch.empty_like(found)
        back[pairs.order.long()] = found
        out = torch.empty(len(x[tokens]), 70, device=kernel_device)
        add_pairs(back, pairs, out, shared=None, gates=None)
        return out

    together = results(slice(0, 70))
    for tokens in (slice(0, 1), slice(69, 70), slice(30, 37)):
        assert torch.equal(results(tokens), together[tokens])
