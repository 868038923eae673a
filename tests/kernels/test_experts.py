"""Experts: which are chosen, and what they give, in plain torch and on every variant of the CPU kernels."""

import pytest
import torch
from torch.nn import functional
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Kolibri1Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headway_executor.models.decoder import FeedForward
from headway_executor.models.experts import Experts
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, CodeForm
from headway_kernels.cpu.experts import PackedExperts, packed_expert
from headway_kernels.cpu.feed_forward import Activation
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm, installed_variants, runs_here
from headway_kernels.experts import Expert, choose_experts
from headway_kernels.routing import Routing, Scoring

VARIANTS = [path for path in installed_variants() if runs_here(path)]
HIDDEN, INNER, SHARED_INNER, NUM_EXPERTS = 36, 20, 44, 8
EPS = 1e-6
V2_GROUPS = Routing(num_experts=8, num_chosen=3, num_groups=4, num_open_groups=2, scaling=1.5)
V3 = Routing(
    num_experts=8,
    num_chosen=3,
    scoring=Scoring.SIGMOID,
    num_groups=2,
    num_open_groups=1,
    scores_per_group=2,
    is_normalised=True,
    scaling=2.5,
)
NEAR = Routing(num_experts=8, num_chosen=2, scoring=Scoring.NEAR, tolerance=0.4)
KOLIBRI = Routing(num_experts=8, num_chosen=3, scoring=Scoring.SIGMOID, corrects_outputs=True)
ROUTINGS = {
    "mixtral": Routing(num_experts=8, num_chosen=2, is_normalised=True),
    "qwen": Routing(num_experts=8, num_chosen=4),
    "all": Routing(num_experts=8, num_chosen=8, is_normalised=True),
    "deepseek-v2": V2_GROUPS,
    "deepseek-v3": V3,
    "phimoe": NEAR,
    "kolibri": KOLIBRI,
}


def drawn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- choosing ---------------------------------------------------------------------------------------------------------


def theirs(router):
    """A router of transformers with random weights: its choice in ascending order, for random rows."""
    with torch.no_grad():
        for seed, tensor in enumerate((*router.parameters(), *router.buffers())):
            tensor.copy_(drawn(*tensor.shape, seed=seed, scale=0.3))
        logits, weights, chosen = router.eval()(drawn(50, 32, seed=99))
    order = chosen.argsort(-1)
    return logits, chosen.gather(-1, order), weights.gather(-1, order)


SIZES = {"hidden_size": 32, "num_experts_per_tok": 3}
V2_SIZES = SIZES | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
ROUTERS = {
    "mixtral": (MixtralTopKRouter, MixtralConfig(**SIZES), Routing(num_experts=8, num_chosen=3, is_normalised=True)),
    "qwen2-moe": (Qwen2MoeTopKRouter, Qwen2MoeConfig(num_experts=8, **SIZES), Routing(num_experts=8, num_chosen=3)),
    "qwen3-moe": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts=8, norm_topk_prob=True, **SIZES),
        Routing(num_experts=8, num_chosen=3, is_normalised=True),
    ),
    "olmoe": (OlmoeTopKRouter, OlmoeConfig(num_experts=8, **SIZES), Routing(num_experts=8, num_chosen=3)),
    "gpt-oss": (
        GptOssTopKRouter,
        GptOssConfig(num_local_experts=8, **SIZES),
        Routing(num_experts=8, num_chosen=3, is_normalised=True),
    ),
    "deepseek-v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(topk_method="greedy", **V2_SIZES),
        Routing(num_experts=8, num_chosen=3, scaling=1.5),
    ),
    "deepseek-v2-groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(topk_method="group_limited_greedy", **V2_SIZES),
        V2_GROUPS,
    ),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(n_routed_experts=8, n_group=2, topk_group=1, routed_scaling_factor=2.5, **SIZES),
        V3,
    ),
    "kolibri": (Kolibri1TopKRouter, Kolibri1Config(num_experts=8, **SIZES), KOLIBRI),
    "phimoe": (PhimoeTopKRouter, PhimoeConfig(hidden_size=32, num_local_experts=8, router_jitter_noise=0.2), NEAR),
}


@pytest.mark.parametrize(("router", "config", "routing"), ROUTERS.values(), ids=ROUTERS)
def test_the_choice_is_that_of_transformers(router, config, routing):
    made = router(config)
    logits, expected, expected_weights = theirs(made)
    chosen, weights = choose_experts(routing, logits, getattr(made, "e_score_correction_bias", None))
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


# ---- the compiled kernels ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda path: path.stem)
def library(request):
    return CpuLibrary(request.param)


def an_expert(seed, inner=INNER, *, has_bias=False):
    return Expert(
        gate_up=drawn(2 * inner, HIDDEN, seed=seed, scale=0.2).bfloat16().float(),
        down=drawn(HIDDEN, inner, seed=seed + 1, scale=0.2).bfloat16().float(),
        gate_up_bias=drawn(2 * inner, seed=seed + 2) if has_bias else None,
        down_bias=drawn(HIDDEN, seed=seed + 3) if has_bias else None,
    )


