"""The tensors of a Hugging Face checkpoint: safetensors only, read through memory mapping.

Owns: files, tensors, the fingerprint. Must not know: what a tensor is for.

Pickle checkpoints are refused: unpickling runs code. Nothing here calls ``torch.load``.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway_executor.backend import ModelFilesError
from headway_executor.models.config import (
    CONFIG_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    read_json_object,
)

_SUFFIX = ".safetensors"
_DTYPES = ("F32", "BF16", "F16")

_SAMPLED_PAGES = 16
_PAGE_BYTES = 4096


class TensorHeader(msgspec.Struct, frozen=True):
    """``dtype`` is in safetensors' form."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of one checkpoint directory, mapped inside a ``with`` block.

    Raises (on construction):
        ModelFilesError: files are missing, damaged, refused, or disagree with their index.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        weight_map = _weight_map(directory)
        names = sorted(set(weight_map.values())) if weight_map else [WEIGHTS_FILE]
        self._files = {name: _open(directory / name) for name in names}
        self.headers = dict(self._read_headers())
        if weight_map is not None:
            _check_index(weight_map, self.headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(header.shape) for header in self.headers.values())

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: AbstractSet[str] = frozenset()) -> None:
        """Check for exactly the ``expected`` tensors (name to shape), beside ``ignored`` ones.

        Raises:
            ModelFilesError: names the first tensor that is missing, extra, or of a wrong shape or dtype.
        """
        for name, shape in expected.items():
            header = self.headers.get(name)
            if header is None:
                raise ModelFilesError(f"{self._directory}: tensor {name} is missing")
            if header.shape != shape:
                found, wanted = list(header.shape), list(shape)
                raise ModelFilesError(
                    f"{header.file}: tensor {name} has shape {found}; {CONFIG_FILE} asks for {wanted}"
                )
            if header.dtype not in _DTYPES:
                raise ModelFilesError(
                    f"{header.file}: tensor {name} has dtype {header.dtype}; allowed: {', '.join(_DTYPES)}"
                )
        extra = sorted(self.headers.keys() - expected.keys() - ignored)
        if extra:
            raise ModelFilesError(
                f"{self.headers[extra[0]].file}: tensor {extra[0][:64]} does not belong to this model"
            )

    def read(self, name: str) -> Tensor:
        """Return a tensor. Read-only: its storage may be the mapped file."""
        tensor: Tensor = self._files[self.headers[name].file].get_tensor(name)
        return tensor

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
            f"{WEIGHTS_INDEX_FILE}: file name {file!r:.64} is refused; allowed: a plain *{_SUFFIX} name"
        )


def _open(path: Path) -> Any:
    """The library checks the header, and that tensors neither overlap nor overrun."""
    if path.is_dir():
        raise ModelFilesError(f"{path}: is a directory; allowed: a file")
    if not path.is_file():
        raise ModelFilesError(f"{path}: no such file, though the index names it")
    try:
        path.open("rb").close()
    except OSError as error:  # The library reports a file that it cannot open as damaged.
        raise ModelFilesError(f"{path}: {error.strerror or error}") from None
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
