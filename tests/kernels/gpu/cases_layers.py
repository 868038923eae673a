"""Variants of the kernels around the products that a model of Llama 3 8B's shape launches, and float32 ones."""

from triton_compilation import CompileCase

from headway_kernels.gpu import activation, norm, rotary, rows
from headway_kernels.gpu.activation import Gate

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE = 4096, 32, 8, 128, 14336
BLOCK_SIZE = 16
WIDEST = 16384


def norm_case(dtype, width, has_delta, *, has_factor=False):
    return CompileCase(
        name=f"add_rms_norm {dtype} {width} delta={has_delta} factor={has_factor}",
        kernel=norm._add_rms_norm,
        signature=dict.fromkeys(("hidden", "delta", "weight", "out"), f"*{dtype}")
        | dict.fromkeys(("hidden_stride", "delta_stride", "out_stride"), "i32")
        | {"eps": "fp32", "factor": f"*{dtype}"},
        constants={"WIDTH": width, "BLOCK": width, "HAS_DELTA": has_delta, "HAS_FACTOR": has_factor}
        | {"KEEPS_SUM": has_delta},
        num_warps=norm.warps_for(width),
        aligned=("hidden", "delta", "weight", "out", "hidden_stride", "delta_stride", "out_stride"),
    )


def layer_norm_case(dtype, has_bias):
    return CompileCase(
        name=f"add_layer_norm {dtype} {HIDDEN} bias={has_bias}",
        kernel=norm._add_layer_norm,
        signature=dict.fromkeys(("hidden", "delta", "out"), f"*{dtype}")
        | dict.fromkeys(("weight", "bias"), "*fp32")
        | dict.fromkeys(("hidden_stride", "delta_stride", "out_stride"), "i32")
        | {"eps": "fp32"},
        constants={"WIDTH": HIDDEN, "BLOCK": HIDDEN, "HAS_DELTA": True, "KEEPS_SUM": True, "HAS_BIAS": has_bias},
        num_warps=norm.warps_for(HIDDEN),
        aligned=("hidden", "delta", "weight", "bias", "out", "hidden_stride", "delta_stride", "out_stride"),
    )


def activation_case(dtype, gate=Gate.SILU):
    return CompileCase(
        name=f"activate_and_multiply {dtype} {gate.name}",
        kernel=activation._activate_and_multiply,
        signature=dict.fromkeys(("gates", "ups", "out"), f"*{dtype}")
        | dict.fromkeys(("gates_stride", "ups_stride", "out_stride"), "i32"),
        constants={"WIDTH": INTERMEDIATE, "GATE": int(gate), "BLOCK": activation.BLOCK},
        num_warps=activation.NUM_WARPS,
        aligned=("gates", "ups", "out", "gates_stride", "ups_stride", "out_stride"),
    )


def curve_case(dtype):
    return CompileCase(
        name=f"xielu {dtype}",
        kernel=activation._xielu,
        signature={"inputs": f"*{dtype}", "out": f"*{dtype}", "curve": "*fp32"}
        | dict.fromkeys(("inputs_stride", "out_stride"), "i32"),
        constants={"WIDTH": INTERMEDIATE, "BLOCK": activation.BLOCK},
        num_warps=activation.NUM_WARPS,
        aligned=("inputs", "out", "curve", "inputs_stride", "out_stride"),
    )


