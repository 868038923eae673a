"""Variants of the kernels of states that Qwen3-Next, Kimi Linear, Granite 4, MiniMax-01, LFM2, Mamba and RecurrentGemma launch."""

from triton_compilation import CompileCase

from headway_kernels.gpu import norm
from headway_kernels.gpu.recurrence import channels, convolution, gates, heads

COLUMNS = dict.fromkeys(("rows", "query_start", "first_position"), "*i32")


def convolution_case(dtype, channels, taps, *, gated=False):
    return CompileCase(
        name=f"convolve {dtype} {channels} gated={gated}",
        kernel=convolution._convolve,
        signature=COLUMNS
        | dict.fromkeys(("inputs", "out"), f"*{dtype}")
        | dict.fromkeys(("past", "taps", "bias"), "*fp32")
        | dict.fromkeys(("num_rows", "inputs_stride", "out_stride"), "i32"),
        constants={"CHANNELS": channels, "TAPS": taps, "HAS_BIAS": not gated, "GATED": gated, "SILU": not gated}
        | {"TOKENS": convolution.TOKENS, "BLOCK": convolution.CHANNELS_PER_PROGRAM},
        num_warps=convolution.NUM_WARPS,
        aligned=("inputs", "out", "past", "taps", "bias", "inputs_stride", "out_stride"),
    )


def heads_case(dtype, shape, *, steps=True, by_channel=False):
    keys, block = heads.block_of(shape.key_dim, shape.value_dim)
    return CompileCase(
        name=f"run_heads {dtype} {shape.key_dim} {shape.value_dim} delta={shape.is_delta} channels={by_channel}",
        kernel=heads._run_heads,
        signature=COLUMNS
        | dict.fromkeys(("convolved", "strengths", "steps", "out"), f"*{dtype}")
        | dict.fromkeys(("decay", "step_bias", "skip", "states"), "*fp32")
        | dict.fromkeys(("num_rows", "convolved_stride", "strengths_stride", "steps_stride", "out_stride"), "i32")
        | dict.fromkeys(("decay_bound", "query_factor"), "fp32"),
        constants={
            "NUM_HEADS": shape.num_heads,
            "NUM_KEY_HEADS": shape.num_key_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "PADDED_KEYS": keys,
            "BLOCK": block,
            "DELTA": shape.is_delta,
            "TURNS": shape.keys_take_turns,
            "DOUBLES": shape.doubles_strengths,
            "STEPS": steps,
            "BY_CHANNEL": by_channel,
            "BOUNDED": shape.decay_bound is not None,
            "SKIPS": steps and not shape.is_delta,
        },
        num_warps=heads.NUM_WARPS,
        aligned=("convolved", "states", "out", "convolved_stride", "out_stride"),
        blocks=16,
    )


def gates_case(dtype, width, kind, *, norms=True):
    block = 1 << (width - 1).bit_length() if norms else gates.BLOCK
    return CompileCase(
        name=f"gate_results {dtype} {width} {kind.name} norms={norms}",
        kernel=gates._gate_results,
        signature={"results": f"*{dtype}", "gates": f"*{dtype}", "norm": "*fp32" if norms else f"*{dtype}"}
        | {"num_tokens": "*i32", "results_stride": "i32", "gates_stride": "i32", "eps": "fp32"},
        constants={"WIDTH": width, "BLOCK": block, "NORMS": norms, "KIND": int(kind), "FIRST": False},
        num_warps=norm.warps_for(block),
        aligned=("results", "norm", "results_stride", "gates_stride"),
    )


def channels_case(dtype, width, key_dim):
    padded = 1 << (key_dim - 1).bit_length()
    return CompileCase(
        name=f"scan_channels {dtype} {width} {key_dim}",
        kernel=channels._scan_channels,
        signature=COLUMNS
        | dict.fromkeys(("values", "steps", "selected", "gates", "out"), f"*{dtype}")
        | dict.fromkeys(("decay", "step_bias", "skip", "states"), "*fp32")
        | {"num_rows": "i32"}
        | {f"{name}_stride": "i32" for name in ("values", "steps", "selected", "gates", "out")},
        constants={"CHANNELS": width, "KEY_DIM": key_dim, "PADDED_KEYS": padded, "BLOCK": channels.channels_of(padded)},
        num_warps=channels.NUM_WARPS,
        aligned=("values", "steps", "out", "decay", "states", "values_stride", "steps_stride", "out_stride"),
        blocks=16,
    )


def unit_case(dtype, width, block_width):
    return CompileCase(
        name=f"scan_unit {dtype} {width}",
        kernel=channels._scan_unit,
        signature=COLUMNS
        | dict.fromkeys(("values", "made", "gates", "out"), f"*{dtype}")
        | dict.fromkeys(("decay", "block_bias", "states"), "*fp32")
        | {"num_rows": "i32"}
        | {f"{name}_stride": "i32" for name in ("values", "made", "gates", "out")},
        constants={"CHANNELS": width, "WIDTH": block_width, "BLOCK": channels.CHANNELS_PER_PROGRAM}
        | {"KIND": int(gates.GateKind.GELU_TANH)},
        num_warps=channels.NUM_WARPS,
        aligned=("values", "made", "out", "decay", "states", "values_stride", "made_stride", "out_stride"),
        blocks=16,
    )


QWEN = heads.HeadShape(32, 16, 128, 128, is_delta=True)
KIMI = heads.HeadShape(32, 32, 128, 128, is_delta=True)
GRANITE = heads.HeadShape(48, 1, 128, 64, is_delta=False)
MINIMAX = heads.HeadShape(64, 64, 128, 128, is_delta=False)
FALCON = heads.HeadShape(24, 1, 256, 64, is_delta=False)
CASES = [
    convolution_case("bf16", 8192, 4),
    convolution_case("bf16", 2048, 3, gated=True),
    convolution_case("fp32", 8192, 4),
    heads_case("bf16", QWEN),
    heads_case("fp32", QWEN),
    heads_case("bf16", KIMI, by_channel=True),
    heads_case("bf16", GRANITE),
    heads_case("bf16", MINIMAX, steps=False),
    heads_case("bf16", FALCON),
    gates_case("bf16", 128, gates.GateKind.SILU),
    gates_case("bf16", 8192, gates.GateKind.SIGMOID),
    gates_case("fp32", 4096, gates.GateKind.GELU_TANH, norms=False),
    channels_case("bf16", 8192, 16),
    channels_case("fp32", 8192, 16),
    unit_case("bf16", 2560, 256),
]
