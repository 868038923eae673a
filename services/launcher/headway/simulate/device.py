"""The executor's end of the step protocol, with a cost model where the model would be.

Owns: the virtual device: which step it runs, until when, and the tokens it invents. Must not know: requests, queues.

Steps are applied to the executor's own batch state, which refuses an impossible diff and answers with the digests that
the scheduler checks. So a run also proves that both ends agree, as in production.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from headway.simulate.roofline import Roofline
from headway_executor.batch_state import BatchState
from headway_proto.columns import encode_column
from headway_proto.step import DIGEST_INTERVAL_STEPS, BackendInfo, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.limits import ExecutorCapacity


class StepRecord(NamedTuple):
    """One step as the device ran it; times in seconds. ``num_decodes`` of its rows run a single token and sample."""

    start_s: float
    end_s: float
    num_tokens: int
    num_rows: int
    num_decodes: int


class VirtualDevice:
    """Runs one step after the other, each for as long as the roofline says."""

    def __init__(self, roofline: Roofline, capacity: ExecutorCapacity, rng: np.random.Generator) -> None:
        self._roofline = roofline
        self._vocab_size = capacity.vocab_size
        self._rng = rng
        self._state = BatchState(_info(roofline, capacity))
        self._steps: deque[tuple[StepRecord, ExecutorOutput]] = deque()
        self._free_s = 0.0

    @property
    def next_end_s(self) -> float | None:
        """When the oldest step that has not been answered ends; None if there is none."""
        return self._steps[0][0].end_s if self._steps else None

    def take(self, output: SchedulerOutput, now: float) -> None:
        """Accept a step; it starts when those before it have ended.

        Raises:
            ImpossibleDiff: the scheduler contradicts what it sent before.
        """
        batch = self._state.apply(output).batch
        sampling = batch.samples != 0
        num_samples = int(np.count_nonzero(sampling))
        time = self._roofline.step_time(batch.num_scheduled_tokens, batch.num_computed_tokens, num_samples)
        start_s = max(now, self._free_s)
        self._free_s = start_s + time.total_s
        record = StepRecord(
            start_s=start_s,
            end_s=self._free_s,
            num_tokens=output.total_num_scheduled_tokens,
            num_rows=len(batch.rows),
            num_decodes=int(np.count_nonzero(sampling & (batch.num_scheduled_tokens == 1))),
        )
        answer = ExecutorOutput(
            epoch=output.epoch,
            step=output.step,
            sampled_token_ids=encode_column(self._rng.integers(0, self._vocab_size, size=num_samples, dtype=np.int32)),
            device_time_us=round(time.total_s * 1e6),
            state_digest=self._state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None,
        )
        self._steps.append((record, answer))

    def answer(self) -> tuple[StepRecord, ExecutorOutput]:
        """End the oldest step."""
        return self._steps.popleft()


def _info(roofline: Roofline, capacity: ExecutorCapacity) -> BackendInfo:
    name = roofline.shape.name
    return BackendInfo(
        backend="roofline",
        device=roofline.accelerator.name,
        dtype="bfloat16",
        model_name=name,
        model_fingerprint=name,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        eos_token_ids=(),
        max_num_rows=capacity.max_num_rows,
    )
