"""The interface of proposers.

Owns: the question to a proposer, and the order of the calls. Must not know: how proposals are found.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import Int64Array
from headway_proto.columns import Int32Array


@dataclass(frozen=True, slots=True)
class Asked:
    """``n`` rows for which tokens may be proposed, in ascending order.

    ``numbers``: rows in the store of token ids; ``num_tokens``: their known tokens; ``limits``: the most proposals. All
    int64, shape ``[n]``. ``tables`` int32, shape ``[n, blocks]``: block tables that cover the proposals.
    """

    numbers: Int64Array
    num_tokens: Int64Array
    limits: Int64Array
    tables: Int32Array


class Proposer(Protocol):
    """Proposes tokens; a wrong proposal costs only time."""

    def follow(self, batch: StepBatch) -> None:
        """Record the rows and blocks of a step that is about to run."""
        ...

    def forget_blocks(self, blocks: Int32Array) -> None:
        """Record that these blocks get other contents."""
        ...

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """Write proposals behind the known tokens in ``token_ids`` (int32, ``[max rows, max length]``); return their
        counts, int64, ``[n]``.
        """
        ...

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """Record how many proposals were made and how many were right; int64, shape ``[n]`` each."""
        ...
