"""The compiled library, called from Python.

Owns: the variant for this processor, threads, products. Must not know: checkpoints, the executor, whole models.

The library gets addresses, so every object here keeps its arrays alive. Every call releases the interpreter's lock.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway_kernels.cpu.build import SOURCES, digest_of, instruction_sets_here, read_sources
from headway_kernels.cpu.coded_weight import CodedWeight, of_4_bits

_DIRECTORY = Path(__file__).parent
_AVX512 = ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl", "avx512_vnni")
_FEATURES = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"),
    "neon": (),
}
"""The processor features of each variant, in torch's names; the best variant first."""

_DIGITS = 2 * hashlib.sha256().digest_size
_NEED_PERMISSION = frozenset({"amx"})
"""Variants whose registers a process must ask the system for; virtual machines may refuse."""


class WeightForm(IntEnum):
    """float32; bfloat16, for float32 weights that it holds exactly; 8 bits; bfloat16 for inputs that are rounded to it.

    ``PAIRS`` only if the library ``multiplies_pairs``.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    PAIRS = 10


class BlockForm(IntEnum):
    """Codes that are multiplied as integers, in blocks, with inputs that are rounded to 8 bits, or to 24 in three digits.

    Digits only if the library ``multiplies_digits``. They are as exact as float32, and faster.
    """

    CODES4 = 7
    CODES8 = 8
    TABLE4 = 9


class StaleKernelsError(Exception):
    """A library was compiled of other sources than those beside it: its structs may have other fields."""


class CpuLibrary:
    """One loaded variant.

    Raises:
        PermissionError: the system does not allow its registers.
        StaleKernelsError: its sources are here, and are others.
    """

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        if SOURCES.is_dir() and _sources_in(loaded) != digest_of(read_sources(SOURCES)):
            raise StaleKernelsError(f"{path.name} was compiled of other sources than are here; run: make kernels")
        self.functions = _declared(loaded)
        self.variant = variant_of(path)
        if not self.functions.headway_permitted():
            raise PermissionError(f"the system does not let this process use the processor's {self.variant}")
        self.lanes = int(self.functions.headway_lanes())
        self.panel = 2 * self.lanes
        self.max_head_dim = int(self.functions.headway_max_head_dim())
        self.multiplies_pairs = bool(self.functions.headway_multiplies_pairs())
        """Whether it multiplies pairs of bfloat16s at once on this processor, since that is faster."""
        self.multiplies_digits = bool(self.functions.headway_multiplies_digits())
        """Whether it multiplies codes with inputs in digits: see ``BlockForm``."""

    def padded_head_dim(self, head_dim: int) -> int:
        """Round up to whole vector registers."""
        return rounded(head_dim, self.lanes)


def _sources_in(loaded: ctypes.CDLL) -> str:
    """The digest of what a library was compiled of; empty if it does not say."""
    try:
        return (ctypes.c_char * _DIGITS).in_dll(loaded, "headway_cpu_kernels_sources").value.decode()
    except ValueError:
        return ""


def _declared(functions: ctypes.CDLL) -> Any:
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "permitted": (ctypes.c_int, ()),
        "lanes": (integer, ()),
        "multiplies_pairs": (ctypes.c_int, ()),
        "multiplies_digits": (ctypes.c_int, ()),
        "max_head_dim": (integer, ()),
        "block_floats": (integer, (pointer,)),
        "logits_stride": (integer, (integer,)),
        "linear_new": (pointer, (pointer, integer, pointer, integer, integer, integer, integer)),
        "linear_of_codes": (pointer, (pointer, pointer, integer, integer, integer, integer)),
        "sums_can_be_scaled": (ctypes.c_int, (pointer, integer, integer)),
        "round_to_4_bits": (None, (pointer, integer, integer, integer, pointer, pointer)),
        "linear_free": (None, (pointer,)),
        "linears_join": (None, (pointer, integer)),
        "team_new": (pointer, (integer,)),
        "team_free": (None, (pointer,)),
        "decoder_new": (pointer, (pointer, pointer, pointer)),
        "decoder_free": (None, (pointer,)),
        "decoder_run": (ctypes.c_int, (pointer, pointer, pointer)),
        "linear_run": (
            ctypes.c_int,
            (pointer, pointer, pointer, integer, pointer, number, integer, pointer, integer),
        ),
        "experts_run": (ctypes.c_int, (pointer, pointer, pointer, integer, integer, pointer, number)),
        "meet": (None, (pointer, integer, integer)),
        "post": (None, (pointer, integer)),
        "await": (None, (pointer, integer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, f"headway_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


@functools.cache
def load_library() -> CpuLibrary | None:
    """The best installed variant for this processor, or None. Raises ``StaleKernelsError``: see ``CpuLibrary``."""
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
    if variant not in instruction_sets_here() or not all(has.get(name) for name in _FEATURES[variant]):
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
        self.handle = made(library.functions.headway_team_new(num_threads), f"{num_threads} threads")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.functions.headway_team_free(self.handle)


class _CodedStruct(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("group_of", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("rounds_inputs", ctypes.c_int64),
        ("is_narrow", ctypes.c_int64),
        ("table", ctypes.c_float * 16),
    )


@dataclass(frozen=True, slots=True)
class StackedRows:
    """A matrix in ``parts``, ``[rows, inputs]`` each and of one dtype, whose rows follow each other."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """All rows, and inputs."""
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    def with_rows(self, change: Callable[[Tensor], Tensor]) -> "StackedRows":
        """Change the rows of each part."""
        return StackedRows(tuple(map(change, self.parts)))


class PackedLinear:
    """Weights of one product in the library's layout; ``weight`` and ``bias`` are copied.

    ``weight`` floating, ``[outputs, inputs]``, held in ``form``, or codes, which are not changed; ``bias``
    ``[outputs]`` or None. With ``gated``, outputs are gates, then ups, and the product gives ``silu(gate) * up``.
    ``may_be_narrow``: where inputs stay floats, they and what codes stand for may be rounded to bfloat16, if that is faster.
    """

    def __init__(
        self,
        library: CpuLibrary,
        weight: Tensor | StackedRows | CodedWeight,
        bias: Tensor | None,
        form: WeightForm = WeightForm.FLOAT32,
        *,
        gated: bool = False,
        may_be_narrow: bool = False,
    ) -> None:
        self._library = library
        self._gated = gated
        self.form: IntEnum
        """In which the weights are held."""
        self.outputs, self.inputs = weight.shape
        wide_bias = None if bias is None else bias.float().contiguous()
        rest = (address(wide_bias), self.outputs, self.inputs)
        if isinstance(weight, CodedWeight):
            kept = weight.contiguous()
            struct = _coded_struct(kept, is_narrow=may_be_narrow and library.multiplies_pairs)
            self.form = _held_form(library, kept, struct)
            handle = library.functions.headway_linear_of_codes(ctypes.byref(struct), *rest, int(self.form), int(gated))
        else:
            self.form = form
            stacked = StackedRows((weight,)) if isinstance(weight, Tensor) else weight
            floats, is_narrow = _readable(stacked, may_be_narrow=form is not WeightForm.INT8)
            rows = _addresses_of_rows(floats)
            handle = library.functions.headway_linear_new(rows.data_ptr(), is_narrow, *rest, int(form), int(gated))
        self.handle = made(handle, "the weights")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.functions.headway_linear_free(self.handle)

    @property
    def padded_outputs(self) -> int:
        """As many as a product writes: whole panels."""
        return rounded(self.outputs, self._library.panel)

    def new_outputs(self, rows: int) -> Tensor:
        """Memory for the outputs of some rows: float32, ``[rows, outputs]``, rounded up to whole panels."""
        return torch.zeros(rows, self.padded_outputs)

    def __call__(
        self,
        team: Team,
        inputs: Tensor,
        norm: Tensor | None = None,
        norm_eps: float = 0.0,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply, for tests. ``inputs`` float32, contiguous, ``[rows, inputs]``; ``out`` as of ``new_outputs``."""
        out = self.new_outputs(len(inputs)) if out is None else out
        done = self._library.functions.headway_linear_run(
            self.handle,
            team.handle,
            inputs.data_ptr(),
            len(inputs),
            address(norm),
            norm_eps,
            int(self._gated),
            out.data_ptr(),
            out.shape[1],
        )
        made(done, "a product")
        return out[:, : self.outputs // 2 if self._gated else self.outputs]


def join_panels(library: CpuLibrary, products: Sequence[PackedLinear]) -> None:
    """Put the weights of many products into huge pages: one alone may be smaller than such a page."""
    handles = (ctypes.c_void_p * len(products))(*(product.handle for product in products))
    library.functions.headway_linears_join(ctypes.byref(handles), len(products))


def rounded_to_4_bits(library: CpuLibrary, weight: StackedRows) -> CodedWeight:
    """As ``rounded_to_4_bits`` of ``coded_weight``, but for scales that are equally good, and much faster.

    A group with a number that is not finite gets the scale NaN.
    """
    outputs, inputs = weight.shape
    floats, is_narrow = _readable(weight)
    rounded_weight = of_4_bits(outputs, inputs)
    rows, codes, scales = _addresses_of_rows(floats), rounded_weight.codes, rounded_weight.scales
    library.functions.headway_round_to_4_bits(
        rows.data_ptr(), is_narrow, outputs, inputs, codes.data_ptr(), scales.data_ptr()
    )
    return rounded_weight


def _readable(weight: StackedRows, *, may_be_narrow: bool = True) -> tuple[StackedRows, bool]:
    """Parts as the library reads them, and whether they are bfloat16 and not float32."""
    is_narrow = weight.parts[0].dtype == torch.bfloat16 and may_be_narrow
    return weight.with_rows(lambda part: _with_whole_rows(part if is_narrow else part.float())), is_narrow


def _with_whole_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _addresses_of_rows(matrix: StackedRows) -> Tensor:
    return torch.cat(
        [part.data_ptr() + torch.arange(len(part)) * part.stride(0) * part.itemsize for part in matrix.parts]
    )


def _held_form(library: CpuLibrary, weight: CodedWeight, struct: _CodedStruct) -> IntEnum:
    if weight.is_for_int8:
        return WeightForm.INT8
    uses_digits = library.multiplies_digits and not _takes_pairs(library, weight, struct)
    if weight.has_blocks and (weight.rounds_inputs or uses_digits):
        return BlockForm[weight.form.name]
    return weight.form


def _takes_pairs(library: CpuLibrary, weight: CodedWeight, struct: _CodedStruct) -> bool:
    """Whether codes are rounded to bfloat16 in place of digits: not if each weight would have to be scaled first."""
    if not struct.is_narrow:
        return False
    return bool(library.functions.headway_sums_can_be_scaled(ctypes.byref(struct), weight.shape[0], int(weight.form)))


def _coded_struct(weight: CodedWeight, *, is_narrow: bool) -> _CodedStruct:
    return _CodedStruct(
        codes=weight.codes.data_ptr(),
        scales=weight.scales.data_ptr(),
        minima=address(weight.minima),
        group_of=address(weight.group_of),
        group=weight.group,
        num_groups=weight.scales.shape[1],
        rounds_inputs=weight.rounds_inputs,
        is_narrow=is_narrow,
        table=weight.table or (),
    )


def rounded(width: int, multiple: int) -> int:
    """The next multiple."""
    return -(-width // multiple) * multiple


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers begin; None of none."""
    return None if tensor is None else tensor.data_ptr()


def made(result: int | None, what: str) -> int:
    """Return a result of the library. Raises ``MemoryError``: there is none."""
    if not result:
        raise MemoryError(f"no memory for {what}")
    return result