def rotary_case(
    dtype,
    head_dim,
    normalise,
    *,
    codes=False,
    grows=False,
    layer_norms=False,
    norms_values=False,
    kv_heads=NUM_KV_HEADS,
):
    block_pairs = 1 << (head_dim // 2 - 1).bit_length()
    kinds = f"normalise={normalise} codes={codes} grows={grows} layer_norms={layer_norms} kv_heads={kv_heads}"
    return CompileCase(
        name=f"rotate_and_store {dtype} {head_dim} {kinds}",
        kernel=rotary._rotate_and_store,
        signature=dict.fromkeys(("qkv", "pool_layer", "q_norm", "k_norm"), f"*{dtype}")
        | ({"pool_layer": "*u8"} if codes else {})
        | (dict.fromkeys(("q_norm", "k_norm"), "*fp32") if layer_norms else {})
        | {"positions": "*i32", "slots": "*i32", "cosines": "*fp32", "sines": "*fp32", "query_factors": "*fp32"}
        | {"qkv_stride": "i32", "eps": "fp32"},
        constants={
            "NUM_HEADS": NUM_HEADS,
            "NUM_KV_HEADS": kv_heads,
            "PAIRS": head_dim // 2,
            "CODED": int(codes),
            "BLOCK_SIZE": BLOCK_SIZE,
            "BLOCK_STRIDE": 2 * NUM_KV_HEADS * BLOCK_SIZE * (head_dim + int(codes)),
            "BLOCK_HEADS": max(rotary.PAIRS_PER_PROGRAM // block_pairs, 1),
            "BLOCK_PAIRS": block_pairs,
            "NORMALISE": normalise,
            "LAYER_NORMS": layer_norms,
            "HAS_BIASES": layer_norms,
            "GROWS": grows,
            "NORMS_ROTATED": False,
            "NORMS_VALUES": norms_values,
        },
        num_warps=rotary.NUM_WARPS,
        aligned=("qkv", "pool_layer", "q_norm", "k_norm", "cosines", "sines", "qkv_stride"),
    )


def gather_case(dtype):
    return CompileCase(
        name=f"gather_rows {dtype}",
        kernel=rows._gather_rows,
        signature={
            "source": f"*{dtype}",
            "index": "*i32",
            "out": f"*{dtype}",
            "source_stride": "i32",
            "out_stride": "i32",
        },
        constants={"WIDTH": HIDDEN, "BLOCK": rows.CHANNELS_PER_PROGRAM},
        num_warps=rows.NUM_WARPS,
        aligned=("source", "out", "source_stride", "out_stride"),
    )


def column_case(kernel, numbers, constants):
    """A kernel whose pointers are all int32 columns or stores."""
    kinds = {name: "i32" if name in numbers else "*i32" for name in kernel.arg_names if name not in constants}
    return CompileCase(
        name=kernel.fn.__name__,
        kernel=kernel,
        signature=kinds,
        constants=constants,
        num_warps=rows.NUM_WARPS,
    )


BLOCK = {"BLOCK": rows.ENTRIES_PER_PROGRAM}
COUNTS = ("num_rows", "num_tokens", "search_steps")
CASES = [
    norm_case("bf16", HIDDEN, has_delta=True),
    norm_case("bf16", HIDDEN, has_delta=False),
    norm_case("bf16", HIDDEN, has_delta=True, has_factor=True),
    norm_case("bf16", WIDEST, has_delta=True),
    norm_case("fp32", HIDDEN, has_delta=True),
    layer_norm_case("bf16", has_bias=True),
    layer_norm_case("fp32", has_bias=False),
    activation_case("bf16"),
    activation_case("bf16", Gate.CLAMPED),
    activation_case("bf16", Gate.GELU_TANH),
    activation_case("fp32"),
    curve_case("bf16"),
    curve_case("fp32"),
    rotary_case("bf16", HEAD_DIM, normalise=False),
    rotary_case("bf16", HEAD_DIM, normalise=True),
    rotary_case("bf16", 80, normalise=False),
    rotary_case("bf16", HEAD_DIM, normalise=False, grows=True),
    rotary_case("bf16", HEAD_DIM, normalise=False, layer_norms=True),
    rotary_case("bf16", HEAD_DIM, normalise=True, codes=True),
    rotary_case("bf16", 512, normalise=True, norms_values=True),
    rotary_case("bf16", 512, normalise=True, kv_heads=0),
    rotary_case("fp32", HEAD_DIM, normalise=True),
    gather_case("bf16"),
    gather_case("fp32"),
    column_case(rows._expand_rows, ("store_stride", "table_stride", *COUNTS), {"BLOCK_SIZE": BLOCK_SIZE} | BLOCK),
    column_case(rows._edit_tables, ("table_stride", "num_edits"), BLOCK),
    column_case(rows._store_tokens, ("store_stride", *COUNTS), BLOCK),
    column_case(rows._store_sampled, ("store_stride", "num_sampled"), BLOCK),
]
