"""The scheduler's core against the executor's own mirror of its rows: what runs in each step, by request.

Owns: requests by number, steps by what they run, answers with made-up tokens. Must not know: any policy.
"""

from collections import deque
from collections.abc import Collection

import numpy as np

from headway_executor.batch.batch_state import BatchState
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, BackendInfo, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request

STOP_TOKEN = 0
OTHER_TOKEN = 1


class CoreDriver:
    """A core whose requests are known by their handles and whose steps are dictionaries from handle to tokens."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity) -> None:
        self.core = Scheduler(limits, capacity)
        self.num_output_tokens: dict[int, int] = {}
        self.finished: list[int] = []
        self._mirror = BatchState(
            BackendInfo(
                backend="test",
                device="test",
                dtype="test",
                model_name="test",
                model_fingerprint="test",
                num_blocks=capacity.num_blocks,
                block_size=capacity.block_size,
                max_model_len=capacity.max_model_len,
                vocab_size=capacity.vocab_size,
                eos_token_ids=(STOP_TOKEN,),
                max_num_rows=capacity.max_num_rows,
                num_host_blocks=capacity.num_host_blocks,
                num_lanes=capacity.num_lanes,
            )
        )
        self.now = 0.0
        self.sent: SchedulerOutput | None = None
        """The last step."""
        self._epoch = 0
        self._mirror.begin_epoch()
        self._in_flight: deque[tuple[int, list[int], int | None]] = deque()

    def add(
        self,
        handle: int,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        priority: int = 3,
        tenant: str = "",
        ttft_slo_ms: int = 0,
        itl_slo_ms: int = 0,
        begins_with: int = OTHER_TOKEN,
    ) -> None:
        """A request that may stop at ``STOP_TOKEN``. All prompts are alike but for the token they begin with."""
        self.num_output_tokens[handle] = 0
        token_ids = np.full(num_prompt_tokens, OTHER_TOKEN, dtype=np.int32)
        token_ids[0] = begins_with
        self.core.add_request(
            NewRequestEvent(
                origin=Origin(0, handle),
                request_id=str(handle),
                token_ids=token_ids,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                sampling=SamplingParams(),
                stop_token_ids=frozenset({STOP_TOKEN}),
                priority=priority,
                tenant=tenant,
                ttft_slo_ms=ttft_slo_ms,
                itl_slo_ms=itl_slo_ms,
            ),
            now=self.now,
        )

    def abort(self, handle: int) -> None:
        self.core.abort(Origin(0, handle))

    def schedule(self) -> dict[int, int] | None:
        """The next step as the executor understands it: tokens by request."""
        output = self.core.schedule(now=self.now)
        self.finished += [end.origin.handle for end in self.core.take_shed()]
        if output is None:
            return None
        batch = self._mirror.apply(output).batch
        self.sent = output
        digest = self._mirror.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None
        handles = [self.core.rows.request_in(row).new.origin.handle for row in batch.rows.tolist()]
        sampling = [handle for handle, samples in zip(handles, batch.samples.tolist(), strict=True) if samples]
        self._in_flight.append((output.step, sampling, digest))
        return dict(zip(handles, batch.num_scheduled_tokens.tolist(), strict=True))

    def update(self, stopping: Collection[int] = (), *, move_time_us: int = 0) -> list[int]:
        """Answer the oldest step, with a stop token for those ``stopping``; return who ended, ascending."""
        step, sampling, digest = self._in_flight.popleft()
        tokens = [STOP_TOKEN if handle in stopping else OTHER_TOKEN for handle in sampling]
        answer = ExecutorOutput(
            epoch=self._epoch,
            step=step,
            sampled_token_ids=encode_column(tokens),
            state_digest=digest,
            move_time_us=move_time_us,
        )
        events = self.core.update(answer, now=self.now)
        for handle, index in zip(events.handles.tolist(), events.indices.tolist(), strict=True):
            assert index == self.num_output_tokens[handle]
            self.num_output_tokens[handle] += 1
        ended = sorted(end.origin.handle for end in events.finished)
        self.finished += ended
        return ended

    def begin_epoch(self, capacity: ExecutorCapacity) -> None:
        """The executor has lost its state and the steps in flight."""
        self._epoch += 1
        self._in_flight.clear()
        self._mirror.begin_epoch()
        events = self.core.begin_epoch(capacity, self._epoch)
        self.finished += [end.origin.handle for end in events.finished]

    def request(self, handle: int) -> Request:
        """A live request."""
        request = self.core.find(Origin(0, handle))
        assert request is not None
        return request

    @property
    def running(self) -> list[int]:
        """Who has a row, ascending."""
        rows = self.core.rows
        return sorted(rows.request_in(row).new.origin.handle for row in rows.live_rows().tolist())

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def next_steps(self, count: int) -> list[dict[int, int]]:
        """``count`` steps, each answered before the next."""
        steps = []
        for _ in range(count):
            step = self.schedule()
            assert step is not None
            steps.append(step)
            self.update()
        return steps

    def all_steps(self) -> list[dict[int, int]]:
        """The steps until everything has ended, each answered before the next."""
        steps = []
        while self.core.num_unfinished:
            steps += self.next_steps(1)
        return steps
