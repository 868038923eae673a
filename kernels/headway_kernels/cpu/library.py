"""The compiled library, called from Python.

Owns: the variant for this processor, the C structs. Must not know: checkpoints, the executor.

The library gets addresses, so every object here keeps its arrays alive. Every call releases the interpreter's lock.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_DIRECTORY = Path(__file__).parent
_AVX512 = ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl", "avx512_vnni")
_FEATURES = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"),
    "neon": (),
}
"""The processor features of each variant, in torch's names; the best variant first."""

_ARCHITECTURES = {"amx": "x86_64", "avx512": "x86_64", "avx2": "x86_64", "neon": "aarch64"}

_NEED_PERMISSION = frozenset({"amx"})
"""Variants whose registers a process must ask the system for; virtual machines may refuse."""


class WeightForm(IntEnum):
    """float32; bfloat16, for float32 weights that it holds exactly; 8 bits."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class _ShapeStruct(ctypes.Structure):
    _fields_ = (
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("true_head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("score_scale", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
    )


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _StepStruct(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("row_tokens", ctypes.c_void_p),
        ("row_positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("sampled", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
    )


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes of a model, and its tensors outside of layers.

    ``embedding`` ``[vocab, hidden]``, ``cosines`` and ``sines`` ``[context, head_dim // 2]``, ``final_norm``
    ``[hidden]``: float32, contiguous, on the CPU.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    norm_eps: float
    score_scale: float
    embedding: Tensor
    cosines: Tensor
    sines: Tensor
    final_norm: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer; ``qkv`` outputs and ``output`` inputs have heads of ``CpuLibrary.padded_head_dim``.

    Norms float32, contiguous, on the CPU: ``attention_norm`` and ``mlp_norm`` ``[hidden]``, ``qk_norm`` ``[heads +
    kv_heads, head_dim]`` or None. A token sees ``window`` positions; None: all.
    """

    qkv: "PackedLinear"
    output: "PackedLinear"
    gate_up: "PackedLinear"
    down: "PackedLinear"
    attention_norm: Tensor
    mlp_norm: Tensor
    qk_norm: Tensor | None
    window: int | None


