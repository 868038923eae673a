"""Linear layers in the form that is quickest for their device and number format.

Owns: packing and quantising weights, and multiplying with them.
Must not know: what a layer is for, or how tokens are batched.

Three forms. ``DenseLinear`` is plain torch. ``PackedLinear`` holds float32 weights in MKL's own layout: at the 2 to 64
rows of a decode step, where an unpacked product spends its time rearranging the weights, it is 1.2 to 2 times as fast.
``Int8Linear`` holds 8-bit weights and quantises its input token by token, for AMX or VNNI through oneDNN and FBGEMM.
"""

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_FOR_ROWS = 32
_INT8_MAX = 127.0
_TINY = 1e-30
_FBGEMM = "fbgemm"
_UINT8_ZERO = 128
"""FBGEMM's inputs are unsigned; with this zero point they mean the same as signed ones."""


class Linear(Protocol):
    """A linear layer."""

    def __call__(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """Multiply: ``[tokens, in] -> [tokens, out]``, same dtype; the result is a new tensor.

        ``scale``, shape ``[tokens, 1]``, is a factor on each token's input.
        """
        ...


class DenseLinear:
    """``weight`` shape ``[out, in]``, ``bias`` shape ``[out]`` or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """See ``Linear.__call__``."""
        return functional.linear(inputs if scale is None else inputs * scale, self._weight, self._bias)


class PackedLinear:
    """Float32 on the CPU with weights in MKL's packed layout.

    MKL packs for a number of rows; its layout is the same for any (``accepts`` tries that on the machine at hand), so one
    copy serves prefill and decode. The original weights are not kept: torch asks for them only to learn their shape.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)  # noqa: SLF001
        self._shape_only = torch.empty(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """See ``Linear.__call__``."""
        output: Tensor = torch.ops.mkl._mkl_linear.default(  # noqa: SLF001
            inputs if scale is None else inputs * scale, self._packed, self._shape_only, self._bias, inputs.shape[0]
        )
        return output

    @staticmethod
    def accepts() -> bool:
        """Whether this torch has MKL's packed products and they do not depend on the number of rows packed for."""
        mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
        if not (mkl and hasattr(torch.ops.mkl, "_mkl_linear")):
            return False
        weight = torch.linspace(-1, 1, 96 * 40).view(96, 40)
        packed = PackedLinear(weight, None)
        for num_rows in (1, 2, 7, 64, 300):
            inputs = torch.linspace(-1, 1, num_rows * 40).view(num_rows, 40)
            if not torch.allclose(packed(inputs), inputs @ weight.t(), rtol=1e-4, atol=1e-4):
                return False
        return True


class Int8Linear:
    """8-bit weights with one scale per output channel; inputs quantised per token, symmetrically. CPU only.

    ``weight`` is float, shape ``[out, in]``. A token's result depends on that token alone: products are exact in int32,
    then scaled in float32. A token alone in its step takes FBGEMM's matrix-vector product where there is one, which does
    the same in two thirds of the time, at the price of a second copy of the weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(1) / _INT8_MAX).clamp_(min=_TINY)
        quantised = (wide / scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(quantised, [_PACKED_FOR_ROWS, weight.shape[1]])
        self._packed_for_one = _pack_for_one(quantised, scales) if _has_matrix_vector_products() else None
        self._scales = scales / _INT8_MAX
        self._bias = bias

    def __call__(self, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """See ``Linear.__call__``. A factor on the input changes nothing but the scale of the output."""
        wide = inputs.float()
        largest = wide.abs().amax(-1, keepdim=True).clamp_(min=_TINY)
        if len(wide) == 1 and self._packed_for_one is not None:
            factor = scale
            output: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(
                wide, largest.item() / _INT8_MAX, _UINT8_ZERO, self._packed_for_one
            )
        else:
            factor = largest if scale is None else largest * scale
            narrow = (wide * (_INT8_MAX / largest)).round_().to(torch.int8)
            # Input scale 1 and zero point 0 here: the operator takes one scale per batch, ours differ by token.
            output = torch.ops.onednn.qlinear_pointwise.default(
                narrow, 1.0, 0, self._packed, self._scales, None, None, 1.0, 0, torch.float32, "none", [], ""
            )
        if factor is not None:
            output.mul_(factor)
        if self._bias is not None:
            output.add_(self._bias)
        return output.to(inputs.dtype)


def _has_matrix_vector_products() -> bool:
    """FBGEMM, on a processor whose 8-bit products do not saturate."""
    vnni = getattr(torch.cpu, "_is_vnni_supported", None)
    return _FBGEMM in torch.backends.quantized.supported_engines and vnni is not None and bool(vnni())


def _pack_for_one(weight: Tensor, scales: Tensor) -> Any:
    """FBGEMM's packed form of int8 ``weight`` (``[out, in]``) with ``scales`` (``[out]``)."""
    zero_points = torch.zeros(len(scales), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = _FBGEMM
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated; the packed products are not
            tensor = torch._make_per_channel_quantized_tensor(weight, scales.double(), zero_points, 0)  # noqa: SLF001
            return torch.ops.quantized.linear_prepack(tensor, None)
    finally:
        torch.backends.quantized.engine = engine


class LinearFactory:
    """Builds layers for one ``device``, dtype and quantization ("none" or "int8")."""

    def __init__(self, device: torch.device, dtype: torch.dtype, quantization: str) -> None:
        self.device = device
        self._dtype = dtype
        if quantization == "int8":
            self._form: type[Int8Linear | PackedLinear | DenseLinear] = Int8Linear
        elif device.type == "cpu" and dtype == torch.float32 and PackedLinear.accepts():
            self._form = PackedLinear
        else:
            self._form = DenseLinear

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """``weight`` floating, shape ``[out, in]``, any device; ``bias`` shape ``[out]`` or None."""
        held = bias if bias is None else bias.to(self.device, self._dtype)
        return self._form(weight.to(self.device, self._dtype), held)
