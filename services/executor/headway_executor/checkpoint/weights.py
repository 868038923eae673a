"""The tensors of a Hugging Face checkpoint: safetensors only, read through memory mapping.

Owns: files, tensors, the fingerprint. Must not know: what a tensor is for, how a format stores codes.

A quantised weight goes by the name that it has unquantised, ``*.weight``, whatever tensors hold it. A name with another end
is that of a stack of weights, ``[count, inputs, outputs]``.

Pickle checkpoints are refused: unpickling runs code. Nothing here calls ``torch.load``.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import (
    CONFIG_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    read_json_object,
)
from headway_executor.checkpoint.stored_weights.formats import scheme_in
from headway_executor.checkpoint.stored_weights.scheme import FLOATS, UNREAD, StoredTensor, StoredTensors
from headway_kernels.cpu.coded_weight import CodedWeight
from headway_proto.wording import shown

_SUFFIX = ".safetensors"
_WEIGHT = ".weight"
_CODES_OF_A_WORD = 8

_BITS = re.compile("[0-9]+")
"""In the name of a dtype; one without is of bytes."""

_SAMPLED_PAGES = 16
_PAGE_BYTES = 4096


Report = Callable[[str, int, int], None]


def _say_nothing(what: str, done: int, total: int) -> None:
    del what, done, total


class TensorHeader(msgspec.Struct, frozen=True):
    """``dtype`` is in safetensors' form."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In the file."""
        bits = _BITS.search(self.dtype)
        return math.prod(self.shape) * (8 if bits is None else int(bits[0])) // 8


class _Reading:
    """How much of the files has been read, in MiB, for people who wait. Of several ranks each reads its share.

    Several threads may read.
    """

    def __init__(self, num_bytes: int, num_ranks: int, report: Report) -> None:
        self._num_bytes, self._num_ranks, self._num_read = num_bytes // num_ranks, num_ranks, 0
        self._report = report
        self._lock = Lock()

    def leave_out(self, num_bytes: int) -> None:
        """Nobody reads so many of all ranks' bytes."""
        self._num_bytes -= num_bytes // self._num_ranks

    def count(self, tensor: Tensor) -> Tensor:
        with self._lock:
            self._num_read = min(self._num_bytes, self._num_read + tensor.nbytes)
            self._report("reading the weights, MiB", self._num_read >> 20, self._num_bytes >> 20)
        return tensor


class _Files(NamedTuple):
    """Open files; see ``StoredTensors``."""

    files: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    reading: _Reading

    def dtype(self, name: str) -> str | None:
        return self.headers[name].dtype if name in self.headers else None

    def read(self, name: str) -> Tensor:
        return self.reading.count(self.files[self.headers[name].file].get_tensor(name))


class _PlaceInStacks(NamedTuple):
    """The part at one place of each tensor of a stack, and others whole; see ``StoredTensors``."""

    stored: _Files
    stack: str
    place: int

    def dtype(self, name: str) -> str | None:
        return self.stored.dtype(name)

    def read(self, name: str) -> Tensor:
        if not name.startswith(self.stack):
            return self.stored.read(name)
        whole = self.stored.files[self.stored.headers[name].file].get_slice(name)
        return self.stored.reading.count(whole[self.place : self.place + 1])[0]


