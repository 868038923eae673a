"""The draft model of a model on a device: its passes are launched, and nobody waits for what they draw.

Owns: the launches of a pass. Must not know: which rows draft, what is verified.

A pass of one token for each row is what a decode step is, so it has graphs, with the draw inside where rows are greedy.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.gpu.device_model import DeviceModel
from headway_executor.gpu.device_sampler import DeviceSampler
from headway_executor.gpu.step_columns import shape_of
from headway_executor.gpu.step_upload import StepUpload
from headway_executor.models.forward import StepRows
from headway_proto.columns import EMPTY_COLUMN, Int32Array


class DeviceDraftPass:
    """A ``DraftPass``. ``model`` has the columns of ``upload`` and the target's rows, and runs ``most_tokens`` at once."""

    def __init__(self, model: DeviceModel, upload: StepUpload, sampler: DeviceSampler, most_tokens: int) -> None:
        self._model = model
        self._upload = upload
        self._sampler = sampler
        self._most_tokens = most_tokens

    def __call__(self, rows: StepRows, token_ids: Tensor) -> Int32Array:
        """See ``DraftPass``."""
        for batch in self._steps(rows):
            self._launch(batch, token_ids)
        return np.zeros(len(rows.numbers), dtype=np.int32)

    def _launch(self, batch: StepBatch, token_ids: Tensor) -> None:
        shape, views = shape_of(batch), self._upload.views
        sampled_rows = batch.rows[batch.samples != 0]
        may_draw = not shape.has_chunks and shape.num_sampled == shape.num_rows
        size = self._model.size_of(shape, draws=may_draw and self._sampler.is_greedy(sampled_rows))
        self._upload.send(batch, shape, size.num_rows)
        self._model.launch(size, batch)
        if shape.num_sampled and not size.draws:
            self._sampler.draw(self._model.decoder.logits(shape.num_sampled), sampled_rows, views, token_ids)

    def _steps(self, rows: StepRows) -> Iterator[StepBatch]:
        """Steps within the draft's memory. Behind a long pause, a row has many tokens to catch up with."""
        parts: list[tuple[int, int, int, bool]] = []
        room = self._most_tokens
        columns = (rows.numbers.tolist(), rows.num_computed.tolist(), rows.num_new.tolist())
        for number, computed, num_new in zip(*columns, strict=True):
            done = 0
            while done < num_new:
                count = min(num_new - done, room)
                parts.append((number, count, computed + done, done + count == num_new))
                done, room = done + count, room - count
                if not room:
                    yield _step(parts)
                    parts, room = [], self._most_tokens
        if parts:
            yield _step(parts)


def _step(parts: list[tuple[int, int, int, bool]]) -> StepBatch:
    """Of rows, numbers of tokens, positions before them, and whether they draw."""
    columns = np.array(parts, dtype=np.int32).T
    return StepBatch(
        step=0,
        finished_rows=EMPTY_COLUMN,
        new_rows=(),
        new_blocks=np.empty((2, 0), dtype=np.int32),
        rows=columns[0],
        num_scheduled_tokens=columns[1],
        num_computed_tokens=columns[2],
        samples=columns[3],
        block_table=np.empty((0, 0), dtype=np.int32),
    )
