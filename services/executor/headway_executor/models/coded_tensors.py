"""The quantised weights of a checkpoint in the model's form, as codes.

Owns: the cut and the fusion of codes with their scales. Must not know: formats, files, kernels.

The model's form takes rows of tensors, orders them and puts them together. What it does to a weight, it does here to its
codes, its scales and its minima, each in turn.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.loading import ModelTensors
from headway_executor.models.stored_names import TensorSource
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight, unified

Projection: TypeAlias = Callable[[ModelTensors], tuple[Tensor, Tensor | None]]
"""One projection's weight, ``[outputs, inputs]``, and bias."""


class _View:
    """A ``TensorSource`` with one part of each coded weight in its place; it keeps the weights that were asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.weights: dict[str, CodedWeight] = {}
        self.part: Callable[[CodedWeight], Tensor] = _codes
        self.is_coded = True

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        if not self._checkpoint.is_coded(name):
            self.is_coded = self.is_coded and not name.endswith(".weight")
            return self._checkpoint.read(name, rows, columns)
        is_stack = not name.endswith(".weight")
        if name not in self.weights:
            self.weights[name] = self._checkpoint.read_codes(name, rows if is_stack else None)
        part = self.part(self.weights[name])
        if is_stack:
            outputs = slice(None) if columns is None else slice(columns.start, columns.stop)
            return part[outputs].t().unsqueeze(0)
        assert columns is None
        return part if rows is None else part[rows.start : rows.stop]


class CodedTensors:
    """Reads projections. ``tensors_of`` gives the model's form of the tensors of a source."""

    def __init__(self, checkpoint: Checkpoint, tensors_of: Callable[[TensorSource], ModelTensors]) -> None:
        self._checkpoint = checkpoint
        self._tensors_of = tensors_of

    def read(self, projection: Projection) -> tuple[CodedWeight, Tensor | None] | None:
        """A projection and its bias; None if it is not stored as codes, or one form cannot hold all of its parts."""
        if self._checkpoint.format is None:
            return None
        view = _View(self._checkpoint)
        tensors = self._tensors_of(view)
        projection(tensors)
        if not view.is_coded or not view.weights:
            return None
        same = unified(list(view.weights.values()))
        if same is None:
            return None
        view.weights = dict(zip(view.weights, same, strict=True))
        codes, bias = projection(tensors)
        view.part = _scales
        scales, _ = projection(tensors)
        view.part = _minima
        minima = None if same[0].minima is None else projection(tensors)[0]
        return replace(same[0], codes=codes.view(CODE_DTYPES[same[0].form]), scales=scales, minima=minima), bias


def _codes(weight: CodedWeight) -> Tensor:
    return weight.codes.view(torch.uint8)


def _scales(weight: CodedWeight) -> Tensor:
    return weight.scales


def _minima(weight: CodedWeight) -> Tensor:
    assert weight.minima is not None
    return weight.minima
