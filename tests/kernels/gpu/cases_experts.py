"""Variants of the kernels of experts that a model of the shape of Qwen3 30B-A3B, gpt-oss or DeepSeek V3 launches."""

from cases_quantized_linear import DTYPES, pointers_of, weight_of
from triton_compilation import CompileCase

from headway_kernels.gpu.experts import grouped as module
from headway_kernels.gpu.experts import kernels as expert_kernels
from headway_kernels.routing import Routing, Scoring

QWEN3 = Routing(num_experts=128, num_chosen=8, is_normalised=True)
GPT_OSS = Routing(num_experts=32, num_chosen=4, is_normalised=True)
DEEPSEEK = Routing(
    num_experts=256, num_chosen=8, scoring=Scoring.SIGMOID, num_groups=8, num_open_groups=4, scores_per_group=2,
    is_normalised=True, scaling=2.5,
)  # fmt: skip


def choice(name, routing, dtype, **kinds):
    return CompileCase(
        name=f"choose {name}",
        kernel=expert_kernels.choose_kernel,
        signature={"logits": f"*{dtype}", "slots": "*i32", "chosen": "*i32"}
        | dict.fromkeys(("correction", "factors", "weights"), "*fp32")
        | {"logits_stride": "i32", "scaling": "fp32"},
        constants=module.choice_constants(routing, **{"has_correction": False} | kinds),
        num_warps=1,
        aligned=("logits", "correction", "factors", "chosen", "weights"),
    )


def product(name, routing, dtype, form, shape, group=None, *, has_bias=False, gathers=True, **kind):
    weight = weight_of(form, shape, group, **kind)
    tiling = module.pair_tiling(weight, DTYPES[dtype])
    pointers = pointers_of(dtype, form, has_bias=has_bias) | {"pair_order": "*i32", "ends": "*i32"}
    return CompileCase(
        name=f"multiply_pairs {name} {dtype} {form} group={group} gathers={gathers}",
        kernel=expert_kernels.multiply_pairs_kernel,
        signature=pointers | {"x_stride": "i32", "out_stride": "i32"},
        constants=module.pair_constants(
            weight, tiling, routing.num_experts, routing.num_chosen, has_bias=has_bias, gathers=gathers
        )
        | {"WIDE": dtype == "fp32"},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=(*pointers, "x_stride", "out_stride"),
    )


CASES = [
    choice("DeepSeek V3", DEEPSEEK, "fp32", has_correction=True),
    choice("Gemma 4", QWEN3, "bf16", has_factors=True),
    choice("Phi-3.5-MoE", Routing(num_experts=16, num_chosen=2, scoring=Scoring.NEAR, tolerance=0.02), "bf16"),
    CompileCase(
        "sort_pairs",
        expert_kernels.sort_pairs_kernel,
        {"chosen": "*i32", "order": "*i32", "ends": "*i32", "num_pairs": "i32"},
        {"BLOCK": module.PAIRS_PER_TURN},
        num_warps=module.NUM_WARPS,
        aligned=("chosen", "order", "ends"),
    ),
    product("Qwen3", QWEN3, "bf16", "DENSE", (1536, 2048)),
    product("Qwen3", QWEN3, "bf16", "INT4", (1536, 2048), 128),
    product("Qwen3", QWEN3, "bf16", "INT4", (2048, 768), 32, gathers=False, minima=True),
    product("DeepSeek V3", DEEPSEEK, "bf16", "FP8_PAIRS", (4096, 7168), 128),
    product("gpt-oss", GPT_OSS, "fp32", "DENSE", (2880, 2880), has_bias=True, gathers=False),
    CompileCase(
        "weigh_pairs",
        expert_kernels.weigh_pairs_kernel,
        {"rows": "*bf16", "order": "*i32", "weights": "*fp32", "stride": "i32"},
        {"WIDTH": 16384, "BLOCK": module.CHANNELS_PER_PROGRAM},
        num_warps=module.NUM_WARPS,
        aligned=("rows", "order", "weights", "stride"),
    ),
    CompileCase(
        "add_pairs",
        expert_kernels.add_pairs_kernel,
        {"given": "*bf16", "chosen": "*i32", "weights": "*fp32", "shared": "*bf16", "gates": "*bf16", "out": "*bf16"}
        | dict.fromkeys(("given_stride", "shared_stride", "gate_stride", "out_stride"), "i32"),
        {"WIDTH": 2048, "NUM_EXPERTS": 128, "NUM_CHOSEN": 8, "WEIGHS": True, "HAS_SHARED": True, "HAS_GATE": True}
        | {"BLOCK": module.CHANNELS_PER_PROGRAM},
        num_warps=module.NUM_WARPS,
        aligned=("given", "weights", "shared", "out", "given_stride", "shared_stride", "out_stride"),
    ),
]
