"""Checks of a diff that need no state.

Owns: decoding columns, ranges. Must not know: rows.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from headway_executor.backend import NewRow
from headway_proto.columns import Int32Array, decode_column, decode_columns
from headway_proto.pooling import NO_POOLING, POOL_SCORE, is_known, needs_every_token
from headway_proto.step import BackendInfo, BlockPull

_MAX_POOL_CHARACTERS = 4096
_MAX_ADDRESSES = 8
_MAX_HOST_BLOCKS = 1 << 24


class ImpossibleDiff(ValueError):  # noqa: N818 (it names the finding)
    """A diff contradicts the state: the epoch is lost."""


class Pull(NamedTuple):
    """A checked ``BlockPull``; ``blocks`` int32, ``[3, n]``: host block there, step that wrote it, device block here."""

    pool: str
    addresses: tuple[str, ...]
    epoch: int
    blocks: Int32Array


def decoded(data: bytes, field: str) -> Int32Array:
    """Decode a column."""
    try:
        return decode_column(data)
    except ValueError as error:
        raise ImpossibleDiff(f"{field}: {len(data)} bytes are not a column") from error


def decoded_group(data: bytes, field: str, count: int = 2) -> Int32Array:
    """Decode a group of ``count`` columns."""
    try:
        return decode_columns(data, count)
    except ValueError as error:
        raise ImpossibleDiff(f"{field}: {len(data)} bytes are not {count} columns") from error


def checked_pull(pull: BlockPull) -> Pull:
    """Check what needs no state."""
    blocks = decoded_group(pull.blocks, "pulls", 3)
    check_range(blocks[0], _MAX_HOST_BLOCKS, "pulls: host block")
    if blocks.size and blocks[1].min() < 0:
        raise ImpossibleDiff(f"pulls: step {blocks[1].min()} is negative")
    if not 1 <= len(pull.pool) <= _MAX_POOL_CHARACTERS:
        raise ImpossibleDiff(
            f"pulls: a pool's name of {len(pull.pool)} characters; allowed: 1 to {_MAX_POOL_CHARACTERS}"
        )
    if len(pull.addresses) > _MAX_ADDRESSES:
        raise ImpossibleDiff(f"pulls: {len(pull.addresses)} addresses; allowed: at most {_MAX_ADDRESSES}")
    if not 0 < pull.epoch < 1 << 64:
        raise ImpossibleDiff(f"pulls: epoch {pull.epoch} is outside 1 to {(1 << 64) - 1}")
    return Pull(pull.pool, pull.addresses, pull.epoch, blocks)


def with_pooling(new_rows: Iterable[NewRow], column: bytes, info: BackendInfo) -> tuple[NewRow, ...]:
    """Give the pooled ones among new rows their pooling."""
    group = decoded_group(column, "pooled")
    check_distinct(group[0], "pooled: row")
    poolings = dict(zip(*group.tolist(), strict=True))
    found = []
    for new in new_rows:
        pooling = poolings.pop(new.row, NO_POOLING)
        if not is_known(pooling):
            raise ImpossibleDiff(f"pooled: row {new.row} has the unknown pooling {pooling}")
        if pooling and not info.embedding_size:
            raise ImpossibleDiff(f"pooled: row {new.row}, but this executor makes no vectors")
        if pooling and (pooling == POOL_SCORE) != (info.default_pooling == POOL_SCORE):
            raise ImpossibleDiff(f"pooled: row {new.row} has the pooling {pooling}, which this executor has not")
        if needs_every_token(pooling) and new.num_computed_tokens:
            raise ImpossibleDiff(f"pooled: row {new.row} needs every token, but begins at {new.num_computed_tokens}")
        found.append(msgspec.structs.replace(new, pooling=pooling) if pooling else new)
    if poolings:
        raise ImpossibleDiff(f"pooled: row {min(poolings)} is not new")
    return tuple(found)


def check_range(values: Int32Array, end: int, what: str) -> None:
    """Check that each is 0 to ``end - 1``."""
    if values.size and not (values.min() >= 0 and values.max() < end):
        wrong = values[(values < 0) | (values >= end)].flat[0]
        raise ImpossibleDiff(f"{what} {wrong} is outside 0 to {end - 1}")


def check_distinct(values: Int32Array, what: str) -> None:
    """Check that none occurs twice."""
    numbers = values.tolist()
    # Columns are short, and np.unique takes long to begin: 0.1 ms of a hand-off, after a pause that empties the caches.
    if len(set(numbers)) != len(numbers):
        twice = next(number for number, count in Counter(numbers).items() if count > 1)
        raise ImpossibleDiff(f"{what} {twice} is listed twice")
