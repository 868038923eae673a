"""Linear layers on a GPU, into preallocated memory.

Owns: dense weights, weights as codes. Must not know: a layer's use, files.
"""

from typing import Protocol

import torch
from torch import Tensor

from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.models.adapters import AdapterSite
from headway_kernels.gpu.activation import Gate
from headway_kernels.gpu.experts.float8 import are_many, multiply_rounded_pairs
from headway_kernels.gpu.experts.grouped import ExpertPairs, multiply_pairs
from headway_kernels.gpu.linear import skinny as skinny_linear
from headway_kernels.gpu.linear.float8 import float8_linear, workspace_size
from headway_kernels.gpu.linear.quantized import Tiling, quantized_linear
from headway_kernels.gpu.linear.weights import DeviceWeight, dense
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS


class DeviceLinear(Protocol):
    """``out = inputs @ weight.T + bias``: ``[tokens, in] -> [tokens, out]``."""

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """Multiply; allocates nothing."""
        ...


class SplitWorkspace:
    """Shared memory for partial sums, and counters of those that are there: int32, zeros between products."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def grow(self, num_elements: int, num_counters: int = 0) -> None:
        """Call before any step."""
        if self.memory.numel() < num_elements:
            self.memory = torch.empty(num_elements, dtype=torch.float32, device=self.memory.device)
        if self.arrived.numel() < num_counters:
            self.arrived = torch.zeros(num_counters, dtype=torch.int32, device=self.arrived.device)


class FewTokens:
    """Products of a few tokens of 16-bit numbers, each of which has the same result in any number of them.

    ``dtype`` is that of ``bias``, ``[out]`` or None, and of inputs.
    """

    def __init__(
        self, weight: DeviceWeight, bias: Tensor | None, dtype: torch.dtype, workspace: SplitWorkspace
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._workspace = workspace
        if dtype.itemsize == 2:
            workspace.grow(*skinny_linear.workspace_sizes(weight.num_outputs, weight.num_inputs))

    def __call__(self, inputs: Tensor, out: Tensor, gate: Gate = Gate.NONE) -> bool:
        """Multiply; with a gate, gates and ups to ``[tokens, out / 2]``. False: nothing is done, they are too many or too wide."""
        if not skinny_linear.takes(len(inputs), inputs.dtype):
            return False
        space = self._workspace
        skinny_linear.skinny_linear(inputs, self._weight, self._bias, out, space.memory, space.arrived, gate)
        return True


class RoundedInputs:
    """Products of many inputs, which are rounded to E4M3 as the weight is; ``max_num_rows`` of inputs in a step.

    ``weight`` is one, or that of all experts; ``tilings`` are of such products. Few inputs stay what they are: reading the
    weight takes the time, and rounding would be one launch more.
    """

    def __init__(
        self,
        weight: DeviceWeight,
        bias: Tensor | None,
        workspace: SplitWorkspace,
        tilings: tuple[Tiling, ...],
        max_num_rows: int,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._workspace = workspace
        self._tilings = tilings
        workspace.grow(workspace_size(max_num_rows, weight.num_inputs))

    def multiply(self, inputs: Tensor, out: Tensor) -> bool:
        """As ``DeviceLinear``. False: nothing is done, the tokens are few."""
        if len(inputs) <= MOST_FEW_TOKENS:
            return False
        float8_linear(inputs, self._weight, self._bias, out, self._workspace.memory, self._tilings)
        return True

    def multiply_pairs(self, inputs: Tensor, out: Tensor, pairs: ExpertPairs, *, gathers: bool) -> bool:
        """As ``ExpertsLinear``. False: nothing is done, the pairs are few."""
        if not are_many(len(pairs.order), len(pairs.ends)):
            return False
        space, tilings = self._workspace.memory, self._tilings
        multiply_rounded_pairs(inputs, self._weight, self._bias, out, pairs, space, gathers=gathers, tilings=tilings)
        return True


class DenseLinear:
    """``weight`` ``[out, in]``, ``bias`` ``[out]`` or None, in the model's dtype.

    Of more tokens than ``few``, or of float32, torch's library decides by their number how it adds.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: SplitWorkspace) -> None:
        self._weight = weight.contiguous()
        self._bias = bias
        self.few = FewTokens(dense(self._weight), bias, weight.dtype, workspace)

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        if self.few(inputs, out):
            return
        if self._bias is None:
            torch.mm(inputs, self._weight.t(), out=out)
        else:
            torch.addmm(self._bias, inputs, self._weight.t(), out=out)


