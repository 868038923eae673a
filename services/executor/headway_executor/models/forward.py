"""The seam between a backend and the two ways to run a model.

Owns: what a forward pass is given. Must not know: how it computes.

``eager`` runs plain torch operators on any device and in any dtype. ``compiled`` runs the CPU kernels, which compute in
float32 with float32 or 8-bit weights.
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
    """The rows of one step, ``n`` of them.

    Row i runs ``num_new[i]`` tokens, the first at position ``num_computed[i]``; ``numbers[i]`` is its row in the store of
    token ids. ``tables`` int32, shape ``[n, blocks]``; the others int64, shape ``[n]``. ``wanted`` int64, shape ``[m]``,
    ascending: the tokens whose logits are asked for, by where they stand when all rows' tokens stand row after row.
    """

    numbers: Int64Array
    num_new: Int64Array
    num_computed: Int64Array
    tables: Int32Array
    wanted: Int64Array

    def token_places(self) -> tuple[Int64Array, Int64Array]:
        """For every token, row after row: its row's place, and its position in the sequence; each ``[tokens]``."""
        places = np.repeat(np.arange(len(self.num_new)), self.num_new)
        first = self.num_computed - (np.cumsum(self.num_new) - self.num_new)
        return places, np.arange(len(places)) + first[places]


def last_tokens(num_new: Int64Array) -> Int64Array:
    """Where the last token of each row stands when all rows' tokens, ``num_new`` of each, stand row after row."""
    return np.cumsum(num_new) - 1


class ForwardPass(Protocol):
    """A loaded model with its pool of keys and values."""

    pool: KvPool

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """Logits of the wanted tokens: floating, shape ``[m, vocab]``.

        ``token_ids`` int32, shape ``[max rows, max length]``: every row's tokens. Keys and values of all tokens of the
        step are stored on the way.
        """
        ...
