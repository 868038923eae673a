"""One step as int32 columns in one piece of memory: one copy takes it to the device.

Owns: the layout. Must not know: devices, kernels, token values.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import StepBatch

Int32Column = NDArray[np.int32]


class StepShape(NamedTuple):
    """The sizes that decide a launch."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    has_decodes: bool
    has_chunks: bool


def shape_of(batch: StepBatch) -> StepShape:
    """The sizes of ``batch``."""
    counts = batch.num_scheduled_tokens
    num_rows, num_tokens = len(counts), int(counts.sum())
    return StepShape(
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_sampled=int(batch.samples.sum()),
        has_decodes=bool((counts == 1).any()),
        has_chunks=num_tokens > num_rows,
    )


class ColumnViews(NamedTuple):
    """The columns on the device: int32, for at most ``m`` rows. Padding rows have no tokens.

    - ``rows`` and ``kv_length`` ``[m]``, ``query_start`` ``[m + 1]``: see ``AttentionRows`` of the kernels;
    - ``first_position`` ``[m]``: the position of a row's first token;
    - ``sampled_token`` ``[m]``: a sampling row's last token in the flat batch;
    - ``sampled_row``, ``sampled_position`` ``[m]``: the sampling row, and the position of its draw. Padding is -1, up to
      the number of padded rows.
    """

    rows: Tensor
    query_start: Tensor
    first_position: Tensor
    kv_length: Tensor
    sampled_token: Tensor
    sampled_row: Tensor
    sampled_position: Tensor


class StepColumns:
    """The layout."""

    def __init__(self, max_num_rows: int) -> None:
        sizes = (max_num_rows, max_num_rows + 1, *[max_num_rows] * 5)
        ends = np.cumsum(sizes).tolist()
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.size: int = ends[-1]
        """Numbers in all columns."""

    def views(self, columns: Tensor) -> ColumnViews:
        """Split ``columns``, int32, ``[size]``."""
        return ColumnViews(*[columns[span] for span in self._spans])

    def fill(self, target: Int32Column, batch: StepBatch, shape: StepShape, num_padded_rows: int) -> None:
        """Write the columns to ``target`` (``[size]``), padded to ``num_padded_rows``."""
        rows, query_start, first_position, kv_length, *sampling = (target[span] for span in self._spans)
        count = shape.num_rows
        padding = slice(count, num_padded_rows)
        rows[:count] = batch.rows
        rows[padding] = 0
        query_start[0] = 0
        np.cumsum(batch.num_scheduled_tokens, out=query_start[1 : count + 1])
        query_start[count + 1 : num_padded_rows + 1] = shape.num_tokens
        first_position[:count] = batch.num_computed_tokens
        first_position[padding] = 0
        np.add(batch.num_computed_tokens, batch.num_scheduled_tokens, out=kv_length[:count])
        kv_length[padding] = 0
        for column in sampling:
            column[shape.num_sampled : num_padded_rows] = -1
        self._fill_sampling(sampling, batch, shape, query_start[1 : count + 1] - 1, kv_length[:count])

    @staticmethod
    def _fill_sampling(
        columns: list[Int32Column], batch: StepBatch, shape: StepShape, last_token: Int32Column, reached: Int32Column
    ) -> None:
        sampled_token, sampled_row, sampled_position = (column[: shape.num_sampled] for column in columns)
        if shape.num_sampled == shape.num_rows:
            sampled_token[:], sampled_row[:], sampled_position[:] = last_token, batch.rows, reached
        else:
            samples = batch.samples != 0
            sampled_token[:], sampled_row[:] = last_token[samples], batch.rows[samples]
            sampled_position[:] = reached[samples]
