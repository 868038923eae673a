"""Decisions of the core that the specification does not state: rows that could not be run."""

import numpy as np

from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput, RowError
from headway_scheduler.core.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.request import NewRequestEvent, Origin
from headway_scheduler.core.scheduler import Scheduler

CAPACITY = ExecutorCapacity(num_blocks=16, block_size=4, max_model_len=32, vocab_size=64, max_num_rows=1)


def request(handle: int) -> NewRequestEvent:
    return NewRequestEvent(
        origin=Origin(0, handle),
        request_id=str(handle),
        token_ids=np.arange(20, dtype=np.int32),
        num_prompt_tokens=20,
        max_tokens=4,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
    )


def test_an_error_in_a_chunk_of_a_request_that_left_does_not_end_the_next_one_in_its_row() -> None:
    core = Scheduler(SchedulerLimits(max_num_batched_tokens=8), CAPACITY)
    core.add_request(request(0), now=0.0)
    core.schedule(now=0.0)
    core.abort(Origin(0, 0))
    core.add_request(request(1), now=0.0)
    core.schedule(now=0.0)
    digest = core._in_flight[0].digest
    answer = ExecutorOutput(epoch=0, step=0, errors=(RowError(0, "cannot be run"),), state_digest=digest)
    assert core.update(answer, now=0.0).finished == ()
    assert core.num_running == 1