class CpuLibrary:
    """One loaded variant. Raises ``PermissionError``: the system does not allow its registers."""

    def __init__(self, path: Path) -> None:
        self.functions = _declared(ctypes.CDLL(str(path)))
        self.variant = variant_of(path)
        if not self.functions.headway_permitted():
            raise PermissionError(f"the system does not let this process use the processor's {self.variant}")
        self.lanes = int(self.functions.headway_lanes())
        self.max_head_dim = int(self.functions.headway_max_head_dim())

    def padded_head_dim(self, head_dim: int) -> int:
        """Round up to whole vector registers."""
        return -(-head_dim // self.lanes) * self.lanes


def _declared(functions: ctypes.CDLL) -> Any:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "permitted": (ctypes.c_int, ()),
        "lanes": (integer, ()),
        "max_head_dim": (integer, ()),
        "block_floats": (integer, (pointer,)),
        "logits_stride": (integer, (integer,)),
        "linear_new": (pointer, (pointer, pointer, integer, integer, integer, integer)),
        "linear_free": (None, (pointer,)),
        "team_new": (pointer, (integer,)),
        "team_free": (None, (pointer,)),
        "decoder_new": (pointer, (pointer, pointer, pointer)),
        "decoder_free": (None, (pointer,)),
        "decoder_run": (ctypes.c_int, (pointer, pointer, pointer)),
        "linear_run": (
            ctypes.c_int,
            (pointer, pointer, pointer, integer, pointer, number, integer, pointer, integer),
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, f"headway_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


@functools.cache
def load_library() -> CpuLibrary | None:
    """The best installed variant for this processor, or None."""
    for path in installed_variants():
        if runs_here(path):
            return CpuLibrary(path)
    return None


def installed_variants() -> list[Path]:
    """Libraries beside this file, the best first."""
    found = {variant_of(path): path for path in _DIRECTORY.glob("libheadway_cpu.*.*")}
    return [found[variant] for variant in _FEATURES if variant in found]


def runs_here(path: Path) -> bool:
    """Whether this processor and the system support a variant."""
    variant = variant_of(path)
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != _ARCHITECTURES[variant] or not all(has.get(name) for name in _FEATURES[variant]):
        return False
    return variant not in _NEED_PERMISSION or _is_permitted(path)


def _is_permitted(path: Path) -> bool:
    """Permission is for the whole process, present and future threads."""
    try:
        CpuLibrary(path)
    except PermissionError:
        return False
    return True


def variant_of(path: Path) -> str:
    """The name of a library's variant."""
    return path.stem.rpartition(".")[2]


class Team:
    """``num_threads`` threads, including the caller's."""

    def __init__(self, library: CpuLibrary, num_threads: int) -> None:
        self._library = library
        self.handle = _made(library.functions.headway_team_new(num_threads), f"{num_threads} threads")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.functions.headway_team_free(self.handle)


class PackedLinear:
    """Weights of one product in the library's layout; ``weight`` and ``bias`` are copied.

    ``weight`` floating, ``[outputs, inputs]``; ``bias`` ``[outputs]`` or None. With ``gated``, outputs are gates, then
    ups, and the product gives ``silu(gate) * up``.
    """

    def __init__(
        self, library: CpuLibrary, weight: Tensor, bias: Tensor | None, form: WeightForm, *, gated: bool = False
    ) -> None:
        self._library = library
        self._gated = gated
        self.outputs, self.inputs = weight.shape
        wide = weight.float().contiguous()
        wide_bias = None if bias is None else bias.float().contiguous()
        self.handle = _made(
            library.functions.headway_linear_new(
                wide.data_ptr(),
                None if wide_bias is None else wide_bias.data_ptr(),
                self.outputs,
                self.inputs,
                int(form),
                int(gated),
            ),
            "the weights",
        )

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.functions.headway_linear_free(self.handle)

    def __call__(self, team: Team, inputs: Tensor, norm: Tensor | None = None, norm_eps: float = 0.0) -> Tensor:
        """Multiply, for tests. ``inputs`` float32, contiguous, ``[rows, inputs]``."""
        panel = 2 * self._library.lanes
        stride = -(-self.outputs // panel) * panel
        out = torch.zeros(len(inputs), stride)
        done = self._library.functions.headway_linear_run(
            self.handle,
            team.handle,
            inputs.data_ptr(),
            len(inputs),
            None if norm is None else norm.data_ptr(),
            norm_eps,
            int(self._gated),
            out.data_ptr(),
            stride,
        )
        _made(done, "a product")
        return out[:, : self.outputs // 2 if self._gated else self.outputs]


class Decoder:
    """A whole model."""

    def __init__(
        self, library: CpuLibrary, team: Team, shape: DecoderShape, layers: Sequence[LayerWeights], head: PackedLinear
    ) -> None:
        self._library = library
        self._team = team
        self._kept = (shape, tuple(layers), head)
        self._vocab_size = shape.vocab_size
        struct = _shape_struct(library, shape, len(layers))
        self.block_floats = int(library.functions.headway_block_floats(ctypes.byref(struct)))
        self._logits_stride = int(library.functions.headway_logits_stride(shape.vocab_size))
        structs = (_LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._handle = _made(
            library.functions.headway_decoder_new(ctypes.byref(struct), structs, head.handle), "the model"
        )

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.functions.headway_decoder_free(self._handle)

    def forward(
        self,
        *,
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        first_positions: NDArray[np.int64],
        tables: NDArray[np.int32],
        sampled: NDArray[np.int64],
        pool: Tensor,
    ) -> Tensor:
        """Store keys and values of all tokens; return float32 logits, ``[len(sampled), vocab]``.

        ``token_ids``: row after row, ``num_tokens[i]`` of row i, from position ``first_positions[i]`` on, with the
        block table ``tables[i]``. ``sampled``: ascending indices into ``token_ids``. ``pool`` float32, ``[layers,
        num_blocks, block_floats]``. All contiguous.

        Raises:
            MemoryError: the step is too large; nothing has changed.
        """
        arrays = (token_ids, num_tokens, first_positions, tables, sampled)
        assert all(array.flags.c_contiguous for array in arrays)
        starts = np.cumsum(num_tokens) - num_tokens
        logits = torch.empty(len(sampled), self._logits_stride)
        step = _StepStruct(
            num_rows=len(num_tokens),
            num_tokens=len(token_ids),
            num_sampled=len(sampled),
            token_ids=token_ids.ctypes.data,
            row_starts=starts.ctypes.data,
            row_tokens=num_tokens.ctypes.data,
            row_positions=first_positions.ctypes.data,
            tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            sampled=sampled.ctypes.data,
            logits=logits.data_ptr(),
            pool=pool.data_ptr(),
            layer_stride=pool.stride(0),
        )
        done = self._library.functions.headway_decoder_run(self._handle, self._team.handle, ctypes.byref(step))
        _made(done, f"a step of {len(token_ids)} tokens")
        return logits[:, : self._vocab_size]


def _shape_struct(library: CpuLibrary, shape: DecoderShape, num_layers: int) -> _ShapeStruct:
    return _ShapeStruct(
        num_layers=num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=library.padded_head_dim(shape.head_dim),
        true_head_dim=shape.head_dim,
        block_size=shape.block_size,
        norm_eps=shape.norm_eps,
        score_scale=shape.score_scale,
        embedding=shape.embedding.data_ptr(),
        cosines=shape.cosines.data_ptr(),
        sines=shape.sines.data_ptr(),
        final_norm=shape.final_norm.data_ptr(),
    )


def _layer_struct(layer: LayerWeights) -> _LayerStruct:
    return _LayerStruct(
        qkv=layer.qkv.handle,
        output=layer.output.handle,
        gate_up=layer.gate_up.handle,
        down=layer.down.handle,
        attention_norm=layer.attention_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        window=layer.window or 0,
    )


def _made(result: int | None, what: str) -> int:
    if not result:
        raise MemoryError(f"no memory for {what}")
    return result
