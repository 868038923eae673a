"""Checkpoints with quantised weights, written number by number in the layouts that published ones have.

``quantise(directory, kind)`` rewrites the linear weights of a float checkpoint; beside it stands the float32 checkpoint of
what they stand for. ``KINDS``, ``MIXED_KINDS`` and ``STACKED_KINDS`` list the layouts.
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

LINEAR = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "c_attn.weight", "c_fc.weight")
"""How the names of weights end that are quantised."""

GROUP = 32
BLOCK = (32, 48)

_Ints = NDArray[np.int64]
_Stored = tuple[dict[str, Tensor], NDArray[np.float64]]
_Store = Callable[[np.random.Generator, str, tuple[int, ...]], _Stored]


def _words(numbers: _Ints, bits: int, axis: int) -> Tensor:
    """Unsigned integers, the first in the lowest bits, along an axis; the last word may have some left over."""
    along = np.moveaxis(numbers, axis, 0)
    words = np.zeros((-(-len(along) * bits // 32) + 1, *along.shape[1:]), np.uint64)
    for place, numbers_here in enumerate(along):
        word, shift = divmod(place * bits, 32)
        wide = numbers_here.astype(np.uint64) << np.uint64(shift)
        words[word] |= wide & np.uint64(0xFFFFFFFF)
        words[word + 1] |= wide >> np.uint64(32)
    words = words[:-1]
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), 0, axis).copy())


def _scales(draw: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.from_numpy(draw.uniform(0.01, 0.04, shape)).to(dtype)


def _wide(scales: Tensor) -> NDArray[np.float64]:
    return scales.double().numpy()


def _gptq(
    bits: int, *, less: int = 1, act_order: bool = False, own_order: bool = False, symmetric: bool = False
) -> _Store:
    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        outputs, inputs = shape
        groups = inputs // GROUP
        codes = draw.integers(0, 1 << bits, shape)
        low = np.full((outputs, groups), 1 << (bits - 1))
        zeros = low if symmetric else draw.integers(less, 1 << bits, (outputs, groups))
        scales = _scales(draw, groups, outputs)
        # One order for the projections that have the same inputs.
        kind = inputs if base.rpartition(".")[2] in ("down_proj", "o_proj", "w2") else 0
        kind = zlib.crc32(base.encode()) if own_order else kind
        order = np.random.default_rng(kind).permutation(inputs) if act_order else np.arange(inputs)
        group_of = order // GROUP
        dense = (codes - zeros[:, group_of]) * _wide(scales).T[:, group_of]
        return {
            f"{base}.qweight": _words(codes.T, bits, 0),
            f"{base}.qzeros": _words(zeros.T - less, bits, 1),
            f"{base}.scales": scales,
            f"{base}.g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }, dense

    return store


def _awq(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    outputs, inputs = shape
    codes = draw.integers(0, 16, (inputs, outputs))
    zeros = draw.integers(0, 16, (inputs // GROUP, outputs))
    scales = _scales(draw, inputs // GROUP, outputs)

    def shuffled(numbers: _Ints) -> _Ints:
        """The lowest bits hold outputs 0, 2, 4, 6 of eight, then 1, 3, 5, 7."""
        eights = numbers.reshape(len(numbers), -1, 8)
        return np.concatenate([eights[:, :, 0::2], eights[:, :, 1::2]], axis=2).reshape(numbers.shape)

    dense = (codes - zeros.repeat(GROUP, 0)) * _wide(scales).repeat(GROUP, 0)
    return {
        f"{base}.qweight": _words(shuffled(codes), 4, 1),
        f"{base}.qzeros": _words(shuffled(zeros), 4, 1),
        f"{base}.scales": scales,
    }, dense.T


def _packed(bits: int, *, symmetric: bool = True, group: int | None = GROUP) -> _Store:
    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        outputs, inputs = shape
        size = group or inputs
        half = 1 << (bits - 1)
        codes = draw.integers(-half, half, shape)
        zeros = np.zeros((outputs, inputs // size), np.int64)
        scales = _scales(draw, outputs, inputs // size, dtype=torch.bfloat16)
        stored = {
            f"{base}.weight_packed": _words(codes + half, bits, 1),
            f"{base}.weight_scale": scales,
            f"{base}.weight_shape": torch.tensor(shape),
        }
        if not symmetric:
            zeros = draw.integers(-half, half, zeros.shape)
            stored[f"{base}.weight_zero_point"] = _words(zeros + half, bits, 0)
        return stored, (codes - zeros.repeat(size, 1)) * _wide(scales).repeat(size, 1)

    return store


def _mlx(bits: int) -> _Store:
    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        codes, groups = draw.integers(0, 1 << bits, shape), (shape[0], shape[1] // GROUP)
        scales = (_scales(draw, *groups, dtype=torch.float32) * (8 / (1 << bits))).bfloat16()
        minima = torch.from_numpy(draw.uniform(-0.1, 0.1, groups)).bfloat16()
        return {
            f"{base}.weight": _words(codes, bits, 1).view(torch.uint32),
            f"{base}.scales": scales,
            f"{base}.biases": minima,
        }, codes * _wide(scales).repeat(GROUP, 1) + _wide(minima).repeat(GROUP, 1)

    return store


def _bytes(*, per_tensor: bool = False, symmetric: bool = True, bits: int = 8) -> _Store:
    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        half = 1 << (bits - 1)
        codes = draw.integers(-half, half, shape)
        scales = _scales(draw, *((1,) if per_tensor else (shape[0], 1)), dtype=torch.float32) * (8 / half)
        zeros = np.zeros((shape[0], 1), np.int64)
        stored = {f"{base}.weight": torch.from_numpy(codes.astype(np.int8)), f"{base}.weight_scale": scales}
        if not symmetric:
            zeros = draw.integers(-half, half, zeros.shape)
            stored[f"{base}.weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
        return stored, (codes - zeros) * _wide(scales)

    return store


def _float8(
    kind: str, scale_name: str = "weight_scale", *, is_static: bool = False, powers: torch.dtype | None = None
) -> _Store:
    """``powers``: scales are powers of two, in this dtype."""

    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        codes = torch.from_numpy(draw.normal(0, 30, shape)).to(torch.float8_e4m3fn)
        codes[0, 0], codes[0, 1] = 2**-9, -448  # The smallest and the largest.
        block = {"block": BLOCK, "group": (1, GROUP)}.get(kind, (1, 1))
        counts = tuple(-(-size // per_block) for size, per_block in zip(shape, block, strict=True))
        shapes = {"tensor": (), "channel": (shape[0], 1)}
        scales = _scales(draw, *shapes.get(kind, counts), dtype=torch.float32) / 4
        wide = _wide(scales)
        if powers is not None:
            exponents = draw.integers(118, 121, counts)
            scales, wide = torch.from_numpy(exponents.astype(np.uint8)).view(powers), 2.0 ** (exponents - 127)
        if kind in ("block", "group"):
            wide = wide.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
        stored = {f"{base}.weight": codes, f"{base}.{scale_name}": scales}
        if is_static:
            stored[f"{base}.input_scale"] = torch.tensor(0.5)
            stored[f"{base}.k_scale"] = torch.tensor(0.25)
        return stored, codes.double().numpy() * wide

    return store


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _in_pairs(codes: _Ints, *, high_first: bool = False) -> Tensor:
    """Two codes of 4 bits in a byte."""
    first, second = codes[..., 0::2], codes[..., 1::2]
    if high_first:
        first, second = second, first
    return torch.from_numpy((first | second << 4).astype(np.uint8))


def _float4(codes_name: str, total: str | None = None) -> _Store:
    """``total`` None: MXFP4; else NVFP4, with this name for the number that scales all; a global one divides."""

    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        codes = draw.integers(0, 16, shape)
        stored = {f"{base}.{codes_name}": _in_pairs(codes)}
        if total is None:
            exponents = draw.integers(120, 124, (shape[0], shape[1] // 32))
            stored[f"{base}.weight_scale"] = torch.from_numpy(exponents.astype(np.uint8))
            return stored, _E2M1[codes] * 2.0 ** (exponents - 127).repeat(32, 1)
        scales = torch.from_numpy(draw.uniform(8, 448, (shape[0], shape[1] // 16))).to(torch.float8_e4m3fn)
        factor = torch.tensor([draw.uniform(1e-4, 2e-4)], dtype=torch.float32)
        divides = "global" in total
        stored |= {f"{base}.weight_scale": scales, f"{base}.{total}": 1 / factor if divides else factor[0]}
        exact = 1 / (1 / factor).double() if divides else factor.double()
        return stored, _E2M1[codes] * (scales.double() * exact).numpy().repeat(16, 1)

    return store


_NF4 = np.array(
    (
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105003, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ),
    dtype=np.float32,
)


def _bnb4(*, is_nested: bool) -> _Store:
    """Blocks of 16 weights, so that several stand in a row, and 24 scales with one scale of theirs."""

    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        codes, blocks = draw.integers(0, 16, shape), shape[0] * shape[1] // 16
        state: dict[str, object] = {"quant_type": "nf4", "blocksize": 16, "dtype": "bfloat16", "shape": list(shape)}
        stored = {
            f"{base}.weight": _in_pairs(codes.reshape(-1), high_first=True)[:, None],
            f"{base}.weight.quant_map": torch.from_numpy(_NF4.copy()),
        }
        scales = draw.uniform(0.05, 0.3, blocks).astype(np.float32)
        if is_nested:
            places, map_of_scales = draw.integers(0, 256, blocks), np.linspace(-1, 1, 256, dtype=np.float32)
            sizes, offset = draw.uniform(0.02, 0.05, -(-blocks // 24)).astype(np.float32), np.float32(0.1)
            scales = map_of_scales[places] * sizes.repeat(24)[:blocks] + offset
            stored[f"{base}.weight.absmax"] = torch.from_numpy(places.astype(np.uint8))
            stored[f"{base}.weight.nested_absmax"] = torch.from_numpy(sizes)
            stored[f"{base}.weight.nested_quant_map"] = torch.from_numpy(map_of_scales)
            state |= {"nested_blocksize": 24, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            stored[f"{base}.weight.absmax"] = torch.from_numpy(scales)
        in_bytes = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
        stored[f"{base}.weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(in_bytes)
        return stored, _NF4[codes].astype(np.float64) * scales.reshape(shape[0], -1).repeat(16, 1)

    return store


def _bnb8(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    codes, largest = draw.integers(-127, 128, shape), draw.uniform(0.1, 0.3, shape[0]).astype(np.float32)
    stored = {f"{base}.weight": torch.from_numpy(codes.astype(np.int8)), f"{base}.SCB": torch.from_numpy(largest)}
    stored[f"{base}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return stored, codes * largest[:, None].astype(np.float64) / 127


def _ternary(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    """A quarter of the outputs after the other in the bits of a byte; a scale that divides."""
    codes = draw.integers(0, 3, shape)
    scale = torch.from_numpy(draw.uniform(2.0, 8.0, 1)).bfloat16()
    packed = (codes.reshape(4, -1, shape[1]) << 2 * np.arange(4)[:, None, None]).sum(0).astype(np.uint8)
    values = (codes - 1) / _wide(scale)
    return {f"{base}.weight": torch.from_numpy(packed), f"{base}.weight_scale": scale}, values


def _plain(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    weight = torch.from_numpy(draw.normal(0, 0.1, shape)).to(torch.bfloat16)
    return {f"{base}.weight": weight}, weight.double().numpy()


def _by_name(*stores: tuple[str, _Store], otherwise: _Store) -> _Store:
    """The first of ``stores`` whose part the name has."""

    def store(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
        return next((some for part, some in stores if part in base), otherwise)(draw, base, shape)

    return store


def _mxfp4(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    """A stack ``[count, inputs, outputs]``."""
    count, inputs, outputs = shape
    codes = draw.integers(0, 16, (count, outputs, inputs))
    exponents = draw.integers(120, 124, (count, outputs, inputs // 32))
    dense = _E2M1[codes] * 2.0 ** (exponents - 127).repeat(32, -1)
    return {
        f"{base}_blocks": _in_pairs(codes.reshape(count, outputs, -1, 32)),
        f"{base}_scales": torch.from_numpy(exponents.astype(np.uint8)),
    }, dense.swapaxes(1, 2)


def _float8_stack(draw: np.random.Generator, base: str, shape: tuple[int, ...]) -> _Stored:
    """A stack ``[count, outputs, inputs]`` with scales of blocks."""
    store = _float8("block", "weight_scale_inv")
    parts = [store(draw, base, shape[1:]) for _ in range(shape[0])]
    codes, scales = (
        torch.stack([stored[f"{base}.{name}"].view(kind) for stored, _ in parts])
        for name, kind in (("weight", torch.uint8), ("weight_scale_inv", torch.float32))
    )
    stacks = {base: codes.view(torch.float8_e4m3fn), f"{base}_scale_inv": scales}
    return stacks, np.stack([dense for _, dense in parts])


def _gptq_config(bits: int = 4, **changes: object) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False} | changes


def _compressed(name: str, **weights: object) -> dict[str, object]:
    return _compressed_groups(name, {"targets": ["Linear"], "weights": weights, "input_activations": None})


def _compressed_groups(name: str, *groups: dict[str, object]) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ["lm_head", "re:.*o_proj"],
    }


def _integers(bits: int, strategy: str, group: int | None = None, *, symmetric: bool = True) -> dict[str, object]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": symmetric}


def _floats(bits: int, strategy: str, group: int | None = None) -> dict[str, object]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group, "symmetric": True}


def _modelopt(algorithm: str, **changes: object) -> dict[str, object]:
    """As published; the groups are not read."""
    described: dict[str, object] = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    return described | {"config_groups": {"group_0": {"targets": ["Linear"]}}} | changes


def _quark(**weight: object) -> dict[str, object]:
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    usual = {"weight": weight, "input_tensors": {"dtype": weight["dtype"], "is_dynamic": True}, "bias": None}
    return {"quant_method": "quark", "export": export, "global_quant_config": usual, "exclude": ["lm_head"]}


def _auto_round(layout: str, **changes: object) -> dict[str, object]:
    described = {"quant_method": "auto-round", "packing_format": layout, "bits": 4, "group_size": GROUP, "sym": False}
    return described | {"data_type": "int", "act_bits": 16, "autoround_version": "0.8.0"} | changes


_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
_FP8_TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}

KINDS: dict[str, tuple[dict[str, object], _Store]] = {
    "gptq": (_gptq_config(), _gptq(4)),
    "gptq-act-order": (_gptq_config(desc_act=True), _gptq(4, act_order=True)),
    "gptq-own-orders": (_gptq_config(desc_act=True), _gptq(4, act_order=True, own_order=True)),
    "gptq-symmetric": (_gptq_config(sym=True), _gptq(4, symmetric=True)),
    "gptq-v2": (_gptq_config(checkpoint_format="gptq_v2"), _gptq(4, less=0)),
    "gptq-2": (_gptq_config(2), _gptq(2)),
    "gptq-3": (_gptq_config(3), _gptq(3)),
    "gptq-8": (_gptq_config(8), _gptq(8)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, _awq),
    "w4a16": (_compressed("pack-quantized", **_integers(4, "group", GROUP)), _packed(4)),
    "w4a16-zeros": (
        _compressed("pack-quantized", **_integers(4, "group", GROUP, symmetric=False)),
        _packed(4, symmetric=False),
    ),
    "w3a16-zeros": (
        _compressed("pack-quantized", **_integers(3, "group", GROUP, symmetric=False)),
        _packed(3, symmetric=False),
    ),
    "w6a16": (_compressed("pack-quantized", **_integers(6, "group", GROUP)), _packed(6)),
    "w4a16-channel": (_compressed("pack-quantized", **_integers(4, "channel")), _packed(4, group=None)),
    "w8a16": (_compressed("pack-quantized", **_integers(8, "group", GROUP)), _packed(8)),
    "w8a8": (_compressed("int-quantized", **_integers(8, "channel")), _bytes()),
    "w8a8-tensor": (_compressed("int-quantized", **_integers(8, "tensor")), _bytes(per_tensor=True)),
    "w8a8-zeros": (_compressed("int-quantized", **_integers(8, "channel", symmetric=False)), _bytes(symmetric=False)),
    "w4a8": (_compressed("int-quantized", **_integers(4, "channel")), _bytes(bits=4)),
    "w4a8-zeros": (
        _compressed("int-quantized", **_integers(4, "channel", symmetric=False)),
        _bytes(bits=4, symmetric=False),
    ),
    "fp8-blocks": (_FP8_BLOCKS, _float8("block", "weight_scale_inv")),
    "fp8-tensors": (_FP8_TENSORS, _float8("tensor", is_static=True)),
    "fp8-tensors-inv": (_FP8_TENSORS, _float8("tensor", "weight_scale_inv")),
    "float-channel": (_compressed("float-quantized", **_floats(8, "channel")), _float8("channel")),
    "float-blocks": (
        _compressed("float-quantized", **_floats(8, "block"), block_structure=list(BLOCK)),
        _float8("block"),
    ),
    "float-groups": (_compressed("float-quantized", **_floats(8, "group", GROUP)), _float8("group")),
    "fp8-powers": (_FP8_BLOCKS, _float8("block", "weight_scale_inv", powers=torch.float8_e8m0fnu)),
    "fp8-mx": (_compressed("mxfp8-quantized", **_floats(8, "group", 32)), _float8("group", powers=torch.uint8)),
    "fp8-fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _float8("channel")),
    "fp8-modelopt": (_modelopt("FP8"), _float8("tensor", is_static=True)),
    "fp8-quark": (_quark(dtype="fp8_e4m3", qscheme="per_tensor"), _float8("tensor", is_static=True)),
    "fp4-mx": (_compressed("mxfp4-pack-quantized", **_floats(4, "group", 32)), _float4("weight_packed")),
    "fp4-nv": (
        _compressed("nvfp4-pack-quantized", **_floats(4, "tensor_group", 16)),
        _float4("weight_packed", "weight_global_scale"),
    ),
    "fp4-modelopt": (_modelopt("NVFP4", group_size=16), _float4("weight", "weight_scale_2")),
    "fp4-quark": (_quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"), _float4("weight")),
    "mlx": ({"quant_method": "mlx", "bits": 4, "group_size": GROUP}, _mlx(4)),
    "mlx-3": ({"quant_method": "mlx", "bits": 3, "group_size": GROUP, "mode": "affine"}, _mlx(3)),
    "mlx-6": ({"quant_method": "mlx", "bits": 6, "group_size": GROUP}, _mlx(6)),
    "mlx-8": ({"quant_method": "mlx", "bits": 8, "group_size": GROUP}, _mlx(8)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _bnb4(is_nested=False)),
    "nf4-nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _bnb4(is_nested=True)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bnb8),
    "bitnet": ({"quant_method": "bitnet", "modules_to_not_convert": None}, _ternary),
}

_RULES = {
    r"-:.*\.o_proj": {},
    r"+:model\.layers\.(0|7)\..*(down_proj|v_proj)": {"bits": 8, "damp_percent": 0.1},
    "model.layers.0": {},
    r".*down_proj": {"bits": 8, "group_size": GROUP},
    r"-:model\.layers\.1\.(?!mlp)": {},
}

_EXTRA = {
    ".*o_proj": {"bits": 16, "data_type": "float"},
    "model.layers.0.mlp.down_proj": {"bits": 8},
    "down_proj$": {},
    r"mlp\..*down": {"bits": 8},
    "v_proj": {"bits": 8},
}

MIXED_KINDS: dict[str, tuple[dict[str, object], _Store]] = {
    "gptq-rules": (
        _gptq_config(dynamic=_RULES),
        _by_name(
            ("o_proj", _plain),
            ("down_proj", _gptq(8)),
            ("0.self_attn.v_proj", _gptq(8)),
            ("1.self_attn", _plain),
            otherwise=_gptq(4),
        ),
    ),
    "auto-round": (
        _auto_round("auto_round:auto_gptq", extra_config=_EXTRA),
        _by_name(("o_proj", _plain), ("down_proj", _gptq(8)), ("v_proj", _gptq(8)), otherwise=_gptq(4)),
    ),
    "auto-round-v2": (
        _auto_round("auto_round:gptqmodel", extra_config={"o_proj": {"bits": 16}}),
        _by_name(("o_proj", _plain), otherwise=_gptq(4, less=0)),
    ),
    "auto-round-awq": (_auto_round("auto_round:auto_awq"), _by_name(("o_proj", _plain), otherwise=_awq)),
    "awq-some": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "modules_to_not_convert": ["o_proj"],
        },
        _by_name(("o_proj", _plain), ("k_proj", _plain), otherwise=_awq),
    ),
    "fp8-some": (
        _FP8_BLOCKS | {"modules_to_not_convert": ["o_proj"], "ignored_layers": ["o_proj"]},
        _by_name(("o_proj", _plain), ("k_proj", _plain), otherwise=_float8("block", "weight_scale_inv")),
    ),
    "compressed-groups": (
        _compressed_groups(
            "pack-quantized",
            {"targets": ["Linear"], "weights": _integers(4, "group", GROUP)},
            {"targets": ["re:.*down_proj", "model.layers.0.self_attn.q_proj"], "weights": _integers(8, "group", GROUP)},
        ),
        _by_name(
            ("o_proj", _plain), ("down_proj", _packed(8)), ("0.self_attn.q_proj", _packed(8)), otherwise=_packed(4)
        ),
    ),
    "compressed-formats": (
        _compressed_groups(
            "mixed-precision",
            {
                "targets": ["re:.*self_attn.*"],
                "weights": _floats(8, "channel"),
                "format": "float-quantized",
                "input_activations": _floats(8, "token") | {"dynamic": True},
            },
            {"targets": ["re:.*mlp.*"], "weights": _integers(4, "group", GROUP), "format": "pack-quantized"},
        ),
        _by_name(("o_proj", _plain), ("self_attn", _float8("channel")), otherwise=_packed(4)),
    ),
    "modelopt-mixed": (
        _modelopt(
            "MIXED_PRECISION",
            quantized_layers={
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            },
        ),
        _by_name(("o_proj", _plain), ("self_attn", _float8("tensor")), otherwise=_float4("weight", "weight_scale_2")),
    ),
}
"""Layouts in which weights differ; those of ``o_proj`` are not quantised."""

STACKED_KINDS: dict[str, tuple[dict[str, object], _Store]] = {
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, _mxfp4),
    "fp8-stacks": (_FP8_BLOCKS, _float8_stack),
}
"""Layouts of experts that are one tensor."""

STACKS = ("experts.gate_up_proj", "experts.down_proj")


def quantise(directory: Path, kind: str, *, seed: int = 0) -> Path:
    """Rewrite a checkpoint; return the directory of its float32 reference."""
    described, store = (KINDS | MIXED_KINDS | STACKED_KINDS)[kind]
    draw = np.random.default_rng(seed)
    reference = directory.with_name(f"{directory.name}-reference")
    shutil.copytree(directory, reference)
    stored = load_file(directory / "model.safetensors")
    dense = dict(stored)
    for name in [name for name in stored if name.endswith(STACKS if kind in STACKED_KINDS else LINEAR)]:
        tensors, values = store(draw, name.removesuffix(".weight"), tuple(stored.pop(name).shape))
        stored |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        dense[name] = torch.from_numpy(values).float().contiguous()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, reference / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=described)
    return reference


def change_config(directory: Path, **changes: object) -> None:
    """Change fields of a checkpoint's config.json."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
