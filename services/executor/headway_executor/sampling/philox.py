"""Counter-based random numbers: Philox4x32-10, vectorised over rows.

Owns: the map from (seed, position) to a uniform number. Must not know: its use.

Source: J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The seed is
the key, the position the counter.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MANTISSA_SHIFT = np.uint64(11)
_TO_UNIT = 2.0**-53


def philox_4x32(
    key: tuple[NDArray[np.uint64], NDArray[np.uint64]],
    counter: tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Encrypt ``counter`` under ``key``; each word is ``[n]``, 32-bit values as uint64."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> _HALF) ^ c1 ^ k0, (product0 >> _HALF) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in ``[0, 1)`` with 53 random bits per (seed, position).

    ``seeds`` uint64, ``positions`` int64, result float64, all ``[n]``.
    """
    counters = positions.astype(np.uint64)
    zero = np.zeros_like(counters)
    low, high, _, _ = philox_4x32((seeds & _LOW, seeds >> _HALF), (counters & _LOW, counters >> _HALF, zero, zero))
    return ((high << _HALF | low) >> _MANTISSA_SHIFT).astype(np.float64) * _TO_UNIT
