"""Who proposes tokens.

Owns: what a proposer is asked, and the order of the calls. Must not know: how any of them finds its proposals.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import Int64Array
from headway_proto.columns import Int32Array


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows for which tokens may be proposed, ``n`` of them, in ascending order.

    ``numbers`` in the store of token ids, where the first ``num_tokens`` of each are known; at most ``limits`` tokens may be
    proposed. All int64, shape ``[n]``. ``tables`` int32, shape ``[n, blocks]``: their block tables, which cover the
    proposals.
    """

    numbers: Int64Array
    num_tokens: Int64Array
    limits: Int64Array
    tables: Int32Array


class Proposer(Protocol):
    """Proposes tokens; what it proposes may be wrong, and costs time then."""

    def follow(self, batch: StepBatch) -> None:
        """A step is about to run: its rows come and go, blocks are given out."""
        ...

    def forget_blocks(self, blocks: Int32Array) -> None:
        """These blocks are about to hold something else."""
        ...

    def propose(self, asked: Asked, token_ids: Tensor) -> Int64Array:
        """Write proposals behind the known tokens of each row; return how many, int64, shape ``[n]``.

        ``token_ids`` int32, shape ``[max rows, max length]``: every row's tokens.
        """
        ...

    def settle(self, asked: Asked, num_proposed: Int64Array, num_accepted: Int64Array) -> None:
        """The proposals have been verified: of so many so many were right, int64, shape ``[n]`` each."""
        ...
