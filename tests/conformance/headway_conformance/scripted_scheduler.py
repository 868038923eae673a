"""A scheduler reduced to its arithmetic: it runs a script and writes it as step messages.

Owns: rows, blocks, host blocks, and which results still count. Must not know: policies (the script decides), right
tokens.

With several steps in flight it schedules a token before it knows the one before. It shuffles rows, blocks and the
entries of a message, so that a backend cannot rely on their order. It reuses freed ones first, in the same step if
possible.
"""

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headway_conformance.answers import AskedPrompt, AskedStep, check_answer, parts_of
from headway_conformance.executor_side import ExecutorSide
from headway_conformance.failures import NotApplicable
from headway_conformance.requests import ScriptedRequest
from headway_executor.backend import StepResult
from headway_proto.columns import decode_floats, encode_column, encode_columns
from headway_proto.sampling import NO_LOGPROBS
from headway_proto.step import ERRORED_ROW, BackendInfo, NewRequest, PoolingOutput, RowLogprobs, SchedulerOutput

_Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class _Drawing:
    request: ScriptedRequest
    life: int


@dataclass(frozen=True)
class _Flight:
    """``prompts`` have their rows ascending."""

    asked: AskedStep
    drawings: tuple[_Drawing, ...]
    prompts: tuple[_Drawing, ...]
    future: Future[StepResult]


@dataclass
class _Diff:
    admitted: list[ScriptedRequest] = field(default_factory=list)
    finished_rows: list[int] = field(default_factory=list)
    copies: _Pairs = field(default_factory=list)
    swap_out: _Pairs = field(default_factory=list)
    swap_in: _Pairs = field(default_factory=list)
    host_blocks_read: list[int] = field(default_factory=list)
    ahead: dict[ScriptedRequest, int] = field(default_factory=dict)