class Layer:
    """Random experts with a router of the shape that ``routing`` wants."""

    def __init__(self, routing, *, shared="none", has_bias=False, activation="silu"):
        self.activation = activation
        self.routing = routing
        self.experts = [an_expert(10 * i, has_bias=has_bias) for i in range(NUM_EXPERTS)]
        self.shared = None if shared == "none" else an_expert(777, SHARED_INNER)
        self.gate = shared == "gated"
        self.router = drawn(NUM_EXPERTS + self.gate, HIDDEN, seed=5, scale=0.3)
        self.correction = drawn(NUM_EXPERTS, seed=6, scale=0.3) if routing.scoring is Scoring.SIGMOID else None
        self.norm = 0.5 + drawn(HIDDEN, seed=7).abs()

    def packed(self, library, form, coded=lambda weight: weight):
        """``coded`` makes codes of a weight, or numbers."""
        every = [*self.experts, self.shared] if self.shared else self.experts
        router = PackedLinear(library, self.router, None, WeightForm.FLOAT32)
        activation = Activation.SILU if self.activation == "silu" else Activation.CLAMPED_SWISH

        def pack(weight, bias, *, gated=False):
            return PackedLinear(library, weight, bias, form, gated=gated)

        packed = [
            packed_expert(
                library.panel,
                (coded(expert.gate_up), expert.gate_up_bias),
                (coded(expert.down), expert.down_bias),
                pack,
                activation,
            )
            for expert in every
        ]
        return PackedExperts(
            library, self.routing, router, packed, self.correction, has_gate=self.gate, activation=activation
        )

    def eager(self, rounded=lambda rows: rows):
        def given(expert):
            return FeedForward(
                lambda rows: functional.linear(rounded(rows), rounded(expert.gate_up), expert.gate_up_bias),
                self.activation,
                True,
                lambda inner: functional.linear(rounded(inner), rounded(expert.down), expert.down_bias),
            )

        return Experts(
            self.routing,
            lambda rows: functional.linear(rows, self.router[:NUM_EXPERTS]),
            tuple(map(given, self.experts)),
            self.correction,
            shared=None if self.shared is None else given(self.shared),
            shared_gate=(lambda rows: functional.linear(rows, self.router[NUM_EXPERTS:])) if self.gate else None,
        )

    def expected(self, hidden, rounded=lambda rows: rows):
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm
        return hidden + self.eager(rounded)(normed)


def in_8_bits(rows):
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


