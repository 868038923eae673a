"""The accepted proposals in an answer.

Owns: how they are read. Must not know: what happens to them.
"""

from typing import NamedTuple

import numpy as np

from headway_proto.columns import Int32Array, decode_column, decode_columns
from headway_proto.step import ExecutorOutput
from headway_proto.wording import shown
from headway_scheduler.core.state.indices import RowIndices


class AcceptedTokens(NamedTuple):
    """A row's allowed and made proposals, and its accepted tokens."""

    row: int
    num_allowed: int
    num_proposed: int
    token_ids: list[int]


def split_tokens(
    output: ExecutorOutput, sampling_rows: RowIndices, speculating: list[tuple[int, int]]
) -> tuple[Int32Array, list[AcceptedTokens]]:
    """The first tokens of ``sampling_rows``, and the accepted tokens of the ``speculating`` (row, most proposals).

    Raises:
        ValueError: the answer does not fit the step.
    """
    token_ids = decode_column(output.sampled_token_ids)
    rows, proposed, accepted = decode_columns(output.accepted_tokens, 3).tolist()
    if rows != [row for row, _ in speculating]:
        raise ValueError(f"tokens were accepted for the rows {shown(rows)}")
    failed = {error.row for error in output.errors}
    for (row, num_allowed), num_proposed, num_accepted in zip(speculating, proposed, accepted, strict=True):
        if not 0 <= num_accepted <= num_proposed <= num_allowed or (num_accepted and row in failed):
            raise ValueError(f"row {row}: {num_accepted} of {num_proposed} tokens were accepted, {num_allowed} allowed")
    if not any(accepted):
        nothing = zip(speculating, proposed, strict=True)
        return token_ids, [AcceptedTokens(row, num_allowed, count, []) for (row, num_allowed), count in nothing]
    num_each = np.ones(len(sampling_rows), dtype=np.intp)
    places = sampling_rows.searchsorted(rows)
    num_each[places] += accepted
    starts = np.cumsum(num_each) - num_each
    if len(token_ids) != int(num_each.sum()):
        raise ValueError(f"{len(token_ids)} sampled tokens, not {int(num_each.sum())}")
    ends = (starts + num_each)[places].tolist()
    further = [
        AcceptedTokens(row, num_allowed, num_proposed, token_ids[end - num_accepted : end].tolist())
        for (row, num_allowed), num_proposed, num_accepted, end in zip(
            speculating, proposed, accepted, ends, strict=True
        )
    ]
    return token_ids[starts], further
