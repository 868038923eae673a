"""Columns: arrays of 32-bit numbers inside a message.

Owns: the bytes of a column (little-endian int32 or float32) and of a column group. Must not know: what columns mean.
A group of k columns with n entries has ``4 * k * n`` bytes, column after column, so each is a view without a copy.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
Float32Array: TypeAlias = NDArray[np.float32]

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
EMPTY_COLUMN = np.empty(0, dtype=INT32)


def encode_column(values: NDArray[np.integer] | Sequence[int]) -> bytes:
    """Encode integers, shape ``[n]``."""
    if isinstance(values, list):
        return array("i", values).tobytes()  # sooner than numpy for a few; every host here is little-endian
    return np.asarray(values, dtype=INT32).tobytes()


def decode_column(data: bytes) -> Int32Array:
    """View as read-only int32, shape ``[n]``.

    Raises:
        ValueError: the length is not a multiple of 4.
    """
    return np.frombuffer(data, INT32)


def encode_columns(columns: Iterable[NDArray[np.integer]]) -> bytes:
    """Encode equally long columns as one group."""
    return b"".join([np.ascontiguousarray(column, INT32) for column in columns])  # type: ignore[misc]  # each is a buffer


def decode_columns(data: bytes, num_columns: int) -> Int32Array:
    """View a group as read-only int32, shape ``[num_columns, n]``.

    Raises:
        ValueError: the length is not a multiple of ``4 * num_columns``.
    """
    return np.frombuffer(data, INT32).reshape(num_columns, -1)


def encode_floats(values: NDArray[np.floating] | Sequence[float]) -> bytes:
    """Encode numbers, shape ``[n]``."""
    return np.asarray(values, dtype=FLOAT32).tobytes()


def decode_floats(data: bytes) -> Float32Array:
    """View as read-only float32, shape ``[n]``.

    Raises:
        ValueError: the length is not a multiple of 4.
    """
    return np.frombuffer(data, FLOAT32)
