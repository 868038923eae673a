"""Columns of pairs, as steps have them, and an announced backend: for tests of the executor."""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import encode_columns
from headway_proto.step import BackendInfo

NO_PAIRS = np.empty((2, 0), dtype=np.int32)


def pair_columns(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int32]:
    """Pairs as two columns: shape ``[2, n]``."""
    return np.array(list(pairs), dtype=np.int32).reshape(-1, 2).T


def encoded_pairs(pairs: Iterable[tuple[int, int]]) -> bytes:
    """Pairs as two columns on the wire."""
    return encode_columns(pair_columns(pairs))


def backend_info(**changes: object) -> BackendInfo:
    """What a backend of 64 small blocks announces, with ``changes``."""
    info = BackendInfo(
        backend="test",
        device="none",
        dtype="none",
        model_name="test",
        model_fingerprint="test",
        num_blocks=64,
        block_size=4,
        max_model_len=64,
        vocab_size=100,
        eos_token_ids=(0,),
        max_num_rows=4,
    )
    return msgspec.structs.replace(info, **changes)
