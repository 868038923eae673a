"""Triton's interpreter, made to round as a device does and to take less time.

Owns: what is put in the place of the interpreter's parts, all of them inside of Triton. Where they are gone, or are called
in another way, tests of bfloat16 and of float8 will say so. Must not know any kernel.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float
_get_np_dtype = interpreter._get_np_dtype
_BLOCK_TYPES: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


@contextlib.contextmanager
def quick_interpreter() -> Iterator[None]:
    """While this lasts, kernels are interpreted so."""
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_float)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_of)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_function)
        patch.setattr(interpreter.GridExecutor, "__call__", _one_at_a_time(interpreter.GridExecutor.__call__))
        patch.setattr(
            interpreter.InterpretedFunction, "rewrite", _one_at_a_time(interpreter.InterpretedFunction.rewrite)
        )
        patch.setattr(tl.core.tensor, "__init__", begin_tensor)
        patch.setattr(tl.core.block_type, "with_element_ty", with_element_type)
        patch.setattr(interpreter.InterpreterBuilder, "get_block_ty", known_block_type)
        # Triton's own works out in 64 bits whether integers overflow, and uses the answer only in debug mode, which is off.
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        assert not builder.options.debug
        yield


def _one_at_a_time(function):
    """Triton's own changes its modules while it interprets a kernel, so that threads would disturb each other. CPython 3.11 fails
    where two of them parse a source (issue 106905 there).
    """
    is_busy = threading.Lock()

    @functools.wraps(function)
    def waited(*arguments, **named):
        with is_busy:
            return function(*arguments, **named)

    return waited


def convert_float(values, source, target, rounding_mode):
    """Triton's own cuts float32 off to bfloat16 where a device rounds to nearest, and takes numbers apart where a table has all."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
    if (source, target) == (tl.bfloat16, tl.float32):
        return (values.astype("uint32") << 16).reshape(values.shape)
    if source.primitive_bitwidth == 8:
        return _float8_values(source, target)[values]
    return _convert_float(values, source, target, rounding_mode)


def create_dot(_builder, left, right, added, _input_precision, _max_num_imprecise_acc):
    """Triton's own leaves the order of a sum to numpy's BLAS, where on some processors a row's place in the tile decides it.

    A sum in 64 bits is exact for inputs of 16 bits, or nearly so, and is rounded once.
    """
    wide = [_wide(part) for part in (left, right)]
    product = np.matmul(*wide, dtype=np.float64).astype(added.data.dtype)
    return interpreter.TensorHandle(product + added.data, added.dtype.scalar)


def _wide(part):
    is_float8 = part.dtype.primitive_bitwidth == 8 and part.dtype.is_floating()
    return convert_float(part.data, part.dtype, tl.float16, None).view(np.float16) if is_float8 else part.data


@functools.cache
def _float8_values(source, target):
    return _convert_float(np.arange(256, dtype=np.uint8), source, target, None)


def numpy_type_of(triton_type):
    """Triton's own makes a table of all types whenever it looks one up."""
    scalar = triton_type.scalar
    return _get_np_dtype(scalar) if scalar.is_ptr() else _numpy_type_of_scalar(scalar)


@functools.cache
def _numpy_type_of_scalar(scalar):
    return _get_np_dtype(scalar)


def begin_tensor(tensor, handle, triton_type):
    """Triton's own makes new constants for the shape of each tensor."""
    tensor.handle, tensor.type, tensor.dtype = handle, triton_type, triton_type.scalar
    tensor.shape, tensor.numel = _shape_and_size(tuple(triton_type.shape.values) if triton_type.is_block() else ())


def with_element_type(block, scalar):
    """Triton's own describes a type anew whenever it is needed."""
    return known_block_type(None, scalar, block.shape)


def known_block_type(_builder, scalar, shape):
    """As ``with_element_type``, for a scalar and a shape."""
    key = scalar.name, tuple(shape.values)
    if key not in _BLOCK_TYPES:
        _BLOCK_TYPES[key] = tl.block_type(scalar, shape)
    return _BLOCK_TYPES[key]


@functools.cache
def _shape_and_size(sizes):
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def call_function(function, *arguments, **named):
    """Triton's own patches ``triton.language`` again at each call, though it did so when the kernel began."""
    if tl.core.is_builtin(tl.core.load):  # for functions of Triton's own library, which know it by this name
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*arguments, **named)