@pytest.mark.parametrize("form", [WeightForm.FLOAT32, WeightForm.BFLOAT16])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_compiled_experts_give_what_eager_operators_give(library, routing, shared, form):
    layer = Layer(routing, shared=shared, has_bias=shared == "none")
    packed, team = layer.packed(library, form), Team(library, 2)
    for num_rows in (1, 2, 13, 150):
        hidden = drawn(num_rows, HIDDEN, seed=num_rows)
        torch.testing.assert_close(packed(team, hidden, layer.norm, EPS), layer.expected(hidden), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", [WeightForm.FLOAT32, WeightForm.INT8])
def test_clamped_experts_give_what_eager_operators_give(library, form):
    layer = Layer(ROUTINGS["mixtral"], has_bias=True, activation="clamped_swish")
    packed, team = layer.packed(library, form), Team(library, 2)
    hidden, rounded = drawn(60, HIDDEN), in_8_bits if form is WeightForm.INT8 else lambda rows: rows
    tolerance = {"rtol": 0.01, "atol": 0.2} if form is WeightForm.INT8 else {"rtol": 2e-5, "atol": 2e-4}
    layer.norm *= 8  # Most gates and ups are out of bounds.
    torch.testing.assert_close(packed(team, hidden, layer.norm, EPS), layer.expected(hidden, rounded), **tolerance)


def test_gates_and_ups_are_clamped_as_in_transformers():
    theirs = GptOssExperts(GptOssConfig(num_local_experts=1, intermediate_size=INNER, hidden_size=HIDDEN))
    pairs = drawn(30, 2 * INNER, scale=9.0)
    apart = torch.cat([pairs[:, ::2], pairs[:, 1::2]], 1)
    ours = FeedForward(lambda rows: rows, "clamped_swish", True, lambda inner: inner)(apart)
    torch.testing.assert_close(ours, theirs._apply_gate(pairs))


def test_8_bit_experts_are_chosen_by_a_router_in_full_precision(library):
    layer = Layer(V3, shared="plain", has_bias=True)
    hidden = drawn(70, HIDDEN)
    given = layer.packed(library, WeightForm.INT8)(Team(library, 2), hidden, layer.norm, EPS)
    # A value between two codes may go to either.
    torch.testing.assert_close(given, layer.expected(hidden, in_8_bits), rtol=0.01, atol=0.05)


def company_changes_nothing(layer, packed, team):
    hidden = drawn(90, HIDDEN)
    together = packed(team, hidden, layer.norm, EPS)
    for rows in (slice(0, 1), slice(7, 9), slice(30, 61)):
        assert torch.equal(packed(team, hidden[rows], layer.norm, EPS), together[rows])
    return together


@pytest.mark.parametrize("form", WeightForm)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_rows_experts_give_the_same_bits_in_any_company(library, form, num_threads):
    layer = Layer(V3, shared="gated")
    company_changes_nothing(layer, layer.packed(library, form), Team(library, num_threads))


def codes_of(form, group, *, has_minima=False, is_scattered=False, rounds_inputs=False):
    """Codes of a weight's shape, which do not stand for it."""

    def coded(weight):
        draw = torch.Generator().manual_seed(weight.shape[0])
        outputs, inputs = weight.shape
        size = group or inputs
        groups = -(-inputs // size)
        codes = torch.randint(0, 127 if form is CodeForm.FP8 else 16, weight.shape, generator=draw, dtype=torch.uint8)
        return CodedWeight(
            form,
            codes.view(CODE_DTYPES[form]),
            torch.rand(outputs, groups, generator=draw) * (1e-3 if form is CodeForm.FP8 else 0.03),
            size,
            torch.rand(outputs, groups, generator=draw) * -0.2 if has_minima else None,
            torch.randint(0, groups, (inputs,), generator=draw, dtype=torch.int32) if is_scattered else None,
            rounds_inputs=rounds_inputs,
            table=tuple(range(-8, 8)) if form is CodeForm.TABLE4 else None,
        )

    return coded


@pytest.mark.parametrize("activation", ["silu", "clamped_swish"])
@pytest.mark.parametrize(
    "kind",
    [
        {"form": CodeForm.CODES4, "group": 16},
        {"form": CodeForm.CODES4, "group": 32, "has_minima": True},
        {"form": CodeForm.CODES4, "group": 16, "is_scattered": True},
        {"form": CodeForm.CODES8, "group": 16, "has_minima": True},
        {"form": CodeForm.CODES8, "group": None},
        {"form": CodeForm.FP8, "group": 48},
        {"form": CodeForm.TABLE4, "group": 32},
    ],
    ids=str,
)
def test_experts_of_codes_are_as_exact_as_experts_of_what_they_stand_for(library, kind, activation):
    """They have their bits, where the variant widens codes."""
    layer = Layer(V3, shared="gated" if activation == "silu" else "none", activation=activation)
    coded, team = codes_of(**kind), Team(library, 2)
    wide = layer.packed(library, WeightForm.FLOAT32, lambda weight: coded(weight).float())
    hidden = drawn(90, HIDDEN)
    found = company_changes_nothing(layer, layer.packed(library, WeightForm.FLOAT32, coded), team)
    expected = wide(team, hidden, layer.norm, EPS)
    if library.multiplies_digits and coded(drawn(32, HIDDEN)).has_blocks:
        assert (found - expected).norm() < 1e-6 * expected.norm()
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "kind",
    [
        {"form": CodeForm.CODES4, "group": 32},
        {"form": CodeForm.CODES4, "group": 16, "has_minima": True},
        {"form": CodeForm.CODES8, "group": 16},
        {"form": CodeForm.CODES8, "group": None},
        {"form": CodeForm.TABLE4, "group": 32},
    ],
    ids=str,
)
def test_experts_of_codes_round_their_inputs_if_they_may(library, kind):
    layer = Layer(V3, shared="gated")
    exact, rounded = (
        company_changes_nothing(
            layer, layer.packed(library, WeightForm.FLOAT32, codes_of(**kind, rounds_inputs=rounds)), Team(library, 2)
        )
        for rounds in (False, True)
    )
    assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 0.05


def test_experts_may_be_stored_in_different_ways(library):
    """One with codes whose inputs are rounded, which no product before it can pack, beside others."""
    layer = Layer(V3, shared="plain")

    def given(*, rounds):
        coded = codes_of(CodeForm.CODES8, 16, rounds_inputs=rounds)

        def of_shared(weight):
            return coded(weight) if weight.shape in ((HIDDEN, SHARED_INNER), (2 * SHARED_INNER, HIDDEN)) else weight

        return company_changes_nothing(layer, layer.packed(library, WeightForm.FLOAT32, of_shared), Team(library, 2))

    rounded, exact = given(rounds=True), given(rounds=False)
    assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 0.05


def test_a_row_that_is_no_number_stays_alone(library):
    layer = Layer(V3, shared="plain")
    packed, team = layer.packed(library, WeightForm.FLOAT32), Team(library, 2)
    hidden = drawn(20, HIDDEN)
    expected = packed(team, hidden, layer.norm, EPS)
    hidden[3, 5] = float("nan")
    given = packed(team, hidden, layer.norm, EPS)
    assert given[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(given[others], expected[others])
