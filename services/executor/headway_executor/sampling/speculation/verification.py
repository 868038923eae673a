"""A step with proposals: what the model runs, and which draws count.

Owns: places of tokens, acceptance. Must not know: models.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headway_executor.backend import StepBatch, StepResult
from headway_executor.models.forward import Int64Array, StepRows
from headway_executor.sampling.speculation.proposer import Asked
from headway_proto.columns import Int32Array
from headway_proto.step import ERRORED_ROW, RowError, RowLogprobs


@dataclass(frozen=True, slots=True)
class Draws:
    """The ``m`` draws of a step, by row, then position; all int64, ``[m]``.

    ``places`` counts a row's earlier draws.
    """

    numbers: Int64Array
    positions: Int64Array
    places: Int64Array


def asked_of(batch: StepBatch, num_allowed: Int32Array, refused: frozenset[int]) -> Asked:
    """The rows that may get proposals."""
    asked = np.flatnonzero(num_allowed)
    numbers = batch.rows[asked].astype(np.int64)
    limits = num_allowed[asked].astype(np.int64)
    if refused:
        limits[np.isin(numbers, list(refused))] = 0
    num_tokens = (batch.num_computed_tokens + batch.num_scheduled_tokens)[asked].astype(np.int64)
    return Asked(numbers, num_tokens, limits, batch.block_table[batch.rows[asked]])


def with_proposals(batch: StepBatch, asked: Asked, num_proposed: Int64Array) -> tuple[StepRows, Draws]:
    """Return the rows of a step with its proposals, and all draws."""
    more = np.zeros(len(batch.rows), dtype=np.int64)
    more[np.searchsorted(batch.rows, asked.numbers)] = num_proposed
    numbers = batch.rows.astype(np.int64)
    num_new = batch.num_scheduled_tokens + more
    num_draws = np.where(batch.samples != 0, 1 + more, 0)
    owner = np.repeat(np.arange(len(numbers)), num_draws)
    places = np.arange(len(owner)) - (np.cumsum(num_draws) - num_draws)[owner]
    rows = StepRows(
        numbers=numbers,
        num_new=num_new,
        num_computed=batch.num_computed_tokens.astype(np.int64),
        tables=batch.block_table[batch.rows],
        wanted=(np.cumsum(num_new) - num_draws)[owner] + places,
    )
    positions = (batch.num_computed_tokens + batch.num_scheduled_tokens).astype(np.int64)[owner] + places
    return rows, Draws(numbers[owner], positions, places)


def as_rows_of_one_token(batch: StepBatch, asked: Asked, num_proposed: Int64Array) -> tuple[StepBatch, Draws]:
    """Return a step in which each proposal is a row of its own, behind the row that it is for, and all draws.

    Such rows have the same number. Their tokens and those before share a block table.
    """
    more = np.zeros(len(batch.rows), dtype=np.int64)
    more[np.searchsorted(batch.rows, asked.numbers)] = num_proposed
    owner = np.repeat(np.arange(len(batch.rows)), 1 + more)
    places = np.arange(len(owner)) - (np.cumsum(1 + more) - 1 - more)[owner]
    expanded = msgspec.structs.replace(
        batch,
        rows=batch.rows[owner],
        # A row with proposals runs one token.
        num_scheduled_tokens=np.where(places, 1, batch.num_scheduled_tokens[owner]).astype(np.int32),
        num_computed_tokens=(batch.num_computed_tokens[owner] + places).astype(np.int32),
        samples=batch.samples[owner],
    )
    sampling = expanded.samples != 0
    reached = (expanded.num_computed_tokens + expanded.num_scheduled_tokens)[sampling].astype(np.int64)
    return expanded, Draws(expanded.rows[sampling].astype(np.int64), reached, places[sampling])


def proposal_places(asked: Asked, num_proposed: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The row and the position of each proposal, rows in order; both int64."""
    owner = np.repeat(np.arange(len(num_proposed)), num_proposed)
    places = np.arange(len(owner)) - (np.cumsum(num_proposed) - num_proposed)[owner]
    return asked.numbers[owner], asked.num_tokens[owner] + places


def num_accepted(
    drawn: Int32Array, draws: Draws, asked: Asked, proposals: Int32Array, counts: Int64Array
) -> Int64Array:
    """Count the right proposals of each row, int64, ``[n]``.

    ``drawn`` int32, ``[m]``; ``proposals`` int32, of all rows in order. If the draw behind right proposals failed, a
    later step draws the last of them again.
    """
    accepted = np.zeros(len(counts), dtype=np.int64)
    starts = np.searchsorted(draws.numbers, asked.numbers)
    first = 0
    for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        own = drawn[start : start + count + 1]
        wrong = np.flatnonzero(own[:count] != proposals[first : first + count])
        right = int(wrong[0]) if len(wrong) else count
        accepted[place] = right - 1 if right and own[right] == ERRORED_ROW else right
        first += count
    return accepted


def counting(draws: Draws, asked: Asked, accepted: Int64Array) -> Int64Array:
    """The places of the draws that count, ascending."""
    most = np.zeros(len(draws.numbers), dtype=np.int64)
    owner = np.minimum(np.searchsorted(asked.numbers, draws.numbers), len(asked.numbers) - 1)
    is_asked = asked.numbers[owner] == draws.numbers
    most[is_asked] = accepted[owner[is_asked]]
    return np.flatnonzero(draws.places <= most)


def result_of(
    drawn: Int32Array,
    logprobs: Sequence[RowLogprobs],
    errors: Sequence[RowError],
    kept: Int64Array,
    draws: Draws,
    asked: Asked,
    counts: Int64Array,
    accepted: Int64Array,
) -> StepResult:
    """The result of a step, from those of all ``drawn`` tokens (int32) that are at ``kept``."""
    drawn = drawn[kept]
    failed = set(draws.numbers[kept][drawn == ERRORED_ROW].tolist())
    kept_errors = {error.row: error for error in errors if error.row in failed}
    most = dict(zip(asked.numbers.tolist(), (1 + accepted).tolist(), strict=True)) | dict.fromkeys(failed, 0)
    counts_of_row: Counter[int] = Counter()
    kept_logprobs = []
    for values in logprobs:
        counts_of_row[values.row] += 1
        if counts_of_row[values.row] <= most.get(values.row, 1):
            kept_logprobs.append(values)
    return StepResult(
        sampled_token_ids=drawn,
        logprobs=tuple(kept_logprobs),
        errors=tuple(kept_errors.values()),
        accepted_tokens=np.stack((asked.numbers, counts, accepted)).astype(np.int32),
    )
