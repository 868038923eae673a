"""The scheduler's core and a backend with a real model, without links or processes: outputs of many requests, in seconds.

Owns: requests by number, steps in flight, new epochs of an executor that knows nothing, and what each request came to.
Must not know: any policy, or what the model is.
"""

from collections import deque
from pathlib import Path

import msgspec
import numpy as np

from headway_executor.backend import BackendConfig, ExecutorBackend, StepResult
from headway_executor.batch.batch_state import BatchState
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

MOST_BEATS = 100_000


class ModelCore:
    """A core, an open backend, and the tokens that each request has received."""

    def __init__(self, backend: ExecutorBackend, config: BackendConfig, limits: SchedulerLimits) -> None:
        self._backend = ThreadedBackend(backend)
        self.info = self._backend.open(config)
        self._state = BatchState(self.info)
        info = self.info
        self.capacity = ExecutorCapacity.of(info)
        self.limits = limits
        self.core = Scheduler(limits, self.capacity)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedEvent] = {}
        self.num_cached_tokens: dict[int, int] = {}
        """Of each request's prompt, when it began."""
        self._epoch = 0
        self._now = 0.0
        self._in_flight: deque[tuple[SchedulerOutput, int | None, object]] = deque()

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: SamplingParams,
        *,
        held: tuple[int, ...] = (),
        **fields: object,
    ) -> int:
        """Queue a request that has the tokens ``held`` already; return its handle."""
        handle = len(self.tokens)
        self.core.add_request(
            NewRequestEvent(
                origin=Origin(0, handle),
                request_id=str(handle),
                token_ids=np.asarray([*prompt, *held], dtype=np.int32),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                sampling=sampling,
                stop_token_ids=frozenset(self.info.eos_token_ids),
                **fields,
            ),
            self._now,
        )
        self.tokens[handle] = list(held)
        return handle

    def schedule(self) -> bool:
        """Send the next step; whether there was one."""
        output = self.core.schedule(self._now)
        if output is None:
            return False
        applied = self._state.apply(output)
        if applied.moves is not None:
            moves = applied.moves
            self._backend.move_blocks(copies=moves.copies, swap_out=moves.swap_out, swap_in=moves.swap_in)
        digest = self._state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None
        self._in_flight.append((output, digest, self._backend.execute(applied.batch)))
        return True

    def answer(self) -> StepEvents:
        """Take in what the oldest step in flight brought."""
        output, digest, future = self._in_flight.popleft()
        result = future.result()
        assert isinstance(result, StepResult)
        events = self.core.update(
            ExecutorOutput(
                epoch=output.epoch,
                step=output.step,
                sampled_token_ids=encode_column(result.sampled_token_ids),
                logprobs=result.logprobs,
                errors=result.errors,
                state_digest=digest,
            ),
            self._now,
        )
        self._take(events)
        return events

    def beat(self) -> bool:
        """Send as many steps as may be in flight and take in one answer; whether anything was under way."""
        self._now += 0.001
        while self.schedule():
            pass
        if self._in_flight:
            self.answer()
            return True
        return False

    def run(self) -> None:
        """Until every request has ended."""
        for _ in range(MOST_BEATS):
            if not self.beat():
                break
        assert self.core.num_unfinished == 0

    def begin_epoch(self, **changed: object) -> None:
        """The executor is another, which knows nothing; what is in flight is never answered."""
        self._epoch += 1
        self._in_flight.clear()
        self._state.begin_epoch()
        self._take(self.core.begin_epoch(msgspec.structs.replace(self.capacity, **changed), self._epoch))

    def close(self) -> None:
        self._backend.close()

    def _take(self, events: StepEvents) -> None:
        for handle, index, token in zip(
            events.handles.tolist(), events.indices.tolist(), events.token_ids.tolist(), strict=True
        ):
            assert index == len(self.tokens[handle])
            self.tokens[handle].append(token)
        for admitted in events.admitted:
            self.num_cached_tokens.setdefault(admitted.origin.handle, admitted.num_cached_tokens)
        for end in events.finished:
            self.ends[end.origin.handle] = end


def demo_model() -> Path:
    """The directory of the model that Headway brings along."""
    import headway

    return Path(headway.__file__).parent / "demo_model"
