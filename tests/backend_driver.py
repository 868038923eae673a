"""Drives an executor backend with scripted steps, as the executor would: a scheduler reduced to its arithmetic.

Rows are admitted, prefilled in chunks under a token budget and decoded together; blocks are handed out in a shuffled
order, so that nothing can rely on them being neighbours. A running request can be swapped out and later resumed in
another row and other blocks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway_executor.backend import AdapterBackend, ExecutorBackend, NewRow, StepBatch, StepResult
from headway_proto.adapters import LoadedAdapter
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs
from step_columns import NO_PAIRS, pair_columns


def load_adapter(backend: AdapterBackend, name: str, directory: str) -> LoadedAdapter:
    """Read an adapter and take it into use, on a backend that answers at once."""
    loaded = backend.load_adapter(backend.read_adapter(name, directory))
    assert isinstance(loaded, LoadedAdapter)
    return loaded


@dataclass
class Request:
    """One request and what came of it. ``shared_blocks`` already hold its first positions."""

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    shared_blocks: list[int] = field(default_factory=list)
    adapter: str = ""
    output: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    row: int = -1
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens or bool(self.errors)


class BackendDriver:
    """Runs requests to completion on an open backend."""

    def __init__(self, backend: ExecutorBackend, info: BackendInfo, *, seed: int = 0) -> None:
        self._backend = backend
        self._block_size = info.block_size
        width = -(-info.max_model_len // info.block_size) + 1
        self._table = np.zeros((info.max_num_rows, width), dtype=np.int32)
        self._free_blocks = list(range(info.num_blocks))
        random.Random(seed).shuffle(self._free_blocks)
        self._free_rows = list(range(info.max_num_rows))
        random.Random(seed + 1).shuffle(self._free_rows)
        self._free_host_blocks = list(range(info.num_host_blocks))
        random.Random(seed + 2).shuffle(self._free_host_blocks)
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self._held_blocks: list[tuple[int, int]] = []
        self._finished_rows: list[int] = []
        self._step = 0

    def run(self, requests: Sequence[Request], *, budget: int) -> None:
        """Run all requests; each step spends at most ``budget`` tokens, decode first."""
        waiting, running = list(requests), []
        while waiting or running:
            arrivals = []
            left = budget - sum(1 for request in running if request.num_tokens - request.num_computed == 1)
            while waiting and self._free_rows and left > 0:
                arrivals.append(self._admit(waiting.pop(0)))
                left -= arrivals[-1].num_tokens - arrivals[-1].num_computed
            running = self.step(running + arrivals, arrivals, budget=budget)

    def swap_out(self, request: Request) -> None:
        """With the next step, move a running request's blocks to main memory; others get its row and blocks at once."""
        request.host_blocks = [self._free_host_blocks.pop() for _ in request.blocks]
        self._swap_out += zip(request.blocks, request.host_blocks, strict=True)
        self._free_blocks += request.blocks
        request.blocks = []
        self._release(request)

    def swap_in(self, request: Request) -> Request:
        """With the next step, of which it is an arrival, bring back a request that was swapped out."""
        request.row = self._free_rows.pop()
        self._held_blocks += self._grow(request, 0)
        self._swap_in += zip(request.host_blocks, request.blocks, strict=True)
        request.host_blocks = []
        return request

    def drop(self, request: Request) -> None:
        """Give up a request that was swapped out: its place in main memory is free, of which the backend hears nothing."""
        self._free_host_blocks += request.host_blocks
        request.host_blocks = []

    def step(self, running: list[Request], arrivals: Sequence[Request], *, budget: int) -> list[Request]:
        """Run one step of ``running``, which includes ``arrivals``; returns those that go on."""
        scheduled = {}
        for request in sorted(running, key=lambda request: request.num_tokens - request.num_computed > 1):
            count = min(request.num_tokens - request.num_computed, budget)
            if count:
                scheduled[request.row] = count
                budget -= count
        by_row = {request.row: request for request in running}
        rows = sorted(scheduled)
        new_blocks = self._held_blocks + [pair for row in rows for pair in self._grow(by_row[row], scheduled[row])]
        self._held_blocks = []
        columns = np.array(
            [
                (row, scheduled[row], by_row[row].num_computed, int(self._catches_up(by_row[row], scheduled[row])))
                for row in rows
            ]
        )
        batch = StepBatch(
            step=self._step,
            finished_rows=np.array(self._finished_rows, dtype=np.int32),
            new_rows=tuple(self._new_row(request) for request in arrivals),
            new_blocks=pair_columns(new_blocks),
            rows=columns[:, 0].astype(np.int32),
            num_scheduled_tokens=columns[:, 1].astype(np.int32),
            num_computed_tokens=columns[:, 2].astype(np.int32),
            samples=columns[:, 3].astype(np.int32),
            block_table=self._table,
        )
        if self._swap_out or self._swap_in:
            self._move_blocks()
        result = self._backend.execute(batch)
        assert isinstance(result, StepResult)
        self._finished_rows = []
        self._step += 1
        self._collect(by_row, columns, result)
        for request in running:
            if request.done:
                self._release(request)
        return [request for request in running if not request.done]

    def _move_blocks(self) -> None:
        out, back = (pair_columns(pairs) for pairs in (self._swap_out, self._swap_in))
        self._backend.move_blocks(copies=NO_PAIRS, swap_out=out, swap_in=back)
        # Only now: a step swaps out before it swaps in.
        self._free_host_blocks += [host_block for host_block, _ in self._swap_in]
        self._swap_out, self._swap_in = [], []

    def _admit(self, request: Request) -> Request:
        request.row = self._free_rows.pop()
        request.num_computed = len(request.shared_blocks) * self._block_size
        request.blocks = list(request.shared_blocks)
        self._table[request.row, : len(request.blocks)] = request.blocks
        self._held_blocks += [(request.row, block) for block in request.blocks]
        return request

    @staticmethod
    def _new_row(request: Request) -> NewRow:
        return NewRow(
            row=request.row,
            token_ids=np.array(request.prompt + request.output, dtype=np.int32),
            num_prompt_tokens=len(request.prompt),
            num_computed_tokens=request.num_computed,
            sampling=request.sampling,
            adapter=request.adapter,
        )

    def _grow(self, request: Request, count: int) -> list[tuple[int, int]]:
        added = []
        while len(request.blocks) * self._block_size < request.num_computed + count:
            block = self._free_blocks.pop()
            self._table[request.row, len(request.blocks)] = block
            request.blocks.append(block)
            added.append((request.row, block))
        return added

    @staticmethod
    def _catches_up(request: Request, count: int) -> bool:
        return request.num_computed + count == request.num_tokens

    @staticmethod
    def _collect(by_row: dict[int, Request], columns: np.ndarray, result: StepResult) -> None:
        drawn = iter(result.sampled_token_ids.tolist())
        for row, count, _, samples in columns.tolist():
            by_row[row].num_computed += count
            if samples:
                by_row[row].output.append(next(drawn))
        assert next(drawn, None) is None
        for entry in result.logprobs:
            by_row[entry.row].logprobs.append(entry)
        for error in result.errors:
            by_row[error.row].errors.append(error)

    def _release(self, request: Request) -> None:
        """Free the row. Blocks stay: tests read them again as shared prefixes."""
        self._free_rows.append(request.row)
        self._finished_rows.append(request.row)
