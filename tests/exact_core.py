"""The scheduler's core against the simulated backend, without links: every token and every block is checked.

Owns: requests by number, answers in order, failures of rows, new epochs, and what must hold after each of them.
Must not know: any policy.
"""

from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np

from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.rank_place import RankPlace
from headway_proto.columns import encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, RowError
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent, StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason

VOCAB_SIZE = 13


class Pending(NamedTuple):
    """A step sent, with the answer that the backend gave, and the handles that sampled, rows ascending."""

    step: int
    digest: int | None
    result: StepResult
    rows: tuple[int, ...]
    handles: tuple[int, ...]


class ExactCore:
    """A core, and the tokens that each of its requests has received."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity, *, acceptance: float = 0.5) -> None:
        """``capacity.num_host_blocks`` of at most ``num_blocks``. ``acceptance``: how likely a proposal is right."""
        self.limits = limits
        self.backend = SimulatedBackend()
        info = self.backend.open(
            BackendConfig(
                model="",
                block_size=capacity.block_size,
                num_kv_blocks=capacity.num_blocks,
                max_model_len=capacity.max_model_len,
                max_num_seqs=capacity.max_num_rows,
                place=RankPlace(pipeline_parallel=capacity.num_lanes),
                options={
                    "vocab_size": str(VOCAB_SIZE),
                    "context_length": str(capacity.max_model_len),
                    "real_time": "false",
                    "max_speculative_tokens": str(capacity.max_speculative_tokens),
                    "speculative_acceptance": str(acceptance),
                },
            )
        )
        self._state = BatchState(msgspec.structs.replace(info, num_host_blocks=capacity.num_host_blocks))
        self._state.begin_epoch()
        self.capacity = msgspec.structs.replace(capacity, vocab_size=VOCAB_SIZE)
        self.core = Scheduler(limits, self.capacity)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishedEvent] = {}
        self._requests: dict[int, NewRequestEvent] = {}
        self._in_flight: deque[Pending] = deque()
        self._epoch = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def live(self) -> list[int]:
        """The handles of requests without an end, ascending."""
        return [handle for handle in self._requests if handle not in self.ends]

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        priority: int = 3,
        tenant: str = "",
        stop_token_ids: frozenset[int] = frozenset(),
        ttft_slo_ms: int = 0,
        itl_slo_ms: int = 0,
    ) -> int:
        """Queue a request; return its handle."""
        handle = len(self._requests)
        new = NewRequestEvent(
            origin=Origin(0, handle),
            request_id=str(handle),
            token_ids=np.asarray(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(seed=handle, temperature=float(handle % 2)),
            stop_token_ids=stop_token_ids,
            priority=priority,
            tenant=tenant,
            ttft_slo_ms=ttft_slo_ms,
            itl_slo_ms=itl_slo_ms,
        )
        self.core.add_request(new, self.now)
        self._requests[handle] = new
        self.tokens[handle] = []
        return handle

    def abort(self, handle: int) -> None:
        end = self.core.abort(Origin(0, handle))
        assert (end is None) == (handle in self.ends)
        if end is not None:
            self._take_end(end)

    def schedule(self) -> bool:
        """Decide, run and check the next step; whether there was one."""
        output = self.core.schedule(self.now)
        for end in self.core.take_shed():
            assert self.limits.shed_late
            self._take_end(end)
        if output is None:
            return False
        applied = self._state.apply(output)
        if applied.moves is not None:
            moves = applied.moves
            self.backend.move_blocks(copies=moves.copies, swap_out=moves.swap_out, swap_in=moves.swap_in)
        result = self.backend.execute(applied.batch)
        rows = applied.batch.rows[applied.batch.samples != 0].tolist()
        handles = [self.core.rows.request_in(row).new.origin.handle for row in rows]
        digest = self._state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None
        if result.accepted_tokens is not None:
            self._state.accept(result.accepted_tokens)
        self._in_flight.append(Pending(output.step, digest, result, tuple(rows), tuple(handles)))
        return True

    def answer(self, failing: int | None = None) -> None:
        """Answer the oldest step; ``failing``: the place among its sampling rows of one that reports an error."""
        step = self._in_flight.popleft()
        token_ids, errors = step.result.sampled_token_ids.tolist(), ()
        accepted = step.result.accepted_tokens
        if failing is not None and step.rows and accepted is None:
            place = failing % len(step.rows)
            errors = (RowError(step.rows[place], "cannot be run"),)
            token_ids[place] = -1
        events = self.core.update(
            ExecutorOutput(
                epoch=self._epoch,
                step=step.step,
                sampled_token_ids=encode_column(token_ids),
                errors=errors,
                state_digest=step.digest,
                move_time_us=step.result.move_time_us,
                accepted_tokens=b"" if accepted is None else encode_columns(accepted),
            ),
            self.now,
        )
        self._take(events)

    def begin_epoch(self) -> None:
        """The executor has lost its state; what is in flight will never be answered."""
        self._epoch += 1
        self._in_flight.clear()
        self._state.begin_epoch()
        self._take(self.core.begin_epoch(self.capacity, self._epoch))

    def drain(self, most_beats: int) -> None:
        """Run until nobody is left; fails if that takes more steps than ``most_beats``."""
        for _ in range(most_beats):
            self.now += 0.001
            while self.schedule():
                pass
            if not self._in_flight:
                break
            self.answer()
        assert not self.live, f"{len(self.live)} requests never ended"
        assert self.num_in_flight == 0

    def check(self) -> None:
        """What must hold at any time: every block is where the books say, and every request is in one place."""
        core = self.core
        rows = core.rows.live_rows().tolist()
        tables = [core.rows.blocks_of(row) for row in rows]
        core.pool.check(np.concatenate(tables) if tables else np.zeros(0, dtype=np.intp))
        swapped = [request.host_blocks for request in core.requests() if request.num_swapped_tokens]
        held = np.concatenate(swapped) if swapped else np.zeros(0, dtype=np.intp)
        assert len(np.unique(held)) == len(held)
        assert core.swapping.num_free_host_blocks + len(held) == core.swapping.num_host_blocks
        assert core.num_waiting + core.num_running == core.num_unfinished == len(self.live)
        assert core._state.waiting.room.num_tokens == sum(
            request.num_queued_tokens for request in core.requests() if request.row < 0
        )

    def check_nothing_is_left(self) -> None:
        """When every request has ended: all device and host blocks are free."""
        core = self.core
        core.schedule(self.now)  # host blocks given back behind the last step are free from the next one on
        self.check()
        assert core.pool.num_free == core.pool.num_blocks
        assert core.swapping.num_free_host_blocks == core.swapping.num_host_blocks
        assert core.num_unfinished == 0
        assert core.expected_prefill_s == 0.0

    def _take(self, events: StepEvents) -> None:
        for handle, index, token in zip(
            events.handles.tolist(), events.indices.tolist(), events.token_ids.tolist(), strict=True
        ):
            assert index == len(self.tokens[handle])
            self.tokens[handle].append(token)
        for end in events.finished:
            self._take_end(end)

    def _take_end(self, end: FinishedEvent) -> None:
        handle = end.origin.handle
        assert handle not in self.ends
        self.ends[handle] = end
        got, new = self.tokens[handle], self._requests[handle]
        assert end.num_output_tokens == len(got)
        most = min(new.max_tokens, self.capacity.max_request_tokens - new.num_prompt_tokens)
        expected = self.backend.token_hash.continuation(new.token_ids.tolist(), most, new.sampling)
        ends_at = next((place for place, token in enumerate(expected) if token in new.stop_token_ids), most - 1)
        assert got == expected[: len(got)]
        assert len(got) <= ends_at + 1
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == expected[: ends_at + 1]
            assert (end.reason is FinishReason.STOP) == (got[-1] in new.stop_token_ids)
        elif end.reason is FinishReason.SHED:
            assert got == []
