"""Vectors of pooled rows, for backends with a ``ForwardPass``.

Owns: what a row's chunks add up to, and where its vector stands in a step's results. Must not know: a pass, the scheduler.

Pooled rows run in a pass of their own: they draw no token, so they need no logits. Sums are in float64, so that a vector
hardly depends on its chunks. A row that is new begins anew, whoever had its number before.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import StepBatch, StepResult
from headway_executor.models.forward import ForwardPass, Int64Array, StepRows, last_tokens
from headway_proto.columns import encode_floats
from headway_proto.pooling import POOL_CLS, POOL_MEAN
from headway_proto.step import ERRORED_ROW, RowError, RowVector

NOT_FINITE = "a number of its vector is NaN or infinite"


@dataclass(slots=True)
class _Pooled:
    """``value``, float64: of the mean, the sum so far; of others, the one hidden state, once it is known."""

    pooling: int
    num_tokens: int
    value: Tensor | None = None


class PooledPart(msgspec.Struct, frozen=True):
    """A step's pooled rows. ``places`` (int64) are theirs among all rows of the step."""

    places: Int64Array
    rows: StepRows
    samples: NDArray[np.bool_]


class PooledRows:
    """The rows that want vectors."""

    def __init__(self) -> None:
        self._rows: dict[int, _Pooled] = {}

    def begin_step(self, batch: StepBatch) -> None:
        """Record new and finished rows."""
        if self._rows:
            for row in batch.finished_rows.tolist():
                self._rows.pop(row, None)
        for new in batch.new_rows:
            self._rows.pop(new.row, None)
            if new.pooling:
                self._rows[new.row] = _Pooled(new.pooling, len(new.token_ids))

    def part_of(self, batch: StepBatch) -> PooledPart | None:
        """The pooled rows of a step, or None."""
        if not self._rows:
            return None
        places = np.flatnonzero(np.isin(batch.rows, list(self._rows)))
        if not len(places):
            return None
        numbers = batch.rows[places]
        num_new, start = batch.num_scheduled_tokens[places], batch.num_computed_tokens[places]
        rows = StepRows(
            numbers=numbers.astype(np.int64),
            num_new=num_new.astype(np.int64),
            num_computed=start.astype(np.int64),
            tables=batch.block_table[numbers],
            wanted=self._wanted(numbers.tolist(), num_new.astype(np.int64), start.astype(np.int64)),
        )
        return PooledPart(places, rows, batch.samples[places] != 0)

    def run(
        self, part: PooledPart, forward: ForwardPass, token_ids: Tensor, refused: Mapping[int, str]
    ) -> tuple[tuple[RowVector, ...], tuple[RowError, ...]]:
        """Run these rows; return the vectors of those that are complete, and the errors. Both have rows ascending.

        ``token_ids``: see ``ForwardPass``. ``refused``: rows whose vectors would mean nothing, and why.
        """
        rows = part.rows
        hidden = forward.hidden(rows, token_ids).to("cpu", torch.float64)
        owners = rows.token_places()[0][rows.wanted]
        vectors, errors = [], []
        for place, row in enumerate(rows.numbers.tolist()):
            own = hidden[np.searchsorted(owners, place) : np.searchsorted(owners, place, side="right")]
            pooled = self._rows[row]
            if len(own):
                total = own.sum(0)
                pooled.value = total if pooled.value is None else pooled.value + total
            if not part.samples[place]:
                continue
            values = _vector(pooled)
            problem = refused.get(row) or (None if np.isfinite(values).all() else NOT_FINITE)
            if problem is None:
                vectors.append(RowVector(row, encode_floats(values)))
            else:
                errors.append(RowError(row, problem))
        return tuple(vectors), tuple(errors)

    def _wanted(self, numbers: list[int], num_new: Int64Array, start: Int64Array) -> Int64Array:
        """The tokens of this step whose hidden states count, among all its tokens."""
        last = last_tokens(num_new)
        found = []
        for place, row in enumerate(numbers):
            pooled, first, end = self._rows[row], int(start[place]), int(start[place] + num_new[place])
            if pooled.pooling == POOL_MEAN:
                found.append(np.arange(last[place] + 1 - num_new[place], last[place] + 1))
            elif pooled.pooling == POOL_CLS and first == 0:
                found.append(last[place : place + 1] + 1 - num_new[place])
            elif pooled.pooling != POOL_CLS and end == pooled.num_tokens:
                found.append(last[place : place + 1])
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def pooled(states: Tensor, pooling: int) -> Tensor:
    """Make the vector of a whole input, ``[tokens, hidden]``."""
    return {POOL_MEAN: states.mean(0), POOL_CLS: states[0]}.get(pooling, states[-1])


def without(batch: StepBatch, part: PooledPart) -> StepBatch:
    """The rest of the step, for a draw."""
    stays = np.ones(len(batch.rows), dtype=bool)
    stays[part.places] = False
    limits = batch.num_speculative_tokens
    return msgspec.structs.replace(
        batch,
        rows=batch.rows[stays],
        num_scheduled_tokens=batch.num_scheduled_tokens[stays],
        num_computed_tokens=batch.num_computed_tokens[stays],
        samples=batch.samples[stays],
        num_speculative_tokens=None if limits is None else limits[stays],
    )


def whole_result(
    rest: StepBatch,
    result: StepResult,
    part: PooledPart,
    vectors: tuple[RowVector, ...],
    errors: tuple[RowError, ...],
) -> StepResult:
    """The results of the whole step: ``result`` is that of ``rest``, which may have brought several tokens per row."""
    owners = rest.rows[rest.samples != 0]
    if result.accepted_tokens is not None:
        extra = dict(zip(result.accepted_tokens[0].tolist(), result.accepted_tokens[2].tolist(), strict=True))
        owners = np.repeat(owners, [1 + extra.get(row, 0) for row in owners.tolist()])
    pooled = part.rows.numbers[part.samples]
    failed = [error.row for error in errors]
    tokens = np.where(np.isin(pooled, failed), ERRORED_ROW, 0).astype(np.int32)
    return msgspec.structs.replace(
        result,
        sampled_token_ids=np.insert(result.sampled_token_ids, np.searchsorted(owners, pooled), tokens),
        errors=tuple(sorted((*result.errors, *errors), key=lambda error: error.row)),
        vectors=vectors,
    )


def _vector(pooled: _Pooled) -> NDArray[np.float64]:
    assert pooled.value is not None
    values: NDArray[np.float64] = pooled.value.numpy()
    return values / pooled.num_tokens if pooled.pooling == POOL_MEAN else values