class Checkpoint:
    """The tensors of one checkpoint directory, mapped inside a ``with`` block.

    ``report``: see ``BackendConfig.progress``. ``num_ranks`` share the reading.

    Raises (on construction):
        ModelFilesError: files are missing, damaged, refused, or disagree with their index.
    """

    def __init__(self, directory: Path, report: Report = _say_nothing, num_ranks: int = 1) -> None:
        self._directory = directory
        weight_map = _weight_map(directory)
        names = sorted(set(weight_map.values())) if weight_map else [WEIGHTS_FILE]
        self._files = {name: open_safetensors(directory / name) for name in names}
        self.headers = dict(self._read_headers())
        if weight_map is not None:
            _check_index(weight_map, self.headers)
        self._scheme = scheme_in(directory)
        num_bytes = sum((directory / name).stat().st_size for name in names)
        self._stored = _Files(self._files, self.headers, _Reading(num_bytes, num_ranks, report))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def __contains__(self, name: object) -> bool:
        return name in self.headers or (isinstance(name, str) and self.is_coded(name))

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors, about."""
        return sum(
            math.prod(header.shape) * (_CODES_OF_A_WORD if header.dtype in ("I32", "U32") else 1)
            for header in self.headers.values()
        )

    @property
    def format(self) -> str | None:
        """The name of the format of quantised weights; None: there are none."""
        return None if self._scheme is None else self._scheme.name

    def is_coded(self, name: str) -> bool:
        """Whether a weight, or a stack of weights, is stored as codes."""
        return self._scheme is not None and self._scheme.holds(name.removesuffix(_WEIGHT), self._stored)

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: AbstractSet[str] = frozenset()) -> None:
        """Check for exactly the ``expected`` tensors (name to shape), beside ``ignored`` ones.

        Raises:
            ModelFilesError: names the first tensor that is missing, extra, or of a wrong shape or dtype.
        """
        known = set(ignored)
        for name, shape in expected.items():
            stored = self._holders(name, shape)
            known |= stored.keys()
            for tensor, wanted in stored.items():
                self._check_tensor(tensor, wanted)
            if self._scheme is not None and self.is_coded(name):
                base = name.removesuffix(_WEIGHT)
                beside = {base + end for end in self._scheme.zeros} - expected.keys()
                known.update(tensor for tensor in beside if self._is_zero(tensor))
        if self._scheme is not None:
            known.update(name for name in self.headers if name.endswith(UNREAD))
        extra = sorted(self.headers.keys() - known)
        if extra:
            raise ModelFilesError(
                f"{self.headers[extra[0]].file}: tensor {extra[0][:64]} does not belong to this model"
            )
        self._stored.reading.leave_out(sum(self.headers[name].num_bytes for name in ignored & self.headers.keys()))

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Return a tensor, or some of its rows and columns (of the first and the last dimension), the only ones read.

        Read-only: its storage may be the mapped file. A weight of codes is widened to float32; of a stack, rows are named.
        """
        if self.is_coded(name):
            wide = self._widened(name, rows)
            return wide if columns is None else wide[..., columns.start : columns.stop]
        if rows is None and columns is None:
            return self._stored.read(name)
        file = self._files[self.headers[name].file]
        wanted = [slice(None)] * len(self.headers[name].shape)
        for place, part in ((-1, columns), (0, rows)):
            wanted[place] = wanted[place] if part is None else slice(part.start, part.stop)
        return self._stored.reading.count(file.get_slice(name)[tuple(wanted)])

    def read_codes(self, name: str, rows: range | None = None) -> CodedWeight:
        """Return a weight that is stored as codes, or some of its rows; of a stack, the weight of the one row.

        Raises:
            ModelFilesError: a code is no number, or a scale or zero is not finite.
        """
        if not name.endswith(_WEIGHT):
            assert rows is not None
            return self._coded(name, _PlaceInStacks(self._stored, name, rows.start))
        weight = self._coded(name, self._stored)
        return weight if rows is None else weight.with_rows(lambda all_rows: all_rows[rows.start : rows.stop])

    def fingerprint(self) -> str:
        """16 hex digits over config.json, all headers, file sizes and a few pages of each file.

        The sample is cheap at any size and distinguishes fine-tunes.
        """
        digest = hashlib.sha256((self._directory / CONFIG_FILE).read_bytes())
        for name, header in sorted(self.headers.items()):
            digest.update(f"{name} {header.dtype} {header.shape}\n".encode())
        for name in sorted(self._files):
            with (self._directory / name).open("rb") as file:
                size = file.seek(0, 2)
                digest.update(f"{size}\n".encode())
                for i in range(_SAMPLED_PAGES):
                    file.seek(max(0, size - _PAGE_BYTES) * i // (_SAMPLED_PAGES - 1))
                    digest.update(file.read(_PAGE_BYTES))
        return digest.hexdigest()[:16]

    def _holders(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """The tensors that hold an expected one."""
        if self._scheme is None or not self.is_coded(name):
            return {name: StoredTensor(FLOATS, (shape,))}
        if name.endswith(_WEIGHT):
            if len(shape) != 2:
                raise ModelFilesError(
                    f"{self._directory}: {name} is a stack of weights in codes ({self.format}); allowed: numbers"
                )
            outputs, inputs = shape
            return self._scheme.tensors(name.removesuffix(_WEIGHT), (outputs, inputs), self._stored)
        count, inputs, outputs = shape
        return {
            tensor: wanted._replace(shapes=tuple((count, *one) for one in wanted.shapes))
            if tensor.startswith(name)
            else wanted
            for tensor, wanted in self._scheme.tensors(name, (outputs, inputs), self._stored).items()
        }

    def _is_zero(self, name: str) -> bool:
        return name in self.headers and not bool(self._stored.read(name).any())

    def _coded(self, name: str, stored: StoredTensors) -> CodedWeight:
        assert self._scheme is not None
        weight = self._scheme.read(name.removesuffix(_WEIGHT), stored)
        for numbers in (weight.scales, weight.minima, weight.table):
            if numbers is not None and not bool(torch.isfinite(torch.as_tensor(numbers)).all()):
                raise ModelFilesError(
                    f"{self._directory}: {name}: a scale or zero is not finite; allowed: finite numbers"
                )
        return weight

    def _widened(self, name: str, rows: range | None) -> Tensor:
        if name.endswith(_WEIGHT):
            return self.read_codes(name, rows).float()
        assert rows is not None
        return torch.stack([self.read_codes(name, range(row, row + 1)).float().t() for row in rows])

    def _check_tensor(self, name: str, wanted: StoredTensor) -> None:
        header = self.headers.get(name)
        if header is None and wanted.is_optional:
            return
        if header is None:
            raise ModelFilesError(f"{self._directory}: tensor {name} is missing")
        if wanted.shapes and header.shape not in wanted.shapes:
            allowed = " or ".join(str(list(shape)) for shape in wanted.shapes)
            raise ModelFilesError(
                f"{header.file}: tensor {name} has shape {list(header.shape)}; {CONFIG_FILE} asks for {allowed}"
            )
        if header.dtype not in wanted.dtypes:
            raise ModelFilesError(
                f"{header.file}: tensor {name} has dtype {header.dtype}; allowed: {', '.join(wanted.dtypes)}"
            )

    def _read_headers(self) -> Iterator[tuple[str, TensorHeader]]:
        seen: dict[str, str] = {}
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name in seen:
                    raise ModelFilesError(f"{file}: tensor {name[:64]} is also in {seen[name]}")
                seen[name] = file
                view = handle.get_slice(name)
                yield name, TensorHeader(file, view.get_dtype(), tuple(view.get_shape()))


def _weight_map(directory: Path) -> dict[str, str] | None:
    if (directory / WEIGHTS_FILE).exists():  # It wins over an index, as in transformers.
        return None
    if (directory / WEIGHTS_INDEX_FILE).exists():
        fields = read_json_object(directory / WEIGHTS_INDEX_FILE)
        weight_map = fields.values.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise fields.refuse("weight_map", "an object of tensor and file names")
        for file in weight_map.values():
            _check_file_name(file)
        return weight_map
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelFilesError(
            f"{directory}: {pickles[0]} is a pickle checkpoint, which is never loaded; convert it to {WEIGHTS_FILE}"
        )
    raise ModelFilesError(f"{directory}: no {WEIGHTS_FILE} or {WEIGHTS_INDEX_FILE}")


def _check_file_name(file: object) -> None:
    if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(_SUFFIX) or "\0" in file:
        raise ModelFilesError(
            f"{WEIGHTS_INDEX_FILE}: file name {shown(file)} is refused; allowed: a plain *{_SUFFIX} name"
        )


def open_safetensors(path: Path) -> Any:
    """Map a file. The library checks the header, and that tensors neither overlap nor overrun.

    Raises:
        ModelFilesError: it cannot be read.
    """
    if path.is_dir():
        raise ModelFilesError(f"{path}: is a directory; allowed: a file")
    if not path.is_file():
        raise ModelFilesError(f"{path}: no such file, though the index names it")
    try:
        path.open("rb").close()
    except OSError as error:  # The library reports a file that it cannot open as damaged.
        raise ModelFilesError(f"{path}: {error.strerror or error}") from None
    try:
        str(path).encode()
    except UnicodeEncodeError:  # As above.
        raise ModelFilesError(
            f"{shown(path)}: the path is not UTF-8, which the library needs; allowed: one that is"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: damaged or not a safetensors file ({str(error)[:64]})") from None


def _check_index(weight_map: Mapping[str, str], headers: Mapping[str, TensorHeader]) -> None:
    for name, file in weight_map.items():
        if name not in headers or headers[name].file != file:
            raise ModelFilesError(f"{WEIGHTS_INDEX_FILE}: tensor {name[:64]} is not in {file}")
    unlisted = sorted(headers.keys() - weight_map.keys())
    if unlisted:
        raise ModelFilesError(
            f"{WEIGHTS_INDEX_FILE}: tensor {unlisted[0][:64]} of {headers[unlisted[0]].file} is not listed"
        )
