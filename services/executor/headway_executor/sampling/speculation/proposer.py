"""The interface of proposers.

Owns: the question to a proposer, the order of calls. Must not know: models.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import Int64Array
from headway_proto.columns import Int32Array


@dataclass(frozen=True, slots=True)
class Asked:
    """``n`` rows that may get proposals, ascending.

    ``numbers``: rows in the store of token ids; ``num_tokens``: their known tokens; ``limits``: the most proposals. All
    int64, ``[n]``. ``tables`` int32, ``[n, blocks]``.
    """

    numbers: Int64Array
    num_tokens: Int64Array
    limits: Int64Array
    tables: Int32Array


class Proposer(Protocol):
    """Proposes tokens; a wrong proposal costs only time."""

    def follow(self, batch: StepBatch) -> None:
        """Record a step's rows and blocks before it runs."""
        ...

    def forget_blocks(self, blocks: Int32Array) -> None:
        """Record that these blocks get other contents."""
        ...

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """Write proposals behind the known tokens in ``token_ids`` (int32); return their counts, int64, ``[n]``."""
        ...

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """Count proposals and right ones, int64, ``[n]`` each."""
        ...
