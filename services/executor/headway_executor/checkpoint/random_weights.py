"""Random weights, to measure a model's speed with only its config.json.

Owns: their distribution. Must not know: models.
"""

import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_NORM_SUFFIX = "norm.weight"


class RandomCheckpoint:
    """Normal numbers, drawn from names and ``seed``; norms are ones.

    The variance keeps activations of order one.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], *, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = shapes
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release nothing."""

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def is_coded(self, name: str) -> bool:
        """Never."""
        del name
        return False

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Draw a tensor, whole; return it, or some of its rows and columns."""
        drawn = self._drawn(name)
        wanted = tuple(slice(None) if part is None else slice(part.start, part.stop) for part in (rows, columns))
        return drawn[wanted[: drawn.dim()]]

    def _drawn(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(_NORM_SUFFIX):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed ^ zlib.crc32(name.encode()))
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def fingerprint(self) -> str:
        """16 hex digits over shapes and seed."""
        text = f"{self._seed} {self._dtype} {sorted(self._shapes.items())}".encode()
        return f"{zlib.crc32(text):08x}{zlib.crc32(text[::-1]):08x}"
