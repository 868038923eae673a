"""A GGUF file, read with the ``gguf`` package.

Owns: typed metadata, tensors. Must not know: models, tokenizers.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.flags.settings import ConfigurationError
from headway_proto.wording import shown

_PART = "-{:05d}-of-{:05d}.gguf"
"""How the names of several files end."""


class GgufFile:
    """Metadata and tensors, also of the files behind the first of several, which has the metadata.

    Raises:
        ConfigurationError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _opened(path)
        readers = [self._reader, *self._others()]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}

    def _others(self) -> list[gguf.GGUFReader]:
        """Each file says how many there are and which one it is, from 0 on."""
        count = self.index("split.count") or 0
        if count < 2:
            return []
        first = _PART.format(1, count)
        if not self._path.name.endswith(first) or self.value("split.no", 0) != 0:
            raise self.refuse(f"not the first of {count} files; allowed: the one whose name ends with {first}")
        stem = self._path.name.removesuffix(first)
        others = []
        for number in range(1, count):
            path = self._path.with_name(stem + _PART.format(number + 1, count))
            if not path.is_file():
                raise self.refuse(f"the model is in {count} files, and {path.name} is missing; allowed: all beside it")
            others.append(_opened(path))
            if [_number(others[-1], key) for key in ("split.no", "split.count")] != [number, count]:
                raise self.refuse(f"{path.name} is not the file {number + 1} of the {count} of this model")
        total = sum(len(reader.tensors) for reader in (self._reader, *others))
        expected = self.value("split.tensors.count", total)
        if expected != total:
            raise self.refuse(f"the {count} files have {total} tensors; split.tensors.count says {shown(expected)}")
        return others

    def refuse(self, what: str) -> ConfigurationError:
        """Return an error about the file."""
        return ConfigurationError(f"{self._path}: {what}")

    @property
    def tensor_names(self) -> list[str]:
        """In the order of the file."""
        return list(self._tensors)

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; without a ``default`` it has to be there."""
        field = self._reader.get_field(key)
        if field is not None:
            try:
                return field.contents()
            except ValueError as error:  # of a text that is none
                raise self.refuse(f"{key} cannot be read ({str(error)[:64]})") from None
        if default is None:
            raise self.refuse(f"{key} is missing from the metadata")
        return default

    def each(self, key: str, *kinds: type) -> list[Any]:
        """A list of the metadata with values of these types alone."""
        values = self.value(key)
        if not isinstance(values, list) or any(type(value) not in kinds for value in values):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise self.refuse(f"{key} {shown(values)} is not supported; allowed: a list of {names}")
        return values

    def index(self, key: str) -> int | None:
        """An integer of the metadata from 0 on; None if it is not there."""
        if key not in self:
            return None
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refuse(f"{key} {shown(value)} is not supported; allowed: an integer from 0 on")
        return value

    def __contains__(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def kind(self, name: str) -> str:
        """The kind of a tensor's numbers, in ggml's words, in small letters."""
        return str(self._tensor(name).tensor_type.name).lower()

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def floats(self, name: str) -> Tensor:
        """A tensor of kind f32, f16 or bf16."""
        data: NDArray[Any] = self._tensor(name).data
        if self.kind(name) == "bf16":
            return (
                torch.from_numpy(np.ascontiguousarray(data).view(np.int16)).view(torch.bfloat16).view(self.shape(name))
            )
        return torch.from_numpy(np.array(data)).view(self.shape(name))

    def wide(self, name: str) -> Tensor:
        """A tensor of any kind: floats as they are, blocks as float32."""
        tensor = self._tensor(name)
        if self.kind(name) in ("f32", "f16", "bf16"):
            return self.floats(name)
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(self.shape(name))

    def book(self, kind: str) -> Tensor:
        """The book of a kind's codes, which the package has, as places in the order of its numbers: uint8."""
        quants = getattr(gguf.quants, kind.upper())
        quants.init_grid()
        return torch.from_numpy(np.searchsorted(quants.grid_map, quants.grid[0, 0]).astype(np.uint8))

    def blocks(self, name: str) -> Tensor:
        """A tensor of blocks: uint8, ``[rows, bytes]``; of a stack ``[count, rows, bytes]``."""
        return torch.from_numpy(np.array(self._tensor(name).data)).view(*self.shape(name)[:-1], -1)

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        if name not in self._tensors:
            raise self.refuse(f"tensor {name} is missing")
        return self._tensors[name]


def _number(reader: gguf.GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _opened(path: Path) -> gguf.GGUFReader:
    if path.exists() and not path.is_file():  # a pipe's reader would wait
        raise ConfigurationError(f"{path}: not a readable GGUF file (it is no file)")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ConfigurationError(f"{path}: not a readable GGUF file ({str(error)[:64]})") from None
    if reader.endianess is not gguf.GGUFEndian.LITTLE:  # The package does not turn the numbers inside of blocks.
        raise ConfigurationError(f"{path}: a file for big-endian machines; allowed: a little-endian file")
    return reader
