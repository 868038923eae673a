"""From the tensors of a checkpoint to weights on a device, as numbers or as codes.

Owns: which weights become codes, which inputs are rounded. Must not know: layers, launches, formats.

Codes of a checkpoint stay codes, where a kernel has their form. The rest is numbers of the model's dtype, or codes of a
``QuantizationKind``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.gpu.linear import (
    CodedLinear,
    DenseLinear,
    DeviceLinear,
    ExpertsLinear,
    RoundedInputs,
    SplitWorkspace,
)
from headway_executor.models.coded_tensors import CodedTensors, Projection
from headway_executor.models.linear import placed
from headway_executor.models.loading import ModelTensors
from headway_executor.models.stored_names import TensorSource
from headway_kernels.cpu.coded_weight import rounded_to_4_bits
from headway_kernels.gpu.experts.float8 import are_many
from headway_kernels.gpu.linear import float8 as float8_linear
from headway_kernels.gpu.linear.weights import DeviceWeight, coded, dense, quantized, stacked
from headway_kernels.gpu.tunings import Tunings
from headway_kernels.routing import Routing

QuantizationKind: TypeAlias = Literal["int8", "int4", "fp8"]
Activations: TypeAlias = Literal["auto", "exact", "fp8"]
"""The inputs of products with E4M3 codes: as the weights are meant, as they are, rounded. Values of the option ``activations``."""


class DeviceWeights:
    """Reads weights. ``tensors_of`` gives the model's form of the tensors of a source, on the device of ``tunings``.

    ``max_num_tokens``: of a step. ``warn`` gets a line if codes of the checkpoint do not stay codes.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        tensors_of: Callable[[TensorSource], ModelTensors],
        quantization: QuantizationKind | None,
        activations: Activations,
        dtype: torch.dtype,
        tunings: Tunings,
        max_num_tokens: int,
        warn: Callable[[str], None],
    ) -> None:
        device = tunings.device
        self.tunings = tunings
        self.tensors = tensors_of(checkpoint)
        self._codes = CodedTensors(checkpoint, tensors_of) if isinstance(checkpoint, Checkpoint) else None
        self._quantization = quantization
        self._activations = activations
        self._max_num_tokens = max_num_tokens
        self._dtype = dtype
        self._device = device
        self._workspace = SplitWorkspace(device)
        self._warn, self._has_warned = warn, False

    def here(self, tensor: Tensor) -> Tensor:
        """A copy in the model's dtype."""
        return placed(tensor, self._dtype, self._device)

    def linear(self, read: Projection, *, is_exact: bool = False) -> DeviceLinear:
        """One projection; if ``is_exact``, codes are those of the checkpoint alone."""
        weight, bias = self._stored(read)
        return self.product(weight, bias, is_exact=is_exact)

    def product(self, weight: Tensor | DeviceWeight, bias: Tensor | None, *, is_exact: bool = False) -> DeviceLinear:
        """As ``linear``, of a weight ``[outputs, inputs]`` that has been read."""
        if isinstance(weight, Tensor) and not is_exact:
            weight = self._quantised(weight) or weight
        own_bias = None if bias is None else self.here(bias)
        if isinstance(weight, Tensor):
            return DenseLinear(self.here(weight), own_bias, self._workspace)
        return CodedLinear(
            weight,
            own_bias,
            dtype=self._dtype,
            workspace=self._workspace,
            tilings=self.tunings.of_products(self._dtype),
            rounded=None if is_exact else self._rounded(weight, own_bias),
        )

    def _rounds(self, weight: DeviceWeight) -> bool:
        """Whether the inputs of many tokens are rounded."""
        is_meant = weight.rounds_inputs if self._activations == "auto" else self._activations == "fp8"
        return is_meant and float8_linear.is_native(self._device) and float8_linear.multiplies(weight)

    def _rounded(self, weight: DeviceWeight, bias: Tensor | None) -> RoundedInputs | None:
        if not self._rounds(weight):
            return None
        tilings = self.tunings.of_products(torch.float8_e4m3fn)
        return RoundedInputs(weight, bias, self._workspace, tilings, self._max_num_tokens)

    def of_experts(self, reads: Sequence[Projection], rows_per_token: int, routing: Routing) -> ExpertsLinear:
        """The same projection of each expert, whose inputs have so many rows for a token."""
        weight, bias = self._of_experts(reads)
        rounded: RoundedInputs | None = None
        if are_many(self._max_num_tokens * routing.num_chosen, routing.num_experts) and self._rounds(weight):
            tilings, max_num_rows = self.tunings.of_rounded_pairs(), self._max_num_tokens * rows_per_token
            rounded = RoundedInputs(weight, bias, self._workspace, tilings, max_num_rows)
        return ExpertsLinear(weight, bias, self.tunings.of_pairs(self._dtype), rounded)

    def _of_experts(self, reads: Sequence[Projection]) -> tuple[DeviceWeight, Tensor | None]:
        """Weights, and biases ``[experts, outputs]``. All have codes of one form, or none."""
        found = self._coded_experts(reads)
        together = None if found is None else stacked([weight for weight, _ in found])
        if found is not None and together is not None:
            return together, self._side_by_side((bias for _, bias in found), len(found))
        biases: list[Tensor | None] = []

        def weights() -> Iterator[Tensor]:
            for read in reads:
                weight, bias = read(self.tensors)
                biases.append(bias)
                yield weight

        numbers = self._side_by_side(weights(), len(reads))
        assert numbers is not None
        return dense(numbers), self._side_by_side(biases, len(reads))

    def _coded_experts(self, reads: Sequence[Projection]) -> list[tuple[DeviceWeight, Tensor | None]] | None:
        """None as soon as one has no codes."""
        found = []
        for read in reads:
            weight, bias = self._stored(read)
            codes = self._quantised(weight) if isinstance(weight, Tensor) else weight
            if codes is None:
                return None
            found.append((codes, bias))
        return found

    def _side_by_side(self, tensors: Iterable[Tensor | None], count: int) -> Tensor | None:
        """Copied one by one: together they are many times a dense layer. Either all are None or none is."""
        out: Tensor | None = None
        for place, tensor in enumerate(tensors):
            if tensor is None:
                return None
            if out is None:
                out = torch.empty(count, *tensor.shape, dtype=self._dtype, device=self._device)
            out[place] = tensor
        return out

    def _stored(self, read: Projection) -> tuple[Tensor | DeviceWeight, Tensor | None]:
        found = None if self._codes is None else self._codes.read(read)
        if found is None:
            return read(self.tensors)
        weight, bias = found
        codes = coded(weight)
        if codes is None and not self._has_warned:
            self._has_warned = True
            name = str(self._dtype).removeprefix("torch.")
            self._warn(f"no kernel has some of the checkpoint's codes; they are widened to {name}, and take its memory")
        return codes or weight.float(), bias

    def _quantised(self, weight: Tensor) -> DeviceWeight | None:
        if self._quantization is None:
            return None
        return (
            coded(rounded_to_4_bits(weight)) if self._quantization == "int4" else quantized(weight, self._quantization)
        )
