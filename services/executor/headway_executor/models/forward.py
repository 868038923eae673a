"""The interface of the two ways to run a model.

Owns: the input of a forward pass. Must not know: how it computes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.recurrence import RowStates
from headway_proto.columns import Int32Array

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The ``n`` rows of one step.

    Row i runs ``num_new[i]`` tokens from position ``num_computed[i]``; ``numbers[i]`` is its row in the store of token
    ids. ``tables`` int32, ``[n, blocks]``; the others int64, ``[n]``. ``wanted`` int64, ``[m]``, ascending: the tokens
    that need logits.
    """

    numbers: Int64Array
    num_new: Int64Array
    num_computed: Int64Array
    tables: Int32Array
    wanted: Int64Array

    def token_places(self) -> tuple[Int64Array, Int64Array]:
        """Each token's row and position; both ``[tokens]``."""
        places = np.repeat(np.arange(len(self.num_new)), self.num_new)
        first = self.num_computed - (np.cumsum(self.num_new) - self.num_new)
        return places, np.arange(len(places)) + first[places]


def last_tokens(num_new: Int64Array) -> Int64Array:
    """Each row's last token among all tokens."""
    return np.cumsum(num_new) - 1


def step_rows(batch: StepBatch) -> StepRows:
    """The rows of a step without proposals; logits of those that draw are wanted."""
    num_new = batch.num_scheduled_tokens.astype(np.int64)
    return StepRows(
        numbers=batch.rows.astype(np.int64),
        num_new=num_new,
        num_computed=batch.num_computed_tokens.astype(np.int64),
        tables=batch.block_table[batch.rows],
        wanted=last_tokens(num_new)[np.flatnonzero(batch.samples)],
    )


class ForwardPass(Protocol):
    """A loaded model with its pool, or a rank's part of it."""

    pool: KvPool
    adapters: ModelAdapters | None
    states: RowStates | None
    """Of a model in which blocks alone do not say what a row's tokens have been."""
    has_slow_start: bool
    """Whether the first prompt and the first token take much longer than later ones."""

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """Store the keys and values of all tokens; return the wanted logits: floating, ``[m, vocab]``.

        ``token_ids`` int32, ``[max rows, max length]``. Of several ranks, only those of the last stage have logits, and
        they last until the next pass.
        """
        ...

    def hidden(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """The same, but return the wanted tokens' hidden states behind the final norm: floating, ``[m, hidden]``."""
        ...
