"""The largest step that there can be: whoever runs it has compiled what steps launch, and holds the memory that they take.

Owns: its rows and tokens. Must not know: who runs it, and what it launches.
"""

import numpy as np

from headway_executor.backend import NewRow, StepBatch
from headway_proto.columns import EMPTY_COLUMN
from headway_proto.sampling import SamplingParams


def largest_step(*, most_tokens: int, most_rows: int, max_num_seqs: int, max_model_len: int) -> StepBatch:
    """All rows from position 0 on; with proposals, ``most_rows`` is more than ``max_num_seqs``, and a row occurs again."""
    num_rows = min(most_rows, most_tokens)
    num_tokens = min(most_tokens, num_rows * max_model_len)
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    counts[: num_tokens % num_rows] += 1
    return StepBatch(
        step=0,
        finished_rows=EMPTY_COLUMN,
        new_rows=(),
        new_blocks=np.empty((2, 0), dtype=np.int32),
        rows=np.arange(num_rows, dtype=np.int32) % max_num_seqs,
        num_scheduled_tokens=counts,
        num_computed_tokens=np.zeros_like(counts),
        samples=np.ones_like(counts),
        block_table=np.empty((0, 0), dtype=np.int32),
    )


def any_row() -> NewRow:
    """A row 0 of one token."""
    return NewRow(
        row=0,
        token_ids=np.zeros(1, dtype=np.int32),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        sampling=SamplingParams(),
    )
