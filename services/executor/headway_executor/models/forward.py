"""The interface between a backend and the two ways to run a model, ``eager`` and ``compiled``.

Owns: the input of a forward pass. Must not know: how it computes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.kv_pool import KvPool
from headway_proto.columns import Int32Array

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The ``n`` rows of one step.

    Row i runs ``num_new[i]`` tokens from position ``num_computed[i]``; ``numbers[i]`` is its row in the store of token
    ids. ``tables`` int32, ``[n, blocks]``; the others int64, ``[n]``. ``wanted`` int64, ``[m]``, ascending: the tokens
    whose logits are needed, as indices into all tokens in row order.
    """

    numbers: Int64Array
    num_new: Int64Array
    num_computed: Int64Array
    tables: Int32Array
    wanted: Int64Array

    def token_places(self) -> tuple[Int64Array, Int64Array]:
        """For every token in row order: its row's place, and its position in the sequence; each ``[tokens]``."""
        places = np.repeat(np.arange(len(self.num_new)), self.num_new)
        first = self.num_computed - (np.cumsum(self.num_new) - self.num_new)
        return places, np.arange(len(places)) + first[places]


def last_tokens(num_new: Int64Array) -> Int64Array:
    """The index of each row's last token, among all tokens in row order."""
    return np.cumsum(num_new) - 1


class ForwardPass(Protocol):
    """A loaded model with its pool of keys and values."""

    pool: KvPool

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """Store the keys and values of all tokens; return the logits of the wanted ones: floating, shape ``[m,
        vocab]``.

        ``token_ids`` int32, shape ``[max rows, max length]``: every row's tokens.
        """
        ...