class CodedLinear:
    """Weights as codes; ``bias`` ``[out]`` or None, in the model's ``dtype``, for which ``tilings`` are.

    ``rounded``: of the same weight, if inputs may be rounded.
    """

    def __init__(
        self,
        weight: DeviceWeight,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        workspace: SplitWorkspace,
        tilings: tuple[Tiling, ...],
        rounded: RoundedInputs | None = None,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._tilings = tilings
        self._rounded = rounded
        self.few = FewTokens(weight, bias, dtype, workspace)

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        if self.few(inputs, out) or (self._rounded is not None and self._rounded.multiply(inputs, out)):
            return
        quantized_linear(inputs, self._weight, self._bias, out, self._tilings)


class ExpertsLinear:
    """One projection of all experts, ``bias`` ``[experts, out]`` or None. ``rounded``: of the same weight, if inputs may be rounded."""

    def __init__(
        self, weight: DeviceWeight, bias: Tensor | None, tiling: Tiling, rounded: RoundedInputs | None = None
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._tiling = tiling
        self._rounded = rounded

    def __call__(self, inputs: Tensor, out: Tensor, pairs: ExpertPairs, *, gathers: bool) -> None:
        """See ``multiply_pairs``; allocates nothing."""
        if self._rounded is not None and self._rounded.multiply_pairs(inputs, out, pairs, gathers=gathers):
            return
        multiply_pairs(inputs, self._weight, self._bias, out, pairs, gathers=gathers, tiling=self._tiling)


class DeviceExperts(Protocol):
    """A projection of all experts."""

    def __call__(self, inputs: Tensor, out: Tensor, pairs: ExpertPairs, *, gathers: bool) -> None:
        """See ``multiply_pairs``."""
        ...


class AdaptedExperts:
    """A ``DeviceExperts``, and what each row's adapter adds to it at a ``site`` of a layer; this allocates in large steps."""

    def __init__(self, product: DeviceExperts, step: DeviceAdapters, layer: int, site: AdapterSite) -> None:
        self._product = product
        self._step = step
        self._layer = layer
        self._site = site

    def __call__(self, inputs: Tensor, out: Tensor, pairs: ExpertPairs, *, gathers: bool) -> None:
        """See ``DeviceExperts``."""
        self._product(inputs, out, pairs, gathers=gathers)
        if self._step.are_any:
            self._step.add_of_pairs(self._layer, self._site, inputs, out, pairs, gathers=gathers)


class AdaptedLinear:
    """A ``DeviceLinear``, and what each row's adapter adds to it at a ``site`` of a layer; this allocates in large steps.

    ``columns`` of the outputs are those of the site, if it has not all.
    """

    def __init__(
        self,
        product: DeviceLinear,
        step: DeviceAdapters,
        layer: int,
        site: AdapterSite,
        columns: slice = slice(None),
    ) -> None:
        self._product = product
        self._step = step
        self._layer = layer
        self._site = site
        self._columns = columns

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        self._product(inputs, out)
        if self._step.are_any:
            self._step.add(self._layer, self._site, inputs, out[:, self._columns])

    def few(self, inputs: Tensor, out: Tensor, gate: Gate) -> bool:
        """See ``FewTokens``; what adapters add comes between the product and the activation."""
        return (
            not self._step.are_any
            and isinstance(self._product, (DenseLinear, CodedLinear))
            and self._product.few(inputs, out, gate)
        )