class _Places:
    def __init__(self, info: BackendInfo, chance: random.Random) -> None:
        self.rows = list(range(info.max_num_rows))
        self.blocks = list(range(info.num_blocks))
        self.host_blocks = list(range(info.num_host_blocks))
        for numbers in (self.rows, self.blocks, self.host_blocks):
            chance.shuffle(numbers)
        self._users: Counter[int] = Counter()

    def reserve(self, count: int) -> list[int]:
        return [self.blocks.pop() for _ in range(count)]

    def hold(self, block: int) -> None:
        if not self._users[block] and block in self.blocks:
            self.blocks.remove(block)
        self._users[block] += 1

    def release(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self.blocks.append(block)


class ScriptedScheduler:
    """Drives ``executor``, with at most ``depth`` steps in flight."""

    def __init__(self, executor: ExecutorSide, *, max_num_batched_tokens: int, depth: int = 1, seed: int = 0) -> None:
        self.depth = depth
        self.live: dict[int, ScriptedRequest] = {}
        self._executor = executor
        self._block_size = executor.info.block_size
        self._budget = max_num_batched_tokens
        self._random = random.Random(seed)
        self._epoch = 0
        self._step = 0
        self._diff = _Diff()
        self._flights: deque[_Flight] = deque()
        self._abandoned: list[Future[StepResult]] = []
        self._begin()

    # These take effect with the next step.

    def admit(
        self,
        request: ScriptedRequest,
        *,
        row: int | None = None,
        blocks: Iterable[int] = (),
        num_computed: int = 0,
    ) -> None:
        """Give the request a row. The first ``num_computed`` positions are in the first of ``blocks``."""
        request.row = self._free.rows.pop() if row is None else row
        if row is not None:
            self._free.rows.remove(row)
        for block in blocks:
            self._free.hold(block)
            request.blocks.append(block)
        request.num_computed = num_computed
        request.num_tokens = len(request.history)
        self.live[request.row] = request
        self._diff.admitted.append(request)

    def finish(self, request: ScriptedRequest) -> None:
        """Free row and blocks; steps in flight still count."""
        del self.live[request.row]
        self._diff.finished_rows.append(request.row)
        self._free.rows.append(request.row)
        request.row = -1
        for block in request.blocks:
            self._free.release(block)
        request.blocks = []

    def preempt(self, request: ScriptedRequest) -> None:
        """Free row and blocks and ignore steps in flight."""
        request.life += 1
        self.finish(request)

    def swap_out(self, request: ScriptedRequest) -> None:
        """Free the row and move the blocks to the host. Steps in flight still count."""
        request.host_blocks = self.copy_to_host(request.blocks)
        self.finish(request)

    def swap_in(self, request: ScriptedRequest, *, row: int | None = None) -> None:
        """Give a swapped request a row and its blocks, after its results: the message must contain its tokens."""
        self.drain()
        num_computed, host_blocks = request.num_computed, request.host_blocks
        request.host_blocks = []
        self.admit(request, row=row, blocks=self.copy_from_host(host_blocks), num_computed=num_computed)
        self._diff.host_blocks_read += host_blocks

    def drop(self, request: ScriptedRequest) -> None:
        """Give up a swapped request; the backend gets no message about it."""
        self._free.host_blocks += request.host_blocks
        request.host_blocks = []

    def copy_to_host(self, blocks: Sequence[int]) -> list[int]:
        if len(self._free.host_blocks) < len(blocks):
            raise NotApplicable("it has no host blocks")
        host_blocks = [self._free.host_blocks.pop() for _ in blocks]
        self._diff.swap_out += zip(blocks, host_blocks, strict=True)
        return host_blocks

    def copy_from_host(self, host_blocks: Sequence[int]) -> list[int]:
        """Swap host blocks in; return the blocks, for ``admit``."""
        blocks = self._free.reserve(len(host_blocks))
        self._diff.swap_in += zip(host_blocks, blocks, strict=True)
        return blocks

    def copy_blocks(self, sources: Sequence[int]) -> list[int]:
        """Return copies of blocks, for ``admit``."""
        copies = self._free.reserve(len(sources))
        self._diff.copies += zip(sources, copies, strict=True)
        return copies

    def new_epoch(self) -> None:
        for flight in self._flights:
            self._abandoned.append(flight.future)
        for request in self.live.values():
            request.life += 1
            request.row = -1
            request.blocks, request.host_blocks = [], []
        self._flights.clear()
        self._executor.begin_epoch()
        self._begin()

    # Running.

    def step(self, counts: Mapping[ScriptedRequest, int] | None = None) -> None:
        """Send one step: every live row runs one token, except those in ``counts``. Collect results down to the depth."""
        planned = {request: (counts or {}).get(request, 1) for request in self.live.values()}
        reported = {request: prompt for request in planned if (prompt := _asked_prompt(request, planned[request]))}
        in_order = sorted(reported, key=lambda request: request.row)
        output, asked, drawings = self._message(planned)
        asked = msgspec.structs.replace(asked, prompts=tuple(reported[request] for request in in_order))
        prompts = tuple(_Drawing(request, request.life) for request in in_order)
        self._flights.append(_Flight(asked, drawings, prompts, self._executor.submit(output)))
        self._step += 1
        self._free.host_blocks += self._diff.host_blocks_read
        self._diff = _Diff()
        while len(self._flights) >= self.depth:
            self._collect()

    @property
    def max_speculative_tokens(self) -> int:
        return self._executor.info.max_speculative_tokens

    def step_speculating(self, most: int) -> int:
        """Let decoding rows run ``most`` proposals in one step; return how many were accepted.

        Rows in their prompt sit out.
        """
        self.drain()
        counts = {request: int(request.remaining == 1) for request in self.live.values()}
        ahead = {
            request: min(most, request.max_tokens - len(request.output) - 1)
            for request, count in counts.items()
            if count and request.max_tokens - len(request.output) > 1
        }
        self._diff.ahead = ahead
        output, asked, drawings = self._message(counts)
        allowed = sorted((request.row, count) for request, count in ahead.items())
        output = msgspec.structs.replace(output, num_speculative_tokens=_pairs(allowed))
        self._step += 1
        self._diff = _Diff()
        result = self._executor.wait(self._executor.submit(output))
        if allowed:
            self._executor.accept(result)
        return self._take_parts(asked, drawings, result)

    def _take_parts(self, asked: AskedStep, drawings: tuple[_Drawing, ...], result: StepResult) -> int:
        """Return how many proposals were accepted."""
        by_row = {drawing.request.row: drawing for drawing in drawings}
        num_accepted = 0
        for place, (part, rows) in enumerate(parts_of(result, asked.sampling_rows)):
            drawing = [by_row[row] for row in rows]
            wanted = tuple(entry.request.sampling.logprobs for entry in drawing)
            part_asked = msgspec.structs.replace(asked, sampling_rows=rows, num_logprobs=wanted)
            self._take_answer(_Flight(part_asked, tuple(drawing), (), Future()), part)
            for entry in drawing if place else ():
                entry.request.num_computed += 1
                entry.request.num_tokens += 1
                num_accepted += 1
        return num_accepted

    def step_whole(self) -> None:
        self.step({request: request.remaining for request in self.live.values()})

    def run(
        self, requests: Iterable[ScriptedRequest] = (), *, budget: int | None = None, chunk: int | None = None
    ) -> None:
        """Run the live rows, and ``requests`` as soon as they fit, until all have ended.

        Decodes first, then prompts: at most ``budget`` tokens a step, at most ``chunk`` of one row.
        """
        waiting = deque(requests)
        while True:
            for request in tuple(self.live.values()):
                if request.ended or request.fully_scheduled:
                    self.finish(request)
            counts, left = self._share(budget or self._budget, chunk)
            while waiting and left > 0 and self._free.rows and self._has_room(waiting[0]):
                request = waiting.popleft()
                self.admit(request)
                counts[request] = min(request.remaining, left, chunk or left)
                left -= counts[request]
            if not self.live:
                break
            self.step(counts)
        self.drain()

    def drain(self) -> None:
        """Wait for steps in flight, also of earlier epochs: the backend must still finish them."""
        while self._flights:
            self._collect()
        while self._abandoned:
            self._executor.wait(self._abandoned.pop(0))

    def submit_raw(self, output: SchedulerOutput) -> None:
        self._executor.submit(output)

    def other_free_row(self, row: int) -> int:
        return next(free for free in self._free.rows if free != row)

    @property
    def num_host_blocks(self) -> int:
        return self._executor.info.num_host_blocks

    @property
    def makes_vectors(self) -> bool:
        return bool(self._executor.info.embedding_size)

    @property
    def reports_prompts(self) -> bool:
        return self._executor.info.supports_prompt_logprobs

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and number of the next step."""
        return self._epoch, self._step

    def _begin(self) -> None:
        self._epoch += 1
        self._step = 0
        self.live = {}
        self._diff = _Diff()
        self._free = _Places(self._executor.info, self._random)

    def _has_room(self, request: ScriptedRequest) -> bool:
        promised = sum(self._most_blocks(other) - len(other.blocks) for other in self.live.values())
        return self._most_blocks(request) <= len(self._free.blocks) - promised

    def _most_blocks(self, request: ScriptedRequest) -> int:
        surplus = 0 if request.foreseen else self.depth
        return max(len(request.blocks), -(-(len(request.prompt) + request.max_tokens + surplus) // self._block_size))

    def _share(self, budget: int, chunk: int | None) -> tuple[dict[ScriptedRequest, int], int]:
        counts: dict[ScriptedRequest, int] = {}
        for request in sorted(self.live.values(), key=lambda request: request.remaining > 1):
            counts[request] = min(request.remaining, budget, chunk or budget)
            budget -= counts[request]
        return counts, budget

    def _message(self, planned: Mapping[ScriptedRequest, int]) -> tuple[PoolingOutput, AskedStep, tuple[_Drawing, ...]]:
        total = sum(planned.values())
        assert total <= self._budget, f"the script schedules {total} tokens of {self._budget}"
        new_blocks = self._grow(planned)
        new_requests = tuple(_new_request(request) for request in self._diff.admitted)
        drawing = _advance(planned)
        output = PoolingOutput(
            epoch=self._epoch,
            step=self._step,
            scheduled_new_reqs=new_requests,
            finished_rows=encode_column(self._diff.finished_rows),
            new_blocks=_pairs(new_blocks),
            num_scheduled_tokens=_pairs(self._exceptions(planned)),
            block_copies=_pairs(self._diff.copies),
            swap_out=_pairs(self._diff.swap_out),
            swap_in=_pairs(self._diff.swap_in),
            pooled=_pairs([(request.row, request.pooling) for request in self._diff.admitted if request.pooling]),
            total_num_scheduled_tokens=total,
        )
        asked = AskedStep(
            where=f"epoch {self._epoch} step {self._step}",
            rows=frozenset(request.row for request, count in planned.items() if count),
            sampling_rows=tuple(request.row for request in drawing),
            num_logprobs=tuple(request.sampling.logprobs for request in drawing),
            pooled_rows=tuple(request.row for request in drawing if request.pooling),
            has_moves=bool(output.block_copies or output.swap_out or output.swap_in),
        )
        return output, asked, tuple(_Drawing(request, request.life) for request in drawing)

    def _grow(self, planned: Mapping[ScriptedRequest, int]) -> _Pairs:
        added: _Pairs = []
        for request in self._in_any_order(planned):
            end = request.num_computed + planned[request] + self._diff.ahead.get(request, 0)
            while len(request.blocks) * self._block_size < end:
                block = self._free.blocks[-1]
                self._free.hold(block)
                request.blocks.append(block)
                if request not in self._diff.admitted:
                    added.append((request.row, block))
        return added

    def _exceptions(self, planned: Mapping[ScriptedRequest, int]) -> _Pairs:
        return [(request.row, planned[request]) for request in self._in_any_order(planned) if planned[request] != 1]

    def _in_any_order(self, requests: Iterable[ScriptedRequest]) -> list[ScriptedRequest]:
        shuffled = list(requests)
        self._random.shuffle(shuffled)
        return shuffled

    def _collect(self) -> None:
        flight = self._flights.popleft()
        self._take_answer(flight, self._executor.wait(flight.future))

    def _take_answer(self, flight: _Flight, result: StepResult) -> None:
        check_answer(flight.asked, result, self._executor.info)
        logprobs = {entry.row: entry for entry in result.logprobs}
        errors = {error.row: error.message for error in result.errors}
        vectors = {entry.row: decode_floats(entry.values) for entry in result.vectors}
        tokens = result.sampled_token_ids.tolist()
        for row, token, drawing in zip(flight.asked.sampling_rows, tokens, flight.drawings, strict=True):
            request = drawing.request
            if drawing.life == request.life and not request.ended:
                _record(request, token, logprobs.get(row), errors.get(row))
                request.vector = vectors.get(row)
        for entry, reported in zip(result.prompt_logprobs, flight.prompts, strict=True):
            if reported.life == reported.request.life:
                reported.request.record_prompt(entry.values)


def _advance(planned: Mapping[ScriptedRequest, int]) -> list[ScriptedRequest]:
    """Rule 3; return the requests that draw a token, rows ascending."""
    drawing = []
    for request, count in sorted(planned.items(), key=lambda item: item[0].row):
        request.num_computed += count
        if count and not request.remaining:
            request.num_tokens += 1
            drawing.append(request)
    return drawing


def _new_request(request: ScriptedRequest) -> NewRequest:
    return NewRequest(
        row=request.row,
        token_ids=encode_column(request.history),
        num_prompt_tokens=len(request.prompt),
        block_ids=encode_column(request.blocks),
        num_computed_tokens=request.num_computed,
        sampling=request.sampling,
    )


def _asked_prompt(request: ScriptedRequest, count: int) -> AskedPrompt | None:
    start = request.num_computed
    end = min(start + count, len(request.prompt) - 1)
    if request.sampling.prompt_logprobs == NO_LOGPROBS or end <= start:
        return None
    return AskedPrompt(request.row, start + 1, end + 1, request.sampling.prompt_logprobs)


def _record(request: ScriptedRequest, token: int, logprobs: RowLogprobs | None, error: str | None) -> None:
    if token == ERRORED_ROW:
        request.error = error
        return
    request.output.append(token)
    request.logprobs.append(logprobs if request.sampling.logprobs != NO_LOGPROBS else None)


def _pairs(pairs: _Pairs) -> bytes:
    return encode_columns(np.array(pairs, dtype=np.int32).reshape(-1, 2).T)
